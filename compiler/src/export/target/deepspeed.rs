//! The parts list of DeepSpeed's `PipelineModule` (`deepspeed/runtime/pipe/module.py`): stage k holds the layers from `parts[k]` to
//! `parts[k + 1]` of the list of layers that the module is made from.
//!
//! ```text
//! {"layers": ["embed", "layers.0", "layers.1", "head"], "parts": [0, 2, 4], …}
//! ```
//!
//! DeepSpeed works `parts` out itself in `_partition_layers`; a subclass that sets `self.parts` there, and then calls
//! `self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])`, takes these. It runs 1F1B over straight pipelines with equal
//! replicas.

use super::layers::layers;
use super::refusal::Refusal;
use super::{Asked, Bundle, fit};
use crate::plan::ScheduleKind;
use serde_json::json;

const TOOL: &str = "DeepSpeed";

/// Writes `deepspeed.json`.
pub fn write(asked: &Asked<'_>) -> Result<Bundle, Refusal> {
    let plan = asked.plan;
    fit::flushes(plan, TOOL)?;
    fit::shares_nothing(plan, TOOL)?;
    fit::schedules(plan, TOOL, &[ScheduleKind::OneFOneB], "1f1b", "1f1b")?;
    let replicas = fit::replicas(plan, TOOL)?;
    let microbatches = fit::share(plan, replicas)?;
    let stages = layers(plan, TOOL)?;
    let mut parts = vec![0];
    for modules in &stages {
        parts.push(parts.last().copied().unwrap_or(0) + modules.len());
    }
    let micro = plan.schedule.micro_batch;
    let whole = json!({
        "layers": stages.concat(),
        "parts": parts,
        "num_stages": stages.len(),
        "data_parallel_replicas": replicas,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": microbatches,
        "train_batch_size": micro.saturating_mul(u64::from(microbatches)).saturating_mul(u64::from(replicas)),
    });
    let mut bundle = Bundle::of("deepspeed.json", serde_json::to_string_pretty(&whole).unwrap_or_default() + "\n");
    bundle.notes.extend(fit::handed_on(plan, TOOL));
    Ok(bundle)
}
