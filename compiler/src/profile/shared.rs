//! Costs of a model under tensor parallelism.
//!
//! Ops, tensors and parameters are those of the model, with the times and sizes of one device of a tensor-parallel
//! group. Stages can only end where all activations are held as [`ActivationSharding`] states; the ops between such
//! points are fused.

use super::cost_graph::CostGraph;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A collective of a tensor-parallel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
}

impl Collective {
    /// In the order of [`OpTraffic`].
    pub const ALL: [Collective; 4] =
        [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter, Collective::AllToAll];

    pub fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all-reduce",
            Collective::AllGather => "all-gather",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::AllToAll => "all-to-all",
        }
    }
}

/// Number of collectives of one kind, and the bytes that each device sends in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub count: u64,
    pub bytes: u64,
}

impl Traffic {
    pub fn add(&mut self, other: Traffic) {
        self.count = self.count.saturating_add(other.count);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// The traffic of an op per micro-batch, in forward and in backward, by kind of collective.
pub type OpTraffic = [[Traffic; 4]; 2];

/// How a group shards the weights of the experts of a mixture: parameters of three axes, of which the first counts
/// experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertWeights {
    /// Experts of a layer.
    pub experts: u64,
    /// The axis that is split: 0 for experts, 1 for their inputs, 2 for their outputs. `None` if replicated.
    pub axis: Option<usize>,
    /// Number of such parameters.
    pub weights: u32,
}

/// What each device of a group holds of the activations between layers and stages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ActivationSharding {
    /// All of them.
    #[default]
    Replicated,
    /// A part of each sequence: sequence parallelism (Korthikanti et al., "Reducing activation recomputation in large
    /// transformer models", MLSys 2023, section 4.2).
    Sequence,
    /// Those of a part of the samples: data parallelism in a group that shares experts (Rajbhandari et al.,
    /// "DeepSpeed-MoE", ICML 2022).
    Batch,
}

impl ActivationSharding {
    pub fn is_replicated(&self) -> bool {
        *self == ActivationSharding::Replicated
    }
}

/// Costs of a model at one tensor-parallel degree.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TensorParallelCosts {
    /// Tensor-parallel degree, at least 2.
    pub devices: u32,
    /// True if matrices of weights are sharded and never gathered.
    pub keeps_weights: bool,
    pub activations: ActivationSharding,
    /// Times and bytes per device.
    pub graph: CostGraph,
    /// For each op: microseconds of collectives in forward and in backward.
    pub meetings: Vec<[f64; 2]>,
    /// For each op, its collectives; empty if they are unknown.
    pub traffic: Vec<OpTraffic>,
    /// Weights of experts, if the model has any.
    pub experts: Vec<ExpertWeights>,
}
