//! Options of embeddings that change only the gradient.

use crate::import::build::Build;
use crate::import::formula::formula;
use crate::import::lower_error::LowerReason;
use crate::op::{Compare, Gather, Op, ScatterAdd, Value};

/// `rows` of `table`, whose gradient is divided by the number of times that the index occurs if it is `scaled`; those of
/// index `padding` get none.
pub fn with_options(
    scope: &mut impl Build,
    mut rows: Value,
    [table, index]: [Value; 2],
    scaled: bool,
    padding: Option<i64>,
) -> Result<Value, LowerReason> {
    if scaled {
        rows = scaled_by_frequency(scope, rows, table, index)?;
    }
    let Some(padding) = padding.filter(|padding| *padding >= 0) else { return Ok(rows) };
    let is_padding = is_padding(scope, index, padding)?;
    let without_gradient = scope.stop_gradient(rows)?;
    scope.select(is_padding, without_gradient, rows)
}

/// True for each index that is `padding`, with a last axis of size 1.
pub fn is_padding(scope: &mut impl Build, index: Value, padding: i64) -> Result<Value, LowerReason> {
    let number = scope.scalar(scope.graph().fact(index).dtype, padding as f64)?;
    let is_padding = scope.compare(Compare::Equal, index, number)?;
    scope.column(is_padding)
}

fn scaled_by_frequency(scope: &mut impl Build, rows: Value, table: Value, index: Value) -> Result<Value, LowerReason> {
    let fact = scope.fact(table);
    let (shape, size) = (scope.fact(index).shape, fact.shape[0].clone());
    let one = scope.scalar(fact.dtype, 1.0)?;
    let ones = scope.broadcast(one, shape)?;
    let counts = scope.add(Op::ScatterAdd(ScatterAdd { axis: 0, size }), &[ones, index])?;
    let counts = scope.add(Op::Gather(Gather { axis: 0 }), &[counts, index])?;
    let counts = scope.column(counts)?;
    let without_gradient = scope.stop_gradient(rows)?;
    formula(scope, [rows, without_gradient, counts], |[rows, without_gradient, counts]| {
        without_gradient + (rows - without_gradient) / counts
    })
}
