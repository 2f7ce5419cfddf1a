//! The canonical topological order: of all nodes whose inputs are placed, the smallest id comes first.
//!
//! It depends on ids and edges only, so equal graphs have equal orders. Plans identify ops by their position in it. A
//! part of an op ([`Node::part_of`](super::Node)) has the id of that op, so parts leave the order of the ops unchanged.

use super::Graph;
use crate::op::{NodeId, Op};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};

/// All nodes in canonical topological order. Nodes on or after a cycle are missing; [`super::verify`] reports cycles.
pub fn canonical(graph: &Graph) -> Vec<NodeId> {
    let ids: Vec<NodeId> = graph.ids().collect();
    let most = ids.iter().map(|id| id.0 as usize + 1).max().unwrap_or(0);
    let mut missing_inputs = vec![0; most];
    ids.iter().for_each(|id| missing_inputs[id.0 as usize] = distinct_producers(graph, *id));
    let key = |id: NodeId| Reverse((graph.op_of(id), id));
    let is_ready = |id: &&NodeId| missing_inputs[id.0 as usize] == 0;
    let mut ready: BinaryHeap<Reverse<(NodeId, NodeId)>> = ids.iter().filter(is_ready).map(|id| key(*id)).collect();
    let mut order = Vec::with_capacity(graph.len());
    while let Some(Reverse((_, id))) = ready.pop() {
        order.push(id);
        for next in graph.successors(id) {
            let count: &mut usize = &mut missing_inputs[next.0 as usize];
            *count -= 1;
            if *count == 0 {
                ready.push(key(next));
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

/// The sources for which `is_source` is true, and the nodes that depend on them; `order` is topological.
pub fn dependents(graph: &Graph, order: &[NodeId], is_source: impl Fn(&Op) -> bool) -> HashSet<NodeId> {
    let mut dependents = HashSet::new();
    for &id in order {
        if is_source(&graph.node(id).op) || graph.inputs(id).iter().any(|value| dependents.contains(&value.node)) {
            dependents.insert(id);
        }
    }
    dependents
}

/// The numbered ops of plans: op `i` is the `i`th node of [`executed`] that is not a part of another op.
pub fn numbered(graph: &Graph) -> Vec<NodeId> {
    let mut ops = executed(graph);
    ops.retain(|id| graph.node(*id).part_of.is_none());
    ops
}

/// The nodes that depend on an input, parameter or state, in canonical order. These sources and constant expressions
/// are left out; every stage has copies of those it needs.
pub fn executed(graph: &Graph) -> Vec<NodeId> {
    let is_source = |op: &Op| matches!(op, Op::Input(_) | Op::Parameter(_) | Op::State(_));
    let mut order = canonical(graph);
    let non_constant = dependents(graph, &order, is_source);
    order.retain(|id| non_constant.contains(id) && !is_source(&graph.node(*id).op));
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Origin, Writer};
    use crate::op::{Cast, Emit, Input, Unary};
    use crate::tensor::DType;
    use crate::tensor::fact::Fact;

    #[test]
    fn parts_leave_the_order_of_ops_unchanged() {
        let mut graph = Graph::new("net");
        let mut out = Writer { graph: &mut graph, origin: Origin::default() };
        let x = out.emit(Op::Input(Input { name: "x".into(), fact: Fact::of(DType::F32, &[2]) }), &[]);
        let [a, b] = [Unary::Exp, Unary::Neg].map(|unary| out.emit(Op::Unary(unary), &[x]));
        let c = out.emit(Op::Unary(Unary::Abs), &[a]);
        let before = numbered(&graph);
        let cast = graph.add(Op::Cast(Cast { to: DType::F32 }), &[x], &Origin::default()).unwrap();
        graph.node_mut(cast).part_of = Some(a.node);
        graph.set_input(a.node, 0, crate::op::Value { node: cast, output: 0 });
        assert_eq!(numbered(&graph), before);
        assert_eq!(executed(&graph), [cast, a.node, b.node, c.node]);
    }
}
