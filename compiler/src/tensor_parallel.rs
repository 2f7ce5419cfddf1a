//! Tensor parallelism: distributes the ops of one stage, forward and backward, over a group of devices.
//!
//! It works on the joint forward and backward graph of a stage ([`forward_backward_graph`]), like GSPMD (Xu et al.,
//! 2021) and Alpa (Zheng et al., OSDI 2022). Gradients are ordinary tensors there, so no op needs a conjugate
//! collective. Every op's rule lists its sharding strategies ([`sharding`](crate::op::sharding)). [`strategy_search`]
//! finds the cheapest combination under the times of [`cost`]. [`costs`] computes the planner's costs per segment of
//! ops ([`segments`]), once for each set of equal segments ([`dedup`]). [`spmd_graph`] rewrites the graph to the one
//! that every device runs, with explicit collectives.
//!
//! Invariants: results equal those of one device, up to the summation order over split axes. A parameter and its
//! gradient have one sharding, so the optimizer steps each shard separately. Values entering or leaving a stage are
//! replicated; with sequence parallelism, activations and their gradients are split.
//!
//! ```text
//!   x ── matmul ── gelu ── matmul ──(all_reduce)── y       the columns of the first weight and the rows of the second
//!        w1: S1            w2: S0                          are split; only the final sum is communicated
//! ```

pub mod blocks;
pub mod cost;
pub mod costs;
pub mod dedup;
pub mod experts;
pub mod forward_backward_graph;
pub mod order;
pub mod partition_stage;
pub mod reshard;
pub mod segments;
pub mod spmd_graph;
pub mod strategy_search;
pub mod variable_elimination;

use crate::graph::Graph;
use crate::op::{NodeId, Sharding, Strategy, Value};
use std::collections::{BTreeSet, HashMap};

/// Required sharding of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Whole,
    /// The sharding of this parameter.
    Like(NodeId),
    /// This sharding.
    Split(Sharding),
}

/// A graph to shard.
#[derive(Clone, Debug)]
pub struct SpmdTask {
    /// Ops of fixed sizes.
    pub graph: Graph,
    /// Per output, its required sharding.
    pub ends: Vec<End>,
    /// Parameters that must be replicated.
    pub replicated: BTreeSet<NodeId>,
    /// Inputs that arrive split.
    pub split: HashMap<NodeId, Sharding>,
}

/// A sharding decision for all ops of a graph.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// The strategy of every op with inputs.
    pub strategies: HashMap<NodeId, Strategy>,
    pub parameters: HashMap<NodeId, Sharding>,
    /// The second sharding in which a value is kept, in addition to the one it is made in.
    pub second_layouts: HashMap<Value, Sharding>,
}

impl Choice {
    /// The sharding in which a value is made.
    pub fn layout(&self, value: Value) -> Sharding {
        let by_op = || self.strategies.get(&value.node).map(|strategy| strategy.outputs[value.output as usize]);
        self.parameters.get(&value.node).copied().or_else(by_op).unwrap_or(Sharding::Replicated)
    }

    /// The required sharding of an output.
    pub fn end(&self, end: End) -> Sharding {
        match end {
            End::Whole => Sharding::Replicated,
            End::Split(sharding) => sharding,
            End::Like(parameter) => self.parameters.get(&parameter).copied().unwrap_or(Sharding::Replicated),
        }
    }
}
