//! Tensor-parallel plans: plans over tensor-parallel groups instead of single devices.
//!
//! A group of t devices is treated as one device with the per-device time and memory of its sharded ops
//! (`profile/shared.rs`); the innermost level then has a t-th of its members (`plan/groups.rs`). All planning features
//! apply unchanged: replicas, several servers, recomputation, in-flight limits, schedules. The result is expanded to all
//! devices and verified, and the best degree wins.
//!
//! All stages of a plan use the same degree, which is what the runtime and the export targets support.

use crate::partition::error::PlanError;
use crate::partition::infeasible;
use crate::partition::options::PlannerOptions;
use crate::partition::partitioners::Partitioner;
use crate::partition::planned::Planned;
use crate::partition::search::select::baselines;
use crate::partition::search::simulate_candidate::is_of_figures;
use crate::partition::single_degree;
use crate::plan::check::verify;
use crate::plan::device_memory::fullest;
use crate::plan::problem::{Constraints, CostModel, Objective, Problem, ProblemError};
use crate::plan::{Edge, Plan, Stage, TensorParallelCost, groups};
use crate::profile::cost_graph::OpId;
use crate::profile::shared::TensorParallelCosts;
use serde_json::json;
use std::cmp::Ordering;

/// The best plan over all tensor-parallel degrees, including degree 1 unless tensor parallelism is required.
pub fn best(problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    let mut planned: Vec<Planned> = Vec::new();
    let (mut missing, mut impossible): (Option<PlanError>, Option<PlanError>) = (None, None);
    let mut took = |answer: Result<Planned, PlanError>| match answer {
        Ok(found) => {
            planned.push(found);
            Ok(())
        }
        Err(error) if infeasible::is_infeasible(&error) => {
            missing = Some(infeasible::smaller_need(missing.take(), error));
            Ok(())
        }
        Err(error @ PlanError::Unsound(_)) => Err(error),
        // A problem that is invalid at one degree may be valid at another.
        Err(error) => {
            impossible.get_or_insert(error);
            Ok(())
        }
    };
    if !problem.constraints.tensor {
        took(best_also_with_equal_replicas(&Problem { shared: Vec::new(), ..problem.clone() }, options))?;
    }
    // Keeping weights in place saves memory, and sometimes time. Among many degrees it is tried where memory is short.
    let mut roomy = None;
    for costs in &problem.shared {
        if costs.keeps_weights && roomy == Some(costs.devices) && !problem.constraints.tensor {
            continue;
        }
        if let Some(asked) = group_problem(problem, costs) {
            let found = of_groups(problem, costs, &asked, options, &best_also_with_equal_replicas);
            roomy = found.as_ref().ok().filter(|found| has_room(problem, &found.plan)).map(|_| costs.devices);
            took(found)?;
        }
    }
    let least = planned.iter().map(|found| found.plan.lower_bound_us).fold(f64::INFINITY, f64::min);
    let states = planned.iter().map(|found| found.plan.search.states).sum();
    let missed = planned.iter().find_map(|found| found.plan.search.fallback.clone());
    planned.sort_by(|left, right| order(problem.objective, &left.plan, &right.plan));
    let mut all = planned.into_iter();
    let Some(mut best) = all.next() else { return Err(missing.or(impossible).unwrap_or_else(none)) };
    let is_proven =
        best.plan.proven_optimal && best.plan.predicted.by_equations_us() <= least * (1.0 + verify::TOLERANCE);
    best.plan.proven_optimal = is_proven;
    best.plan.lower_bound_us = best.plan.lower_bound_us.min(least);
    (best.plan.search.states, best.plan.search.fallback) = (states, best.plan.search.fallback.or(missed));
    let mut sizes: Vec<u32> = problem.shared.iter().map(|costs| costs.devices).collect();
    sizes.dedup();
    best.plan
        .options
        .insert("tensor".to_string(), if problem.constraints.tensor { json!(sizes) } else { json!("auto") });
    for (at, other) in all.enumerate() {
        // The baselines are the same for all degrees.
        let is_new = |name: &str| at == 0 || name == "pipec";
        best.compared.extend(other.compared.into_iter().filter(|candidate| is_new(candidate.name)));
    }
    Ok(best)
}

/// The best plan, also among plans with equal replicas in all stages. With flushes the closed form underestimates the
/// cost of unequal replicas, so an equal plan may be faster in simulation.
fn best_also_with_equal_replicas(problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    let free = single_degree::plan(problem, options);
    let constraints = &problem.constraints;
    let is_free =
        constraints.replicas.is_none() && constraints.cut_after.is_none() && !constraints.require_pipec_cost();
    let may_differ = problem.cost == CostModel::Pipec && !problem.schedule.is_continuous() && problem.chunks == 1;
    if !is_free || !may_differ || options.partitioner != Partitioner::Pipec {
        return free;
    }
    let mut even = problem.clone();
    even.constraints.equal_replicas = true;
    let Ok(mut even) = single_degree::plan(&even, options) else { return free };
    let Ok(free) = free else { return Ok(even) };
    match order(problem.objective, &even.plan, &free.plan) {
        Ordering::Less => {
            even.plan.lower_bound_us = even.plan.lower_bound_us.min(free.plan.lower_bound_us);
            even.plan.proven_optimal &= free.plan.proven_optimal;
            even.plan.search.states += free.plan.search.states;
            even.compared.extend(free.compared.iter().filter(|candidate| candidate.name == "pipec").cloned());
            Ok(even)
        }
        _ => Ok(free),
    }
}

/// True if less memory could not make the plan faster.
fn has_room(problem: &Problem, plan: &Plan) -> bool {
    let limit = problem.memory_limit.map_or(u64::MAX, |limit| limit.0);
    let is_pressed = fullest(plan) > limit / 10 * 9;
    problem.objective != Objective::Memory && !is_pressed && plan.stages.iter().all(|stage| !stage.recompute)
}

/// The error if no degree divides the innermost level.
fn none() -> PlanError {
    let what = "the tensor-parallel degree must divide the number of devices of the innermost level".to_string();
    PlanError::Problem(ProblemError::Unmet { what })
}

/// Orders plans: by the objective, then smaller degree, then fewer stages.
fn order(objective: Objective, left: &Plan, right: &Plan) -> Ordering {
    let time = |plan: &Plan| plan.predicted.minibatch_us;
    let peak = |plan: &Plan| plan.stages.iter().map(|stage| stage.memory.total).max();
    let size = |plan: &Plan| (plan.stages.first().map(Stage::degree), plan.stages.len());
    let time = time(left).total_cmp(&time(right));
    let first = match objective {
        Objective::Throughput | Objective::Latency => time,
        Objective::Memory => peak(left).cmp(&peak(right)).then(time),
    };
    first.then(size(left).cmp(&size(right)))
}

/// The problem over groups; `None` if the degree does not divide the innermost level.
pub fn group_problem(problem: &Problem, costs: &TensorParallelCosts) -> Option<Problem> {
    let degree = costs.devices;
    let mut levels = groups::seen(&problem.cluster.levels, degree);
    let first = levels.first_mut().filter(|level| level.count.is_multiple_of(degree))?;
    first.count /= degree;
    let mut asked = problem.clone();
    asked.graph = costs.graph.clone();
    asked.shared = Vec::new();
    asked.constraints.tensor = false;
    asked.cluster.levels = levels;
    Some(asked)
}

/// Makes a plan of a problem over groups, as all its devices see it.
pub fn of_groups(
    problem: &Problem,
    costs: &TensorParallelCosts,
    asked: &Problem,
    options: &PlannerOptions<'_>,
    plan: &dyn Fn(&Problem, &PlannerOptions<'_>) -> Result<Planned, PlanError>,
) -> Result<Planned, PlanError> {
    let efficiency = options.efficiency.map(|efficiency| {
        move |stages: &[Stage], edges: &[Edge], caps: &[u32]| {
            let stages: Vec<Stage> = stages.iter().map(|stage| whole(stage, costs.devices)).collect();
            efficiency(&stages, edges, caps)
        }
    });
    let efficiency = efficiency.as_ref().map(|own| own as _);
    let of_groups = PlannerOptions { efficiency, without_baselines: true, ..*options };
    let mut planned = plan(asked, &of_groups).map_err(|error| match error {
        PlanError::Problem(ProblemError::TooManyReplicas { wanted, .. }) => {
            let (degree, devices) = (costs.devices, problem.cluster.devices());
            PlanError::Problem(ProblemError::TooManyGroups { wanted, degree, devices })
        }
        other => other,
    })?;
    let plan = &mut planned.plan;
    plan.cluster.levels = problem.cluster.levels.clone();
    plan.cluster.devices = problem.cluster.devices();
    for stage in &mut plan.stages {
        *stage = Stage { tensor_parallel: Some(sharing(problem, costs, stage)), ..whole(stage, costs.devices) };
    }
    plan.baselines = baselines(problem, options, plan.predicted.minibatch_us);
    plan.predicted.busiest_link = None;
    let checked = verify::check(problem, plan).map_err(PlanError::Unsound)?;
    plan.predicted.busiest_link = checked.busiest_link;
    for candidate in &mut planned.compared {
        candidate.tensor = costs.devices;
    }
    Ok(planned)
}

/// The same stages with the costs of `problem`, which are those of these stages, each sharded as a whole. `None` if they
/// do not fit in memory, or if the planner places them elsewhere.
pub fn as_trained(problem: &Problem, searched: &Planned, options: &PlannerOptions<'_>) -> Option<Planned> {
    let (costs, before) = (problem.shared.first()?, &searched.plan);
    let mut asked = group_problem(problem, costs)?;
    // Ops of one stage are fused, so that no other stages are possible.
    for stage in &before.stages {
        let leader = stage.op_ids().find(|op| asked.graph.ops[*op as usize].joins.is_none())?;
        for op in stage.op_ids() {
            asked.graph.ops[op as usize].joins = Some(OpId(leader)).filter(|_| op != leader);
        }
    }
    asked.graph.check().ok()?;
    let replicas = before.stages.iter().map(|stage| stage.replicas).collect();
    asked.constraints = Constraints { replicas: Some(replicas), ..Constraints::default() };
    let options = PlannerOptions { without_baselines: true, ..*options };
    let mut planned = of_groups(problem, costs, &asked, &options, &single_degree::plan).ok()?;
    planned.set_idle(problem);
    let plan = &mut planned.plan;
    let is_same = |(one, other): (&Stage, &Stage)| (&one.ops, &one.devices) == (&other.ops, &other.devices);
    if plan.stages.len() != before.stages.len() || !plan.stages.iter().zip(&before.stages).all(is_same) {
        return None;
    }
    // The search stands as it was; only figures of its result change.
    plan.lower_bound_us = before.lower_bound_us.min(plan.predicted.minibatch_us);
    plan.proven_optimal =
        before.proven_optimal && plan.predicted.minibatch_us <= before.lower_bound_us * (1.0 + verify::TOLERANCE);
    (plan.search, plan.options, plan.baselines) = (before.search.clone(), before.options.clone(), before.baselines);
    plan.warnings.extend(before.warnings.iter().filter(|warning| !is_of_figures(warning)).cloned());
    let mut compared = searched.compared.clone();
    if let (Some(first), Some(own)) = (compared.first_mut(), planned.compared.first()) {
        (first.minibatch_us, first.peak_bytes) = (own.minibatch_us, own.peak_bytes);
    }
    planned.compared = compared;
    Some(planned)
}

fn whole(stage: &Stage, degree: u32) -> Stage {
    let all = |group: &u32| group * degree..(group + 1) * degree;
    Stage { devices: stage.devices.iter().flat_map(all).collect(), tensor_degree: Some(degree), ..stage.clone() }
}

fn sharing(problem: &Problem, costs: &TensorParallelCosts, stage: &Stage) -> TensorParallelCost {
    let sum = |us: &dyn Fn(usize) -> f64| stage.op_ids().map(|op| us(op as usize)).sum::<f64>();
    let ops = &problem.graph.ops;
    TensorParallelCost {
        keeps_weights: costs.keeps_weights,
        activations: costs.activations,
        unsharded_fwd_us: sum(&|op| ops[op].fwd_us),
        unsharded_bwd_us: sum(&|op| ops[op].bwd_us),
        collective_fwd_us: sum(&|op| costs.meetings[op][0]),
        collective_bwd_us: sum(&|op| costs.meetings[op][1]),
    }
}
