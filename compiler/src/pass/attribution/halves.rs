//! What of a backward run is kept between its halves where it is split, by the op that answers for it.
//!
//! A stage splits its backward by the gradients that leave it (`pass::split`). Which do is not known before there are stages, so
//! here every gradient that flows from one op to an earlier one counts as one that is waited for: what it is made of is the first
//! half. For a stage in the middle of a model that is the same; the first stage, which nobody waits for, keeps nothing between.

use super::{owner, owners, runs};
use crate::graph::{Graph, order};
use crate::op::{NodeId, Op, Value};
use crate::pass::backward::{Backward, Made};
use crate::pass::gradient_accumulation::root;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// The halves of a backward run.
pub struct Halves {
    /// The nodes of the second half.
    pub second: HashSet<NodeId>,
    /// What the first half makes for the second.
    pub between: HashSet<Value>,
    /// For every op what its own halves keep between them, and what they keep of the gradients of its outputs.
    pub bytes: [Vec<u64>; 2],
}

impl Halves {
    /// The order of a run of which the second half comes after the first.
    pub fn in_order(&self, order: &[NodeId]) -> Vec<NodeId> {
        let (second, first): (Vec<NodeId>, Vec<NodeId>) = order.iter().partition(|id| self.second.contains(id));
        first.into_iter().chain(second).collect()
    }
}

/// Tells the halves apart. `leaders` names for every op the one whose stage it shares: itself where it depends on data, and gradients
/// flow to those alone.
pub fn halves(made: &Backward, leaders: &[Option<usize>]) -> Halves {
    let backward = &made.graph;
    let order = order::canonical(backward);
    let owners = owners(backward, &order);
    // What no rule wrote, the sum of a parameter's gradient, is nobody's.
    let own = |id: NodeId| owner(backward.node(id));
    let flows = |value: &Value, reader: NodeId| {
        let (made, read) = (owners.get(&value.node).copied(), own(reader));
        made != read && read.is_some_and(|read| leaders[read] == Some(read)) && !is_source(backward, value.node)
    };
    // What leaves the stage is waited for, too.
    let leaves = made.makes.iter().zip(&backward.outputs).filter(|(made, _)| matches!(made, Made::Gradient { .. }));
    let mut queue: Vec<NodeId> = leaves.map(|(_, output)| output.value.node).collect();
    for &id in &order {
        queue.extend(backward.inputs(id).iter().filter(|value| flows(value, id)).map(|value| value.node));
    }
    let mut first: HashSet<NodeId> = HashSet::new();
    while let Some(id) = queue.pop() {
        if first.insert(id) {
            queue.extend(backward.inputs(id).into_iter().map(|value| value.node));
        }
    }
    let second: HashSet<NodeId> =
        order.iter().copied().filter(|id| !first.contains(id) && !is_source(backward, *id)).collect();
    let is_first = |value: &Value| first.contains(&value.node) && !is_source(backward, value.node);
    let mut readers: BTreeMap<Value, BTreeSet<usize>> = BTreeMap::new();
    for &id in order.iter().filter(|id| second.contains(id)) {
        for value in backward.inputs(id).into_iter().filter(is_first) {
            readers.entry(root(backward, value)).or_default().extend(owners.get(&id));
        }
    }
    for value in backward.outputs.iter().map(|output| output.value).filter(is_first) {
        readers.entry(root(backward, value)).or_default();
    }
    let between = readers.keys().copied().collect();
    let mut bytes = [vec![0u64; leaders.len()], vec![0u64; leaders.len()]];
    for (value, readers) in readers {
        let Some(&maker) = owners.get(&value.node) else { continue };
        if is_source(backward, value.node) || !(runs(&backward.node(value.node).op) || value.output > 0) {
            continue;
        }
        // Ops that a gradient passes through unchanged share it; the last of them makes the tensor that it is the gradient of.
        let reader = readers.into_iter().filter_map(|reader| leaders[reader]).filter(|reader| *reader != maker).max();
        let (kind, op) = reader.map_or((0, maker), |reader| (1, reader));
        let size = backward.fact(value).bytes().unwrap_or(u64::MAX);
        bytes[kind][op] = bytes[kind][op].saturating_add(size);
    }
    Halves { second, between, bytes }
}

fn is_source(graph: &Graph, id: NodeId) -> bool {
    matches!(graph.node(id).op, Op::Input(_) | Op::Parameter(_) | Op::State(_) | Op::Constant(_))
}
