//! Describes the gradient all-reduce of a plan in a sentence.

use crate::plan::Plan;
use crate::plan::buckets::USUAL_BYTES;
use crate::schedule::pipeline::{generated, pipeline};
use crate::simulate::overlap::hidden;
use crate::text::quantity;
use serde_json::Value;

/// The number of buckets, and the fraction of the all-reduce time hidden behind computation. `None` without all-reduce,
/// or if the simulation would take too long.
pub fn gradients(plan: &Plan) -> Option<String> {
    let kind = generated(plan.schedule.kind).ok()?;
    let pipeline = pipeline(plan).ok()?;
    let share = hidden(kind, &pipeline, plan.schedule.microbatches).ok()??;
    let size = plan.options.get("bucket_bytes").and_then(Value::as_u64).unwrap_or(USUAL_BYTES);
    let parts = plan.stages.iter().map(|stage| stage.buckets.len()).max().unwrap_or(0);
    let how = match parts {
        0 | 1 => "at once".to_string(),
        _ => format!("in buckets of {}, up to {parts} per stage", quantity::bytes(size)),
    };
    Some(format!("replicas all-reduce them {how}; {:.0} % of that time overlaps with computation", share * 100.0))
}
