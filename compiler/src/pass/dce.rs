//! Dead code elimination: removes nodes that no output or average depends on. Inputs stay as the graph's signature.

use super::Changed;
use crate::graph::Graph;
use crate::op::{NodeId, Op};
use std::collections::HashSet;

/// Removes all nodes that no output or average depends on.
pub fn dce(graph: &mut Graph) -> Changed {
    let mut live: HashSet<NodeId> = HashSet::new();
    let mut queue: Vec<NodeId> = graph.outputs.iter().map(|o| o.value.node).collect();
    queue.extend(graph.averages.iter().flat_map(|a| [a.state, a.sample.node]));
    while let Some(id) = queue.pop() {
        if live.insert(id) {
            queue.extend(graph.inputs(id).into_iter().map(|v| v.node));
        }
    }
    let dead: Vec<NodeId> =
        graph.ids().filter(|id| !live.contains(id) && !matches!(graph.node(*id).op, Op::Input(_))).collect();
    for id in &dead {
        graph.remove(*id);
    }
    Changed::from(!dead.is_empty())
}
