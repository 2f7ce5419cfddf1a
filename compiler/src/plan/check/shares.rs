//! The judge's own reckoning of what replicas share, from the definitions.

use crate::plan::check::error::PlanFault;
use crate::plan::{Plan, ScheduleKind, Stage};
use crate::profile::cost_graph::CostGraph;
use std::collections::BTreeSet;

/// What a stage would hold alike on all replicas: bytes of its weights, of one sum of gradients for each of them, of their masters, of one sum
/// for each use of each, of those that other stages hold too, of those of the op that uses most, with what it reads at the same time where
/// that is gathered, and of the optimizer's state for each byte.
pub struct Of {
    pub weights: u64,
    pub summed: u64,
    pub masters: u64,
    pub terms: u64,
    pub shared: u64,
    pub largest: u64,
    pub state: f64,
}

/// Levels that do not go with the stages, and parameters of which replicas have shares that are not those of the model.
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
        let can_share = stage.replicas >= 2 && plan.schedule.kind != ScheduleKind::Inference;
        if stage.zero > 3 || (stage.zero > 0 && !can_share) {
            let what = format!("stage {at} says zero {}, with {} replicas", stage.zero, stage.replicas);
            faults.push(PlanFault::Schedule { what });
        }
        let expected = if stage.zero == 3 { whole[at] } else { 0 };
        if stage.parameter_bytes != expected {
            let what = format!("stage {at} says parameter_bytes {}, found {expected}", stage.parameter_bytes);
            faults.push(PlanFault::Schedule { what });
        }
    }
    faults
}

/// Bytes of one version of the weights that each replica holds.
pub fn kept(stage: &Stage, of: &Of) -> u64 {
    if stage.zero < 3 {
        return of.weights;
    }
    // Every replica has all that other stages hold too, and one of r parts of the rest.
    let r = u64::from(stage.replicas.max(1));
    let apart = of.weights.saturating_sub(of.shared).div_ceil(r);
    of.weights.min(apart.saturating_add(of.shared))
}

/// Rounds that a stage is ahead of the slowest one with which it shares parameters, so that its sums for these wait. Round robin the first
/// stage is the slowest: an item is that many minibatches further there, and a replica of this one takes one of so many.
pub fn late(plan: &Plan, stage: usize) -> u64 {
    let (own, in_flight) = (&plan.stages[stage], u64::from(plan.schedule.in_flight[stage]));
    let replicas = u64::from(own.replicas.max(1));
    match plan.schedule.kind {
        ScheduleKind::RoundRobin => {
            let first = u64::from(plan.stages[0].replicas.max(1)) * u64::from(plan.schedule.in_flight[0]);
            first.saturating_sub(in_flight * replicas).div_ceil(replicas)
        }
        _ => 0,
    }
}

/// Bytes of gradients and of the optimizer's state on each replica, of a stage with so many versions of its weights.
pub fn held(stage: &Stage, versions: u32, kind: ScheduleKind, of: &Of) -> (u64, u64) {
    let state = |bytes: u64, masters: u64| ((bytes as f64 * of.state).ceil() as u64).saturating_add(masters);
    // Sums over the items of the replica, and those with what other stages have.
    let own = of.terms.saturating_add(of.shared);
    if stage.replicas < 2 || stage.zero == 0 {
        // With other replicas, the sum of all of them as well.
        let with_others = match stage.replicas {
            0 | 1 => 0,
            // One version is left when that is made, and what the other took is free, if it is as wide.
            _ if kind == ScheduleKind::TwoBw && of.masters == 0 => of.terms.saturating_sub(of.weights),
            _ => of.terms,
        };
        return (own.saturating_add(with_others), state(of.summed, of.masters));
    }
    // What one of r has of so many bytes, no less than its part of each; of what other stages hold too, all.
    let part = |bytes: u64, shared: u64| {
        let (r, rest) = (u64::from(stage.replicas), bytes.saturating_sub(shared));
        (rest / r + u64::from(!rest.is_multiple_of(r))).saturating_add(shared)
    };
    // With older versions others add to the sums of a round before a replica is done with those of the one before, and under 2BW it does itself.
    let of_others = match stage.zero {
        1 if kind == ScheduleKind::TwoBw => {
            // Of the weights one version is left then, and what the other took is free, if it is as wide.
            let free = if of.masters == 0 { of.weights.min(of.terms) } else { 0 };
            of.terms.saturating_add(part(of.terms, of.shared)).saturating_sub(of.shared).saturating_sub(free)
        }
        2.. if versions > 1 => part(of.terms, of.shared).saturating_mul(2),
        _ => part(of.terms, of.shared),
    };
    // From the second level on a replica has of its own what one op makes at a time, or what is then added up with other stages.
    let of_its_own = if stage.zero == 1 { own } else { of.largest.max(of.shared) };
    let stepped = state(part(of.summed, of.shared), part(of.masters, of.shared.min(of.masters)));
    (of_its_own.saturating_add(of_others), stepped)
}
