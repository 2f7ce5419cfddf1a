//! Parameters that several stages of a plan share: which schedules can train them.

use compiler::import::onnx::name::shown;
use compiler::plan::Plan;
use compiler::profile::cost_graph::ParamCost;

/// A warning where `pipec train` would refuse the plan, because stages of unequally many replicas share a parameter under a schedule
/// that steps them at different times.
pub fn refused(params: &[ParamCost], plan: &Plan) -> Option<String> {
    if !plan.schedule.kind.is_round_robin() {
        return None;
    }
    let holds = |stage: &compiler::plan::Stage, op: u32| stage.ops.iter().any(|&(from, to)| (from..to).contains(&op));
    let stages = |param: &ParamCost| -> Vec<u32> {
        let with = plan.stages.iter().filter(|stage| param.users.iter().any(|user| holds(stage, user.0)));
        with.map(|stage| stage.id.0).collect()
    };
    let replicas = |id: u32| plan.stages.iter().find(|stage| stage.id.0 == id).map(|stage| stage.replicas);
    let shared: Vec<(&ParamCost, Vec<u32>)> = params
        .iter()
        .filter(|param| param.users.len() > 1)
        .map(|param| (param, stages(param)))
        .filter(|(_, stages)| stages.iter().any(|stage| replicas(*stage) != replicas(stages[0])))
        .collect();
    let (first, of) = shared.first()?;
    let list = of.iter().map(u32::to_string).collect::<Vec<_>>().join(" and ");
    let more = match shared.len() {
        1 => String::new(),
        count => format!(" ({} more are shared as well)", count - 1),
    };
    Some(format!(
        "stages {list} share the parameter `{}`{more} and have unequally many replicas: `pipec train` refuses that under {}, `--schedule 1f1b` trains it",
        shown(&first.name),
        plan.schedule.kind.name()
    ))
}
