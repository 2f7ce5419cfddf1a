//! Discrete-event simulation of programs: executes the workers' instruction lists with modelled times.
//!
//! [`run::simulate`] turns a [`Program`](crate::schedule::Program) into a [`Timeline`], which gives throughput,
//! bubbles, items in flight and memory. Training fills the same [`Track`]s with measured times, for comparison. All
//! times are microseconds.

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
use crate::schedule::collective::{Collective, CollectiveId};
use crate::schedule::{MicrobatchId, Payload};

#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Activity {
    Forward(StageId, MicrobatchId),
    Backward(StageId, MicrobatchId),
    /// The forward rerun before the backward of a recomputed stage.
    Recompute(StageId, MicrobatchId),
    /// The input-gradient pass of a split backward.
    BackwardInput(StageId, MicrobatchId),
    /// The weight-gradient pass of a split backward.
    BackwardWeight(StageId, MicrobatchId),
    /// Stage, round.
    Step(StageId, u32),
    /// Stage, round, bucket.
    AllReduce(StageId, u32, u32),
    /// Stage, round.
    ReduceScatter(StageId, u32),
    /// Stage, version.
    AllGather(StageId, u32),
    /// A transfer of activations or gradients; the stage is the producer.
    Transfer(StageId, Payload, MicrobatchId),
    Wait,
}

impl Activity {
    pub fn of(Work { stage, item, part }: Work) -> Activity {
        match part {
            Phase::Forward => Activity::Forward(stage, item),
            Phase::Backward => Activity::Backward(stage, item),
            Phase::BackwardInput => Activity::BackwardInput(stage, item),
            Phase::BackwardWeight => Activity::BackwardWeight(stage, item),
        }
    }

    pub fn of_meeting(CollectiveId { kind, stage, number, bucket }: CollectiveId) -> Activity {
        match kind {
            Collective::AllReduce => Activity::AllReduce(stage, number, bucket),
            Collective::ReduceScatter => Activity::ReduceScatter(stage, number),
            Collective::AllGather => Activity::AllGather(stage, number),
        }
    }

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

    pub fn computes(self) -> bool {
        let carries = matches!(self, Activity::AllReduce(..) | Activity::ReduceScatter(..) | Activity::AllGather(..));
        !carries && !matches!(self, Activity::Transfer(..) | Activity::Wait)
    }
}

impl fmt::Display for Activity {
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

/// An activity from `start` to `end`, in microseconds since the start of the run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Span {
    pub activity: Activity,
    pub start: f64,
    pub end: f64,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Track {
    /// `1.0` for a worker, `0.0 > 1.0` for a link, `all-reduce 1` for the collectives of a stage.
    pub name: String,
    pub spans: Vec<Span>,
}

/// The activities of all workers and links in one run. Times are microseconds.
#[derive(Clone, PartialEq, Debug)]
pub struct Timeline {
    /// By [`WorkerId`](crate::schedule::WorkerId); compute activities only, gaps are idle time.
    pub workers: Vec<Track>,
    /// One track per link with traffic, then one per stage with collectives, by name.
    pub links: Vec<Track>,
    pub makespan: f64,
    /// For each item, the end of its last compute activity.
    pub finished: Vec<f64>,
    /// For each worker, the peak number of items in flight, counted per stage.
    pub peak_in_flight: Vec<u32>,
    /// For each worker, bytes of weight versions, gradients and saved activations over time; empty if the pipeline has
    /// no sizes.
    pub memory: Vec<Vec<(f64, u64)>>,
}

impl Timeline {
    pub fn busy(&self, worker: usize) -> f64 {
        let spans = self.workers[worker].spans.iter();
        spans.filter(|span| span.activity.computes()).map(|span| span.end - span.start).sum()
    }

    /// Fraction of all workers' time without compute, over the whole run.
    pub fn bubble(&self) -> f64 {
        let whole = self.makespan * self.workers.len() as f64;
        if whole == 0.0 {
            return 0.0;
        }
        let busy: f64 = (0..self.workers.len()).map(|worker| self.busy(worker)).sum();
        1.0 - busy / whole
    }

    /// Items per second in the middle half of the run, without fill and drain; over the whole run if that is too short.
    pub fn throughput(&self) -> f64 {
        let n = self.finished.len();
        let microseconds = self.middle(n / 4, n - n / 4 - 1);
        let (items, time) = microseconds.unwrap_or((n as f64, self.makespan));
        if time > 0.0 { items / time * 1e6 } else { f64::INFINITY }
    }

    /// Items and time between the ends of the `from`-th and the `to`-th item to finish; `None` if the time is zero.
    pub fn middle(&self, from: usize, to: usize) -> Option<(f64, f64)> {
        let mut finished = self.finished.clone();
        finished.sort_by(f64::total_cmp);
        let (start, end) = (*finished.get(from)?, *finished.get(to)?);
        (end > start).then_some(((to - from) as f64, end - start))
    }

    /// End times of minibatches with `microbatches` items each, ascending.
    pub fn ends(&self, microbatches: u32) -> Vec<f64> {
        let last = |items: &[f64]| items.iter().copied().fold(0.0, f64::max);
        let mut ends: Vec<f64> = self.finished.chunks(microbatches.max(1) as usize).map(last).collect();
        ends.sort_by(f64::total_cmp);
        ends
    }

    /// Peak memory of a worker in bytes; 0 without sizes.
    pub fn peak_memory(&self, worker: usize) -> u64 {
        self.memory[worker].iter().map(|&(_, bytes)| bytes).max().unwrap_or(0)
    }
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SimulateError {
    #[error("the program has {program}, the pipeline {pipeline}")]
    Mismatch { program: String, pipeline: String },
    #[error("worker {worker} waits forever at instruction {at} (`{instruction}`); `schedule check` gives the reason")]
    Stuck { worker: String, at: usize, instruction: String },
    #[error(transparent)]
    Schedule(#[from] crate::schedule::ScheduleError),
}
