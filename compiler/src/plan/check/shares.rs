//! Recomputes the memory of ZeRO shards, from the definitions.

use crate::plan::check::error::PlanFault;
use crate::plan::schedule::{Schedule, VersionRule};
use crate::plan::{Plan, Stage};
use crate::profile::cost_graph::CostGraph;
use std::collections::BTreeSet;

/// Unsharded bytes of a stage: `summed` has one gradient sum per parameter, `terms` one per use, `shared` those of tied
/// weights. `largest` is the most of any op, with its weights if these are gathered at the same time. `state` is
/// optimizer bytes per byte.
pub struct UnshardedBytes {
    pub weights: u64,
    pub summed: u64,
    pub masters: u64,
    pub terms: u64,
    pub shared: u64,
    pub largest: u64,
    pub state: f64,
}

/// ZeRO stages that do not match the replicas, and values of `parameter_bytes` that differ from the model.
pub fn faults(graph: &CostGraph, plan: &Plan, stage_of: &[usize]) -> Vec<PlanFault> {
    let mut faults = Vec::new();
    let mut whole = vec![0u64; plan.stages.len()];
    for param in &graph.params {
        let stages: BTreeSet<usize> = param.users.iter().filter_map(|op| stage_of.get(op.index()).copied()).collect();
        for stage in stages.into_iter().filter(|stage| *stage < plan.stages.len()) {
            whole[stage] = whole[stage].saturating_add(param.bytes);
        }
    }
    for (at, stage) in plan.stages.iter().enumerate() {
        let can_share = stage.replicas >= 2 && plan.schedule.kind.trains();
        if stage.zero > 3 || (stage.zero > 0 && !can_share) {
            let what = format!("stage {at} states zero {}, with {} replicas", stage.zero, stage.replicas);
            faults.push(PlanFault::Schedule { what });
        }
        let is_right = stage.shard_degree == 0
            || (stage.zero > 0
                && (2..stage.replicas).contains(&stage.shard_degree)
                && stage.replicas.is_multiple_of(stage.shard_degree));
        if !is_right {
            let what = format!("stage {at} of {} replicas states shard_degree {}", stage.replicas, stage.shard_degree);
            faults.push(PlanFault::Schedule { what });
        }
        let expected = if stage.zero == 3 { whole[at] } else { 0 };
        if stage.parameter_bytes != expected {
            let what = format!("stage {at} states parameter_bytes {}, expected {expected}", stage.parameter_bytes);
            faults.push(PlanFault::Schedule { what });
        }
    }
    faults
}

/// Bytes of one weight version per replica.
pub fn kept(stage: &Stage, of: &UnshardedBytes) -> u64 {
    if stage.zero < 3 {
        return of.weights;
    }
    // Tied weights are not sharded.
    let r = u64::from(stage.shards().max(1));
    let apart = of.weights.saturating_sub(of.shared).div_ceil(r);
    of.weights.min(apart.saturating_add(of.shared))
}

/// Rounds by which a stage is ahead of the first stage, so that its tied-weight sums wait. Under 1F1B-RR the first
/// stage is the slowest; the lead in minibatches is divided by the stage's replicas.
pub fn late(plan: &Plan, stage: usize) -> u64 {
    let (own, in_flight) = (&plan.stages[stage], u64::from(plan.schedule.in_flight[stage]));
    let replicas = u64::from(own.replicas.max(1));
    match plan.schedule.kind.versions() {
        VersionRule::Stashed => {
            let first = u64::from(plan.stages[0].replicas.max(1)) * u64::from(plan.schedule.in_flight[0]);
            first.saturating_sub(in_flight * replicas).div_ceil(replicas)
        }
        _ => 0,
    }
}

/// Bytes of gradients and optimizer state per replica, with the given number of weight versions. `is_in_place` is true
/// if gradients are all-reduced in their own buffer.
pub fn held(stage: &Stage, (versions, kind): (u32, Schedule), is_in_place: bool, of: &UnshardedBytes) -> (u64, u64) {
    let state = |bytes: u64, masters: u64| ((bytes as f64 * of.state).ceil() as u64).saturating_add(masters);
    let own = of.terms.saturating_add(of.shared);
    // Gradients of later rounds, contributed before the first is stepped. Weight versions of the same element type leave them
    // their memory.
    let is_apart = kind.is_round_robin() && stage.replicas > 1 && of.masters > 0;
    let later = if is_apart { versions.saturating_sub(1) } else { 0 };
    let own = own.saturating_add(of.terms.saturating_mul(u64::from(later)));
    if stage.replicas < 2 || stage.zero == 0 {
        let with_others = match stage.replicas {
            0 | 1 => 0,
            _ if is_in_place => 0,
            // Under 2BW it reuses the buffer of the released version if that is as wide.
            _ if kind.is_double_buffered() && of.masters == 0 => of.terms.saturating_sub(of.weights),
            _ => of.terms,
        };
        return (own.saturating_add(with_others), state(of.summed, of.masters));
    }
    // One shard, rounded up; tied weights are whole.
    let part = |bytes: u64, shared: u64| {
        let (r, rest) = (u64::from(stage.shards().max(1)), bytes.saturating_sub(shared));
        (rest / r + u64::from(!rest.is_multiple_of(r))).saturating_add(shared)
    };
    // With several versions, the next round's sums start before the previous round is stepped; under 2BW the replica
    // does this too.
    let shard_bytes = match stage.zero {
        1 if is_in_place => 0,
        1 if kind.is_double_buffered() => {
            let free = if of.masters == 0 { of.weights.min(of.terms) } else { 0 };
            of.terms.saturating_add(part(of.terms, of.shared)).saturating_sub(of.shared).saturating_sub(free)
        }
        2.. if versions > 1 => part(of.terms, of.shared).saturating_mul(2),
        _ => part(of.terms, of.shared),
    };
    // From ZeRO 2, a replica holds the gradients of the running op, or during their all-reduce those of tied weights:
    // summed over replicas, apart from its own if not in place, and summed over stages.
    let copies = if is_in_place { 1 } else { 2 };
    let unsharded_bytes = if stage.zero == 1 { own } else { of.largest.max(of.shared.saturating_mul(copies)) };
    let stepped = state(part(of.summed, of.shared), part(of.masters, of.shared.min(of.masters)));
    (unsharded_bytes.saturating_add(shard_bytes), stepped)
}
