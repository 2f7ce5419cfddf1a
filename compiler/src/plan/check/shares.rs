//! What plans say of the shares of replicas, held against the stages and the model.

use crate::plan::fault::Fault;
use crate::plan::{Plan, ScheduleKind};
use crate::profile::cost_graph::CostGraph;
use std::collections::BTreeSet;

/// Levels that do not go with the stages, and parameters of which replicas have shares that are not those of the model.
pub fn faults(graph: &CostGraph, plan: &Plan, stage_of: &[usize]) -> Vec<Fault> {
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
            faults.push(Fault::Schedule { what });
        }
        let expected = if stage.zero == 3 { whole[at] } else { 0 };
        if stage.parameter_bytes != expected {
            let what = format!("stage {at} says parameter_bytes {}, found {expected}", stage.parameter_bytes);
            faults.push(Fault::Schedule { what });
        }
    }
    faults
}
