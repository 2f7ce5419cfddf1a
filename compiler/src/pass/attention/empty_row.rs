//! Tests for rows without a key, by which sources replace their weights.

use super::index_function::IndexFunctions;
use crate::graph::Graph;
use crate::op::{Compare, NodeId, Op, ReduceKind, Unary, Value};

/// Ops of a test.
const STEPS: usize = 8;

/// The nodes of a test for NaN of `value`, and whether it is true for NaN.
pub fn nan_test(graph: &Graph, condition: Value, value: Value) -> Option<([NodeId; 2], bool)> {
    let (equal, is_nan) = match graph.node(condition.node).op {
        Op::Unary(Unary::Not) => (graph.inputs(condition.node)[0], true),
        _ => (condition, false),
    };
    let is_comparison = matches!(graph.node(equal.node).op, Op::Compare(Compare::Equal));
    (is_comparison && graph.inputs(equal.node) == [value, value]).then_some(([equal.node, condition.node], is_nan))
}

/// The tensor of which `condition` tells whether its maximum over the last axis is -∞.
pub fn of_maximum(graph: &Graph, functions: &mut IndexFunctions, condition: Value) -> Option<Value> {
    let Op::Compare(Compare::Equal) = graph.node(condition.node).op else { return None };
    let [row_max, number] = graph.inputs(condition.node)[..] else { return None };
    let is_endless = functions.number(graph, number) == Some(f64::NEG_INFINITY);
    (is_endless && reduces_rows(graph, row_max) == Some(ReduceKind::Max)).then(|| graph.inputs(row_max.node)[0])
}

/// The kind of a reduction that keeps its only axis, the last one.
fn reduces_rows(graph: &Graph, value: Value) -> Option<ReduceKind> {
    let Op::Reduce(reduce) = &graph.node(value.node).op else { return None };
    let rank = graph.fact(value).rank();
    (reduce.keep && rank > 0 && reduce.axes == [rank - 1]).then_some(reduce.kind)
}

/// The scores of which `condition` tells for every row whether all are -∞, and the node that compares them, as
/// `_safe_softmax` of ATen is decomposed: `not(any(not(scores = -∞)))` with the parts of `any`.
pub fn of_all(graph: &Graph, functions: &mut IndexFunctions, condition: Value) -> Option<(Value, NodeId)> {
    // From the condition back: the ops, of which each maps 0 or 1 to a number.
    let mut ops: Vec<Step> = Vec::new();
    let mut value = condition;
    for _ in 0..STEPS {
        let inputs = graph.inputs(value.node);
        let step = match &graph.node(value.node).op {
            Op::Unary(Unary::Not) => Step::Equals(0.0),
            Op::Cast(_) => Step::Same,
            Op::Reduce(_) => Step::Reduced(reduces_rows(graph, value)?),
            Op::Compare(Compare::Equal) => match functions.number(graph, inputs[1])? {
                f64::NEG_INFINITY => return holds_for_all(&ops).then_some((inputs[0], value.node)),
                number => Step::Equals(number),
            },
            _ => return None,
        };
        ops.push(step);
        value = inputs[0];
    }
    None
}

#[derive(Clone, Copy, PartialEq)]
enum Step {
    Same,
    Equals(f64),
    Reduced(ReduceKind),
}

/// True if the steps, from the last to the first, give 1 for a row of only 1, and 0 for every other row.
fn holds_for_all(steps: &[Step]) -> bool {
    let result = |row: &[f64]| {
        let mut row = row.to_vec();
        for step in steps.iter().rev() {
            match step {
                Step::Same => {}
                Step::Equals(number) => row.iter_mut().for_each(|v| *v = f64::from(u8::from(v == number))),
                Step::Reduced(ReduceKind::Max) => row = vec![row.iter().copied().fold(f64::MIN, f64::max)],
                Step::Reduced(ReduceKind::Min) => row = vec![row.iter().copied().fold(f64::MAX, f64::min)],
                Step::Reduced(_) => return None,
            }
        }
        row.first().copied()
    };
    let reductions = steps.iter().filter(|step| matches!(step, Step::Reduced(_))).count();
    reductions == 1 && [result(&[1.0]), result(&[0.0]), result(&[0.0, 1.0])] == [Some(1.0), Some(0.0), Some(0.0)]
}
