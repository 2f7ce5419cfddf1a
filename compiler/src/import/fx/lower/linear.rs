//! Matrix products.

use super::argument::Number;
use super::{Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::onnx::lower::linear::product;
use crate::import::reason::Reason;
use crate::op::{Binary, MatMul, Op, Value};
use crate::tensor::dim::Dim;

/// `x·Wᵀ + b`, with `W [out, in]`.
pub fn linear(scope: &mut Scope<'_>) -> Outputs {
    let (x, weight) = (scope.value("input")?, scope.value("weight")?);
    let (fact, matrix) = (scope.fact(x), scope.fact(weight));
    if matrix.rank() != 2 || fact.rank() == 0 {
        return Err(Reason::Inputs(format!("its weight is {matrix}, its input {fact}")));
    }
    let row = if fact.rank() == 1 { scope.reshape(x, vec![Dim::Known(1), fact.shape[0].clone()])? } else { x };
    let mut y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[row, weight])?;
    if fact.rank() == 1 {
        y = scope.reshape(y, vec![matrix.shape[0].clone()])?;
    }
    one(match scope.optional("bias")? {
        Some(bias) => scope.binary(Binary::Add, y, bias)?,
        None => y,
    })
}

/// The product of `self` and another argument, as NumPy has it.
pub fn matmul(scope: &mut Scope<'_>, other: &'static str) -> Outputs {
    let (a, b) = (scope.value("self")?, scope.value(other)?);
    one(product(scope, a, b)?)
}

fn scaled(scope: &mut Scope<'_>, x: Value, name: &'static str) -> Result<Value, Reason> {
    match scope.number(name)?.map_or(1.0, Number::float) {
        1.0 => Ok(x),
        factor => scope.with_number(Binary::Mul, x, factor),
    }
}

/// `beta·self + alpha·(a·b)`
pub fn with_sum(scope: &mut Scope<'_>, a: &'static str, b: &'static str) -> Outputs {
    let (sum, a, b) = (scope.value("self")?, scope.value(a)?, scope.value(b)?);
    let y = product(scope, a, b)?;
    let y = scaled(scope, y, "alpha")?;
    let sum = scaled(scope, sum, "beta")?;
    one(scope.binary(Binary::Add, y, sum)?)
}
