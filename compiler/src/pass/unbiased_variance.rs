//! Running variances by PyTorch's rule: of the unbiased batch variance, n / (n − 1) times that of the batch.
//!
//! ONNX follows the biased variance, which is what [`BatchNorm`](crate::op::BatchNorm) makes.

use crate::graph::{Graph, Writer};
use crate::op::unary::scalar;
use crate::op::{Binary, Emit, NodeId, Op, Value};

/// Lets every average that follows a batch variance follow the unbiased one, in a graph of fixed sizes. Gives the ops that were
/// added, each with the op whose variance it corrects, beside which it must run.
pub fn unbiased(graph: &mut Graph) -> Vec<(NodeId, NodeId)> {
    let mut added = Vec::new();
    for at in 0..graph.averages.len() {
        let sample = graph.averages[at].sample;
        let norm = sample.node;
        if !matches!(graph.node(norm).op, Op::BatchNorm(_)) || sample.output != 2 {
            continue;
        }
        let x = graph.fact(graph.inputs(norm)[0]).clone();
        let Some(shape) = x.concrete() else { continue };
        let n: usize = shape.iter().enumerate().filter(|(axis, _)| *axis != 1).map(|(_, size)| size).product();
        // One value has no unbiased variance.
        if n < 2 {
            continue;
        }
        let origin = graph.node(norm).origin.clone();
        let mut out = Writer { graph, origin };
        let factor = out.emit(scalar(x.dtype, n as f64 / (n - 1) as f64), &[]);
        let Value { node, output } = out.emit(Op::Binary(Binary::Mul), &[sample, factor]);
        graph.averages[at].sample = Value { node, output };
        added.extend([(factor.node, norm), (node, norm)]);
    }
    added
}
