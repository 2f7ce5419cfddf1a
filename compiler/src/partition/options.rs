//! Options of planning.

use crate::partition::partitioners::Partitioner;
use crate::partition::search::in_flight::Efficiency;
use crate::plan::problem::{Problem, ProblemError};
use std::time::Duration;

pub const MAX_DEVICES: u32 = 4096;

/// How far a plan is improved by simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effort {
    /// Searched coarsely and not improved, because it is compared with others first.
    Draft,
    /// Improved move by move, with half the work.
    Climb,
    /// Improved, also with replicas near those of the best plan.
    #[default]
    Whole,
}

#[derive(Clone, Copy, Default)]
pub struct PlannerOptions<'a> {
    pub partitioner: Partitioner,
    /// Down-sets to explore before falling back. Default: `DEFAULT_BUDGET`, and a few seconds of work.
    pub budget: Option<u64>,
    /// Wall-clock limit; only for `Milp`. A run stopped by it is not reproducible, and its plan says so.
    pub time_limit: Option<Duration>,
    /// Recorded in the plan; no partitioner here is random.
    pub seed: u64,
    /// Simulates how stages run under in-flight limits, to choose the caps automatically. `None` uses the published rule
    /// and the cost model's closed-form times; nothing is simulated, and stages are recomputed as a whole.
    pub efficiency: Option<&'a Efficiency<'a>>,
    pub effort: Effort,
    /// True if the baselines of the plan are not simulated: the caller states others, or compares the plan first.
    pub without_baselines: bool,
    /// A plan within this fraction of a lower bound is not improved.
    pub gap: f64,
}

impl PlannerOptions<'_> {
    /// Rejects invalid problems, problems that no partitioner supports, and options that the chosen partitioner does
    /// not support.
    pub fn check(&self, problem: &Problem) -> Result<(), ProblemError> {
        problem.check()?;
        let devices = problem.cluster.devices();
        if devices > MAX_DEVICES {
            let (limit, found) = (u64::from(MAX_DEVICES), u64::from(devices));
            return Err(ProblemError::TooLarge { method: "planning", what: "devices", limit, found });
        }
        if self.time_limit.is_some() && self.partitioner != Partitioner::Milp {
            let what = "only partitioner `milp` supports a time limit; use `--budget` for the others";
            return Err(ProblemError::Unmet { what: what.to_string() });
        }
        if problem.cluster.is_mixed() && (problem.constraints.tensor || !problem.shared.is_empty()) {
            return Err(ProblemError::Mixed { what: "`--tensor`" });
        }
        if problem.chunks > 1 && self.partitioner != Partitioner::Pipec {
            let what = "only partitioner `pipec` supports several stages per rank";
            return Err(ProblemError::Unmet { what: what.to_string() });
        }
        Ok(())
    }
}
