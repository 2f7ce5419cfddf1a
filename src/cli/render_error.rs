//! Exit codes and JSON of errors.

use compiler::export::failure::Failure;
use pipec::error::{Error, ErrorKind};

/// The exit code of a bug in pipec.
pub const BUG: u8 = 101;
/// The exit code of bad input or usage.
pub const INPUT: u8 = 2;

pub fn exit_code(error: &Error) -> u8 {
    match error.kind() {
        ErrorKind::Negative => 1,
        ErrorKind::Input => INPUT,
        ErrorKind::Infeasible => 3,
        ErrorKind::Bug => BUG,
        ErrorKind::Interrupted(signal) => u8::try_from(128 + signal).unwrap_or(1),
    }
}

/// An error as one line of JSON.
pub fn json(error: &Error) -> String {
    let failure = Failure {
        message: error.message().to_string(),
        causes: error.causes().to_vec(),
        help: error.help().map(str::to_string),
        exit_code: exit_code(error),
    };
    serde_json::to_string(&failure).unwrap_or_default()
}
