//! Costs of the ops of a model, and their origin.
//!
//! [`Profile`] is the content of `profile.json`, written by a measurement, an analytic model or an importer; `read`
//! validates it. `cost_graph` is the form used for planning: ops, tensors and parameters with their times and sizes.
//! `shared` holds the costs under tensor parallelism, `recompute_scope` what recomputation frees.

pub mod arena;
pub mod cost_graph;
pub mod json;
pub mod module_units;
pub mod precision;
pub mod read;
pub mod recompute_scope;
pub mod shared;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Value of the `schema` field of a profile.
pub const SCHEMA: &str = "pipec.profile/1";

/// Source of the times in a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Measured on the device.
    Measured,
    /// Computed from a device type's peak figures.
    Analytic,
    /// Imported from a file of another tool.
    Imported,
}

/// The model that was profiled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfiledModel {
    /// File name without its folder.
    pub file: String,
    /// SHA-256 of the file without its tensor payloads, in hex.
    pub sha256: String,
    /// Number of ops.
    pub ops: u64,
}

/// The device that was measured or assumed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfiledDevice {
    /// Device name, as the driver or the device table gives it.
    pub name: String,
    /// Driver version, or empty.
    pub driver: String,
    /// Memory of the device in bytes.
    pub memory_bytes: u64,
}

/// What the driver version of a GPU starts with.
const CUDA: &str = "CUDA ";

impl ProfiledDevice {
    /// True for a measured GPU.
    pub fn is_gpu(&self) -> bool {
        self.driver.starts_with(CUDA)
    }
}

/// Measurement settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Element type of weights and activations.
    pub dtype: String,
    /// Samples in one micro-batch.
    pub micro_batch: u64,
    /// Unmeasured warm-up runs.
    pub warmup: u32,
    /// Measured runs.
    pub runs: u32,
    /// Seed of the inputs.
    pub seed: u64,
    /// Workers that ran the model at the same time on the CPU, the measured one included; absent if 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub workers: u32,
    /// The loss added to the output, if any; its times count for the op that computes the predictions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<String>,
}

pub(crate) fn one() -> u32 {
    1
}

pub(crate) fn is_one(number: &u32) -> bool {
    *number == 1
}

fn is_none(bytes: &u64) -> bool {
    *bytes == 0
}

/// The cost of one op for one micro-batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OpProfile {
    /// Op id: its index in the canonical topological order.
    pub id: u32,
    /// Name of the source node.
    pub name: String,
    /// Module path of the source node, or empty.
    pub module: String,
    /// Type of op.
    pub op: String,
    /// Forward time in microseconds.
    pub fwd_us: f64,
    /// Backward time in microseconds.
    pub bwd_us: f64,
    /// The weight-gradient part of `bwd_us`, which no other op waits for: 0 for ops without weights. If absent, half of
    /// `bwd_us` is assumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_grad_us: Option<f64>,
    /// Time of one step of SGD with momentum over the op's parameters, in microseconds; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_us: Option<f64>,
    /// Spread of the measured times, as a fraction of the median; 0 if not measured.
    pub spread: f64,
    /// Bytes of the parameters this op uses.
    pub param_bytes: u64,
    /// Bytes saved from forward for backward.
    pub saved_bytes: u64,
    /// Bytes of the outputs.
    pub out_bytes: u64,
    /// Scratch bytes needed while the op runs.
    pub workspace_bytes: u64,
    /// Buffer bytes for computing the weight gradients of several micro-batches at once; absent if the op does not.
    #[serde(default, skip_serializing_if = "is_none")]
    pub batched_grad_bytes: u64,
    /// Scratch bytes for that computation.
    #[serde(default, skip_serializing_if = "is_none")]
    pub batched_grad_workspace_bytes: u64,
    /// Floating point operations, forward.
    pub flops: u64,
    /// Source of the times: a measured kernel, an equal op, a formula, a file.
    pub source: String,
}

/// Times of the whole model, for comparison with the sum of its ops.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Whole {
    /// Forward time in microseconds.
    pub fwd_us: f64,
    /// Backward time in microseconds.
    pub bwd_us: f64,
    /// 5th and 95th percentile of forward plus backward of the measured runs, in microseconds; of fewer than 20 runs, the
    /// least and the most. Absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range_us: Option<[f64; 2]>,
}

/// Error of predictions beyond the variation of the measured runs. With it, the interval contained 44 of 48 rounds of
/// `benches/training` on a CPU whose host other machines share.
const MODEL_ERROR: f64 = 0.2;

/// Upper bound of a prediction interval, relative to the prediction.
pub(crate) const MAX_INTERVAL: f64 = 1e3;

impl Whole {
    /// Prediction interval relative to a predicted time: that of the measured runs relative to their median, widened by
    /// the error of the cost model.
    pub fn interval(&self) -> Option<[f64; 2]> {
        let median = self.fwd_us + self.bwd_us;
        let [low, high] = self.range_us.filter(|[_, high]| median > 0.0 && (high / median).is_finite())?;
        let round = |ratio: f64| ((1e4 * ratio).round() / 1e4).min(MAX_INTERVAL);
        // A range of the sum may leave out the sum of the medians.
        Some([
            round((low / median).min(1.0) * (1.0 - MODEL_ERROR)),
            round((high / median).max(1.0) * (1.0 + MODEL_ERROR)),
        ])
    }
}

/// Costs of every op of a model on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Always [`SCHEMA`].
    #[schemars(extend("const" = SCHEMA))]
    pub schema: String,
    /// The profiled model.
    pub model: ProfiledModel,
    /// The device.
    pub device: ProfiledDevice,
    /// Measurement settings.
    pub settings: Settings,
    /// Source of the times.
    pub method: Method,
    /// One entry for each op, in op id order.
    pub ops: Vec<OpProfile>,
    /// Times of the whole model, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<Whole>,
}

impl Profile {
    /// Total forward and backward microseconds, for comparison with `whole`.
    pub fn sum(&self) -> Whole {
        let fwd_us = self.ops.iter().map(|op| op.fwd_us).sum();
        let bwd_us = self.ops.iter().map(|op| op.bwd_us).sum();
        Whole { fwd_us, bwd_us, range_us: None }
    }

    /// Total microseconds of weight gradients; `None` if it is unknown for some op.
    pub fn weight_grad_us(&self) -> Option<f64> {
        self.ops.iter().map(|op| op.weight_grad_us).sum()
    }
}
