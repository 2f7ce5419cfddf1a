//! The micro-batches in flight that a device holds, and a check of the pending weight gradients.

use crate::plan::fullest_moment;
use crate::plan::problem::{Problem, Target};
use crate::plan::schedule::{PendingWeightGrads, Schedule};
use crate::plan::{Plan, PlannedSchedule};

/// The micro-batches in flight at each stage when its devices are fullest.
pub fn counts(problem: &Problem, plan: &Plan, per_microbatch: &[u64]) -> Vec<u32> {
    let PlannedSchedule { kind, chunks, microbatches, ref in_flight, .. } = plan.schedule;
    let mut counts = in_flight.clone();
    if kind == Schedule::Interleaved && chunks > 1 && problem.constraints.target == Some(Target::Megatron) {
        let ranks = plan.stages.len() / chunks as usize;
        for rank in 0..ranks {
            let own = || (rank..plan.stages.len()).step_by(ranks);
            let bytes: Vec<u64> = own().map(|at| per_microbatch[at]).collect();
            let items = microbatches.div_ceil(plan.stages[rank].replicas.max(1));
            let of_rank = fullest_moment::of_rank((ranks as u32, rank as u32), items, &bytes);
            own().zip(of_rank).for_each(|(at, count)| counts[at] = count);
        }
    }
    counts
}

/// Checks pending weight gradients. Under zb-h1 and zb-h2 a stage starts weight-gradient passes after as many
/// input-gradient passes as there are workers before it, or twice as many. Plans with chunks state the peaks of their
/// compute table.
pub fn wrong_pending(plan: &Plan) -> Option<String> {
    let PlannedSchedule { kind, in_flight, pending_weight_grads, .. } = &plan.schedule;
    if !kind.splits_backward() {
        return (!pending_weight_grads.is_empty()).then(|| {
            format!("pending_weight_grads is {pending_weight_grads:?}, but this schedule does not split the backward")
        });
    }
    if pending_weight_grads.len() != plan.stages.len()
        || pending_weight_grads.iter().zip(in_flight).any(|(pending, most)| !(1..=*most).contains(pending))
    {
        return Some(format!(
            "pending_weight_grads is {pending_weight_grads:?} for caps {in_flight:?}; it needs one number per stage, from 1 to the cap"
        ));
    }
    let Some(PendingWeightGrads::PerEarlierWorker(depth)) = kind.properties().split else { return None };
    let depth = u64::from(depth);
    let mut workers = 0u64;
    for (at, stage) in plan.stages.iter().enumerate() {
        let r = u64::from(stage.replicas.max(1));
        let found = (depth * workers.div_ceil(r) + 1).min(u64::from(in_flight[at]));
        if u64::from(pending_weight_grads[at]) != found {
            return Some(format!(
                "pending_weight_grads is {} at stage {at}, but its position requires {found}",
                pending_weight_grads[at]
            ));
        }
        workers += r;
    }
    None
}
