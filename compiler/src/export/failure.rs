//! The error object of a failed command under `--format json`: one line, the last of stderr.
//!
//! ```text
//! {"message":"no data is given","causes":[],"help":"`--data train.npz` has …","exit_code":2}
//! ```

use schemars::JsonSchema;
use serde::Serialize;

/// Why a verb did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// What could not be done.
    pub message: String,
    /// Where and why, line by line.
    pub causes: Vec<String>,
    /// What to do next; null where nobody knows.
    pub help: Option<String>,
    /// What the process ends with: 1 ran and the answer is no, 2 bad input or usage, 3 no plan fits, 101 a bug, 130 and 143 signals.
    pub exit_code: u8,
}

pub fn schema() -> serde_json::Value {
    schemars::schema_for!(Failure).to_value()
}
