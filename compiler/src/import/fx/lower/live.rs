//! The nodes of a graph that a result needs. Assertions need what they check and nothing needs them, so that neither they
//! nor numbers that are read from tensors for them alone have to be lowered.

use super::table;
use crate::import::fx::program::names;
use crate::import::fx::schema::{Graph, Node};
use std::collections::HashSet;

/// The nodes that are needed, in order: those that make what a result or a later one of them reads, and those that
/// change a tensor.
pub fn live(graph: &Graph) -> Vec<&Node> {
    let mut needed: HashSet<&str> = graph.outputs.iter().flat_map(names).collect();
    let mut live = Vec::with_capacity(graph.nodes.len());
    for node in graph.nodes.iter().rev() {
        if table::in_place(&node.target) || node.outputs.iter().flat_map(names).any(|name| needed.contains(name)) {
            needed.extend(node.inputs.iter().flat_map(|input| names(&input.arg)));
            live.push(node);
        }
    }
    live.reverse();
    live
}
