//! A folder that trains with `torchrun` and `torch.distributed.pipelining`: `stages.json` with the nodes of each stage,
//! `schedule.csv`, `split.py` that splits the model by node name, `runtime.py` that drives torch's pipeline runtime, and
//! the command `train.py`. `split.py` and `runtime.py` are files of the Python package, `python/pipec`.
//!
//! The programs are fixed: names from the model are data in `stages.json` and never program text.
//! `_PipelineScheduleRuntime` and its `_load_csv` are private to torch, so the bundle states the torch version it is
//! for.
//!
//! torch sends tensors only to the next stage and trains copies of tied weights independently. `split.py` forwards skip
//! tensors through the stages between, and `runtime.py` sums the gradients of tied weights.

use super::orders::{Order, order};
use super::refusal::Refusal;
use super::{Bundle, ExportInput, fit, nodes};
use crate::plan::Plan;
use crate::plan::problem::Target;
use crate::text::name::short_name;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const TOOL: &str = "torch.distributed.pipelining";

/// The torch version that the programs support.
const TORCH: &str = "2.15";

pub fn write(input: &ExportInput<'_>) -> Result<Bundle, Refusal> {
    let plan = input.plan;
    fit::shares_nothing(plan, TOOL)?;
    fit::zero(plan, TOOL, Target::Torch)?;
    let Order { table, ranks, microbatches, replicas } = order(input, TOOL)?;
    let mut spans: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
    let mut stages: Vec<Value> = Vec::with_capacity(plan.stages.len());
    for stage in &plan.stages {
        let mut names: Vec<&str> = Vec::new();
        for (name, op) in stage.op_names.iter().zip(stage.op_ids()) {
            // An op without a source node is named by its number.
            if *name == op.to_string() {
                continue;
            }
            let span = spans.entry(name).or_insert((stage.id.0, stage.id.0));
            if names.last() != Some(&name.as_str()) {
                names.push(name);
            }
            span.1 = stage.id.0;
        }
        stages.push(json!({"nodes": names, "modules": stage.modules, "recompute": stage.recompute}));
    }
    let manifest = json!({
        "schema": "pipec.torch/1",
        "torch": TORCH,
        "model": {"file": plan.model.file, "sha256": plan.model.sha256},
        "stages": stages,
        "ranks": ranks,
        "replicas": replicas,
        "micro_batch": plan.schedule.micro_batch,
        "microbatches": microbatches,
    });
    let text = serde_json::to_string_pretty(&manifest).unwrap_or_default() + "\n";
    let mut bundle = Bundle::of("stages.json", text)
        .with("schedule.csv", table)
        .with("split.py", include_str!("../../../../python/pipec/split.py").to_string())
        .with("runtime.py", include_str!("../../../../python/pipec/runtime.py").to_string())
        .with("train.py", include_str!("torch/train.py").to_string());
    let moved: Vec<String> =
        spans.iter().filter(|(_, (first, last))| first != last).map(|(name, _)| name.to_string()).collect();
    bundle.notes.extend(nodes::moved_note(&moved));
    if plan.stages.iter().any(|stage| stage.memory.by_part) {
        bundle.notes.push(
            "the plan recomputes layer by layer, but the bundle recomputes whole stages at once and needs more memory; \
             plan for it with `--target torch`"
                .to_string(),
        );
    }
    let processes = u64::from(ranks.iter().max().map_or(1, |rank| rank + 1)) * u64::from(replicas);
    let planned_file = &plan.model.file;
    let is_exported = planned_file.ends_with(".pt2");
    if !is_exported && !planned_file.is_empty() {
        bundle.notes.push(other_format(plan, planned_file));
    }
    let model = if is_exported { short_name(planned_file) } else { "MODEL.pt2".into() };
    bundle.notes.push(format!(
        "train with: {} FOLDER/train.py --model {model} --data DATA.npz",
        fit::torchrun(plan, processes)
    ));
    Ok(bundle)
}

/// The note on a plan of another file than one of torch.export.save, whose stages are matched by module.
fn other_format(plan: &Plan, planned_file: &str) -> String {
    let mut stage_of_module: BTreeMap<&str, u32> = BTreeMap::new();
    let modules = plan.stages.iter().flat_map(|stage| stage.modules.iter().map(|module| (module.as_str(), stage.id.0)));
    let cut_module =
        modules.into_iter().find(|(module, stage)| *stage_of_module.entry(module).or_insert(*stage) != *stage);
    let planned_file = short_name(planned_file);
    match cut_module {
        Some((module, _)) => format!(
            "the plan is for {planned_file} and cuts module `{}`: the script can only match it to a model with the same nodes. \
             Plan the file of torch.export.save instead, or use `--target torchtitan`, which keeps modules whole",
            short_name(module)
        ),
        None => format!(
            "the plan is for {planned_file}, but the script trains a file of torch.export.save: export the same module with \
             `torch.export.save(torch.export.export(model, inputs), \"MODEL.pt2\")`"
        ),
    }
}
