//! Tensor parallelism: the ops of one stage, forward and backward, shared among the devices of a group.
//!
//! It works on the joint graph of what a stage runs forward and backward (`joint`), as GSPMD (Xu et al., 2021) and Alpa (Zheng et al.,
//! OSDI 2022) do: gradients are ordinary tensors there, so that no op needs a partner that does the reverse. Every op says in its own file
//! how it can be shared ([`layout`](crate::op::sharding)). `choose` finds, for all ops together, the cheapest strategies by the times that
//! `price` gives; `costs` tells the planner what that comes to, run by run (`runs`), those that are alike once (`alike`). `rewrite` turns
//! the graph into the one that every device runs, with what they do together as ops in it.
//!
//! What is promised. Devices compute what one device computes, but that sums over split axes are added in another order. A parameter lies
//! as its gradient does, so that an optimizer steps each part by itself. What comes into a stage and what leaves it is whole on every device.
//!
//! ```text
//!   x ── matmul ── gelu ── matmul ──(all_reduce)── y       the columns of the first weight and the rows of the second
//!        w1: S1            w2: S0                          are split; only the sum at the end meets the others
//! ```

pub mod blocks;
pub mod cost;
pub mod costs;
pub mod dedup;
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

/// How a result must lie in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Whole on every device.
    Whole,
    /// As this parameter does.
    Like(NodeId),
}

/// A graph that devices are to share.
#[derive(Clone, Debug)]
pub struct SpmdTask {
    /// Its ops, of fixed sizes.
    pub graph: Graph,
    /// For every result of the graph, how it must lie.
    pub ends: Vec<End>,
    /// Parameters that every device has whole.
    pub whole: BTreeSet<NodeId>,
}

/// Who does what, and what lies where.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// The way of every op that has inputs.
    pub strategies: HashMap<NodeId, Strategy>,
    /// How each parameter lies.
    pub parameters: HashMap<NodeId, Sharding>,
    /// In which second layout a value is kept once it is needed so, beside that in which it was made.
    pub kept: HashMap<Value, Sharding>,
}

impl Choice {
    /// How a value is made.
    pub fn made(&self, value: Value) -> Sharding {
        let by_op = || self.strategies.get(&value.node).map(|strategy| strategy.outputs[value.output as usize]);
        self.parameters.get(&value.node).copied().or_else(by_op).unwrap_or(Sharding::Replicated)
    }

    /// How a result must lie.
    pub fn end(&self, end: End) -> Sharding {
        match end {
            End::Whole => Sharding::Replicated,
            End::Like(parameter) => self.parameters.get(&parameter).copied().unwrap_or(Sharding::Replicated),
        }
    }
}
