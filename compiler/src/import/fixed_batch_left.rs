//! Detects static batch sizes that remain in a graph with a symbolic batch.

use crate::graph::{Graph, Output};
use crate::import::onnx::lower::input::Inputs;
use crate::op::{Binary, Op, ReduceKind, Value};
use crate::tensor::dim::Dim;
use crate::text::name::short_name;

/// Maximum number of ops followed back from a division.
const FOLLOWED: usize = 16;

/// Warns of an output whose leading dimension is the static batch size: somewhere the batch was not recognised.
pub fn warn_fixed_output(graph: &Graph, inputs: &Inputs) -> Option<String> {
    let number = inputs.frozen.values().next().copied()?;
    // Gradients of parameters have parameter shapes. Parameters that are not trained are states.
    let is_parameter = |shape: &[Dim]| {
        let is_one =
            |id| matches!(graph.node(id).op, Op::Parameter(_) | Op::State(_)) && graph.node(id).facts[0].shape == shape;
        graph.ids().any(is_one)
    };
    let is_closed = |output: &&Output| {
        let shape = &graph.fact(output.value).shape;
        shape.first().is_some_and(|dim| dim.is(number))
            && shape.iter().all(|dim| dim.known().is_some())
            && !is_parameter(shape)
    };
    let output = graph.outputs.iter().find(is_closed)?;
    Some(format!(
        "output `{}` would have {number} rows for every batch; export with a batch size that divides no other size, \
        such as 7 or 11",
        short_name(&output.name)
    ))
}

/// Warns of a sum over the batch that is divided by a multiple of the static batch size, which is wrong for any other
/// batch.
pub fn warn_fixed_divisor(graph: &Graph, inputs: &Inputs) -> Option<String> {
    let size = inputs.frozen.values().next().copied()? as f64;
    let is_multiple = |number: f64| {
        let multiple = (number / size).round();
        multiple >= 1.0 && (number / (multiple * size) - 1.0).abs() < 1e-6
    };
    let division = graph.ids().find_map(|id| {
        let operands = graph.inputs(id);
        let divided = match &graph.node(id).op {
            Op::Binary(Binary::Div) => vec![(operands[0], graph.number(operands[1])?)],
            Op::Binary(Binary::Mul) => {
                (0..2).filter_map(|at| Some((operands[1 - at], graph.number(operands[at])?.recip()))).collect()
            }
            _ => return None,
        };
        let divisor = divided.into_iter().find(|(sum, number)| is_multiple(*number) && is_batch_sum(graph, *sum))?.1;
        Some((id, (divisor / size).round() * size))
    });
    let (node, number) = division?;
    Some(format!(
        "node `{}` divides a sum over the batch by {number}, from the exported batch of {size}: with another batch, \
         or micro-batches, that is not a mean; use `.mean()` instead of `/ x.shape[0]`, or export with a dynamic batch",
        short_name(graph.node(node).label())
    ))
}

/// True if the value is a sum over the batch, possibly scaled, shifted or added to others.
fn is_batch_sum(graph: &Graph, mut value: Value) -> bool {
    for _ in 0..FOLLOWED {
        let operands = graph.inputs(value.node);
        match &graph.node(value.node).op {
            Op::Reduce(op) => {
                let shape = &graph.fact(operands[0]).shape;
                if op.kind == ReduceKind::Sum && op.axes.iter().any(|axis| shape[*axis].known().is_none()) {
                    return true;
                }
                value = operands[0];
            }
            Op::Binary(_) => {
                let summand = operands.iter().find(|value| graph.number(**value).is_none());
                value = *summand.unwrap_or(&operands[0]);
            }
            Op::Unary(_) | Op::Cast(_) | Op::Reshape(_) => value = operands[0],
            _ => return false,
        }
    }
    false
}
