//! Dead-node elimination. Assertions, and numbers read from tensors only for them, need not be lowered.

use super::alias::written;
use crate::import::fx::program::names;
use crate::import::fx::schema::{Graph, Node};
use std::collections::HashSet;

/// The live nodes in order: in-place operators, and nodes that an output or a live node depends on.
pub fn live(graph: &Graph) -> Vec<&Node> {
    let mut needed: HashSet<&str> = graph.outputs.iter().flat_map(names).collect();
    let mut live = Vec::with_capacity(graph.nodes.len());
    for node in graph.nodes.iter().rev() {
        if written(node).is_some() || node.outputs.iter().flat_map(names).any(|name| needed.contains(name)) {
            needed.extend(node.inputs.iter().flat_map(|input| names(&input.arg)));
            live.push(node);
        }
    }
    live.reverse();
    live
}
