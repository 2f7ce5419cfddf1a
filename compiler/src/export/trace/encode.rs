//! Encodes a trace as a file.

use crate::export::trace::{Form, Trace, chrome, perfetto};

/// Encodes the trace in the format selected by the file name.
pub fn encode(trace: &Trace<'_>, name: &str) -> Vec<u8> {
    match Form::of(name) {
        Form::Chrome => chrome::json(trace).into_bytes(),
        Form::Perfetto => perfetto::protobuf(trace),
    }
}
