//! Parameters that several stages of a plan share: which schedules can train them, and in which version.

use compiler::import::onnx::name::shown;
use compiler::plan::{Plan, Stage};
use compiler::profile::cost_graph::ParamCost;
use std::cmp::Reverse;

/// The stages that use a parameter, where they are several.
fn shared<'a>(params: &'a [ParamCost], plan: &'a Plan) -> Vec<(&'a ParamCost, Vec<&'a Stage>)> {
    let holds = |stage: &Stage, op: u32| stage.ops.iter().any(|&(from, to)| (from..to).contains(&op));
    let using = |param: &ParamCost| -> Vec<&'a Stage> {
        plan.stages.iter().filter(|stage| param.users.iter().any(|user| holds(stage, user.0))).collect()
    };
    params.iter().map(|param| (param, using(param))).filter(|(_, stages)| stages.len() > 1).collect()
}

fn listed(stages: &[&Stage]) -> String {
    stages.iter().map(|stage| stage.id.0.to_string()).collect::<Vec<_>>().join(" and ")
}

fn more(shared: usize) -> String {
    if shared > 1 { format!(" ({} more are shared as well)", shared - 1) } else { String::new() }
}

/// A warning where `pipec train` would refuse the plan, because stages of unequally many replicas share a parameter under a schedule
/// that steps them at different times.
pub fn refused(params: &[ParamCost], plan: &Plan) -> Option<String> {
    if !plan.schedule.kind.is_round_robin() {
        return None;
    }
    let mut shared = shared(params, plan);
    shared.retain(|(_, stages)| stages.iter().any(|stage| stage.replicas != stages[0].replicas));
    let (first, stages) = shared.first()?;
    Some(format!(
        "stages {} share the parameter `{}`{} and have unequally many replicas: `pipec train` refuses that under {}, `--schedule 1f1b` trains it",
        listed(stages),
        shown(&first.name),
        more(shared.len()),
        plan.schedule.kind.name()
    ))
}

/// Where stages that share a parameter have it in other versions than their own, which a program does not say: all see the one that the
/// stage with the most in flight has, so that the copies are equal.
pub fn aged(params: &[ParamCost], plan: &Plan) -> Option<String> {
    if !plan.schedule.kind.is_round_robin() || refused(params, plan).is_some() {
        return None;
    }
    let cap = |stage: &&Stage| plan.schedule.in_flight.get(stage.id.0 as usize).copied().unwrap_or(1);
    let mut shared = shared(params, plan);
    shared.retain(|(_, stages)| stages.iter().any(|stage| cap(stage) != cap(&stages[0])));
    let (first, stages) = shared.first()?;
    let oldest = stages.iter().max_by_key(|stage| (cap(stage), Reverse(stage.id.0)))?;
    Some(format!(
        "stages {} share the parameter `{}`{}: all use it in the version that stage {} has, which is older than the one that programs name for the others",
        listed(stages),
        shown(&first.name),
        more(shared.len()),
        oldest.id.0
    ))
}
