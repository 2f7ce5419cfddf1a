//! Programs as JSON, for tools: the same as the text, with every operand under its name.
//!
//! ```json
//! {"schema": "pipec.program/1", "schedule": "1f1b", "items": 1, "microbatches": 1,
//!  "stages": [{"rank": 0, "replicas": 1, "cap": 1}], "edges": [],
//!  "workers": [{"rank": 0, "replica": 0, "instructions": [
//!    {"op": "load", "stage": 0, "item": 0},
//!    {"op": "forward", "stage": 0, "item": 0, "version": 0, "slot": 0}]}]}
//! ```
//!
//! Parsed programs are not validated here; the checker does that.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::plan::StageId;
use crate::plan::schedule::Schedule;
use crate::profile::json;
use crate::schedule::{Program, ProgramStage, WorkerProgram};
use crate::text::name::short_name;

/// Value of the `schema` field.
pub const SCHEMA: &str = "pipec.program/1";

/// A pipeline program.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct File {
    /// Always [`SCHEMA`].
    #[schemars(extend("const" = SCHEMA))]
    schema: String,
    /// Name of the schedule.
    schedule: String,
    /// Micro-batches of the whole program.
    items: u32,
    /// Micro-batches of a minibatch.
    microbatches: u32,
    /// The stages, first to last.
    stages: Vec<ProgramStage>,
    /// Pairs of sending and receiving stages.
    edges: Vec<(StageId, StageId)>,
    /// The program of each worker.
    workers: Vec<WorkerProgram>,
}

#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum JsonError {
    #[error("{}", short_name(&.0.to_string()))]
    Json(#[from] json::JsonError),
    #[error("its schema is `{found}`, expected `{SCHEMA}`")]
    Schema { found: String },
    #[error("unknown schedule `{found}`")]
    Schedule { found: String },
}

pub fn to_json(program: &Program) -> Result<String, JsonError> {
    let Program { schedule, items, microbatches, ref stages, ref edges, ref workers } = *program;
    let (schema, schedule) = (SCHEMA.to_string(), schedule.name().to_string());
    let (stages, edges, workers) = (stages.clone(), edges.clone(), workers.clone());
    let file = File { schema, schedule, items, microbatches, stages, edges, workers };
    Ok(json::print(&file)?)
}

pub fn from_json(text: &str) -> Result<Program, JsonError> {
    // The slower reader is used only to locate an error: programs are long.
    let file: File = serde_json::from_str(text).or_else(|_| json::read(text))?;
    if file.schema != SCHEMA {
        return Err(JsonError::Schema { found: short_name(&file.schema) });
    }
    let schedule: Schedule =
        file.schedule.parse().map_err(|_| JsonError::Schedule { found: short_name(&file.schedule) })?;
    let File { items, microbatches, stages, edges, workers, .. } = file;
    Ok(Program { schedule, items, microbatches, stages, edges, workers })
}

pub fn json_schema() -> serde_json::Value {
    schemars::schema_for!(File).to_value()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Pipeline;
    use crate::schedule::generators::schedule;
    use crate::schedule::semantics::StepCount;

    #[test]
    fn reads_back_what_it_wrote() {
        let count = StepCount { minibatches: 2, microbatches: 5 };
        let chunked = Pipeline::balanced(&[2, 2, 2, 2], 2.0).folded();
        let programs = [
            schedule(Schedule::Zbv, &chunked, count),
            schedule(Schedule::TwoBw, &Pipeline::balanced(&[2, 1], 2.0), count),
        ];
        for program in programs.map(Result::unwrap) {
            let text = to_json(&program).unwrap();
            assert_eq!(from_json(&text).unwrap(), program);
            assert!(from_json(&text.replace("program/1", "program/2")).is_err());
            assert!(from_json(&text.replace("\"op\": \"load\"", "\"op\": \"fetch\"")).is_err());
            assert!(from_json(&text.replace("\"items\"", "\"things\"")).is_err());
        }
    }
}
