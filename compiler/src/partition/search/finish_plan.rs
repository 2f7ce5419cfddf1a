//! Turns the chosen candidate into a complete plan and verifies it.

use crate::cluster::class;
use crate::partition::bounds::flush_bound::FlushBound;
use crate::partition::bounds::lower_bound::slowest_op_us;
use crate::partition::options::PlannerOptions;
use crate::partition::search::build_plan;
use crate::partition::search::constraints;
use crate::partition::search::context::SearchContext;
use crate::partition::search::in_flight::ENOUGH;
use crate::partition::search::numbers::same;
use crate::partition::search::result::{PlanCandidate, SearchResult, baseline_times};
use crate::partition::search::select::Simulated;
use crate::partition::search::simulate_candidate::{LINKS, Played};
use crate::plan::buckets;
use crate::plan::check::error::PlanFault;
use crate::plan::check::verify;
use crate::plan::cost_estimate::{CostEstimate, FlowQuery};
use crate::plan::problem::{CostModel, InFlight, Objective, Problem, Recomputation};
use crate::plan::stage_cost;
use crate::plan::{Plan, PlannedCluster, PlannedSchedule, Predicted, SCHEMA, Search};
use crate::profile::cost_graph::OpCost;
use crate::profile::precision::Precision;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Builds and verifies the plan. A fault is a bug in the partitioner.
///
/// `found` are the other candidates, `baselines` single device, data parallelism and uniform pipeline. `is_pinned` is
/// true if constraints fixed the stages, so that the partitioner had no choice.
pub fn finish(
    question: &SearchContext<'_>,
    best: &Simulated,
    found: &SearchResult,
    baselines: &[PlanCandidate; 3],
    is_pinned: bool,
) -> Result<Plan, Vec<PlanFault>> {
    let &SearchContext { full: problem, options, .. } = question;
    let Simulated { candidate: chosen, played } = best;
    let method = if is_pinned { "pinned" } else { options.partitioner.name() };
    let names = problem.constraints.cut_after.as_deref().unwrap_or_default();
    let mut warnings = constraints::moved(question.joined, names);
    let flattens = chosen.shape.is_flat && problem.cluster.levels.len() > 1;
    let bound_us = bound_us(question.problem, chosen, found);
    let Played { caps, minibatch_us, held, warning, .. } = played.clone();
    let (lower_bound_us, proven_optimal) =
        certificate(question.problem, chosen.minibatch_us, minibatch_us, bound_us, options.efficiency.is_some());
    if problem.schedule.is_custom() {
        warnings.push(
            "predicted times are estimates for a flush, not for this table; run `pipec simulate` for the table".into(),
        );
    }
    if let Some(fallback) = found.fallback.as_ref().filter(|_| !proven_optimal) {
        warnings.push(format!("the search is not exhaustive ({fallback}); a better plan may exist"));
    }
    if flattens && problem.cost != CostModel::Pipec {
        warnings.push(
            "stages do not fill whole groups of devices; times assume the slowest level's bandwidth for every \
                link"
                .into(),
        );
    }
    warnings.extend(warning);
    let holdings = build_plan::holdings(problem, &chosen.shape);
    let memory =
        build_plan::memory(problem, &chosen.shape, &chosen.spots, &holdings, &caps, &chosen.pending_weight_grads);
    let weight_versions = build_plan::versions(problem, &chosen.shape, &caps);
    let stages = build_plan::stages(problem, &chosen.shape, &chosen.spots, &memory);
    let mut plan = Plan {
        schema: SCHEMA.to_string(),
        model: problem.model.clone(),
        dtype: problem.dtype.clone(),
        element_types: problem.precision.map(Precision::types),
        optimizer: problem.optimizer.clone(),
        profile: problem.profile.clone(),
        cluster: PlannedCluster {
            levels: problem.cluster.levels.clone(),
            devices: problem.cluster.devices(),
            memory_per_device: problem.memory_limit,
            device: problem.cluster.device.clone(),
            classes: problem.cluster.classes.clone(),
            // Devices may still be renumbered.
            idle: Vec::new(),
        },
        cost: problem.cost,
        objective: problem.objective,
        schedule: PlannedSchedule {
            kind: problem.schedule,
            micro_batch: problem.micro_batch,
            microbatches: problem.microbatches,
            chunks: problem.chunks,
            in_flight: caps,
            weight_versions,
            pending_weight_grads: chosen.pending_weight_grads.clone(),
        },
        predicted: predicted(problem, chosen, minibatch_us, stages.len()),
        stages,
        edges: build_plan::edges(problem, &chosen.shape),
        lower_bound_us,
        proven_optimal,
        baselines: baseline_times(baselines),
        search: Search { method: method.to_string(), states: found.states, fallback: found.fallback.clone() },
        warnings,
        seed: options.seed,
        options: settings(problem, options),
        digest: None,
        extra: BTreeMap::new(),
    };
    let checked = verify::check(problem, &plan)?;
    plan.predicted.bottleneck = match held {
        Some(held) => format!("{held}; with higher limits: {}", checked.bottleneck),
        None => checked.bottleneck,
    };
    if let Some(link) = checked.busiest_link.as_ref().filter(|link| link.share > 1.0 + verify::TOLERANCE) {
        let (level, percent) = (link.level.escape_debug(), link.share * 100.0);
        plan.warnings.push(format!(
            "the links of group {} on {level} need {percent:.0} % {LINKS}; this cost \
             model assumes a separate link for each transfer and all-reduce",
            link.unit
        ));
    }
    plan.predicted.busiest_link = checked.busiest_link;
    Ok(plan)
}

/// Returns the plan's lower bound and whether the plan is proven optimal. `bound_us` is a bound under the closed-form
/// cost model, `objective_us` the closed-form time, and `minibatch_us` the simulated time.
///
/// Bounds concern time, never memory. For flushed schedules the closed form can exceed the simulated fill and drain
/// time, so [`FlushBound`] and total compute bound other plans; for a table, only total compute does.
pub fn certificate(
    problem: &Problem,
    objective_us: f64,
    minibatch_us: f64,
    bound_us: f64,
    is_played: bool,
) -> (f64, bool) {
    let is_table = problem.schedule.is_custom();
    let is_flushed = problem.cost == CostModel::Pipec && !problem.schedule.is_continuous();
    let is_of_time = problem.objective != Objective::Memory && !is_table;
    if is_table || (is_flushed && (is_played || minibatch_us != objective_us)) {
        let bound_us = if FlushBound::holds_for(problem) {
            let bound = FlushBound::of(&problem.graph, &problem.cluster, problem.microbatches);
            bound.least_us(&[problem.schedule], problem.zero, minibatch_us)
        } else {
            spread(problem)
        };
        let meets = same(bound_us, minibatch_us);
        return (if meets { minibatch_us } else { bound_us.min(minibatch_us) }, meets && is_of_time);
    }
    let meets = same(bound_us, objective_us);
    let lower_bound_us = if meets { objective_us } else { bound_us.min(objective_us) };
    (lower_bound_us, meets && is_of_time && is_near(minibatch_us, objective_us))
}

/// Lower bound on the time of every partition from the search and from total compute; equals the time of `chosen` if a
/// bound reaches it.
pub fn bound_us(problem: &Problem, chosen: &PlanCandidate, found: &SearchResult) -> f64 {
    let flattens = chosen.shape.is_flat && problem.cluster.levels.len() > 1;
    let bound = lower_bound(problem, flattens).max(found.bound_us);
    let meets = [Some(bound), found.proven_us].into_iter().flatten().any(|us| same(us, chosen.minibatch_us));
    if meets { chosen.minibatch_us } else { found.proven_us.unwrap_or(0.0).max(bound).min(chosen.minibatch_us) }
}

/// Lower bound under cost model `pipec`: all compute spread over all devices at their speeds, and the latency of one
/// micro-batch on the fastest device.
pub fn spread(problem: &Problem) -> f64 {
    let (devices, fastest) = (class::together(&problem.cluster), class::fastest(&problem.cluster.classes));
    let m = f64::from(problem.microbatches);
    let forward: f64 = problem.graph.ops.iter().map(|op| op.fwd_us).sum();
    let asked = build_plan::asked(problem);
    let total = if asked.trains() { problem.graph.total_us() } else { forward };
    // Weight-gradient passes are not on the critical path; for a table it is unknown which backwards are split.
    let may_split = problem.schedule.splits_backward() || problem.schedule.is_custom();
    let later: f64 = problem.graph.ops.iter().map(|op| op.weight_part_us()).sum();
    let way = if may_split && asked.trains() { (total - later).max(forward) } else { total };
    match (asked.latency, problem.schedule.is_continuous()) {
        (true, _) => forward / fastest,
        (false, true) => asked.link_weight() * total / devices,
        (false, false) => (way / fastest).max(total * m / devices),
    }
}

/// All compute spread over all devices; on one level also the slowest op at its best replica count.
fn lower_bound(problem: &Problem, flattens: bool) -> f64 {
    if problem.cost == CostModel::Pipec {
        return spread(problem);
    }
    let spread = problem.graph.total_us() / f64::from(problem.cluster.devices());
    if problem.cluster.levels.len() > 1 || flattens {
        return spread;
    }
    slowest_op_us(problem, &stage_cost::levels(&problem.cluster)[0]).max(spread)
}

/// Returns whether the simulated time equals the closed form, up to the loss that in-flight limits may cause.
fn is_near(played_us: f64, objective_us: f64) -> bool {
    played_us.min(objective_us) >= ENOUGH * played_us.max(objective_us)
}

/// The operations of a minibatch. Matrix products, which are nearly all of them, have two gradients of the same size; those
/// of frozen weights are not computed.
fn operations(problem: &Problem, chosen: &PlanCandidate) -> Predicted {
    let has_backward = problem.graph.ops.iter().any(|op| op.bwd_us > 0.0);
    let has_backward = problem.schedule.trains() && has_backward;
    let items = f64::from(problem.microbatches);
    let all_passes =
        |op: &OpCost| if has_backward { op.flops * f64::from(3 - op.omitted_grads.min(2)) } else { op.flops };
    let of = |ops: &[u32], flops: &dyn Fn(&OpCost) -> f64| {
        ops.iter().map(|&op| flops(&problem.graph.ops[op as usize])).sum::<f64>()
    };
    let (mut flops, mut recomputed_flops) = (0.0, 0.0);
    for (leaf, spot) in chosen.shape.leaves().iter().zip(&chosen.spots) {
        flops += items * of(leaf.ops, &all_passes);
        recomputed_flops += items * of(spot.recompute.of(leaf.ops), &OpCost::recompute_flops);
    }
    Predicted { flops, recomputed_flops, ..Predicted::default() }
}

fn predicted(problem: &Problem, chosen: &PlanCandidate, minibatch_us: f64, stages: usize) -> Predicted {
    let objective_us = Some(chosen.minibatch_us).filter(|us| *us != minibatch_us);
    let operations = operations(problem, chosen);
    let samples = problem.micro_batch as f64 * f64::from(problem.microbatches);
    let rate = |us: f64| if us > 0.0 { samples * 1e6 / us } else { 0.0 };
    let (step_us, throughput_per_s, bubble) = if problem.cost == CostModel::Pipec {
        let asked = build_plan::asked(problem);
        let looked =
            |asked: &FlowQuery| build_plan::outlook(problem, asked, &chosen.shape, &chosen.spots, &chosen.caps);
        let CostEstimate { step_us, bubble, .. } = looked(&asked);
        match objective_us {
            // Throughput is set by the slowest stage, because micro-batches overlap.
            None => (step_us, rate(looked(&FlowQuery { latency: false, ..asked }).step_us), bubble),
            // Busy time is unchanged; only the total differs.
            Some(objective) if !problem.schedule.is_continuous() && minibatch_us > 0.0 => {
                let busy_us = (1.0 - bubble) * objective;
                (minibatch_us, rate(minibatch_us), (1.0 - busy_us / minibatch_us).max(0.0))
            }
            Some(_) => (minibatch_us, rate(minibatch_us), bubble),
        }
    } else {
        let (m, p) = (f64::from(problem.microbatches), stages as f64);
        let fill = if problem.schedule.is_continuous() { 0.0 } else { p - 1.0 };
        let step_us = minibatch_us * (m + fill);
        (step_us, rate(step_us), fill / (m + fill))
    };
    Predicted { minibatch_us, objective_us, step_us, throughput_per_s, bubble, ..operations }
}

/// The settings of the search, as plans state them.
fn settings(problem: &Problem, options: &PlannerOptions<'_>) -> BTreeMap<String, Value> {
    let in_flight = match &problem.in_flight {
        InFlight::Auto => json!("auto"),
        InFlight::Pipedream => json!("pipedream"),
        InFlight::Given(caps) => json!(caps),
    };
    let constraints = &problem.constraints;
    let pins: Vec<String> = constraints.pins.iter().map(|(name, stage)| format!("{name}={stage}")).collect();
    let (zero, is_grouped) = (problem.zero, problem.zero.level > 0 && problem.zero.degree > 0);
    let all = [
        ("partitioner", Some(json!(options.partitioner.name()))),
        ("optimizer_state", Some(json!(problem.optimizer_state))),
        ("bucket_bytes", (problem.bucket.0 != buckets::USUAL_BYTES).then(|| json!(problem.bucket.0))),
        ("zero", (zero.level > 0).then(|| json!(zero.level))),
        ("shard_degree", is_grouped.then(|| json!(zero.degree))),
        ("in_flight", Some(in_flight)),
        ("activation_compression", problem.activation_compression.map(|ratio| json!(ratio))),
        ("budget", options.budget.map(|budget| json!(budget))),
        ("time_limit", options.time_limit.map(|limit| json!(limit.as_secs_f64()))),
        ("stages", constraints.replicas.as_ref().map(|replicas| json!(replicas))),
        ("pin", (!pins.is_empty()).then(|| json!(pins))),
        ("max_stages", constraints.most_stages.map(|most| json!(most))),
        ("recompute", (problem.recompute != Recomputation::Auto).then(|| json!(problem.recompute.name()))),
        ("no_replication", constraints.no_replication.then_some(json!(true))),
        ("target", constraints.target.map(|target| json!(target.name()))),
        ("cut_after", constraints.cut_after.as_ref().map(|names| json!(names))),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name.to_string(), value?))).collect()
}
