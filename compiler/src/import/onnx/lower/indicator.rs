//! `OneHot` and `EyeLike`.

use super::attribute::axis;
use super::gather::number;
use super::random::dtype;
use super::slice::part;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::op::{Binary, Compare};
use crate::tensor::dim::Dim;
use crate::tensor::{DType, Tensor};

/// `OneHot`. A negative index counts from the end; an index out of range sets no element.
pub fn one_hot(scope: &mut Scope<'_>) -> Outputs {
    let (index, values) = (scope.value(0)?, scope.value(2)?);
    let depth = match scope.dims(1, "the depth of a one-hot tensor")?.as_deref() {
        Some([one]) => one.clone(),
        _ => return Err(LowerReason::Inputs("the depth of a one-hot tensor is not one number".to_string())),
    };
    let pair = scope.fact(values);
    if pair.rank() != 1 || !pair.shape[0].is(2) {
        return Err(LowerReason::Inputs(format!("the values are {pair}, expected two of them")));
    }
    let mut shape = scope.fact(index).shape;
    let at = axis(scope.int("axis", -1)?, shape.len() + 1)?;
    shape.insert(at, Dim::Known(1));
    let index = scope.cast(index, DType::I64)?;
    let index = scope.reshape(index, shape.clone())?;
    let zero = scope.constant(Tensor::from_i64(&[], &[0]))?;
    let negative = scope.compare(Compare::Less, index, zero)?;
    let size = number(scope, &depth)?;
    let wrapped = scope.binary(Binary::Add, index, size)?;
    let index = scope.select(negative, wrapped, index)?;
    let class_index = scope.count(shape.len(), at, &depth)?;
    let is_class = scope.compare(Compare::Equal, class_index, index)?;
    let off = part(scope, values, 0, Dim::Known(0), Dim::Known(1))?;
    let on = part(scope, values, 0, Dim::Known(1), Dim::Known(2))?;
    let (off, on) = (scope.reshape(off, Vec::new())?, scope.reshape(on, Vec::new())?);
    Ok(vec![Known::Value(scope.select(is_class, on, off)?)])
}

/// `EyeLike`: ones on a diagonal of a matrix, zeros elsewhere.
pub fn eye_like(scope: &mut Scope<'_>) -> Outputs {
    let fact = scope.fact_of(0)?;
    let [rows, columns] = fact.shape.as_slice() else {
        return Err(LowerReason::Inputs(format!("{fact} is not a matrix")));
    };
    let dtype = dtype(scope, fact.dtype)?;
    let diagonal = scope.int("k", 0)?;
    let (mut row, column) = (scope.count(2, 0, rows)?, scope.count(2, 1, columns)?);
    if diagonal != 0 {
        let diagonal = scope.constant(Tensor::from_i64(&[], &[diagonal]))?;
        row = scope.binary(Binary::Add, row, diagonal)?;
    }
    let is_diagonal = scope.compare(Compare::Equal, row, column)?;
    Ok(vec![Known::Value(scope.cast(is_diagonal, dtype)?)])
}
