//! The error object of a failed command under `--format json`: the last line of standard error.
//!
//! ```text
//! {"message":"no data is given","causes":[],"help":"`--data train.npz` has …","exit_code":2}
//! ```

use schemars::JsonSchema;
use serde::Serialize;

/// The error of a failed command.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// The error.
    pub message: String,
    /// Its causes, one per line.
    pub causes: Vec<String>,
    /// A suggested fix, or null.
    pub help: Option<String>,
    /// Exit code of the process: 1 check failed, 2 invalid input or usage, 3 no feasible plan, 101 a bug, 130 and 143
    /// signals.
    pub exit_code: u8,
}

pub fn schema() -> serde_json::Value {
    schemars::schema_for!(Failure).to_value()
}
