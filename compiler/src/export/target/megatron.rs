//! Pipeline layout for Megatron-LM (`megatron/core/transformer/pipeline_parallel_layer_layout.py`): a string with `E`
//! for the embedding, `t` for a transformer layer, `L` for the loss and the modules before it, and `|` between stages.
//! Stages are in model chunk order: stage k is chunk k / ranks of rank k modulo ranks.
//!
//! ```text
//! Ettt|tttt|tttL
//! ```
//!
//! Megatron builds its own layers, so only their number matters. The plan must have the numbered layers in order, the
//! modules before them (embedding) in the first stage and those after them (norm, head) in the last. A model with
//! several lists of layers, such as an encoder and a decoder or a ResNet, is refused. Supported
//! schedules are 1F1B and interleaved 1F1B. Megatron recomputes the same number of first layers in every stage: the
//! largest number of the plan.

use super::layers::layers;
use super::refusal::Refusal;
use super::{Bundle, ExportInput, fit};
use crate::plan::problem::Target;
use crate::plan::schedule::Schedule;
use crate::plan::{Plan, Stage};
use crate::profile::module_units::{longest, numbered};
use crate::profile::shared::ActivationSharding;
use crate::schedule::pipeline::pipeline;

const TOOL: &str = "Megatron";

/// Writes `megatron.args`, arguments of the training script. The shell splits them at spaces, so nothing is quoted.
pub fn write(input: &ExportInput<'_>) -> Result<Bundle, Refusal> {
    let plan = input.plan;
    fit::flushes(plan, TOOL)?;
    let supported = [Schedule::OneFOneB, Schedule::Interleaved];
    fit::schedules(plan, TOOL, &supported, "1f1b and interleaved", "1f1b")?;
    let replicas = fit::replicas(plan, TOOL)?;
    let zero = fit::zero(plan, TOOL, Target::Megatron)?.level;
    let instances = plan.stages.first().map_or(1, |stage| stage.replicas / stage.shards().max(1));
    let mut optimizer_flags = String::from(if replicas > 1 { "--overlap-grad-reduce\n" } else { "" });
    if replicas > 1 && zero > 0 {
        optimizer_flags.push_str("--overlap-param-gather\n--use-distributed-optimizer\n");
        if instances > 1 {
            optimizer_flags.push_str(&format!("--num-distributed-optimizer-instances {instances}\n"));
        }
    }
    let microbatches = fit::share(plan, replicas)?;
    let (layout, count) = layout(plan)?;
    let (recompute, note) = recompute(plan, &layout);
    let ranks = pipeline(plan)?.ranks.iter().map(|rank| rank.0 + 1).max().unwrap_or(1);
    let micro = plan.schedule.micro_batch;
    let global = micro.saturating_mul(u64::from(microbatches)).saturating_mul(u64::from(replicas));
    let degree = plan.stages.first().map_or(1, Stage::degree);
    let (groups, micro) = match plan.activations() {
        // Every device of a group has a part of the micro-batch: for Megatron it is a replica.
        ActivationSharding::Batch => {
            (format!("--expert-model-parallel-size {degree}\n"), micro / u64::from(degree.max(1)))
        }
        ActivationSharding::Sequence => {
            (format!("--sequence-parallel\n--tensor-model-parallel-size {degree}\n"), micro)
        }
        ActivationSharding::Replicated if degree > 1 => (format!("--tensor-model-parallel-size {degree}\n"), micro),
        ActivationSharding::Replicated => (String::new(), micro),
    };
    // Without these, Megatron slices every expert over the tensor-parallel group.
    let has_whole_experts = plan.predicted.experts.iter().any(|experts| experts.split == "experts");
    let is_tensor_parallel = degree > 1 && plan.activations() != ActivationSharding::Batch;
    let experts = match is_tensor_parallel && has_whole_experts {
        true => format!("--expert-model-parallel-size {degree}\n--expert-tensor-parallel-size 1\n"),
        false => String::new(),
    };
    let precision = plan.precision().filter(|precision| precision.is_mixed());
    let precision = precision.map_or(String::new(), |precision| format!("--{}\n", precision.name()));
    let text = format!(
        "{precision}{groups}{experts}--pipeline-model-parallel-size {ranks}\n--pipeline-model-parallel-layout {layout}\n--num-layers {count}\n\
         --micro-batch-size {micro}\n--global-batch-size {global}\n{optimizer_flags}{recompute}"
    );
    let mut bundle = Bundle::of("megatron.args", text);
    bundle.notes.extend(fit::handed_on(plan, TOOL));
    bundle.notes.extend(note);
    bundle.notes.push(format!(
        "train with: {} pretrain_gpt.py $(cat FILE), and the arguments of the model, the data and the optimizer",
        fit::torchrun(plan, u64::from(ranks) * u64::from(replicas) * u64::from(degree))
    ));
    Ok(bundle)
}

/// The arguments of activation recomputation. Without `--target`, a plan recomputes ops; all layers that contain any of
/// them then count.
fn recompute(plan: &Plan, layout: &str) -> (String, Option<String>) {
    let layers = |(stage, part): (&Stage, &str)| {
        let share = stage.recomputed_op_ids().count() as f64 / stage.op_ids().count().max(1) as f64;
        let layer_count = part.matches('t').count() as f64;
        (
            stage.recomputed.and_then(|recomputed| recomputed.layers).unwrap_or((layer_count * share).ceil() as u32),
            layer_count as u32,
        )
    };
    let layers: Vec<(u32, u32)> = plan.stages.iter().zip(layout.split('|')).map(layers).collect();
    let max_recomputed = match layers.iter().map(|(recomputed, _)| *recomputed).max().unwrap_or(0) {
        0 => return (String::new(), None),
        max_recomputed => max_recomputed,
    };
    let fewer = layers.iter().filter(|(recomputed, layer_count)| recomputed < layer_count.min(&max_recomputed)).count();
    let note = (fewer > 0).then(|| {
        format!(
            "{fewer} of {} stages recompute fewer layers, but Megatron recomputes the first {max_recomputed} of the layers of \
             every stage, so a step takes longer than planned",
            plan.stages.len()
        )
    });
    (format!("--recompute-granularity full\n--recompute-method block\n--recompute-num-layers {max_recomputed}\n"), note)
}

/// The layout string and the number of layers.
fn layout(plan: &Plan) -> Result<(String, u32), Refusal> {
    let stages = layers(plan, TOOL)?;
    let lists = || stages.iter().flatten().filter_map(|module| numbered(module)).map(|(list, _)| list);
    let (layers, layer_count) = longest(lists()).ok_or(Refusal::NoLayers)?;
    if let Some(other) = lists().filter(|list| *list != layers).min() {
        return Err(Refusal::Lists { tool: TOOL, first: layers.to_string(), second: other.to_string() });
    }
    let last = stages.len().saturating_sub(1);
    let mut next = 0;
    let mut parts = Vec::with_capacity(stages.len());
    for (at, modules) in stages.iter().enumerate() {
        let mut part = String::from(if at == 0 { "E" } else { "" });
        for module in modules {
            let error = |why: String| Refusal::Place { module: module.clone(), stage: at as u32, why };
            match numbered(module).filter(|(list, _)| *list == layers) {
                Some((_, number)) if number == next => {
                    next += 1;
                    part.push('t');
                }
                Some(_) => {
                    return Err(error(format!(
                        "comes where layer {next} is next, and Megatron assigns layers in order"
                    )));
                }
                None if next == 0 && at == 0 => {}
                None if next == layer_count && at == last => {}
                None => {
                    let place = if next == 0 { "first" } else { "last" };
                    return Err(error(format!(
                        "is not a layer of `{layers}`, and Megatron keeps such modules in the {place} stage"
                    )));
                }
            }
        }
        part.push_str(if at == last { "L" } else { "" });
        parts.push(part);
    }
    Ok((parts.join("|"), next))
}
