//! The metrics file of a training run: one JSON object per line.
//!
//! ```text
//! {"step":0,"loss":2.3026,"seconds":0.0132,"samples_per_s":2424.2}      for each minibatch, as it ends
//! {"total":{"steps":100,…}}                                             at the end of a whole run
//! ```
//!
//! `pipec train --metrics FILE` writes it. [`crate::export::report::measured`] reads it and accepts more than this
//! format, since other tools may write such files.

use crate::export::report::{MeasuredOrder, MeasuredPlan};
use schemars::JsonSchema;
use serde::Serialize;

/// One line of a metrics file.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(title = "Metrics line")]
pub enum Line {
    /// A completed minibatch.
    Step(Step),
    /// The end of a run.
    End(Box<End>),
}

/// A completed minibatch.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Its index, counted from 0 over the whole training, including earlier runs.
    pub step: u64,
    /// Its loss; null if not finite.
    pub loss: Option<f64>,
    /// Seconds since this run began.
    pub seconds: f64,
    /// Samples per second since this run began.
    pub samples_per_s: f64,
}

/// The end of a run.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct End {
    /// Totals of the training.
    pub total: Total,
}

/// Totals of the training; `pipec train --format json` prints them too.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Total {
    /// Minibatches, including those before a resumed run.
    pub steps: u64,
    /// Minibatches completed before this run resumed.
    pub resumed_after: u64,
    /// Passes over the data.
    pub epochs: f64,
    /// Loss of the first minibatch of this run; null if not finite or missing.
    pub first_loss: Option<f64>,
    /// Loss of the last minibatch.
    pub last_loss: Option<f64>,
    /// Duration of the run in seconds.
    pub seconds: f64,
    /// Samples per second.
    pub samples_per_s: f64,
    /// Microseconds per minibatch in the steady state: after the first 8 minibatches, or as many as are in flight, in
    /// whole rounds of the replicas; null if fewer than 8 follow them in this run.
    pub step_us: Option<f64>,
    /// Times and memory of each stage.
    pub stages: Vec<StageTotal>,
    /// The plan of the run.
    pub plan: MeasuredPlan,
    /// Schedule and batch sizes.
    pub order: MeasuredOrder,
    /// Settings and work of the run that differ from the plan's, so that its predictions may not apply.
    pub differs_from_plan: Vec<String>,
    /// Workers of all processes.
    pub workers: u64,
    /// Cores of this process's host.
    pub cores: u64,
    /// Validation results on held-out rows; null if there are none.
    pub held_out: Option<HeldOut>,
}

/// Times and memory of a stage.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StageTotal {
    /// Stage index.
    pub stage: u32,
    /// Microseconds of the forward pass of one micro-batch on the slowest replica.
    pub fwd_us: f64,
    /// Microseconds of its backward pass, including recomputation and the optimizer step.
    pub bwd_us: f64,
    /// Peak memory of a replica in bytes.
    pub peak_memory_bytes: u64,
    /// Peak additional bytes of a replica for checkpoints being written.
    pub checkpoint_bytes: u64,
}

/// Validation results on held-out rows.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HeldOut {
    /// Number of rows.
    pub rows: u64,
    /// Mean loss; null if not finite.
    pub loss: Option<f64>,
    /// Accuracy; null if the loss has none.
    pub accuracy: Option<f64>,
}

/// JSON has no non-finite numbers.
pub fn finite(value: f64) -> Option<f64> {
    Some(value).filter(|value| value.is_finite())
}

pub fn schema() -> serde_json::Value {
    schemars::schema_for!(Line).to_value()
}
