//! Splits a backward fragment into an input-gradient part, which other stages wait for, and a weight-gradient part,
//! which can run later (zero bubble).
//!
//! Both parts run the same ops on the same values, so results are bitwise equal to the whole backward. Ops that a sent
//! gradient depends on belong to the first part, even if they also compute parameter gradients (as recurrent layers
//! do). A stage that sends no gradients has an empty first part.

use crate::graph::order;
use crate::op::{NodeId, Op, Value};
use crate::pass::backward::{Backward, Made};
use std::collections::HashSet;

/// The two parts of a backward fragment.
#[derive(Clone, Debug)]
pub struct Parts {
    /// Every node: sources, the first part, the second part.
    pub order: Vec<NodeId>,
    pub second: HashSet<NodeId>,
    /// Values of the first part that the second part or its outputs need.
    pub crossing: HashSet<Value>,
}

/// Splits a backward fragment by the gradients that it sends.
pub fn parts(backward: &Backward) -> Parts {
    let graph = &backward.graph;
    let sent =
        backward.output_roles.iter().zip(&graph.outputs).filter(|(role, _)| matches!(role, Made::Gradient { .. }));
    let mut queue: Vec<NodeId> = sent.map(|(_, output)| output.value.node).collect();
    let mut first: HashSet<NodeId> = HashSet::new();
    while let Some(id) = queue.pop() {
        if first.insert(id) {
            queue.extend(graph.inputs(id).into_iter().map(|value| value.node));
        }
    }
    let is_source =
        |id: &NodeId| matches!(graph.node(*id).op, Op::Input(_) | Op::Parameter(_) | Op::State(_) | Op::Constant(_));
    let order = order::canonical(graph);
    let second: HashSet<NodeId> = order.iter().copied().filter(|id| !first.contains(id) && !is_source(id)).collect();
    let (late_nodes, others): (Vec<NodeId>, Vec<NodeId>) = order.into_iter().partition(|id| second.contains(id));
    let (sources, early_nodes): (Vec<NodeId>, Vec<NodeId>) = others.into_iter().partition(is_source);

    let is_of_first = |value: &Value| !second.contains(&value.node) && !is_source(&value.node);
    let late_inputs = late_nodes.iter().flat_map(|id| graph.inputs(*id));
    let parameters =
        backward.output_roles.iter().zip(&graph.outputs).filter(|(role, _)| matches!(role, Made::Parameter(_)));
    let gradients = parameters.map(|(_, output)| output.value);
    let crossing = late_inputs.chain(gradients).filter(is_of_first).collect();
    Parts { order: [sources, early_nodes, late_nodes].concat(), second, crossing }
}
