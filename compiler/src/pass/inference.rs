//! Converts a training graph to an inference graph: running instead of batch statistics, and no dropout.

use super::Changed;
use crate::graph::{Graph, Writer, order};
use crate::op::dropout::COUNTER;
use crate::op::expr::formula;
use crate::op::{Attention, BatchNorm, Binary, Emit, NodeId, Op, Value};
use crate::tensor::dim::Dim;

/// Replaces every [`BatchNorm`] with running averages by the formula over those averages. One without averages keeps
/// batch statistics. Every [`Dropout`](crate::op::Dropout) becomes its input, attention keeps all weights, and the
/// counter input is removed.
pub fn inference(graph: &mut Graph) -> Changed {
    let mut changed = remove_dropouts(graph);
    let mut replaced = false;
    for id in order::canonical(graph) {
        let Op::BatchNorm(norm) = graph.node(id).op else { continue };
        let average_of = |output: u32| {
            let sample = Value { node: id, output };
            // The variance may be scaled (Bessel's correction) before its average.
            graph.averages.iter().find(|a| reaches(graph, sample, a.sample)).map(|a| a.state)
        };
        if let (Some(mean), Some(variance)) = (average_of(1), average_of(2)) {
            replace(graph, id, norm, mean, variance);
            replaced = true;
        }
    }
    if replaced {
        graph.averages.clear();
        super::dce::dce(graph);
        changed = true;
    }
    Changed::from(changed)
}

fn remove_dropouts(graph: &mut Graph) -> bool {
    let (mut dropouts, mut counters) = (Vec::new(), Vec::new());
    let mut changed = false;
    for id in order::canonical(graph) {
        match &graph.node(id).op {
            Op::Dropout(_) => dropouts.push(id),
            Op::Attention(op) if op.dropout.is_some() => {
                keep_weights(graph, id, *op);
                changed = true;
            }
            Op::Input(input) if input.name == COUNTER => counters.push(id),
            _ => {}
        }
    }
    for &id in &dropouts {
        let x = graph.inputs(id)[0];
        graph.replace_uses(Value { node: id, output: 0 }, x);
        graph.remove(id);
    }
    counters.retain(|id| graph.successors(*id).is_empty() && graph.outputs.iter().all(|o| o.value.node != *id));
    counters.iter().for_each(|id| graph.remove(*id));
    changed || !dropouts.is_empty() || !counters.is_empty()
}

/// Replaces attention with dropout by attention without.
fn keep_weights(graph: &mut Graph, id: NodeId, op: Attention) {
    let mut inputs = graph.inputs(id);
    let extras = op.extras(3, inputs.len()).expect("the op was checked when it was added");
    inputs.truncate(extras.counter.unwrap_or(inputs.len()));
    let origin = graph.node(id).origin.clone();
    let without_dropout = Op::Attention(Attention { dropout: None, part: None, ..op });
    let outputs = Writer { graph, origin }.emit_all(without_dropout, &inputs);
    for (old, new) in graph.values(id).into_iter().zip(outputs) {
        graph.replace_uses(old, new);
    }
    graph.remove(id);
}

/// Tests whether `to` is `from` or an elementwise scaling of it.
fn reaches(graph: &Graph, from: Value, to: Value) -> bool {
    to == from || (matches!(graph.node(to.node).op, Op::Binary(Binary::Mul)) && graph.inputs(to.node).contains(&from))
}

// y = (x - mean) · 1/√(variance + ε) · scale + bias, with the [C] tensors as [C, 1…]
fn replace(graph: &mut Graph, id: NodeId, norm: BatchNorm, mean: NodeId, variance: NodeId) {
    let inputs = graph.inputs(id);
    let of = |node| Value { node, output: 0 };
    let origin = graph.node(id).origin.clone();
    let values = [inputs[0], inputs[1], inputs[2], of(mean), of(variance)];
    let y = formula(&mut Writer { graph, origin }, values, |[x, scale, bias, mean, variance]| {
        let mut shape = vec![Dim::from(1usize); x.fact().rank() - 1];
        shape[0] = scale.shape()[0].clone();
        let epsilon = x.number(norm.epsilon);
        let mean = mean.reshape(shape.clone());
        let factor = ((variance + epsilon).rsqrt() * scale).reshape(shape.clone());
        let bias = bias.reshape(shape);
        (x - mean) * factor + bias
    });
    graph.replace_uses(of(id), y);
}
