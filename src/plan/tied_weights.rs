//! Tied weights across stages: which schedules can train them, and with which weight version.

use compiler::partition::error::PlanError;
use compiler::partition::planned::Planned;
use compiler::plan::device_memory::fullest;
use compiler::plan::problem::{CostModel, Objective, Problem};
use compiler::plan::schedule::Schedule;
use compiler::plan::{Plan, Stage};
use compiler::profile::cost_graph::ParamCost;
use compiler::text::name::short_name;
use compiler::text::quantity;
use std::cmp::Reverse;

/// The tied parameters, with the stages that use them.
fn shared<'a>(params: &'a [ParamCost], plan: &'a Plan) -> Vec<(&'a ParamCost, Vec<&'a Stage>)> {
    let holds = |stage: &Stage, op: u32| stage.ops.iter().any(|&(from, to)| (from..to).contains(&op));
    let using = |param: &ParamCost| -> Vec<&'a Stage> {
        plan.stages.iter().filter(|stage| param.users.iter().any(|user| holds(stage, user.0))).collect()
    };
    params.iter().map(|param| (param, using(param))).filter(|(_, stages)| stages.len() > 1).collect()
}

/// The tied parameters whose stages have different numbers of replicas.
fn uneven<'a>(params: &'a [ParamCost], plan: &'a Plan) -> Vec<(&'a ParamCost, Vec<&'a Stage>)> {
    let mut shared = shared(params, plan);
    shared.retain(|(_, stages)| stages.iter().any(|stage| stage.replicas != stages[0].replicas));
    shared
}

fn listed(stages: &[&Stage]) -> String {
    stages.iter().map(|stage| stage.id.0.to_string()).collect::<Vec<_>>().join(" and ")
}

fn more(shared: usize) -> String {
    if shared > 1 { format!(" ({} more are shared, too)", shared - 1) } else { String::new() }
}

/// What the first of these parameters is shared by.
fn sharing(shared: &[(&ParamCost, Vec<&Stage>)]) -> Option<String> {
    let (first, stages) = shared.first()?;
    let (stages, name) = (listed(stages), short_name(&first.name));
    Some(format!("stages {stages} share the parameter `{name}`{}", more(shared.len())))
}

/// A warning if `pipec train` would refuse the plan: stages with different numbers of replicas share a parameter under a schedule that
/// steps them at different times.
pub fn refused(params: &[ParamCost], plan: &Plan) -> Option<String> {
    if !plan.schedule.kind.is_round_robin() {
        return None;
    }
    let sharing = sharing(&uneven(params, plan))?;
    let kind = plan.schedule.kind.name();
    Some(format!(
        "{sharing} but have different numbers of replicas: `pipec train` refuses this under {kind}, but not with `--schedule 1f1b`"
    ))
}

/// Replaces a plan that `pipec train` would refuse: by the best plan with equal replica counts of the stages that share, else the best
/// under 1F1B. The new plan has a warning with the figure of the replaced one. A plan is kept if there is no other, or if its cost model
/// is one of the literature.
pub fn trained(
    problem: &Problem,
    planned: Planned,
    solve: &dyn Fn(&Problem) -> Result<Planned, PlanError>,
) -> Result<Planned, PlanError> {
    let shared = uneven(&problem.graph.params, &planned.plan);
    let is_asked = problem.cost == CostModel::Pipec && planned.plan.schedule.kind.is_round_robin();
    let Some((first, stages)) = shared.first().filter(|_| is_asked) else { return Ok(planned) };
    let is_taken = |other: &Planned| refused(&problem.graph.params, &other.plan).is_none();
    let better = |left: &Planned, right: &Planned| {
        let time = left.plan.predicted.minibatch_us.total_cmp(&right.plan.predicted.minibatch_us);
        match problem.objective {
            Objective::Memory => fullest(&left.plan).cmp(&fullest(&right.plan)).then(time),
            _ => time,
        }
    };
    let mut asked = Vec::new();
    if problem.constraints.replicas.is_none() && problem.constraints.target.is_none() {
        let mut even = problem.clone();
        even.constraints.equal_replicas = true;
        // The other stages keep their replicas.
        let mut alike = problem.clone();
        let ids: Vec<u32> = shared.iter().flat_map(|(_, stages)| stages.iter().map(|stage| stage.id.0)).collect();
        let least =
            planned.plan.stages.iter().filter(|stage| ids.contains(&stage.id.0)).map(|stage| stage.replicas).min();
        let replicas = |stage: &Stage| least.filter(|_| ids.contains(&stage.id.0)).unwrap_or(stage.replicas);
        alike.constraints.replicas = Some(planned.plan.stages.iter().map(replicas).collect());
        asked.extend([even, alike]);
    }
    let found = asked.iter().filter_map(|asked| solve(asked).ok().filter(is_taken)).min_by(better);
    let found = found.or_else(|| {
        let mut flushed = problem.clone();
        flushed.schedule = Schedule::OneFOneB;
        solve(&flushed).ok()
    });
    let Some(mut other) = found else { return Ok(planned) };
    if problem.constraints.replicas.is_none() {
        other.plan.options.remove("stages");
    }
    if other.plan.schedule.kind == problem.schedule {
        let (ours, theirs) = (&mut other.plan, &planned.plan);
        ours.lower_bound_us = ours.lower_bound_us.min(theirs.lower_bound_us);
        // Optimality was proven over fewer plans.
        ours.proven_optimal &= theirs.proven_optimal;
        if better(&other, &planned).is_le() {
            return Ok(other);
        }
        other.plan.proven_optimal = false;
    }
    let without = match problem.objective {
        Objective::Memory => format!("peak memory {}", quantity::bytes(fullest(&planned.plan))),
        _ => format!("{} per minibatch", quantity::time(planned.plan.predicted.step_us)),
    };
    let instead = match other.plan.schedule.kind == problem.schedule {
        true => "here they have equal numbers".to_string(),
        false => format!(
            "this plan uses {}, which can train them; no plan with equal numbers meets the constraints",
            other.plan.schedule.kind.name()
        ),
    };
    let kind = problem.schedule.name();
    other.plan.warnings.push(format!(
        "stages {} of the best plan under {kind} ({without}) share the parameter `{}`{} but have different numbers of replicas, which `pipec train` \
         refuses: {instead}; `--schedule {kind}` gives the refused plan",
        listed(stages),
        short_name(&first.name),
        more(shared.len()),
    ));
    Ok(other)
}

/// A note on tied weights whose version differs from the program: all stages use the version of the stage with the most in-flight
/// minibatches, so that the copies are equal.
pub fn aged(params: &[ParamCost], plan: &Plan) -> Option<String> {
    if !plan.schedule.kind.is_round_robin() || refused(params, plan).is_some() {
        return None;
    }
    let cap = |stage: &&Stage| plan.schedule.in_flight.get(stage.id.0 as usize).copied().unwrap_or(1);
    let mut shared = shared(params, plan);
    shared.retain(|(_, stages)| stages.iter().any(|stage| cap(stage) != cap(&stages[0])));
    let (_, stages) = shared.first()?;
    let oldest = stages.iter().max_by_key(|stage| (cap(stage), Reverse(stage.id.0)))?.id.0;
    let sharing = sharing(&shared)?;
    Some(format!(
        "{sharing}: all use the weight version of stage {oldest}, which is older than the version in the programs of the others"
    ))
}
