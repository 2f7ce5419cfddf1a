//! Splits a backward into input-gradient and weight-gradient passes, and attributes the bytes kept between them to ops.
//!
//! A stage splits its backward by the gradients it sends (`pass::split_backward`), which are unknown before stages
//! exist. Here every gradient from one op to an earlier one counts as sent, and its dependencies form the first part.
//! This is exact for middle stages. The first stage sends no gradients, so it keeps nothing between the parts.

use super::{owner, owners, runs};
use crate::graph::{Graph, order};
use crate::op::{NodeId, Op, Value};
use crate::pass::backward::{Backward, Made};
use crate::pass::gradient_accumulation::root;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// The input-gradient and weight-gradient parts of a backward.
pub struct BackwardHalves {
    pub second: HashSet<NodeId>,
    /// Values that the first part computes for the second.
    pub between: HashSet<Value>,
    /// Per op, the bytes kept between its own parts, and the bytes kept of its output gradients.
    pub bytes: [Vec<u64>; 2],
}

impl BackwardHalves {
    /// Moves the second part to the end of an execution order.
    pub fn in_order(&self, order: &[NodeId]) -> Vec<NodeId> {
        let (second, first): (Vec<NodeId>, Vec<NodeId>) = order.iter().partition(|id| self.second.contains(id));
        first.into_iter().chain(second).collect()
    }
}

/// Splits a backward. `leaders` gives each op's stage representative: the op itself if it depends on data. Gradients
/// flow only to those.
pub fn halves(backward: &Backward, leaders: &[Option<usize>]) -> BackwardHalves {
    let graph = &backward.graph;
    let order = order::canonical(graph);
    let owners = owners(graph, &order);
    // Nodes that no rule emitted (sums of parameter gradients) have no op.
    let op_of = |id: NodeId| owner(graph.node(id));
    let flows = |value: &Value, reader: NodeId| {
        let (producer, consumer) = (owners.get(&value.node).copied(), op_of(reader));
        producer != consumer && consumer.is_some_and(|op| leaders[op] == Some(op)) && !is_source(graph, value.node)
    };
    // Gradients that leave the stage also belong to the first part.
    let sent =
        backward.output_roles.iter().zip(&graph.outputs).filter(|(role, _)| matches!(role, Made::Gradient { .. }));
    let mut queue: Vec<NodeId> = sent.map(|(_, output)| output.value.node).collect();
    for &id in &order {
        queue.extend(graph.inputs(id).iter().filter(|value| flows(value, id)).map(|value| value.node));
    }
    let mut first: HashSet<NodeId> = HashSet::new();
    while let Some(id) = queue.pop() {
        if first.insert(id) {
            queue.extend(graph.inputs(id).into_iter().map(|value| value.node));
        }
    }
    let second: HashSet<NodeId> =
        order.iter().copied().filter(|id| !first.contains(id) && !is_source(graph, *id)).collect();
    let is_first = |value: &Value| first.contains(&value.node) && !is_source(graph, value.node);
    let mut readers: BTreeMap<Value, BTreeSet<usize>> = BTreeMap::new();
    for &id in order.iter().filter(|id| second.contains(id)) {
        for value in graph.inputs(id).into_iter().filter(is_first) {
            readers.entry(root(graph, value)).or_default().extend(owners.get(&id));
        }
    }
    for value in graph.outputs.iter().map(|output| output.value).filter(is_first) {
        readers.entry(root(graph, value)).or_default();
    }
    let between = readers.keys().copied().collect();
    let mut bytes = [vec![0u64; leaders.len()], vec![0u64; leaders.len()]];
    for (value, readers) in readers {
        let Some(&producer) = owners.get(&value.node) else { continue };
        if is_source(graph, value.node) || !(runs(&graph.node(value.node).op) || value.output > 0) {
            continue;
        }
        // Ops that pass a gradient through unchanged share it; it counts for the last of them, which computes the
        // corresponding tensor.
        let reader =
            readers.into_iter().filter_map(|reader| leaders[reader]).filter(|reader| *reader != producer).max();
        let (kind, op) = reader.map_or((0, producer), |reader| (1, reader));
        let size = graph.fact(value).bytes().unwrap_or(u64::MAX);
        bytes[kind][op] = bytes[kind][op].saturating_add(size);
    }
    BackwardHalves { second, between, bytes }
}

fn is_source(graph: &Graph, id: NodeId) -> bool {
    matches!(graph.node(id).op, Op::Input(_) | Op::Parameter(_) | Op::State(_) | Op::Constant(_))
}
