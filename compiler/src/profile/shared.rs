//! Costs of a model under tensor parallelism.
//!
//! Ops, tensors and parameters are those of the model, with the times and sizes of one device of a tensor-parallel
//! group. Stages can only end where all tensors are replicated on every device, or all activations split along the
//! sequence; the ops between such points are fused.

use super::cost_graph::CostGraph;

/// Costs of a model at one tensor-parallel degree.
#[derive(Clone, Debug, PartialEq)]
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
}
