//! What several targets ask of a plan before they look at anything else.

use super::refusal::Refusal;
use super::{ExportInput, Imported};
use crate::import::onnx::name::shown;
use crate::plan::problem::CostModel;
use crate::plan::{Plan, ScheduleKind, Stage};

/// Refuses what is no plan of a model.
pub fn is_of_a_model(plan: &Plan) -> Result<(), Refusal> {
    match plan.cost {
        CostModel::Load | CostModel::Hybrid => Err(Refusal::Instance),
        CostModel::Pipec | CostModel::Paper | CostModel::Pipedream => Ok(()),
    }
}

/// The model, which is there for targets that say they need it.
pub fn model<'a>(asked: &ExportInput<'a>) -> Result<&'a Imported<'a>, Refusal> {
    asked.model.ok_or_else(|| Refusal::Model { what: "the model is not at hand".to_string() })
}

/// Refuses what only a runtime with stashed weights can run, and what trains nothing.
pub fn flushes(plan: &Plan, tool: &'static str) -> Result<(), Refusal> {
    is_of_a_model(plan)?;
    match plan.schedule.kind {
        kind @ ScheduleKind::Inference => Err(Refusal::TrainsNothing { tool, kind }),
        kind if kind.is_continuous() => Err(Refusal::Versions { tool, kind }),
        _ => Ok(()),
    }
}

/// The replicas of every stage, if all have equally many.
pub fn replicas(plan: &Plan, tool: &'static str) -> Result<u32, Refusal> {
    let all: Vec<u32> = plan.stages.iter().map(|stage| stage.replicas).collect();
    match all.first() {
        Some(&first) if all.iter().all(|replicas| *replicas == first) => Ok(first.max(1)),
        _ => {
            let told: Vec<String> = all.iter().take(32).map(u32::to_string).collect();
            let more = if all.len() > 32 { ", …" } else { "" };
            Err(Refusal::UnequalReplicas { tool, replicas: told.join(", ") + more })
        }
    }
}

/// Refuses groups of devices that share a replica.
pub fn shares_nothing(plan: &Plan, tool: &'static str) -> Result<(), Refusal> {
    match plan.stages.iter().map(Stage::degree).max() {
        Some(devices) if devices > 1 => Err(Refusal::Shared { tool, devices }),
        _ => Ok(()),
    }
}

/// The level of ZeRO of all stages, where the tool has it.
pub fn zero(plan: &Plan, tool: &'static str, most: u32) -> Result<u32, Refusal> {
    match plan.stages.iter().map(|stage| stage.zero).max().unwrap_or(0) {
        level if level > most => Err(Refusal::Zero { tool, level, most }),
        level => Ok(level),
    }
}

/// The micro-batches that one of equally many replicas takes.
pub fn share(plan: &Plan, replicas: u32) -> Result<u32, Refusal> {
    let microbatches = plan.schedule.microbatches;
    match microbatches % replicas.max(1) {
        0 => Ok(microbatches / replicas.max(1)),
        _ => Err(Refusal::Deal { microbatches, replicas }),
    }
}

/// What to know of tensors that pass over stages: these tools hand on what a stage's modules return, whatever the graph had.
pub fn handed_on(plan: &Plan, tool: &'static str) -> Option<String> {
    let passing = plan.edges.iter().filter(|edge| edge.to.0 != edge.from.0 + 1);
    let (first, more) = (passing.clone().next()?, passing.count() - 1);
    let tensor = first.tensors.first().map(|name| format!(" (`{}`)", shown(name))).unwrap_or_default();
    let more = if more > 0 { format!(", and {more} more such ways") } else { String::new() };
    Some(format!(
        "tensors go from stage {} to stage {}{tensor}{more}: {tool} sends what modules return to the next stage only, so that these \
         modules must hand them on, or make them again",
        first.from.0, first.to.0
    ))
}

/// Refuses schedules that the tool does not have.
pub fn schedules(
    plan: &Plan,
    tool: &'static str,
    known: &[ScheduleKind],
    has: &'static str,
    instead: &'static str,
) -> Result<(), Refusal> {
    let kind = plan.schedule.kind;
    if known.contains(&kind) { Ok(()) } else { Err(Refusal::Schedule { tool, kind, has, instead }) }
}
