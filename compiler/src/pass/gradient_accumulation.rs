//! Which gradients of parameters a backward run adds to their sums as it makes them.
//!
//! A parameter's gradient is a sum over items of terms, one term for each op that uses the parameter. A term need not lie anywhere else
//! than in its sum: products and scatters add to what is there, and what other ops make is added when they have run. So terms take no
//! room beside their sums, but for those of one op at a time.

use crate::graph::Graph;
use crate::op::table::rule;
use crate::op::{NodeId, Op, Value};
use crate::pass::attribution::runs;
use crate::pass::backward::{Backward, Made};
use std::collections::{BTreeMap, HashSet};

/// The gradients of parameters that nodes of the graph make, but for `before` them, and that nobody sends; with the terms that each of
/// these tensors is. Terms are counted in the order of what the graph makes.
pub fn summed(backward: &Backward, before: &dyn Fn(NodeId) -> bool) -> BTreeMap<Value, Vec<usize>> {
    let graph = &backward.graph;
    let made = |wanted: fn(&Made) -> bool| {
        let both = backward.makes.iter().zip(&graph.outputs).filter(move |(made, _)| wanted(made));
        both.map(|(_, output)| root(graph, output.value))
    };
    let sent: HashSet<Value> = made(|made| matches!(made, Made::Gradient { .. })).collect();
    let mut summed: BTreeMap<Value, Vec<usize>> = BTreeMap::new();
    for (term, value) in made(|made| matches!(made, Made::Parameter(_))).enumerate() {
        if runs(&graph.node(value.node).op) && !before(value.node) && !sent.contains(&value) {
            summed.entry(value).or_default().push(term);
        }
    }
    summed
}

/// Those of them that lie nowhere but in sums: their makers add, and no op reads them. A product rounds otherwise where it adds than
/// where it is made first, so what else is read is never added, wherever the stages are cut and the backward is split: it is on the way of a
/// gradient to earlier ops, and would be sent or made in the first part somewhere.
pub fn only_in_sums(graph: &Graph, summed: &BTreeMap<Value, Vec<usize>>) -> HashSet<Value> {
    let readers = graph.ids().filter(|id| runs(&graph.node(*id).op));
    let read: HashSet<Value> = readers.flat_map(|id| graph.inputs(id)).map(|value| root(graph, value)).collect();
    summed.keys().copied().filter(|value| is_added(graph, *value) && !read.contains(value)).collect()
}

/// Whether the op that makes a value can add it to what is there. Sums of narrow terms are wide.
fn is_added(graph: &Graph, value: Value) -> bool {
    let adds = matches!(graph.node(value.node).op, Op::MatMul(_) | Op::ConvWeightGrad(_) | Op::ScatterAdd(_));
    adds && graph.fact(value).dtype.size() >= 4
}

/// What a value is a view of, or itself.
pub fn root(graph: &Graph, mut value: Value) -> Value {
    while value.output == 0 && rule(&graph.node(value.node).op).is_view() {
        value = graph.inputs(value.node)[0];
    }
    value
}
