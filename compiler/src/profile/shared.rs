//! What a model costs where groups of devices share every op: tensor parallelism as planning knows it.
//!
//! Ops, tensors and parameters are those of the model, at the times and sizes of one device of a group. Stages end only where
//! everything is whole on every device, which is where the ops that join one another end.

use super::cost_graph::CostGraph;

/// The costs of a model on groups of so many devices.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedCosts {
    /// Devices of a group: 2 or more.
    pub devices: u32,
    /// Times and bytes on each of them. What crosses stages is whole.
    pub graph: CostGraph,
    /// By op, what of its forward and backward the devices spend on each other, in microseconds.
    pub meetings: Vec<[f64; 2]>,
}
