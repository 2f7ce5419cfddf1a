//! Selects the parameter gradients that the backward accumulates directly into their sums.
//!
//! A parameter's gradient is a sum over micro-batches and uses. Matrix products, weight gradients of convolutions and
//! scatters accumulate into the sum; results of other ops are added after they run. Terms therefore need no memory
//! besides their sums, except for one op at a time.

use crate::graph::Graph;
use crate::op::table::rule;
use crate::op::{NodeId, Op, Value};
use crate::pass::attribution::runs;
use crate::pass::backward::{Backward, Made};
use std::collections::{BTreeMap, HashSet};

/// The parameter gradients made by nodes of the graph, excluding nodes for which `before` is true and values that are
/// also sent. Maps each tensor to its terms, as indices of the backward's outputs.
pub fn summed(backward: &Backward, before: &dyn Fn(NodeId) -> bool) -> BTreeMap<Value, Vec<usize>> {
    let graph = &backward.graph;
    let roots = |is_wanted: fn(&Made) -> bool| {
        let pairs = backward.output_roles.iter().zip(&graph.outputs).filter(move |(role, _)| is_wanted(role));
        pairs.map(|(_, output)| root(graph, output.value))
    };
    let sent: HashSet<Value> = roots(|role| matches!(role, Made::Gradient { .. })).collect();
    let mut terms_of_sum: BTreeMap<Value, Vec<usize>> = BTreeMap::new();
    for (term, value) in roots(|role| matches!(role, Made::Parameter(_))).enumerate() {
        if runs(&graph.node(value.node).op) && !before(value.node) && !sent.contains(&value) {
            terms_of_sum.entry(value).or_default().push(term);
        }
    }
    terms_of_sum
}

/// The gradients that exist only in their sums on every device: their producers accumulate, and no op reads them.
pub fn accumulated_in_place(graph: &Graph, summed: &BTreeMap<Value, Vec<usize>>) -> HashSet<Value> {
    read_only_as_sums(graph, summed).into_iter().filter(|value| is_added(graph, *value)).collect()
}

/// The gradients that no op reads. An accumulating product rounds differently from a separate one. So a gradient with
/// other readers is never accumulated, wherever the cuts are: it is on the path of a gradient to earlier ops.
pub fn read_only_as_sums(graph: &Graph, summed: &BTreeMap<Value, Vec<usize>>) -> HashSet<Value> {
    let readers = graph.ids().filter(|id| runs(&graph.node(*id).op));
    let read: HashSet<Value> = readers.flat_map(|id| graph.inputs(id)).map(|value| root(graph, value)).collect();
    summed.keys().copied().filter(|value| !read.contains(value)).collect()
}

/// Tests whether the producing op can accumulate. Sums of two-byte types are f32, which only products write.
fn is_added(graph: &Graph, value: Value) -> bool {
    match graph.node(value.node).op {
        Op::MatMul(_) => true,
        Op::ConvWeightGrad(_) | Op::ScatterAdd(_) => graph.fact(value).dtype.size() >= 4,
        _ => false,
    }
}

/// The base of a view, or the value itself.
pub fn root(graph: &Graph, mut value: Value) -> Value {
    while value.output == 0 && rule(&graph.node(value.node).op).is_view() {
        value = graph.inputs(value.node)[0];
    }
    value
}
