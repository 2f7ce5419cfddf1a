//! Partition for DeepSpeed's `PipelineModule` (`deepspeed/runtime/pipe/module.py`): stage k has the layers `parts[k]`
//! to `parts[k + 1]` of the module's layer list.
//!
//! ```text
//! {"_use": "…", "layers": ["embed", "layers.0", "layers.1", "head"], "parts": [0, 2, 4], …}
//! ```
//!
//! DeepSpeed computes `parts` in `_partition_layers`. A subclass can use these instead: set `self.parts` there, then
//! call `self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])`. DeepSpeed runs 1F1B on linear
//! pipelines with equal replicas. Its pipeline engine (`deepspeed/runtime/pipe/engine.py`) does not support ZeRO stages
//! 2 and 3.

use super::layers::layers;
use super::refusal::Refusal;
use super::{Bundle, ExportInput, fit};
use crate::plan::problem::Target;
use crate::plan::schedule::Schedule;
use serde_json::json;

const TOOL: &str = "DeepSpeed";

const USE: [&str; 2] = [
    "`parts` goes into a subclass of PipelineModule made of `layers`: its _partition_layers sets self.parts = parts and calls \
     self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])",
    "the whole file is also a configuration that deepspeed.initialize(config=…) takes",
];

pub fn write(input: &ExportInput<'_>) -> Result<Bundle, Refusal> {
    let plan = input.plan;
    fit::flushes(plan, TOOL)?;
    fit::shares_nothing(plan, TOOL)?;
    fit::schedules(plan, TOOL, &[Schedule::OneFOneB], "1f1b", "1f1b")?;
    let replicas = fit::replicas(plan, TOOL)?;
    let zero = fit::zero(plan, TOOL, Target::Deepspeed)?.level;
    let microbatches = fit::share(plan, replicas)?;
    let stages = layers(plan, TOOL)?;
    let mut parts = vec![0];
    for modules in &stages {
        parts.push(parts.last().copied().unwrap_or(0) + modules.len());
    }
    let micro = plan.schedule.micro_batch;
    let mut config = json!({
        // JSON has no comments; this key sorts first.
        "_use": USE,
        "layers": stages.concat(),
        "parts": parts,
        "num_stages": stages.len(),
        "data_parallel_replicas": replicas,
        "zero_optimization": {"stage": zero},
        // DeepSpeed clips gradients to norm 1 unless told otherwise.
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": microbatches,
        "train_batch_size": micro.saturating_mul(u64::from(microbatches)).saturating_mul(u64::from(replicas)),
    });
    let recomputes = fit::recomputing(plan) > 0;
    if recomputes {
        config["activation_checkpoint_interval"] = json!(1);
    }
    if let Some(precision) = plan.precision().filter(|precision| precision.is_mixed()) {
        config[precision.name()] = json!({"enabled": true});
    }
    let mut bundle = Bundle::of("deepspeed.json", serde_json::to_string_pretty(&config).unwrap_or_default() + "\n");
    bundle.notes.extend(USE.map(str::to_string));
    if recomputes {
        let why = fit::recomputes_all(plan, TOOL);
        bundle.notes.push(format!("pass activation_checkpoint_interval to PipelineModule: {why}"));
    }
    bundle.notes.extend(fit::handed_on(plan, TOOL));
    Ok(bundle)
}
