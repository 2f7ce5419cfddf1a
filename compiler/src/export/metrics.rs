//! The metrics file of a training run: one JSON object per line.
//!
//! ```text
//! {"step":0,"loss":2.3026,"seconds":0.0132,"samples_per_s":2424.2}      for each minibatch, as it ends
//! {"total":{"steps":100,…}}                                             at the end of a whole run
//! ```
//!
//! `pipec train --metrics FILE` writes it. [`crate::export::report::measured`] reads it and accepts more than this
//! format, since other tools may write such files.

use crate::export::report::{MeasuredOrder, MeasuredPlace};
use schemars::JsonSchema;
use serde::Serialize;

/// A line.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(title = "Metrics line")]
pub enum Line {
    /// A minibatch that ended.
    Step(Step),
    /// The end of a whole run.
    End(End),
}

/// A minibatch that ended.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Which one, counted from 0 over the whole training, resumed or not.
    pub step: u64,
    /// Its loss; null where it is no finite number.
    pub loss: Option<f64>,
    /// Seconds since this run began.
    pub seconds: f64,
    /// Samples a second since this run began.
    pub samples_per_s: f64,
}

/// The end of a whole run.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct End {
    /// What was trained.
    pub total: Total,
}

/// What was trained in all; also what `pipec train --format json` prints.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Total {
    /// Minibatches, with those before a resumed run.
    pub steps: u64,
    /// Minibatches that were done before this run went on.
    pub resumed_after: u64,
    /// Times through the data.
    pub epochs: f64,
    /// The loss of the first minibatch of this run; null where it is no finite number, or there is none.
    pub first_loss: Option<f64>,
    /// The loss of the last one.
    pub last_loss: Option<f64>,
    /// Seconds that the run took.
    pub seconds: f64,
    /// Samples a second.
    pub samples_per_s: f64,
    /// What each stage took and held, of this process's workers.
    pub stages: Vec<StageTotal>,
    /// The plan that was trained.
    pub plan: PlanTotal,
    /// How its minibatches were worked on.
    pub order: MeasuredOrder,
    /// Workers of this process.
    pub workers: u64,
    /// Cores that they shared.
    pub cores: u64,
    /// How good the model was on rows that were kept from training; null where none were.
    pub held_out: Option<HeldOut>,
}

/// What a stage took and held.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StageTotal {
    /// Its index.
    pub stage: u32,
    /// Microseconds of an item's forward on the slowest replica.
    pub fwd_us: f64,
    /// The same of its backward, with what runs forward again and the optimizer's step.
    pub bwd_us: f64,
    /// The most bytes that a replica held at once.
    pub held_bytes: u64,
    /// The most bytes that a replica held beside them until checkpoints were written.
    pub checkpoint_bytes: u64,
}

/// By what a run tells which plan it was under.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanTotal {
    /// Hash of the model's graph, as the plan's `model.graph_hash`.
    pub graph: String,
    /// Its stages, in order.
    pub stages: Vec<MeasuredPlace>,
}

/// How good the model was on rows that were kept from training.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HeldOut {
    /// How many there were.
    pub rows: u64,
    /// Their mean loss; null where it is no finite number.
    pub loss: Option<f64>,
    /// The share that was right; null where the loss knows no right and wrong.
    pub accuracy: Option<f64>,
}

/// JSON has no non-finite numbers.
pub fn finite(value: f64) -> Option<f64> {
    Some(value).filter(|value| value.is_finite())
}

pub fn schema() -> serde_json::Value {
    schemars::schema_for!(Line).to_value()
}
