//! Matrix products.

use super::movement::swapped;
use super::{Known, LowerReason, Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::einsum::{self, Product};
use crate::op::{Binary, MatMul, Op, Value};
use crate::tensor::dim::Dim;
use crate::tensor::{DType, Tensor};

/// `MatMul` with NumPy semantics: a vector is a row on the left and a column on the right, and the added dim is removed
/// from the result.
pub fn matmul(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (scope.value(0)?, scope.value(1)?);
    Ok(vec![Known::Value(product(scope, a, b)?)])
}

/// NumPy matrix product of two values.
pub fn product(scope: &mut impl Build, mut a: Value, mut b: Value) -> Result<Value, LowerReason> {
    let (left, right) = (scope.fact(a).shape, scope.fact(b).shape);
    if left.is_empty() || right.is_empty() {
        return Err(LowerReason::Inputs("a scalar is not a matrix".to_string()));
    }
    if let [k] = left.as_slice() {
        a = scope.reshape(a, vec![Dim::Known(1), k.clone()])?;
    }
    if let [k] = right.as_slice() {
        b = scope.reshape(b, vec![k.clone(), Dim::Known(1)])?;
    }
    let y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[a, b])?;
    let mut shape = scope.fact(y).shape;
    if right.len() == 1 {
        shape.pop();
    }
    if left.len() == 1 {
        // The row axis is the last one, or the last but one if the column axis is still there.
        let row = shape.len() - if right.len() == 1 { 1 } else { 2 };
        shape.remove(row);
    }
    scope.reshape(y, shape)
}

pub fn einsum(scope: &mut Scope<'_>) -> Outputs {
    let (equation, count) = (scope.text("equation", "")?, scope.inputs.len());
    one(einsum::einsum(scope, &equation, count, |scope, slot| scope.value(slot), Product::Transposed)?)
}

/// `alpha·A·B + beta·C`, with optional transposes.
pub fn gemm(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (scope.value(0)?, scope.value(1)?);
    for value in [a, b] {
        let fact = scope.fact(value);
        if fact.rank() != 2 {
            return Err(LowerReason::Inputs(format!("an operand is {fact}, expected a matrix")));
        }
    }
    let (transpose_a, transpose_b) = (scope.flag("transA", false)?, scope.flag("transB", false)?);
    let (alpha, beta) = (scope.float("alpha", 1.0)?, scope.float("beta", 1.0)?);
    let mut y = scope.add(Op::MatMul(MatMul { transpose_a, transpose_b }), &[a, b])?;
    let shape = scope.fact(y).shape;
    if alpha != 1.0 {
        y = scope.with_number(Binary::Mul, y, alpha)?;
    }
    if let Some(mut c) = scope.optional(2)?
        && beta != 0.0
    {
        if beta != 1.0 {
            c = scope.with_number(Binary::Mul, c, beta)?;
        }
        y = scope.binary(Binary::Add, y, c)?;
        let sum = scope.fact(y);
        if sum.shape != shape {
            return Err(LowerReason::Inputs(format!("the third operand broadcasts the product to the shape {sum}")));
        }
    }
    Ok(vec![Known::Value(y)])
}

/// Multiplies `x` along `axis` by a matrix `[to, from]`. Half precision is computed in `f32`, so that the matrix is not
/// rounded.
pub fn multiply_axis(scope: &mut impl Build, x: Value, axis: usize, matrix: &Tensor) -> Result<Value, LowerReason> {
    let fact = scope.fact(x);
    let dtype = if fact.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let matrix = scope.constant(matrix.cast(dtype))?;
    let last = fact.rank() - 1;
    let mut rows = scope.cast(x, dtype)?;
    let is_last = axis + 2 == fact.rank();
    if is_last {
        // For the last but one axis, no transpose is needed.
        let y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[matrix, rows])?;
        return scope.cast(y, fact.dtype);
    }
    if axis != last {
        rows = swapped(scope, rows, axis, last)?;
    }
    if last == 0 {
        rows = scope.reshape(rows, vec![Dim::Known(1), fact.shape[0].clone()])?;
    }
    let mut y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[rows, matrix])?;
    if last == 0 {
        let size = scope.fact(y).shape.split_off(1);
        y = scope.reshape(y, size)?;
    }
    if axis != last {
        y = swapped(scope, y, axis, last)?;
    }
    scope.cast(y, fact.dtype)
}
