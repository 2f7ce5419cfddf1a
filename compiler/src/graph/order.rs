//! The canonical topological order: of all nodes whose inputs are placed, the smallest id comes first.
//!
//! It depends on ids and edges only, so equal graphs have equal orders. Plans identify ops by their position in it.

use super::Graph;
use crate::op::{NodeId, Op};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

/// All nodes in canonical topological order. Nodes on or after a cycle are missing; [`super::verify`] reports cycles.
pub fn canonical(graph: &Graph) -> Vec<NodeId> {
    let mut waiting: HashMap<NodeId, usize> = graph.ids().map(|id| (id, distinct_producers(graph, id))).collect();
    let mut ready: BinaryHeap<Reverse<NodeId>> =
        waiting.iter().filter(|(_, n)| **n == 0).map(|(id, _)| Reverse(*id)).collect();
    let mut order = Vec::with_capacity(graph.len());
    while let Some(Reverse(id)) = ready.pop() {
        order.push(id);
        for next in graph.successors(id) {
            let left = waiting.get_mut(&next).expect("successors are nodes of the graph");
            *left -= 1;
            if *left == 0 {
                ready.push(Reverse(next));
            }
        }
    }
    order
}

fn distinct_producers(graph: &Graph, id: NodeId) -> usize {
    let mut producers: Vec<NodeId> = graph.inputs(id).into_iter().map(|v| v.node).collect();
    producers.sort_unstable();
    producers.dedup();
    producers.len()
}

/// The numbered ops of plans: op `i` is the `i`th node of the canonical order that depends on an input, parameter or
/// state. These sources and constant expressions are not numbered; every stage has copies of those it needs.
pub fn numbered(graph: &Graph) -> Vec<NodeId> {
    let mut moving: HashSet<NodeId> = HashSet::new();
    let mut ops = Vec::new();
    for id in canonical(graph) {
        if matches!(graph.node(id).op, Op::Input(_) | Op::Parameter(_) | Op::State(_)) {
            moving.insert(id);
        } else if graph.inputs(id).iter().any(|v| moving.contains(&v.node)) {
            moving.insert(id);
            ops.push(id);
        }
    }
    ops
}
