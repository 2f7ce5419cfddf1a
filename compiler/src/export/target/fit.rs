//! Checks of a plan shared by several targets.

use super::refusal::Refusal;
use super::{ExportInput, Imported};
use crate::plan::problem::{CostModel, Target};
use crate::plan::schedule::Schedule;
use crate::plan::zero::Zero;
use crate::plan::{Plan, Stage};
use crate::text::name::short_name;

/// Refuses a plan for a published instance, which has no model.
pub fn is_of_a_model(plan: &Plan) -> Result<(), Refusal> {
    match plan.cost {
        CostModel::Load | CostModel::Hybrid => Err(Refusal::Instance),
        CostModel::Pipec | CostModel::Paper | CostModel::Pipedream => Ok(()),
    }
}

pub fn model<'a>(input: &ExportInput<'a>) -> Result<&'a Imported<'a>, Refusal> {
    input.model.ok_or_else(|| Refusal::Model { what: "the model is not available".to_string() })
}

/// Refuses schedules that need weight stashing, and inference plans.
pub fn flushes(plan: &Plan, tool: &'static str) -> Result<(), Refusal> {
    is_of_a_model(plan)?;
    match plan.schedule.kind {
        kind @ Schedule::Inference => Err(Refusal::TrainsNothing { tool, kind }),
        kind if kind.is_continuous() => Err(Refusal::Versions { tool, kind }),
        _ => Ok(()),
    }
}

/// The number of replicas, if it is equal for all stages.
pub fn replicas(plan: &Plan, tool: &'static str) -> Result<u32, Refusal> {
    let replicas: Vec<u32> = plan.stages.iter().map(|stage| stage.replicas).collect();
    match replicas.first() {
        Some(&first) if replicas.iter().all(|replicas| *replicas == first) => Ok(first.max(1)),
        _ => {
            let counts: Vec<String> = replicas.iter().take(32).map(u32::to_string).collect();
            let suffix = if replicas.len() > 32 { ", …" } else { "" };
            Err(Refusal::UnequalReplicas { tool, replicas: counts.join(", ") + suffix })
        }
    }
}

/// Refuses tensor parallelism.
pub fn shares_nothing(plan: &Plan, tool: &'static str) -> Result<(), Refusal> {
    match plan.stages.iter().map(Stage::degree).max() {
        Some(devices) if devices > 1 => Err(Refusal::Shared { tool, devices }),
        _ => Ok(()),
    }
}

/// The ZeRO of the plan, if the target supports it.
pub fn zero(plan: &Plan, tool: &'static str, target: Target) -> Result<Zero, Refusal> {
    let (zero, most) = (plan.zero(), target.most_zero());
    match zero {
        Zero { level, .. } if level > most => Err(Refusal::Zero { tool, level, most }),
        Zero { level, degree: 1.. } if !target.has_shard_degree(level) => Err(Refusal::ShardDegree { tool, zero }),
        _ => Ok(zero),
    }
}

/// Micro-batches per replica, if they divide evenly.
pub fn share(plan: &Plan, replicas: u32) -> Result<u32, Refusal> {
    let microbatches = plan.schedule.microbatches;
    match microbatches % replicas.max(1) {
        0 => Ok(microbatches / replicas.max(1)),
        _ => Err(Refusal::Deal { microbatches, replicas }),
    }
}

/// A note on tensors that skip stages: these tools send only what a stage's modules return to the next stage.
pub fn handed_on(plan: &Plan, tool: &'static str) -> Option<String> {
    let skipping = plan.edges.iter().filter(|edge| edge.to.0 != edge.from.0 + 1);
    let (first, others) = (skipping.clone().next()?, skipping.count() - 1);
    let tensor = first.tensors.first().map(|name| format!(" (`{}`)", short_name(name))).unwrap_or_default();
    let others = if others > 0 { format!(", and {others} more pairs of stages") } else { String::new() };
    Some(format!(
        "tensors go from stage {} to stage {}{tensor}{others}: {tool} only sends module outputs to the next stage; \
         modules between must pass these tensors on or recompute them",
        first.from.0, first.to.0
    ))
}

/// The command that starts this many processes, up to the node's devices on each: the innermost level is a node.
pub fn torchrun(plan: &Plan, processes: u64) -> String {
    let node = plan.cluster.levels.first().map_or(1, |level| u64::from(level.count.max(1)));
    if processes <= node || !processes.is_multiple_of(node) {
        return format!("torchrun --nproc-per-node {processes}");
    }
    format!(
        "torchrun --nnodes {} --nproc-per-node {node} --rdzv-backend c10d --rdzv-endpoint HOST:PORT",
        processes / node
    )
}

/// The number of stages that recompute activations.
pub fn recomputing(plan: &Plan) -> usize {
    plan.stages.iter().filter(|stage| stage.recompute).count()
}

/// Says that the tool recomputes the activations of all stages.
pub fn recomputes_all(plan: &Plan, tool: &'static str) -> String {
    let (recomputed, stages) = (recomputing(plan), plan.stages.len());
    format!("{recomputed} of {stages} stages recompute activations, and {tool} recomputes those of all")
}

/// Refuses schedules that the tool does not support.
pub fn schedules(
    plan: &Plan,
    tool: &'static str,
    supported: &[Schedule],
    has: &'static str,
    instead: &'static str,
) -> Result<(), Refusal> {
    let kind = plan.schedule.kind;
    if supported.contains(&kind) { Ok(()) } else { Err(Refusal::Schedule { tool, kind, has, instead }) }
}
