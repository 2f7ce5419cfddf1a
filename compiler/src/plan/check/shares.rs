//! The judge's own reckoning of what replicas share, from the definitions.

use crate::plan::fault::Fault;
use crate::plan::{Plan, ScheduleKind, Stage};

/// What a stage would hold alike on all replicas: bytes of one sum of gradients for each of its weights, of their masters, of one sum
/// for each use of each, of those that other stages hold too, of those of the op that uses most, and of the optimizer's state for each byte.
pub struct Of {
    pub summed: u64,
    pub masters: u64,
    pub terms: u64,
    pub shared: u64,
    pub largest: u64,
    pub state: f64,
}

/// Levels that do not go with the stages.
pub fn faults(plan: &Plan) -> Vec<Fault> {
    let mut faults = Vec::new();
    for (at, stage) in plan.stages.iter().enumerate() {
        let can_share = stage.replicas >= 2 && plan.schedule.kind != ScheduleKind::Inference;
        if stage.zero > 2 || (stage.zero > 0 && !can_share) {
            let what = format!("stage {at} says zero {}, with {} replicas", stage.zero, stage.replicas);
            faults.push(Fault::Schedule { what });
        }
    }
    faults
}

/// Bytes of gradients and of the optimizer's state on each replica.
pub fn held(stage: &Stage, of: &Of) -> (u64, u64) {
    let state = |bytes: u64, masters: u64| ((bytes as f64 * of.state).ceil() as u64).saturating_add(masters);
    // What one of r has of so many bytes, no less than its part of each.
    let part = |bytes: u64| {
        let r = u64::from(stage.replicas);
        bytes / r + u64::from(!bytes.is_multiple_of(r))
    };
    // Sums over the items of the replica, and those with what other stages have.
    let mut gradients = of.terms.saturating_add(of.shared);
    if stage.replicas < 2 {
        return (gradients, state(of.summed, of.masters));
    }
    if stage.zero == 0 {
        gradients = gradients.saturating_add(of.terms);
        return (gradients, state(of.summed, of.masters));
    }
    let alone = |bytes: u64, shared: u64| part(bytes.saturating_sub(shared)).saturating_add(shared);
    if stage.zero == 2 {
        // Of all that it makes alone, a replica has what one op makes at a time.
        gradients = of.shared.saturating_mul(2).saturating_add(of.largest);
    }
    let stepped = state(alone(of.summed, of.shared), alone(of.masters, of.shared.min(of.masters)));
    (gradients.saturating_add(alone(of.terms, of.shared)), stepped)
}
