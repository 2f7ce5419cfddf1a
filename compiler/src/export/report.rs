//! One page about one plan: what the stages are, what runs when, what is held, what else was possible.
//!
//! [`Report`] is everything the page says, as data. `page` writes it as one HTML file that needs no network and no other file; the
//! pictures, each with the table it was drawn from, have a file each: `graph` the stages, `gantt` the programs at work, `memory` what
//! devices hold, `over_time` the same over time, `costs` the ops between the cuts, `measured` a training run beside the prediction.
//! `play` and `moves` work out what the plan itself does not state.

pub mod alternatives;
pub mod costs;
pub mod gantt;
pub mod graph;
pub mod grid;
pub mod markup;
pub mod measured;
pub mod memory;
pub mod moves;
pub mod over_time;
pub mod page;
pub mod play;
pub mod provenance;
pub mod what_if;

use crate::plan::Plan;
use crate::profile::cost_graph::CostGraph;
use crate::schedule::Program;
use crate::simulate::Timeline;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A simulated stretch of training under the plan.
#[derive(Clone, Debug)]
pub struct Played {
    /// The programs.
    pub program: Program,
    /// What they did.
    pub timeline: Timeline,
    /// Minibatches that were run.
    pub minibatches: u32,
    /// Cores that all workers shared, where they are fewer than the workers.
    pub shared_cores: Option<u32>,
}

/// What moving one op over a cut would come to.
#[derive(Clone, Debug, PartialEq)]
pub struct Move {
    /// The ops that move: one, and those that cannot be apart from it.
    pub ops: Vec<u32>,
    /// Time of a minibatch then, by the judge of plans.
    pub minibatch_us: f64,
    /// Bytes on the fullest device then.
    pub peak_bytes: u64,
    /// Whether that is within the limit.
    pub fits: bool,
}

/// A cut between two stages.
#[derive(Clone, Debug, PartialEq)]
pub struct CutCost {
    /// The stage before it.
    pub before: usize,
    /// Bytes of all tensors over it for one micro-batch, in one direction, to whatever later stage.
    pub bytes: u64,
    /// How many tensors.
    pub tensors: usize,
    /// An op from the stage before it to the stage after it, if any can go.
    pub earlier: Option<Move>,
    /// An op from the stage after it to the stage before it, if any can go.
    pub later: Option<Move>,
}

/// What is known where the model is at hand.
#[derive(Clone, Debug)]
pub struct Modelled {
    /// The costs of its ops.
    pub graph: CostGraph,
    /// The cuts, in order.
    pub cuts: Vec<CutCost>,
    /// What does not follow from these costs as the plan says; empty where all does.
    pub faults: Vec<String>,
}

/// A plain alternative to the plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// What it is.
    pub name: String,
    /// Time of one minibatch, in microseconds.
    pub us: f64,
    /// Whether it fits in memory.
    pub fits: bool,
}

/// The plan for other devices or another size of minibatch.
#[derive(Clone, Debug, PartialEq)]
pub struct WhatIf {
    /// Devices.
    pub devices: u32,
    /// Samples in a micro-batch.
    pub micro_batch: u64,
    /// Micro-batches in a minibatch.
    pub microbatches: u32,
    /// What came of it, or why there is no plan.
    pub answer: Result<Answer, String>,
}

/// A plan in few words.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Replicas of each stage.
    pub replicas: Vec<u32>,
    /// Samples per second.
    pub throughput_per_s: f64,
    /// Bytes on the fullest device.
    pub peak_bytes: u64,
}

/// What one stage did in a training run, on its slowest replica.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredStage {
    /// Which stage.
    pub stage: u32,
    /// Microseconds of one item's forward.
    pub fwd_us: f64,
    /// Microseconds of one item's backward.
    pub bwd_us: f64,
    /// The most bytes held at once.
    pub held_bytes: u64,
}

/// A training run, as its metrics tell it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// For each minibatch: its loss, and seconds from the start of the run to its end.
    pub steps: Vec<(f64, f64)>,
    /// What the stages did, where the file says so.
    pub stages: Vec<MeasuredStage>,
    /// The plan that was trained, where the file says so.
    pub plan: Option<MeasuredPlan>,
    /// How its minibatches were worked on, where the file says so.
    pub order: Option<MeasuredOrder>,
    /// Workers, and the cores that they shared, where the file says so.
    pub shared: Option<(u64, u64)>,
}

/// By what a run tells which plan it was under.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MeasuredPlan {
    /// Hash of the model's graph.
    pub graph: String,
    /// Its stages, in order.
    pub stages: Vec<MeasuredPlace>,
}

/// How a run's minibatches were worked on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MeasuredOrder {
    /// Name of the schedule.
    pub schedule: String,
    /// Samples of an item.
    pub micro_batch: u64,
    /// Items of a minibatch.
    pub microbatches: u32,
}

/// Where a stage of a run stood.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MeasuredPlace {
    /// Ranges of ops.
    pub ops: Vec<(u32, u32)>,
    /// Its devices.
    pub devices: Vec<u32>,
}

/// Everything that the page says.
#[derive(Clone, Debug)]
pub struct Report<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The model, devices and costs in one line each.
    pub heading: Vec<String>,
    /// What to know before anything else, if there is anything.
    pub verdict: Option<String>,
    /// How near the plan is to the best.
    pub bound: String,
    /// The least time of a minibatch that is known, in microseconds; 0 where none is.
    pub bound_us: f64,
    /// The plan itself, then the alternatives.
    pub alternatives: Vec<Alternative>,
    /// The programs at work, or why they cannot be simulated.
    pub played: Result<Played, String>,
    /// What is known where the model is at hand, or why it is not.
    pub modelled: Result<Modelled, String>,
    /// Other devices and sizes; empty where none were tried.
    pub what_if: Vec<WhatIf>,
    /// A training run under this plan.
    pub measured: Option<Measured>,
    /// The SHA-256 of the plan's file.
    pub plan_sha256: String,
}
