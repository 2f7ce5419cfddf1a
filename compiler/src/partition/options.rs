//! Options of planning.

use crate::partition::partitioners::Partitioner;
use crate::partition::search::in_flight::Efficiency;
use std::time::Duration;

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
    /// True if the plan is searched coarsely and not improved by simulation, because it is compared with others first.
    pub is_draft: bool,
    /// True if the baselines of the plan are not simulated: the caller states others, or compares the plan first.
    pub without_baselines: bool,
    /// A plan within this fraction of a lower bound is not improved.
    pub gap: f64,
}
