//! Numbers that were the batch size of the export. A program that divides a sum by `x.shape[0]` holds that size as a plain number, which does
//! not change with the batch.

use crate::graph::Graph;
use crate::op::{Binary, Op, ReduceKind, Value};
use crate::tensor::dim::Bindings;

/// How many ops back from a number the sum is looked for.
const DEPTH: usize = 16;

/// A warning where a sum over the open batch is divided by a multiple of the size that the batch had at the export.
pub fn warning(graph: &Graph, frozen: &Bindings) -> Option<String> {
    let size = *frozen.values().next().filter(|size| frozen.len() == 1 && **size > 1)?;
    for id in graph.ids() {
        let divides = match graph.node(id).op {
            Op::Binary(Binary::Div) => true,
            Op::Binary(Binary::Mul) => false,
            _ => continue,
        };
        let inputs = graph.inputs(id);
        let sides: &[(Value, Value)] = match divides {
            true => &[(inputs[0], inputs[1])],
            false => &[(inputs[0], inputs[1]), (inputs[1], inputs[0])],
        };
        for (sum, number) in sides {
            let Some(number) = scalar(graph, *number) else { continue };
            let number = if divides { number } else { 1.0 / number };
            let times = (number / size as f64).round();
            let is_multiple = times >= 1.0 && (number - times * size as f64).abs() <= 1e-6 * number;
            if is_multiple && is_batch_sum(graph, *sum, frozen) {
                return Some(format!(
                    "node `{}` divides a sum over the batch by {number}, which holds for the exported batch of {size} alone: with another batch \
                     the result is scaled; use a mean, or export with a dynamic batch",
                    graph.node(id).origin.source
                ));
            }
        }
    }
    None
}

/// The number that a constant of one element is.
fn scalar(graph: &Graph, mut value: Value) -> Option<f64> {
    for _ in 0..DEPTH {
        match &graph.node(value.node).op {
            Op::Constant(constant) if constant.tensor.len() == 1 => return Some(constant.tensor.to_f64()[0]),
            Op::Cast(_) | Op::Reshape(_) | Op::Broadcast(_) => value = graph.inputs(value.node)[0],
            _ => return None,
        }
    }
    None
}

/// Whether a value is a sum over the batch, perhaps scaled or shifted since.
fn is_batch_sum(graph: &Graph, mut value: Value, frozen: &Bindings) -> bool {
    for _ in 0..DEPTH {
        let inputs = graph.inputs(value.node);
        value = match &graph.node(value.node).op {
            Op::Reduce(reduce) => {
                let shape = &graph.fact(inputs[0]).shape;
                let has_batch = |axis: &usize| shape[*axis].symbols().iter().any(|s| frozen.contains_key(s));
                if reduce.kind == ReduceKind::Sum && reduce.axes.iter().any(has_batch) {
                    return true;
                }
                inputs[0]
            }
            Op::Unary(_) | Op::Cast(_) | Op::Reshape(_) => inputs[0],
            Op::Binary(Binary::Mul | Binary::Div | Binary::Add | Binary::Sub) => {
                match inputs.iter().find(|input| scalar(graph, **input).is_none()) {
                    Some(other) => *other,
                    None => return false,
                }
            }
            _ => return false,
        };
    }
    false
}
