//! Discrete-event simulation of programs: the very lists that the workers run, against times instead of devices.
//!
//! [`run::simulate`] plays a [`Program`](crate::schedule::Program) and gives a [`Timeline`]: who did what when. From it come
//! throughput, bubbles, items in flight and memory. Training fills the same [`Track`]s with measured times, so prediction and
//! measurement can be laid side by side.
//!
//! All times are microseconds.

pub mod check_plan;
pub mod efficiency;
pub mod inference;
pub mod link_sharing;
pub mod memory;
pub mod network;
pub mod one_f_one_b_rr;
pub mod overlap;
pub mod run;
pub mod steady_throughput;
pub mod step_time;

use std::fmt;

use crate::plan::StageId;
use crate::schedule::action::{Phase, Work};
use crate::schedule::collective::{Collective, Meeting};
use crate::schedule::{MicrobatchId, Payload};

/// What fills a span of time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Activity {
    /// A stage's forward of an item.
    Forward(StageId, MicrobatchId),
    /// A stage's backward of an item.
    Backward(StageId, MicrobatchId),
    /// A stage's forward of an item again, for its backward.
    Recompute(StageId, MicrobatchId),
    /// The part of a stage's backward of an item that other stages wait for.
    BackwardInput(StageId, MicrobatchId),
    /// The part of a stage's backward of an item that makes gradients of weights.
    BackwardWeight(StageId, MicrobatchId),
    /// A stage's optimizer step after a round.
    Step(StageId, u32),
    /// The all-reduce of one bucket of a round of a stage.
    AllReduce(StageId, u32, u32),
    /// The reduce-scatter of a round of a stage.
    ReduceScatter(StageId, u32),
    /// The all-gather of a version of a stage.
    AllGather(StageId, u32),
    /// A transfer of what a stage made of an item: activations, or gradients.
    Transfer(StageId, Payload, MicrobatchId),
    /// Blocked.
    Wait,
}

impl Activity {
    /// The activity that a piece of work is.
    pub fn of(Work { stage, item, part }: Work) -> Activity {
        match part {
            Phase::Forward => Activity::Forward(stage, item),
            Phase::Backward => Activity::Backward(stage, item),
            Phase::BackwardInput => Activity::BackwardInput(stage, item),
            Phase::BackwardWeight => Activity::BackwardWeight(stage, item),
        }
    }

    /// The activity that a collective is.
    pub fn of_meeting(Meeting { kind, stage, number, bucket }: Meeting) -> Activity {
        match kind {
            Collective::AllReduce => Activity::AllReduce(stage, number, bucket),
            Collective::ReduceScatter => Activity::ReduceScatter(stage, number),
            Collective::AllGather => Activity::AllGather(stage, number),
        }
    }

    /// The kind of activity, as one word.
    pub fn kind(self) -> &'static str {
        match self {
            Activity::Forward(..) => "forward",
            Activity::Backward(..) => "backward",
            Activity::Recompute(..) => "recompute",
            Activity::BackwardInput(..) => "backward-input",
            Activity::BackwardWeight(..) => "backward-weight",
            Activity::Step(..) => "step",
            Activity::AllReduce(..) => "all-reduce",
            Activity::ReduceScatter(..) => "reduce-scatter",
            Activity::AllGather(..) => "all-gather",
            Activity::Transfer(..) => "transfer",
            Activity::Wait => "wait",
        }
    }

    /// Whether the worker's device is busy with it.
    pub fn computes(self) -> bool {
        let carries = matches!(self, Activity::AllReduce(..) | Activity::ReduceScatter(..) | Activity::AllGather(..));
        !carries && !matches!(self, Activity::Transfer(..) | Activity::Wait)
    }
}

impl fmt::Display for Activity {
    /// As in programs: `2F3`, `2B3`, `2I3`, `2W3`, `step 2 round 1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Activity::Forward(stage, item) | Activity::Transfer(stage, Payload::Activation, item) => {
                write!(f, "{}F{}", stage.0, item.0)
            }
            Activity::Backward(stage, item) | Activity::Transfer(stage, Payload::Gradient, item) => {
                write!(f, "{}B{}", stage.0, item.0)
            }
            Activity::Recompute(stage, item) => write!(f, "{}R{}", stage.0, item.0),
            Activity::BackwardInput(stage, item) => write!(f, "{}I{}", stage.0, item.0),
            Activity::BackwardWeight(stage, item) => write!(f, "{}W{}", stage.0, item.0),
            Activity::Step(stage, round) => write!(f, "step {} round {round}", stage.0),
            Activity::AllReduce(stage, round, 0) => write!(f, "all-reduce {} round {round}", stage.0),
            Activity::AllReduce(stage, round, bucket) => {
                write!(f, "all-reduce {} round {round} bucket {bucket}", stage.0)
            }
            Activity::ReduceScatter(stage, round) => write!(f, "reduce-scatter {} round {round}", stage.0),
            Activity::AllGather(stage, version) => write!(f, "all-gather {} v{version}", stage.0),
            Activity::Wait => f.write_str("wait"),
        }
    }
}

/// An activity from `start` to `end`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Span {
    /// What.
    pub activity: Activity,
    /// When it began, in microseconds from the start of the run.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// Spans of one worker or one link, in order of their start.
#[derive(Clone, PartialEq, Debug)]
pub struct Track {
    /// `1.0` for a worker, `0.0 > 1.0` for a link, `all-reduce 1` for the collectives of a stage.
    pub name: String,
    /// What happened.
    pub spans: Vec<Span>,
}

/// Who did what when.
#[derive(Clone, PartialEq, Debug)]
pub struct Timeline {
    /// A track for each worker, by [`WorkerId`](crate::schedule::WorkerId): computations only, what lies between is idle.
    pub workers: Vec<Track>,
    /// A track for each link that carried anything, then one for each stage that reduced, by name.
    pub links: Vec<Track>,
    /// When the last activity ended.
    pub makespan: f64,
    /// For each item, in order, when its last computation ended.
    pub finished: Vec<f64>,
    /// For each worker, the most items that were in flight at once, each counted at every stage of the worker that it is at.
    pub peak_in_flight: Vec<u32>,
    /// For each worker, bytes of live weight versions, gradients and saved activations from each moment on; empty without
    /// sizes.
    pub memory: Vec<Vec<(f64, u64)>>,
}

impl Timeline {
    /// Time that the worker computes.
    pub fn busy(&self, worker: usize) -> f64 {
        let spans = self.workers[worker].spans.iter();
        spans.filter(|span| span.activity.computes()).map(|span| span.end - span.start).sum()
    }

    /// The share of all workers' time, from start to end of the run, in which they do not compute.
    pub fn bubble(&self) -> f64 {
        let whole = self.makespan * self.workers.len() as f64;
        if whole == 0.0 {
            return 0.0;
        }
        let busy: f64 = (0..self.workers.len()).map(|worker| self.busy(worker)).sum();
        1.0 - busy / whole
    }

    /// Items per second in the middle half of the run, away from filling and draining; of the whole run if that is too short.
    pub fn throughput(&self) -> f64 {
        let n = self.finished.len();
        let microseconds = self.middle(n / 4, n - n / 4 - 1);
        let (items, time) = microseconds.unwrap_or((n as f64, self.makespan));
        if time > 0.0 { items / time * 1e6 } else { f64::INFINITY }
    }

    /// Items and time between the ends of the `from`-th and the `to`-th item to finish, if there is any time between.
    pub fn middle(&self, from: usize, to: usize) -> Option<(f64, f64)> {
        let mut finished = self.finished.clone();
        finished.sort_by(f64::total_cmp);
        let (start, end) = (*finished.get(from)?, *finished.get(to)?);
        (end > start).then_some(((to - from) as f64, end - start))
    }

    /// When the last computation of each minibatch ended, of so many items each, from the first minibatch to end to the last.
    pub fn ends(&self, microbatches: u32) -> Vec<f64> {
        let last = |items: &[f64]| items.iter().copied().fold(0.0, f64::max);
        let mut ends: Vec<f64> = self.finished.chunks(microbatches.max(1) as usize).map(last).collect();
        ends.sort_by(f64::total_cmp);
        ends
    }

    /// The most bytes the worker held at once; 0 without sizes.
    pub fn peak_memory(&self, worker: usize) -> u64 {
        self.memory[worker].iter().map(|&(_, bytes)| bytes).max().unwrap_or(0)
    }
}

/// Why a program cannot be simulated.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SimulateError {
    #[error("the program has {program}, the pipeline {pipeline}")]
    Mismatch { program: String, pipeline: String },
    #[error("worker {worker} waits for ever at instruction {at} (`{instruction}`); `schedule check` says why")]
    Stuck { worker: String, at: usize, instruction: String },
    #[error(transparent)]
    Schedule(#[from] crate::schedule::ScheduleError),
}
