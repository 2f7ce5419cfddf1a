//! The result of planning: the plan, and the candidates it was chosen from.

use crate::partition::search::result::PlanCandidate;
use crate::plan::Plan;
use crate::plan::problem::Problem;
use std::collections::BTreeSet;

#[derive(Clone, Debug, PartialEq)]
pub struct ComparedPlan {
    pub name: &'static str,
    pub minibatch_us: f64,
    pub replicas: Vec<u32>,
    /// Distinct devices; fewer than the replicas if a device runs several stages.
    pub devices: u32,
    pub tensor: u32,
    pub peak_bytes: u64,
    pub fits: bool,
}

#[derive(Clone, Debug)]
pub struct Planned {
    pub plan: Plan,
    /// All candidates, the chosen one first.
    pub compared: Vec<ComparedPlan>,
}

impl Planned {
    /// Records the devices of the problem's cluster that no stage uses.
    pub fn set_idle(&mut self, problem: &Problem) {
        let busy: BTreeSet<u32> = self.plan.stages.iter().flat_map(|stage| stage.devices.iter().copied()).collect();
        self.plan.cluster.idle = (0..problem.cluster.devices()).filter(|device| !busy.contains(device)).collect();
    }
}

impl ComparedPlan {
    pub fn of(candidate: &PlanCandidate) -> ComparedPlan {
        ComparedPlan {
            name: candidate.name,
            minibatch_us: candidate.minibatch_us,
            replicas: candidate.shape.replicas(),
            devices: candidate.devices(),
            tensor: 1,
            peak_bytes: candidate.peak(),
            fits: candidate.fits,
        }
    }
}
