//! Running variances as in PyTorch: they average the unbiased batch variance, n / (n − 1) times the biased one.
//!
//! ONNX averages the biased variance, which [`BatchNorm`](crate::op::BatchNorm) returns.

use crate::graph::{Graph, Writer};
use crate::op::unary::scalar;
use crate::op::{Binary, Emit, NodeId, Op, Value};

/// The first batch normalisation over one value per channel, which has no variance; PyTorch refuses it in training.
pub fn norm_of_one_value(graph: &Graph) -> Option<NodeId> {
    let is_single = |id: &NodeId| {
        let Op::BatchNorm(_) = graph.node(*id).op else { return false };
        let shape = &graph.fact(graph.inputs(*id)[0]).shape;
        shape.iter().enumerate().all(|(axis, dim)| axis == 1 || dim.is(1))
    };
    graph.ids().find(is_single)
}

/// Makes every running variance average the unbiased batch variance, in a graph of fixed sizes. The added ops are parts
/// of the normalisations.
pub fn unbiased(graph: &mut Graph) {
    for at in 0..graph.averages.len() {
        let sample = graph.averages[at].sample;
        let norm = sample.node;
        if !matches!(graph.node(norm).op, Op::BatchNorm(_)) || sample.output != 2 {
            continue;
        }
        let x = graph.fact(graph.inputs(norm)[0]).clone();
        let Some(shape) = x.concrete() else { continue };
        let n: usize = shape.iter().enumerate().filter(|(axis, _)| *axis != 1).map(|(_, size)| size).product();
        // A single value has no unbiased variance.
        if n < 2 {
            continue;
        }
        let origin = graph.node(norm).origin.clone();
        let mut out = Writer { graph, origin };
        // In mixed precision the statistics have a wider type than the input.
        let dtype = out.fact(sample).dtype;
        let factor = out.emit(scalar(dtype, n as f64 / (n - 1) as f64), &[]);
        let Value { node, output } = out.emit(Op::Binary(Binary::Mul), &[sample, factor]);
        graph.averages[at].sample = Value { node, output };
        for part in [factor.node, node] {
            graph.node_mut(part).part_of = Some(norm);
        }
    }
}
