//! Costs of a model under tensor parallelism.
//!
//! Ops, tensors and parameters are those of the model, with the times and sizes of one device of a tensor-parallel
//! group. Stages can only end where all tensors are replicated on every device, or all activations split along the
//! sequence; the ops between such points are fused.

use super::cost_graph::CostGraph;

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

/// Costs of a model at one tensor-parallel degree.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TensorParallelCosts {
    /// Tensor-parallel degree, at least 2.
    pub devices: u32,
    /// True if matrices of weights are sharded and never gathered.
    pub keeps_weights: bool,
    /// True if activations between layers and stages are split along the sequence.
    pub sequence_parallel: bool,
    /// Times and bytes per device; tensors between stages are not sharded without sequence parallelism.
    pub graph: CostGraph,
    /// For each op: microseconds of collectives in forward and in backward.
    pub meetings: Vec<[f64; 2]>,
    /// For each op, its collectives; empty if they are unknown.
    pub traffic: Vec<OpTraffic>,
    /// Weights of experts, if the model has any.
    pub experts: Vec<ExpertWeights>,
}
