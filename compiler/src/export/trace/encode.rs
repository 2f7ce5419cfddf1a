//! A trace as the bytes of a file.

use crate::export::trace::{Form, Trace, chrome, perfetto};

/// The trace in the form that the file's name asks for.
pub fn encode(trace: &Trace<'_>, name: &str) -> Vec<u8> {
    match Form::of(name) {
        Form::Chrome => chrome::json(trace).into_bytes(),
        Form::Perfetto => perfetto::protobuf(trace),
    }
}
