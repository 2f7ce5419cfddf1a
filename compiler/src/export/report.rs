//! The HTML report about one plan: stages, schedule, memory and alternatives.
//!
//! [`Report`] is the content as data. `page` renders it as one self-contained HTML file. Each picture, with the table
//! of its data, has a file: `graph` for the stages, `gantt` for the simulated schedule, `memory` and `over_time` for
//! device memory. `costs` lists ops and cuts, `measured` compares a training run with the prediction. `play` and
//! `moves` compute what the plan does not contain.

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

use crate::export::sweep::Figures;
use crate::plan::Plan;
use crate::profile::cost_graph::CostGraph;
use crate::schedule::Program;
use crate::simulate::Timeline;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A simulated part of training under the plan.
#[derive(Clone, Debug)]
pub struct Played {
    pub program: Program,
    pub timeline: Timeline,
    pub minibatches: u32,
    /// The number of cores shared by all workers, if smaller than the number of workers.
    pub shared_cores: Option<u32>,
}

/// The effect of moving one op across a cut.
#[derive(Clone, Debug, PartialEq)]
pub struct Move {
    /// The op and those fused with it.
    pub ops: Vec<u32>,
    /// The resulting minibatch time, by the plan checker.
    pub minibatch_us: f64,
    pub peak_bytes: u64,
    pub fits: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct CutCost {
    pub before: usize,
    /// Bytes of all tensors across the cut per micro-batch, in one direction, to any later stage.
    pub bytes: u64,
    pub tensors: usize,
    /// The best move from the stage before to the stage after, if any is possible.
    pub earlier: Option<Move>,
    /// The best move from the stage after to the stage before, if any is possible.
    pub later: Option<Move>,
}

/// Information that needs the model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    pub graph: CostGraph,
    pub cuts: Vec<CutCost>,
    /// Inconsistencies between the plan and these costs; normally empty.
    pub faults: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    pub name: String,
    /// Minibatch time in microseconds.
    pub us: f64,
    pub fits: bool,
}

/// The plan for another number of devices or another minibatch size.
#[derive(Clone, Debug, PartialEq)]
pub struct WhatIf {
    pub devices: u32,
    /// Samples per micro-batch.
    pub micro_batch: u64,
    pub microbatches: u32,
    /// The plan, or the reason why there is none.
    pub answer: Result<Figures, String>,
}

/// Measurements of one stage in a training run, for its slowest replica.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct MeasuredStage {
    pub stage: u32,
    /// Microseconds of the forward pass of one micro-batch.
    pub fwd_us: f64,
    /// Microseconds of the backward pass of one micro-batch.
    pub bwd_us: f64,
    pub peak_memory_bytes: u64,
}

/// A training run, from its metrics file. Optional fields may be missing in the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// For each minibatch: its loss, and the seconds from the start of the run to its end.
    pub steps: Vec<(f64, f64)>,
    /// Microseconds per minibatch in the steady state; `None` if the file does not say it.
    pub step_us: Option<f64>,
    pub stages: Vec<MeasuredStage>,
    pub plan: Option<MeasuredPlan>,
    pub order: Option<MeasuredOrder>,
    /// Settings and work that differ from the plan's.
    pub differs_from_plan: Vec<String>,
    /// Seconds of the whole run; `None` if it resumed an earlier one, or did not end.
    pub seconds: Option<f64>,
    /// True if the file has the totals that a run writes at its end.
    pub has_totals: bool,
    /// Number of workers and of the cores they share.
    pub shared: Option<(u64, u64)>,
}

/// Identifies the plan of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "PlanTotal", deny_unknown_fields)]
pub struct MeasuredPlan {
    /// Hash of the model's graph, as the plan's `model.graph_hash`.
    pub graph: String,
    /// Its stages, in order.
    pub stages: Vec<MeasuredPlace>,
}

/// Schedule and batch sizes of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MeasuredOrder {
    /// Name of the schedule.
    pub schedule: String,
    /// Samples per micro-batch.
    pub micro_batch: u64,
    /// Micro-batches per minibatch.
    pub microbatches: u32,
}

/// Ops and devices of a stage of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MeasuredPlace {
    /// Ranges of ops.
    pub ops: Vec<(u32, u32)>,
    /// Devices of the stage.
    pub devices: Vec<u32>,
}

#[derive(Clone, Debug)]
pub struct Report<'a> {
    pub plan: &'a Plan,
    /// Model, devices and costs, one line each.
    pub heading: Vec<String>,
    /// A notice to show first.
    pub verdict: Option<String>,
    /// The distance to the lower bound, as text.
    pub bound: String,
    /// The lower bound of the minibatch time in microseconds; 0 if there is none.
    pub bound_us: f64,
    /// The plan itself, then the alternatives.
    pub alternatives: Vec<Alternative>,
    /// The simulation, or the reason why there is none.
    pub played: Result<Played, String>,
    /// Information from the model, or the reason why it is not available.
    pub modelled: Result<ModelInfo, String>,
    /// Plans for other devices and sizes; empty if not computed.
    pub what_if: Vec<WhatIf>,
    pub measured: Option<Measured>,
    pub plan_sha256: String,
}
