//! Places where a program lets no gradient pass. Many stop nothing, since no parameter stands before them: a constant
//! that is detached, positions that are worked out without gradients. Those go away.

use crate::graph::{Graph, order};
use crate::op::{NodeId, Op, Value};
use std::collections::HashSet;

/// Takes out every [`StopGradient`](crate::op::StopGradient) that no gradient could reach a parameter through.
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
