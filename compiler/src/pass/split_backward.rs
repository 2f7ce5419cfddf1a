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
    let leaves =
        backward.output_roles.iter().zip(&graph.outputs).filter(|(made, _)| matches!(made, Made::Gradient { .. }));
    let mut queue: Vec<NodeId> = leaves.map(|(_, output)| output.value.node).collect();
    let mut first: HashSet<NodeId> = HashSet::new();
    while let Some(id) = queue.pop() {
        if first.insert(id) {
            queue.extend(graph.inputs(id).into_iter().map(|value| value.node));
        }
    }
    let is_source =
        |id: &NodeId| matches!(graph.node(*id).op, Op::Input(_) | Op::Parameter(_) | Op::State(_) | Op::Constant(_));
    let all = order::canonical(graph);
    let second: HashSet<NodeId> = all.iter().copied().filter(|id| !first.contains(id) && !is_source(id)).collect();
    let (late, rest): (Vec<NodeId>, Vec<NodeId>) = all.into_iter().partition(|id| second.contains(id));
    let (sources, early): (Vec<NodeId>, Vec<NodeId>) = rest.into_iter().partition(is_source);

    let made_first = |value: &Value| !second.contains(&value.node) && !is_source(&value.node);
    let read = late.iter().flat_map(|id| graph.inputs(*id));
    let parameters =
        backward.output_roles.iter().zip(&graph.outputs).filter(|(made, _)| matches!(made, Made::Parameter(_)));
    let at_the_end = parameters.map(|(_, output)| output.value);
    let crossing = read.chain(at_the_end).filter(made_first).collect();
    Parts { order: [sources, early, late].concat(), second, crossing }
}
