//! Matrix products.

use super::argument::{Number, Operand};
use super::{Outputs, Scope, one, promote};
use crate::import::build::Build;
use crate::import::einsum::{self, Product};
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::linear::product;
use crate::import::onnx::lower::movement::transposed;
use crate::op::{Binary, GroupedMatMul, GroupedMatMulGrad, MatMul, Op, ReduceKind, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};

/// `x·Wᵀ + b` with `W [out, in]`.
pub fn linear(scope: &mut Scope<'_>) -> Outputs {
    let (x, weight) = (scope.value("input")?, scope.value("weight")?);
    let (fact, matrix) = (scope.fact(x), scope.fact(weight));
    if matrix.rank() != 2 || fact.rank() == 0 {
        return Err(LowerReason::Inputs(format!("its weight is {matrix}, its input {fact}")));
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

/// `self` times another argument, as in `numpy.matmul`.
pub fn matmul(scope: &mut Scope<'_>, other: &'static str) -> Outputs {
    let (a, b) = (scope.value("self")?, scope.value(other)?);
    one(product(scope, a, b)?)
}

fn scale(scope: &mut Scope<'_>, x: Value, name: &'static str) -> Result<Value, LowerReason> {
    match scope.number(name)?.map_or(1.0, Number::float) {
        1.0 => Ok(x),
        factor => scope.with_number(Binary::Mul, x, factor),
    }
}

/// `y + beta·sum`. With `beta` 0, the sum is not read: NaN and infinity in it do not count.
fn with_scaled(scope: &mut Scope<'_>, y: Value, sum: Value) -> Result<Value, LowerReason> {
    if scope.number("beta")?.is_some_and(|beta| beta.float() == 0.0) {
        return Ok(y);
    }
    let sum = scale(scope, sum, "beta")?;
    scope.binary(Binary::Add, y, sum)
}

/// `beta·self + alpha·(a·b)`
pub fn with_sum(scope: &mut Scope<'_>, a: &'static str, b: &'static str) -> Outputs {
    let (sum, a, b) = (scope.value("self")?, scope.value(a)?, scope.value(b)?);
    let y = product(scope, a, b)?;
    let y = scale(scope, y, "alpha")?;
    one(with_scaled(scope, y, sum)?)
}

/// `beta·self + alpha·Σ a·b`, summed over the batch.
pub fn with_sum_of_all(scope: &mut Scope<'_>) -> Outputs {
    let (sum, a, b) = (scope.value("self")?, scope.value("batch1")?, scope.value("batch2")?);
    let y = product(scope, a, b)?;
    let y = scope.reduce(ReduceKind::Sum, y, &[0], false)?;
    let y = scale(scope, y, "alpha")?;
    one(with_scaled(scope, y, sum)?)
}

fn outer_of(scope: &mut Scope<'_>, a: Value, b: Value) -> Result<Value, LowerReason> {
    let dtype = promote::common(scope, &[Operand::Tensor(a), Operand::Tensor(b)]);
    let (a, b) = (scope.cast(a, dtype)?, scope.cast(b, dtype)?);
    let a = scope.column(a)?;
    scope.binary(Binary::Mul, a, b)
}

/// Outer product of two vectors, added to `self` with `sum`.
pub fn outer(scope: &mut Scope<'_>, sum: bool) -> Outputs {
    if !sum {
        let (a, b) = (scope.value("self")?, scope.value("vec2")?);
        return one(outer_of(scope, a, b)?);
    }
    let (input, a, b) = (scope.value("self")?, scope.value("vec1")?, scope.value("vec2")?);
    let y = outer_of(scope, a, b)?;
    let y = scale(scope, y, "alpha")?;
    one(with_scaled(scope, y, input)?)
}

pub fn inner(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (scope.value("self")?, scope.value("other")?);
    let (left, right) = (scope.fact(a).shape, scope.fact(b).shape);
    let ([rows @ .., depth], [columns @ .., _]) = (&left[..], &right[..]) else {
        return one(scope.binary(Binary::Mul, a, b)?);
    };
    let a = scope.reshape(a, vec![volume(rows)?, depth.clone()])?;
    let b = scope.reshape(b, vec![volume(columns)?, depth.clone()])?;
    let y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[a, b])?;
    one(scope.reshape(y, [rows, columns].concat())?)
}

/// Grouped matrix product: rows `[S, K]`, sorted by group, times the matrices `[G, K, N]`; or `[M, S]` times `[S, N]`,
/// one product per group. `offs` gives the end of each group. Without it, both operands are batches of matrices.
pub fn grouped(scope: &mut Scope<'_>) -> Outputs {
    let first = if scope.has("input") { "input" } else { "self" };
    let second = if scope.has("weight") { "weight" } else { "mat2" };
    let (a, b) = (scope.value(first)?, scope.value(second)?);
    if scope.has("bias") {
        return Err(LowerReason::Unsupported("a grouped matrix product with a bias".to_string()));
    }
    let (left, right) = (scope.fact(a), scope.fact(b));
    let y = match (scope.optional("offs")?, left.rank(), right.rank()) {
        (None, 3, 3) => product(scope, a, b)?,
        (Some(ends), 2, 3) => {
            let ends = scope.cast(ends, DType::I64)?;
            let (b, transpose) = match undo_transpose(scope, b) {
                Some(stored) => (stored, true),
                None => (b, false),
            };
            scope.add(Op::GroupedMatMul(GroupedMatMul { transpose }), &[a, b, ends])?
        }
        (Some(ends), 2, 2) => {
            let ends = scope.cast(ends, DType::I64)?;
            let rows = transposed(scope, a, vec![1, 0])?;
            scope.add(Op::GroupedMatMulGrad(GroupedMatMulGrad {}), &[rows, b, ends])?
        }
        _ => return Err(LowerReason::Unsupported(format!("a grouped matrix product of {left} and {right}"))),
    };
    match scope.dtype("out_dtype")? {
        Some(dtype) => one(scope.cast(y, dtype)?),
        None => one(y),
    }
}

/// The operand of a transpose of the last two axes.
fn undo_transpose(scope: &Scope<'_>, x: Value) -> Option<Value> {
    match &scope.graph.node(x.node).op {
        Op::Transpose(op) if op.perm == [0, 2, 1] => Some(scope.graph.inputs(x.node)[0]),
        _ => None,
    }
}

pub fn einsum(scope: &mut Scope<'_>) -> Outputs {
    let (equation, tensors) = (scope.text("equation", "")?, scope.values("tensors")?);
    one(einsum::einsum(scope, &equation, tensors.len(), |_, at| Ok(tensors[at]), Product::Plain)?)
}
