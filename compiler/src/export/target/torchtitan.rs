//! Settings for torchtitan's `parallelism` section (`torchtitan/distributed/pipeline_parallel.py`): the modules of each
//! model part in `module_fqns_per_model_part`, and a table for `pipeline_parallel_schedule_csv`.
//!
//! torchtitan supports top-level modules and items of top-level lists (`tok_embeddings`, `layers.0`). It assigns part k
//! to rank k modulo ranks, so tables are only possible for such plans. For V-shaped placement it has the schedules
//! `ZBVZeroBubble` and `DualPipeV` by name, without a table. `torchtitan.toml` has the settings in configuration file
//! format, `torchtitan.json` for versions configured in Python.

use super::layers::{are_shallow, layers};
use super::orders::{Order, order};
use super::refusal::Refusal;
use super::{Bundle, ExportInput, fit};
use crate::plan::Stage;
use crate::plan::schedule::Schedule;
use serde_json::{Value, json};

const TOOL: &str = "torchtitan";

const TABLE: &str = "schedule.csv";

/// Writes `torchtitan.toml`, `torchtitan.json` and, for schedules that torchtitan does not have by name,
/// `schedule.csv`.
pub fn write(asked: &ExportInput<'_>) -> Result<Bundle, Refusal> {
    let plan = asked.plan;
    let Order { table, ranks, microbatches, replicas } = order(asked, TOOL)?;
    let parts = layers(plan, TOOL)?;
    are_shallow(&parts, TOOL)?;
    let degree = ranks.iter().max().map_or(1, |rank| rank + 1);
    let by_name = match plan.schedule.kind {
        Schedule::Zbv => Some("ZBVZeroBubble"),
        Schedule::DualPipeV => Some("DualPipeV"),
        kind => {
            if let Some(stage) =
                (0u32..).zip(&ranks).find(|(stage, rank)| **rank != stage % degree).map(|(stage, _)| stage)
            {
                let module = parts[stage as usize].first().cloned().unwrap_or_default();
                let why = format!(
                    "is on rank {}, and torchtitan assigns {} parts to ranks in a loop",
                    ranks[stage as usize],
                    kind.name()
                );
                return Err(Refusal::Place { module, stage, why });
            }
            None
        }
    };
    let mut section = json!({
        "pipeline_parallel_degree": degree,
        "data_parallel_replicate_degree": replicas,
        "pipeline_parallel_microbatch_size": plan.schedule.micro_batch,
        "pipeline_parallel_schedule": by_name.unwrap_or("PipelineScheduleMulti"),
        "module_fqns_per_model_part": parts,
    });
    let shared = plan.stages.first().map_or(1, Stage::degree);
    if shared > 1 {
        section["tensor_parallel_degree"] = json!(shared);
    }
    if by_name.is_none() {
        section["pipeline_parallel_schedule_csv"] = json!(TABLE);
    }
    let batch = plan.schedule.micro_batch.saturating_mul(u64::from(microbatches));
    let training = json!({ "local_batch_size": batch });
    let whole = json!({ "parallelism": section, "training": training });
    let json = serde_json::to_string_pretty(&whole).unwrap_or_default() + "\n";
    let mut bundle = Bundle::of("torchtitan.toml", toml(&whole)).with("torchtitan.json", json);
    bundle.notes.extend(fit::handed_on(plan, TOOL));
    Ok(if by_name.is_none() { bundle.with(TABLE, table) } else { bundle })
}

/// Formats sections of plain values and lists as TOML. Every JSON string without DEL is a valid TOML string.
fn toml(whole: &Value) -> String {
    let mut text = String::new();
    for (name, section) in whole.as_object().into_iter().flatten() {
        text += &format!("[{name}]\n");
        for (key, value) in section.as_object().into_iter().flatten() {
            text += &match value {
                Value::Array(rows) => {
                    let rows: Vec<String> = rows.iter().map(|row| format!("    {},\n", plain(row))).collect();
                    format!("{key} = [\n{}]\n", rows.concat())
                }
                value => format!("{key} = {}\n", plain(value)),
            };
        }
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text + "\n"
}

fn plain(value: &Value) -> String {
    value.to_string().replace('\u{7f}', "\\u007f")
}
