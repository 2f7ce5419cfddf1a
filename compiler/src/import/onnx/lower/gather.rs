//! `GatherElements` and `GatherND`, lowered to one gather from the flattened tensor with the flat index
//! `Σ index_i·stride_i`.

use super::attribute::axis;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::batched;
use crate::import::build::Build;
use crate::op::{Binary, Compare, Gather, Op, Value};
use crate::tensor::dim::{Dim, volume};
use crate::tensor::{DType, Tensor};

/// A size as a scalar `i64` value.
pub fn number(scope: &mut impl Build, dim: &Dim) -> Result<Value, LowerReason> {
    match dim.known() {
        Some(value) => scope.constant(Tensor::from_i64(&[], &[value])),
        None => scope.size(dim),
    }
}

/// An out-of-range flat index, also after one such value per axis has been summed.
const OUTSIDE: i64 = 1 << 52;

/// `index · stride`, where a negative index counts from the end of an axis of `size`. An index outside the axis gives
/// an out-of-range flat index, which the kernel refuses. Otherwise it would address an element of another row.
pub fn steps(scope: &mut impl Build, index: Value, size: &Dim, stride: &Dim) -> Result<Value, LowerReason> {
    let zero = scope.constant(Tensor::from_i64(&[], &[0]))?;
    let negative = scope.compare(Compare::Less, index, zero)?;
    let size = number(scope, size)?;
    let wrapped = scope.binary(Binary::Add, index, size)?;
    let index = scope.select(negative, wrapped, index)?;
    let offset = scale_index(scope, index, stride)?;
    let outside = scope.constant(Tensor::from_i64(&[], &[OUTSIDE]))?;
    let (is_negative, is_below) =
        (scope.compare(Compare::Less, index, zero)?, scope.compare(Compare::Less, index, size)?);
    let offset = scope.select(is_below, offset, outside)?;
    scope.select(is_negative, outside, offset)
}

pub fn scale_index(scope: &mut impl Build, index: Value, stride: &Dim) -> Result<Value, LowerReason> {
    if stride.is(1) {
        return Ok(index);
    }
    let stride = number(scope, stride)?;
    scope.binary(Binary::Mul, index, stride)
}

/// Adds the offset along one more axis to the flat index.
pub fn add_offset(scope: &mut impl Build, sum: Option<Value>, steps: Value) -> Result<Option<Value>, LowerReason> {
    Ok(Some(match sum {
        Some(sum) => scope.binary(Binary::Add, sum, steps)?,
        None => steps,
    }))
}

/// For each element of `index`, the flat index into a tensor of shape `dims`: the value of `index` at axis
/// `index_axis`, its own coordinates at the other axes.
pub fn element_places(
    scope: &mut impl Build,
    dims: &[Dim],
    index: Value,
    index_axis: usize,
) -> Result<Value, LowerReason> {
    let index_shape = scope.fact(index).shape;
    if index_shape.len() != dims.len() {
        return Err(LowerReason::Inputs(format!(
            "an index of rank {} for an input of rank {}",
            index_shape.len(),
            dims.len()
        )));
    }
    let index = scope.cast(index, DType::I64)?;
    let mut flat_index = None;
    for at in 0..dims.len() {
        let stride = volume(&dims[at + 1..])?;
        let steps = if at == index_axis {
            steps(scope, index, &dims[at], &stride)?
        } else {
            let count = scope.count(dims.len(), at, &index_shape[at])?;
            scale_index(scope, count, &stride)?
        };
        flat_index = add_offset(scope, flat_index, steps)?;
    }
    flat_index.ok_or_else(|| LowerReason::Inputs("a scalar has no axis to index".to_string()))
}

/// Fails if the index has more rows than the input along another axis.
pub fn check_rows(scope: &impl Build, dims: &[Dim], index: Value, index_axis: usize) -> Result<(), LowerReason> {
    let shape = scope.fact(index).shape;
    let larger = |(have, size): (&Dim, &Dim)| have.known().zip(size.known()).is_some_and(|(have, size)| have > size);
    let at = shape.iter().zip(dims).enumerate().find(|(at, pair)| *at != index_axis && larger(*pair));
    at.map_or(Ok(()), |(at, (have, size))| {
        let message = format!("an index of {have} rows at axis {at}, where the input has {size}");
        Err(LowerReason::Inputs(message))
    })
}

/// `y[i, j, …] = x[i, index[i, j, …], …]`, with the index at `axis`.
pub fn elements(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value(0)?, scope.value(1)?);
    let dims = scope.fact(x).shape;
    let index_axis = axis(scope.int("axis", 0)?, dims.len())?;
    if let Some(slices) = batched::slices(scope, &dims, index, index_axis)? {
        return Ok(vec![Known::Value(batched::gather(scope, x, slices, index_axis)?)]);
    }
    check_rows(scope, &dims, index, index_axis)?;
    let flat_index = element_places(scope, &dims, index, index_axis)?;
    let flat = scope.reshape(x, vec![volume(&dims)?])?;
    Ok(vec![Known::Value(scope.add(Op::Gather(Gather { axis: 0 }), &[flat, flat_index])?)])
}

/// For each row of `index`, the index of the slice it selects. The first `shared + width` axes of `dims` count as one
/// axis: `width` is the last dimension of `index`, `shared` the number of leading batch axes.
pub fn slice_places(
    scope: &mut impl Build,
    dims: &[Dim],
    index: Value,
    shared: i64,
) -> Result<(Value, usize), LowerReason> {
    let shape = scope.fact(index).shape;
    let width = shape.last().and_then(Dim::known).and_then(|w| usize::try_from(w).ok());
    let is_valid = |shared: usize, width: usize| width > 0 && shared < shape.len() && shared + width <= dims.len();
    let (shared, width) = match (usize::try_from(shared), width) {
        (Ok(shared), Some(width)) if is_valid(shared, width) => (shared, width),
        _ => {
            return Err(LowerReason::Inputs(format!(
                "indices of shape {shape:?} do not fit an input of shape {dims:?}"
            )));
        }
    };
    let index = scope.cast(index, DType::I64)?;
    let (index_shape, last) = (&shape[..shape.len() - 1], shape.len() - 1);
    let indexed = &dims[..shared + width];
    let mut flat_index = None;
    for at in 0..indexed.len() {
        let stride = volume(&indexed[at + 1..])?;
        let steps = if at < shared {
            let count = scope.count(index_shape.len(), at, &dims[at])?;
            scale_index(scope, count, &stride)?
        } else {
            let column = (at - shared) as i64;
            let part = super::slice::part(scope, index, last, Dim::Known(column), Dim::Known(column + 1))?;
            let part = scope.reshape(part, index_shape.to_vec())?;
            steps(scope, part, &dims[at], &stride)?
        };
        flat_index = add_offset(scope, flat_index, steps)?;
    }
    let flat_index = flat_index.ok_or_else(|| LowerReason::Inputs("it has no index".to_string()))?;
    Ok((flat_index, indexed.len()))
}

/// `x` with its first `count` axes flattened.
pub fn read_joined(scope: &mut impl Build, x: Value, count: usize) -> Result<Value, LowerReason> {
    let dims = scope.fact(x).shape;
    let mut shape = vec![volume(&dims[..count])?];
    shape.extend(dims[count..].iter().cloned());
    scope.reshape(x, shape)
}

/// The number of batch axes, if it is at least one and the index has a single value per slice.
fn one_index(dims: &[Dim], shape: &[Dim], shared: i64) -> Option<usize> {
    let batch = usize::try_from(shared).ok().filter(|batch| (1..dims.len()).contains(batch))?;
    let is_single = shape.len() > batch && shape[shape.len() - 1].is(1) && shape[..batch] == dims[..batch];
    is_single.then_some(batch)
}

/// Slices of `x`, selected by the last axis of the index: one number per indexed leading axis, after `batch_dims`
/// shared axes.
pub fn nd(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value(0)?, scope.value(1)?);
    let dims = scope.fact(x).shape;
    let shared = scope.int("batch_dims", 0)?;
    if let Some(batch) = one_index(&dims, &scope.fact(index).shape, shared) {
        let shape = scope.fact(index).shape;
        let slices = scope.reshape(index, shape[..shape.len() - 1].to_vec())?;
        return Ok(vec![Known::Value(batched::gather(scope, x, slices, batch)?)]);
    }
    if let Some(columns) = columns_of_every_row(scope, &dims, shared)? {
        let columns = scope.constant(columns)?;
        return Ok(vec![Known::Value(scope.add(Op::Gather(Gather { axis: 1 }), &[x, columns])?)]);
    }
    let (flat_index, indexed) = slice_places(scope, &dims, index, shared)?;
    let flat = read_joined(scope, x, indexed)?;
    Ok(vec![Known::Value(scope.add(Op::Gather(Gather { axis: 0 }), &[flat, flat_index])?)])
}

/// The columns that a constant index of (row, column) pairs selects, if they are the same in every row, as in mask
/// lookups; else `None`.
fn columns_of_every_row(scope: &Scope<'_>, dims: &[Dim], shared: i64) -> Result<Option<Tensor>, LowerReason> {
    let Known::Tensor(index) = scope.known(1)? else { return Ok(None) };
    let shape = index.shape();
    let ([_, _, ..], [rows, rest @ .., 2], 0) = (dims, shape, shared) else { return Ok(None) };
    let covers_rows = dims[0].substitute(scope.frozen)?.is(*rows as i64);
    let row_pairs: usize = rest.iter().product();
    if !covers_rows || *rows < 2 || row_pairs == 0 {
        return Ok(None);
    }
    let pairs = index.to_i64();
    let columns: Vec<i64> = pairs[..2 * row_pairs].iter().skip(1).step_by(2).copied().collect();
    let is_row = |(row, pairs): (usize, &[i64])| {
        pairs.chunks_exact(2).zip(&columns).all(|(pair, column)| pair == [row as i64, *column])
    };
    let same_columns = pairs.chunks_exact(2 * row_pairs).enumerate().all(is_row);
    Ok(same_columns.then(|| Tensor::from_i64(rest, &columns)))
}
