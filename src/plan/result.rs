//! The result of a plan request.

use compiler::partition::planned::Planned;
use compiler::plan::schedule::Schedule;

/// The result of a request.
#[derive(Clone, Debug)]
pub struct PlanResult {
    /// The plan and its candidates.
    pub planned: Planned,
    /// Why the runtime of pipec cannot train the plan, if it cannot.
    pub untrainable: Option<String>,
    /// Searched combinations of micro-batch size and schedule, if more than one.
    pub tried: Vec<Tried>,
}

/// One combination of micro-batch size and schedule, and its result.
#[derive(Clone, Debug, PartialEq)]
pub struct Tried {
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// Micro-batches per minibatch.
    pub microbatches: u32,
    /// The schedule.
    pub schedule: Schedule,
    /// Samples per second and peak bytes of a device, or the reason why there is no plan.
    pub answer: Result<(f64, u64), String>,
}
