//! Removes stop-gradients without effect: no parameter precedes them, as with detached constants or positions computed
//! under `no_grad`.

use crate::graph::{Graph, order};
use crate::op::{NodeId, Op, Value};
use std::collections::HashSet;

/// Removes every [`StopGradient`](crate::op::StopGradient) that blocks no gradient of a parameter.
pub fn settle(graph: &mut Graph) {
    let mut trained: HashSet<NodeId> = HashSet::new();
    for id in order::canonical(graph) {
        let depends = graph.inputs(id).iter().any(|v| trained.contains(&v.node) && graph.fact(*v).dtype.is_float());
        match graph.node(id).op {
            Op::Parameter(_) => {
                trained.insert(id);
            }
            Op::StopGradient(_) if depends => {}
            Op::StopGradient(_) => {
                let input = graph.inputs(id)[0];
                graph.replace_uses(Value { node: id, output: 0 }, input);
                graph.remove(id);
            }
            _ if depends => {
                trained.insert(id);
            }
            _ => {}
        }
    }
}
