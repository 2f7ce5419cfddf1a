//! Rewrites equivalent forms into a canonical one for later passes, profiles and plans.
//!
//! - A transpose of the last two axes that feeds a matrix product becomes the product's flag. Exporters write `x · Wᵀ`
//!   with a transpose, which would copy every weight.
//! - A transpose, reshape, broadcast or cast without effect is removed.

use super::Changed;
use crate::graph::{Graph, order};
use crate::op::{MatMul, NodeId, Op, Value};

/// Applies the rewrites to the whole graph in one pass.
pub fn canonicalise(graph: &mut Graph) -> Changed {
    let mut changed = false;
    for id in order::canonical(graph) {
        if changes_nothing(graph, id) {
            let input = graph.inputs(id)[0];
            graph.replace_uses(Value { node: id, output: 0 }, input);
            graph.remove(id);
            changed = true;
        } else if let Op::MatMul(product) = graph.node(id).op {
            changed |= absorb_transposes(graph, id, product);
        }
    }
    Changed::from(changed)
}

fn changes_nothing(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    match &node.op {
        Op::Transpose(t) => t.perm.iter().enumerate().all(|(i, p)| i == *p),
        Op::Reshape(_) | Op::Broadcast(_) | Op::Cast(_) => *graph.fact(graph.inputs(id)[0]) == node.facts[0],
        _ => false,
    }
}

fn absorb_transposes(graph: &mut Graph, id: NodeId, mut product: MatMul) -> bool {
    let mut changed = false;
    for slot in 0..2 {
        while let Some(source) = transposed_matrix(graph, graph.inputs(id)[slot]) {
            graph.set_input(id, slot as u32, source);
            let flag = if slot == 0 { &mut product.transpose_a } else { &mut product.transpose_b };
            *flag = !*flag;
            changed = true;
        }
    }
    graph.node_mut(id).op = Op::MatMul(product);
    changed
}

/// The operand of a transpose that swaps exactly the last two axes, if `value` is one.
fn transposed_matrix(graph: &Graph, value: Value) -> Option<Value> {
    let Op::Transpose(t) = &graph.node(value.node).op else { return None };
    let rank = t.perm.len();
    let swaps = rank >= 2
        && t.perm[rank - 1] == rank - 2
        && t.perm[rank - 2] == rank - 1
        && t.perm[..rank - 2].iter().enumerate().all(|(i, p)| i == *p);
    swaps.then(|| graph.inputs(value.node)[0])
}
