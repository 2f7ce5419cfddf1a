//! The result of a plan request.

use compiler::partition::planned::Planned;
use compiler::plan::device_memory::fullest;
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::Zero;
use compiler::plan::{Plan, Stage};
use std::collections::BTreeMap;

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
    /// Kinds of plans that do not fit in memory, with what they need; sentences without a full stop.
    pub too_large: Vec<String>,
}

/// The same stages under a schedule without a flush.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alternative {
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
    pub schedule: Schedule,
    /// The plan, or the reason why there is none.
    pub answer: Result<TriedPlan, String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct TriedPlan {
    /// Replicas of each stage.
    pub replicas: Vec<u32>,
    /// Stages on each device.
    pub chunks: u32,
    pub tensor: u32,
    pub zero: Zero,
    /// Where the time of the busiest device goes.
    pub losses: Losses,
    /// Predicted samples per second.
    pub throughput_per_s: f64,
    /// Memory of the fullest device.
    pub peak_bytes: u64,
}

/// Fractions of a minibatch in which the busiest device does not advance the training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Losses {
    /// It waits: the pipeline fills or drains, or a transfer or an all-reduce does not overlap.
    pub idle: f64,
    /// It recomputes activations.
    pub recomputation: f64,
    /// It waits for collectives of tensor parallelism.
    pub collectives: f64,
}

impl Losses {
    fn of(plan: &Plan) -> Losses {
        let time = plan.predicted.minibatch_us;
        let items = |stage: &Stage| f64::from(plan.schedule.microbatches.div_ceil(stage.replicas.max(1)));
        let busy = |stage: &Stage| items(stage) * (stage.fwd_us + stage.bwd_us);
        // Stages of one device add up.
        let mut devices: BTreeMap<u32, [f64; 3]> = BTreeMap::new();
        for stage in &plan.stages {
            let sums = devices.entry(stage.devices.first().copied().unwrap_or(0)).or_default();
            let collectives =
                stage.tensor_parallel.as_ref().map_or(0.0, |of| of.collective_fwd_us + of.collective_bwd_us);
            sums[0] += busy(stage);
            sums[1] += items(stage) * stage.recompute_us();
            sums[2] += items(stage) * collectives;
        }
        let busiest = devices.into_values().max_by(|a, b| a[0].total_cmp(&b[0])).unwrap_or_default();
        let [busy, recomputation, collectives] = busiest.map(|us| if time > 0.0 { us / time } else { 0.0 });
        Losses { idle: (1.0 - busy).max(0.0), recomputation, collectives }
    }
}

impl Tried {
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
                zero: plan.zero(),
                losses: Losses::of(plan),
                throughput_per_s: plan.predicted.throughput_per_s,
                peak_bytes: fullest(plan),
            }),
        }
    }
}

/// Kinds of plans that are reported.
const KINDS: usize = 12;

/// The chosen one, then the best of those with another schedule or tensor-parallel degree; best first.
pub fn of_each_kind(chosen: Tried, mut tried: Vec<Tried>) -> Vec<Tried> {
    let speed = |one: &Tried| one.answer.as_ref().map_or(f64::NEG_INFINITY, |plan| plan.throughput_per_s);
    tried.sort_by(|left, right| speed(right).total_cmp(&speed(left)));
    let kind = |one: &Tried| {
        let plan = one.answer.as_ref().ok()?;
        let is_pipeline = plan.replicas.len() > 1;
        Some((is_pipeline.then_some(one.schedule), plan.tensor, plan.zero.level > 0 && !is_pipeline))
    };
    let mut known = vec![kind(&chosen)];
    tried.retain(|one| {
        if known.len() == KINDS {
            return false;
        }
        let kind = kind(one);
        let is_new = !known.contains(&kind);
        if is_new {
            known.push(kind);
        }
        is_new
    });
    tried.insert(0, chosen);
    tried
}
