//! Finds the stride of the batch within an axis of merged dims. In `batch*24` the batch is the outer part if
//! `[batch, 24]` was merged, and the inner part if `[24, batch]` was. Only the producer of the axis distinguishes them.

use crate::graph::Graph;
use crate::op::{Op, Value};
use crate::tensor::dim::{Dim, volume};
use std::collections::HashSet;

/// Maximum number of axes visited.
const MOST: usize = 1024;

/// The number of entries of the axis between consecutive samples, if known; 1 for an axis that is only the batch.
pub fn stride_within(graph: &Graph, value: Value, axis: usize) -> Option<i64> {
    follow(graph, value, axis, &mut HashSet::new())
}

/// The axis of shape `to` that contains a factor whose stride is `first`, and the stride within that axis. `None` if
/// there is none, or if it does not divide evenly.
pub fn locate_factor(first: i64, factor: i64, to: &[i64]) -> Option<(usize, i64)> {
    let last = first.checked_mul(factor)?;
    let mut stride = 1i64;
    for axis in (0..to.len()).rev() {
        let end = stride.checked_mul(to[axis])?;
        if stride <= first && last <= end {
            let is_even = stride > 0 && first % stride == 0 && to[axis] % factor == 0;
            return is_even.then_some((axis, first / stride.max(1)));
        }
        stride = end;
    }
    None
}

/// `seen` contains the axes in progress and those with unknown result.
fn follow(graph: &Graph, value: Value, axis: usize, seen: &mut HashSet<(Value, usize)>) -> Option<i64> {
    let shape = &graph.fact(value).shape;
    let symbols = shape.get(axis)?.symbols();
    let [name] = symbols.as_slice() else { return None };
    if shape[axis] == Dim::symbol(name) {
        return Some(1);
    }
    if seen.len() >= MOST || !seen.insert((value, axis)) {
        return None;
    }
    let inputs = graph.inputs(value.node);
    let shape_of = |slot: usize| graph.fact(inputs[slot]).shape.as_slice();
    // The corresponding axis of a broadcast operand, if it has the full size.
    let aligned = |slot: usize| {
        let at = (axis + shape_of(slot).len()).checked_sub(shape.len())?;
        (shape_of(slot)[at] == shape[axis]).then_some((slot, at))
    };
    let (slot, at) = match &graph.node(value.node).op {
        Op::Reshape(_) => {
            let symbolic_axes =
                |dims: &[Dim]| (0..dims.len()).filter(|at| dims[*at].known().is_none()).collect::<Vec<_>>();
            let (&[at], [_]) = (symbolic_axes(shape_of(0)).as_slice(), symbolic_axes(shape).as_slice()) else {
                return None;
            };
            let stride =
                volume(&shape_of(0)[at + 1..]).ok()?.known()?.checked_mul(follow(graph, inputs[0], at, seen)?)?;
            let inner_size = volume(&shape[axis + 1..]).ok()?.known().filter(|inner_size| *inner_size > 0)?;
            return (stride % inner_size == 0).then_some(stride / inner_size);
        }
        // Concatenation of batches.
        Op::Concat(op) if op.axis == axis => {
            let is_batch = |slot: usize| shape_of(slot)[axis] == Dim::symbol(name);
            return (0..inputs.len()).all(is_batch).then_some(1);
        }
        Op::Concat(_) => (0, axis),
        Op::Unary(_) | Op::Cast(_) | Op::Softmax(_) | Op::LogSoftmax(_) | Op::LayerNorm(_) => (0, axis),
        Op::Slice(_) | Op::Pad(_) | Op::Flip(_) if shape_of(0)[axis] == shape[axis] => (0, axis),
        Op::Dropout(_) if value.output == 0 => (0, axis),
        Op::Binary(_) | Op::Compare(_) | Op::Select(_) => {
            return (0..inputs.len()).filter_map(aligned).find_map(|(slot, at)| follow(graph, inputs[slot], at, seen));
        }
        Op::Broadcast(_) => aligned(0)?,
        // Scattering to the indices of a sort restores the order of the sorted axis.
        Op::Scatter(op) if op.axis == axis => {
            return follow(graph, inputs[0], axis, seen).or_else(|| {
                let (sorted, sorted_axis) = sort_source(graph, inputs[1])?;
                (graph.fact(sorted).shape[sorted_axis] == shape[axis])
                    .then(|| follow(graph, sorted, sorted_axis, seen))?
            });
        }
        Op::Scatter(_) => (0, axis),
        Op::TopK(op) if op.axis != axis => (0, axis),
        Op::Transpose(op) => (0, op.perm[axis]),
        Op::Reduce(op) if op.keep => (0, axis),
        Op::Reduce(op) => (0, (0..shape_of(0).len()).filter(|at| !op.axes.contains(at)).nth(axis)?),
        Op::MatMul(_) if axis + 2 < shape.len() => {
            return (0..2).filter_map(aligned).find_map(|(slot, at)| follow(graph, inputs[slot], at, seen));
        }
        Op::GroupedMatMul(_) if axis == 0 => (0, 0),
        Op::MatMul(op) if axis + 2 == shape.len() => (0, shape_of(0).len() - if op.transpose_a { 1 } else { 2 }),
        Op::MatMul(op) => (1, shape_of(1).len() - if op.transpose_b { 2 } else { 1 }),
        Op::Conv(_) | Op::MaxPool(_) | Op::AvgPool(_) | Op::BatchNorm(_) if axis == 0 && value.output == 0 => (0, 0),
        Op::Gather(op) => match (op.axis, shape_of(1).len()) {
            (before, _) if axis < before => (0, axis),
            (before, rank) if axis < before + rank => (1, axis - before),
            (_, rank) => (0, axis + 1 - rank),
        },
        _ => return None,
    };
    follow(graph, inputs[slot], at, seen)
}

/// The tensor and axis whose sort indices (from TopK) the value contains.
fn sort_source(graph: &Graph, mut value: Value) -> Option<(Value, usize)> {
    loop {
        match &graph.node(value.node).op {
            Op::Cast(_) => value = graph.inputs(value.node)[0],
            Op::TopK(op) if value.output == 1 => return Some((graph.inputs(value.node)[0], op.axis)),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Origin;
    use crate::op::{Input, Reshape, Transpose, Unary};
    use crate::tensor::DType;
    use crate::tensor::fact::Fact;

    fn dims(text: &str) -> Vec<Dim> {
        text.split_whitespace().map(|dim| Dim::parse(dim).unwrap()).collect()
    }

    #[test]
    fn stride_comes_from_the_producer_of_the_axis() {
        let mut graph = Graph::new("model");
        let mut add = |op: Op, inputs: &[Value]| {
            let node = graph.add(op, inputs, &Origin::default()).unwrap();
            Value { node, output: 0 }
        };
        let x = add(Op::Input(Input { name: "x".into(), fact: Fact::new(DType::F32, dims("batch 24 8")) }), &[]);
        let reshaped = |to: &str| Op::Reshape(Reshape { shape: dims(to) });
        let merged_in_front = add(reshaped("batch*24 8"), &[x]);
        let transposed = add(Op::Transpose(Transpose { perm: vec![1, 0, 2] }), &[x]);
        let merged_behind = add(reshaped("batch*24 8"), &[transposed]);
        let negated = add(Op::Unary(Unary::Neg), &[merged_behind]);
        let split = add(reshaped("batch*48 4"), &[negated]);
        assert_eq!(
            [x, merged_in_front, merged_behind, negated, split].map(|value| stride_within(&graph, value, 0)),
            [1, 24, 1, 1, 2].map(Some)
        );
        assert_eq!(stride_within(&graph, x, 1), None);
    }

    #[test]
    fn factor_is_located_by_stride() {
        // 24 steps of a batch of 8, width 32.
        assert_eq!(locate_factor(32, 8, &[24, 8, 32]), Some((1, 1)));
        // Batch-major instead.
        assert_eq!(locate_factor(24 * 32, 8, &[8, 24, 32]), Some((0, 1)));
        assert_eq!(locate_factor(24 * 32, 8, &[192, 32]), Some((0, 24)));
        assert_eq!(locate_factor(32, 8, &[4, 12, 4, 32]), None);
        assert_eq!(locate_factor(0, 8, &[0, 4]), None);
    }
}
