//! The result of a plan request.

use compiler::partition::planned::Planned;
use compiler::plan::device_memory::fullest;
use compiler::plan::schedule::Schedule;
use compiler::plan::{Plan, Stage};

/// The result of a request.
#[derive(Clone, Debug)]
pub struct PlanResult {
    /// The plan and its candidates.
    pub planned: Planned,
    /// Why the runtime of pipec cannot train the plan, if it cannot.
    pub untrainable: Option<String>,
    /// Searched configurations; of those that are alike only the best.
    pub tried: Vec<Tried>,
    /// A faster schedule with other semantics.
    pub alternative: Option<Alternative>,
}

/// The same stages under a schedule without a flush.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alternative {
    /// The schedule.
    pub schedule: Schedule,
    /// Predicted time of a minibatch, in microseconds.
    pub minibatch_us: f64,
}

/// One configuration of a search, and its result.
#[derive(Clone, Debug, PartialEq)]
pub struct Tried {
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// Micro-batches per minibatch.
    pub microbatches: u32,
    /// The schedule.
    pub schedule: Schedule,
    /// The plan, or the reason why there is none.
    pub answer: Result<TriedPlan, String>,
}

/// The plan of a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct TriedPlan {
    /// Replicas of each stage.
    pub replicas: Vec<u32>,
    /// Stages on each device.
    pub chunks: u32,
    /// The tensor-parallel degree.
    pub tensor: u32,
    /// The ZeRO stage.
    pub zero: u32,
    /// True if stages recompute their activations.
    pub recomputes: bool,
    /// Predicted samples per second.
    pub throughput_per_s: f64,
    /// Memory of the fullest device.
    pub peak_bytes: u64,
}

impl Tried {
    /// A plan that was made.
    pub fn of(plan: &Plan) -> Tried {
        let stages = &plan.stages;
        Tried {
            micro_batch: plan.schedule.micro_batch,
            microbatches: plan.schedule.microbatches,
            schedule: plan.schedule.kind,
            answer: Ok(TriedPlan {
                replicas: stages.iter().map(|stage| stage.replicas).collect(),
                chunks: plan.schedule.chunks,
                tensor: stages.iter().map(Stage::degree).max().unwrap_or(1),
                zero: stages.iter().map(|stage| stage.zero).max().unwrap_or(0),
                recomputes: stages.iter().any(|stage| stage.recompute),
                throughput_per_s: plan.predicted.throughput_per_s,
                peak_bytes: fullest(plan),
            }),
        }
    }
}
