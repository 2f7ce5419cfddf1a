//! Element indices that are broadcast over whole slices: the gather or scatter then operates on slices, not on
//! elements.
//!
//! Exporters write such indices for mixture-of-experts token routing: `slot.unsqueeze(-1).expand(-1, -1, width)`.

use crate::graph::Graph;
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::op::{BatchGather, BatchScatterAdd, Binary, Gather, Op, ScatterAdd, Value};
use crate::tensor::dim::Dim;

/// The slice indices of an element index, or `None`. `index` must be the result of a broadcast, constant after axis
/// `along`, and have the shape `dims` except for that axis.
pub fn slices(
    scope: &mut (impl Build + ?Sized),
    dims: &[Dim],
    index: Value,
    along: usize,
) -> Result<Option<Value>, LowerReason> {
    let graph = scope.graph();
    let Op::Broadcast(_) = graph.node(index.node).op else { return Ok(None) };
    let source = graph.inputs(index.node)[0];
    let (from, to) = (&graph.fact(source).shape, &graph.fact(index).shape);
    if to.len() != dims.len() || along + 1 >= dims.len() {
        return Ok(None);
    }
    let leading = to.len() - from.len();
    let source_size = |axis: usize| axis.checked_sub(leading).map(|axis| &from[axis]);
    let is_whole = |axis: usize| source_size(axis) == Some(&to[axis]) && (axis == along || to[axis] == dims[axis]);
    let is_stretched = |axis: usize| source_size(axis).is_none_or(|size| size.is(1)) && to[axis] == dims[axis];
    if !(0..=along).all(is_whole) || !(along + 1..to.len()).all(is_stretched) {
        return Ok(None);
    }
    let shape = to[..=along].to_vec();
    scope.reshape(source, shape).map(Some)
}

/// Gathers slices of `x` along axis `batch`, with separate indices for each element of the `batch` leading axes.
pub fn gather(scope: &mut (impl Build + ?Sized), x: Value, indices: Value, batch: usize) -> Result<Value, LowerReason> {
    match batch {
        0 => scope.add(Op::Gather(Gather { axis: 0 }), &[x, indices]),
        _ => scope.add(Op::BatchGather(BatchGather { batch }), &[x, indices]),
    }
}

/// Adds slices to `x` at the given indices.
pub fn scatter_add(
    scope: &mut (impl Build + ?Sized),
    x: Value,
    indices: Value,
    updates: Value,
    batch: usize,
) -> Result<Value, LowerReason> {
    let size = scope.graph().fact(x).shape[batch].clone();
    let op = match batch {
        0 => Op::ScatterAdd(ScatterAdd { axis: 0, size }),
        _ => Op::BatchScatterAdd(BatchScatterAdd { batch, size }),
    };
    let sums = scope.add(op, &[updates, indices])?;
    match is_zero(scope.graph(), x) {
        true => Ok(sums),
        false => scope.add(Op::Binary(Binary::Add), &[x, sums]),
    }
}

fn is_zero(graph: &Graph, value: Value) -> bool {
    match &graph.node(value.node).op {
        Op::Broadcast(_) | Op::Reshape(_) => is_zero(graph, graph.inputs(value.node)[0]),
        Op::Constant(constant) => constant.tensor.bytes().iter().all(|byte| *byte == 0),
        _ => false,
    }
}
