//! Options of embeddings that change only the gradient.

use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::op::{Binary, Compare, Gather, Op, ScatterAdd, StopGradient, Value};
use crate::tensor::dim::Dim;

/// `rows`, where those of index `padding` get no gradient.
pub fn with_padding(
    scope: &mut (impl Build + ?Sized),
    rows: Value,
    index: Value,
    padding: i64,
) -> Result<Value, LowerReason> {
    let number = scope.scalar(scope.graph().fact(index).dtype, padding as f64)?;
    let is_padding = scope.compare(Compare::Equal, index, number)?;
    let mut column = scope.fact(is_padding).shape;
    column.push(Dim::Known(1));
    let is_padding = scope.reshape(is_padding, column)?;
    let without_gradient = scope.add(Op::StopGradient(StopGradient {}), &[rows])?;
    scope.select(is_padding, without_gradient, rows)
}

/// `rows`, whose gradient is divided by the number of times that the index occurs.
pub fn scaled_by_frequency(
    scope: &mut (impl Build + ?Sized),
    rows: Value,
    table: Value,
    index: Value,
) -> Result<Value, LowerReason> {
    let fact = scope.fact(table);
    let (mut shape, size) = (scope.fact(index).shape, fact.shape[0].clone());
    let one = scope.scalar(fact.dtype, 1.0)?;
    let ones = scope.broadcast(one, shape.clone())?;
    let counts = scope.add(Op::ScatterAdd(ScatterAdd { axis: 0, size }), &[ones, index])?;
    let counts = scope.add(Op::Gather(Gather { axis: 0 }), &[counts, index])?;
    shape.push(Dim::Known(1));
    let counts = scope.reshape(counts, shape)?;
    let without_gradient = scope.add(Op::StopGradient(StopGradient {}), &[rows])?;
    let zero = scope.binary(Binary::Sub, rows, without_gradient)?;
    let scaled = scope.binary(Binary::Div, zero, counts)?;
    scope.binary(Binary::Add, without_gradient, scaled)
}
