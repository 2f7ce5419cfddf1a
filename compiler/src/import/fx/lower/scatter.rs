//! Operators that write elements at indices. Each becomes a core scatter, along one axis or into the flattened tensor.

use super::index::Indexed;
use super::{Outputs, Scope, one, promote};
use crate::import::batched;
use crate::import::build::Build;
use crate::import::formula::formula;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute;
use crate::import::onnx::lower::gather::{element_places, number};
use crate::import::onnx::lower::movement::{permuted_back, transposed};
use crate::import::onnx::lower::scatter::into_flat;
use crate::import::onnx::lower::slice::{clamp_index, full_slice, part};
use crate::import::symbolic_batch::with_batch_of;
use crate::op::{Binary, Cumulative, CumulativeKind, Gather, Op, Scatter, ScatterKind, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};
use crate::tensor::fact::Fact;

/// The updates, cut to the shape of the index: the tensor `src`, or a number.
fn updates(scope: &mut Scope<'_>, index: &Fact, dtype: DType) -> Result<Value, LowerReason> {
    if scope.has("src") {
        let source = scope.value("src")?;
        let source = scope.cast(source, dtype)?;
        let mut slice = full_slice(&scope.fact(source).shape);
        if slice.end.len() != index.rank() {
            return Err(LowerReason::Inputs(format!("updates {} for indices {index}", scope.fact(source))));
        }
        if slice.end == index.shape {
            return Ok(source);
        }
        slice.end.clone_from(&index.shape);
        return scope.add(Op::Slice(slice), &[source]);
    }
    let number = scope.operand("value")?.ok_or(LowerReason::NotConstant { what: "the value to write" })?;
    let number = promote::value(scope, &number, dtype)?;
    scope.broadcast(number, index.shape.clone())
}

/// `y[i, index[i, j], …] = src[i, j, …]`, combined with the old value as `kind` or argument `reduce` says.
pub fn scatter(scope: &mut Scope<'_>, kind: ScatterKind) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("index")?);
    let (fact, shape) = (scope.fact(x), scope.fact(index));
    let axis = scope.axis("dim", 0, fact.rank())?;
    let updates = updates(scope, &shape, fact.dtype)?;
    let named = scope.text("reduce", "")?;
    let kind = match named.as_str() {
        "" => kind,
        "add" | "sum" | "mean" => ScatterKind::Add,
        "multiply" | "prod" => ScatterKind::Mul,
        "amax" => ScatterKind::Max,
        "amin" => ScatterKind::Min,
        other => return Err(LowerReason::Unsupported(format!("a scatter with the reduction `{other}`"))),
    };
    let includes_self = scope.flag("include_self", true)?;
    if kind == ScatterKind::Add
        && named != "mean"
        && includes_self
        && fact.dtype != DType::Bool
        && let Some(slices) = batched::slices(scope, &fact.shape, index, axis)?
    {
        return one(batched::scatter_add(scope, x, slices, updates, axis)?);
    }
    let flat_index = element_places(scope, &fact.shape, index, axis)?;
    let start = if includes_self { x } else { reset_targets(scope, kind, x, flat_index, &shape)? };
    let y = into_flat(scope, kind, start, flat_index, updates)?;
    if named != "mean" {
        return one(y);
    }
    if !fact.dtype.is_float() {
        return Err(LowerReason::Unsupported("a mean of integers".to_string()));
    }
    // The number of elements reduced at each index.
    let number = scope.scalar(fact.dtype, 1.0)?;
    let each = scope.broadcast(number, shape.shape.clone())?;
    let ones = scope.broadcast(number, fact.shape.clone())?;
    let counts = if start == x { ones } else { reset_targets(scope, kind, ones, flat_index, &shape)? };
    let count = into_flat(scope, ScatterKind::Add, counts, flat_index, each)?;
    let count = scope.with_number(Binary::Max, count, 1.0)?;
    one(scope.binary(Binary::Div, y, count)?)
}

/// Sets the written elements of `x` to the neutral element of the reduction.
fn reset_targets(
    scope: &mut Scope<'_>,
    kind: ScatterKind,
    x: Value,
    flat_index: Value,
    index: &Fact,
) -> Result<Value, LowerReason> {
    let dtype = scope.fact(x).dtype;
    let neutral = match kind {
        ScatterKind::Replace | ScatterKind::Add => 0.0,
        ScatterKind::Mul => 1.0,
        ScatterKind::Max | ScatterKind::Min if !dtype.is_float() => {
            return Err(LowerReason::Unsupported("a maximum of integers without the initial value".to_string()));
        }
        ScatterKind::Max => f64::NEG_INFINITY,
        ScatterKind::Min => f64::INFINITY,
    };
    let neutral = scope.scalar(dtype, neutral)?;
    let neutral = scope.broadcast(neutral, index.shape.clone())?;
    into_flat(scope, ScatterKind::Replace, x, flat_index, neutral)
}

/// `x[…, index, …] = values`, or added with `accumulate`. A boolean index is a mask.
pub fn index_put(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let fact = scope.fact(x);
    let accumulate = scope.flag("accumulate", false)?;
    let values = scope.value("values")?;
    let values = scope.cast(values, fact.dtype)?;
    let indices = scope.optional_values("indices")?;
    if let [Some(mask)] = indices[..]
        && scope.fact(mask).dtype == DType::Bool
    {
        return masked(scope, x, mask, values, accumulate);
    }
    let Indexed { perm, lead, flat_index, mut flat } = Indexed::read(scope, &fact.shape, indices)?;
    let permuted = transposed(scope, x, perm.clone())?;
    // One update per index: both have the batch axis.
    let permuted =
        if perm.len() == 1 { with_batch_of(scope, permuted, &scope.fact(flat_index).shape)? } else { permuted };
    let permuted_shape = scope.fact(permuted).shape;
    if perm.len() == 1 {
        flat.clone_from(&permuted_shape);
    }
    let reshaped = scope.reshape(permuted, flat.clone())?;
    let mut shape = flat[..lead].to_vec();
    shape.extend(scope.fact(flat_index).shape);
    shape.extend_from_slice(&flat[lead + 1..]);
    let values = scope.broadcast(values, shape)?;
    let kind = if accumulate { ScatterKind::Add } else { ScatterKind::Replace };
    let y = scope.add(Op::Scatter(Scatter { kind, axis: lead }), &[reshaped, flat_index, values])?;
    let y = scope.reshape(y, permuted_shape)?;
    one(permuted_back(scope, y, &perm)?)
}

/// `mask ? value : x` with a single value.
fn masked(scope: &mut Scope<'_>, x: Value, mask: Value, value: Value, accumulate: bool) -> Outputs {
    let (fact, mut shape) = (scope.fact(x), scope.fact(mask).shape);
    if !volume(&scope.fact(value).shape)?.is(1) {
        return Err(LowerReason::Unsupported("a boolean index with one value per element,".to_string()));
    }
    shape.resize(fact.rank().max(shape.len()), Dim::Known(1));
    let mask = scope.reshape(mask, shape)?;
    let value = scope.reshape(value, Vec::new())?;
    let value = if accumulate { scope.binary(Binary::Add, x, value)? } else { value };
    one(scope.select(mask, value, x)?)
}

/// `masked_scatter`: `x[mask] = source`, read in order.
pub fn masked_scatter(scope: &mut Scope<'_>) -> Outputs {
    let (x, mask, source) = (scope.value("self")?, scope.value("mask")?, scope.value("source")?);
    let shape = scope.fact(x).shape;
    let count = volume(&shape)?;
    let mask = scope.broadcast(mask, shape.clone())?;
    let flat = scope.reshape(mask, vec![count])?;
    let counts = scope.cast(flat, DType::I64)?;
    let sum = Cumulative { kind: CumulativeKind::Sum, axis: 0, exclusive: true, reverse: false };
    let flat_index = scope.add(Op::Cumulative(sum), &[counts])?;
    // Unselected elements after the last one may read any index.
    let last = volume(&scope.fact(source).shape)?.sub(&Dim::Known(1))?;
    let last = number(scope, &last)?;
    let flat_index = scope.binary(Binary::Min, flat_index, last)?;
    let source = scope.reshape(source, vec![volume(&scope.fact(source).shape)?])?;
    let values = scope.add(Op::Gather(Gather { axis: 0 }), &[source, flat_index])?;
    let values = scope.reshape(values, shape)?;
    one(scope.select(mask, values, x)?)
}

/// `index_copy`, or `index_add` with factor `alpha`.
pub fn slices(scope: &mut Scope<'_>, kind: ScatterKind) -> Outputs {
    let (x, index) = (scope.value("self")?, scope.value("index")?);
    let fact = scope.fact(x);
    let axis = attribute::axis(scope.int("dim", 0)?, fact.rank())?;
    let index = super::index::open_range(scope, index, &fact.shape[axis])?;
    let mut positions = scope.fact(index);
    let index = if positions.rank() == 0 { scope.reshape(index, vec![Dim::Known(1)])? } else { index };
    positions = scope.fact(index);
    let mut shape = fact.shape.clone();
    shape.splice(axis..=axis, positions.shape);
    let updates = if scope.has("source") {
        let source = scope.value("source")?;
        let source = scope.cast(source, fact.dtype)?;
        scope.reshape(source, shape)?
    } else {
        let value = scope.operand("value")?.ok_or(LowerReason::NotConstant { what: "the value to write" })?;
        let value = promote::value(scope, &value, fact.dtype)?;
        scope.broadcast(value, shape)?
    };
    let updates = match scope.number("alpha")?.filter(|n| n.float() != 1.0) {
        Some(alpha) => {
            let alpha = scope.constant(alpha.tensor(fact.dtype))?;
            scope.binary(Binary::Mul, updates, alpha)?
        }
        None => updates,
    };
    one(scope.add(Op::Scatter(Scatter { kind, axis }), &[x, index, updates])?)
}

/// `x` with the elements `begin, begin + step, …` of an axis replaced by `source`.
pub fn write_slice(
    scope: &mut Scope<'_>,
    x: Value,
    axis: usize,
    begin: &Dim,
    step: i64,
    source: Value,
) -> Result<Value, LowerReason> {
    let shape = scope.fact(x).shape;
    let count = scope.fact(source).shape[axis].clone();
    let end = begin.add(&count)?;
    if step == 1 {
        let mut parts = Vec::with_capacity(3);
        if !begin.is(0) {
            parts.push(part(scope, x, axis, Dim::Known(0), begin.clone())?);
        }
        parts.push(source);
        if end != shape[axis] {
            parts.push(part(scope, x, axis, end, shape[axis].clone())?);
        }
        return scope.concat(&parts, axis);
    }
    let mut index = scope.count(1, 0, &count)?;
    index = scope.with_number(Binary::Mul, index, step as f64)?;
    let begin = number(scope, begin)?;
    index = scope.binary(Binary::Add, index, begin)?;
    scope.add(Op::Scatter(Scatter { kind: ScatterKind::Replace, axis }), &[x, index, source])
}

/// `x[start:end:step] = src` along one axis.
pub fn slice(scope: &mut Scope<'_>) -> Outputs {
    let (x, source) = (scope.value("self")?, scope.value("src")?);
    let shape = scope.fact(x).shape;
    let axis = attribute::axis(scope.int("dim", 0)?, shape.len())?;
    let start = scope.dim("start")?.unwrap_or(Dim::Known(0));
    let begin = clamp_index(&start, &shape[axis], &Dim::Known(0), &shape[axis])?;
    let step = scope.int("step", 1)?;
    if step < 1 {
        return Err(LowerReason::Inputs("the step of a slice is below 1".to_string()));
    }
    let source = scope.cast(source, scope.fact(x).dtype)?;
    one(write_slice(scope, x, axis, &begin, step, source)?)
}

/// `x[index] = src` along one axis.
pub fn select(scope: &mut Scope<'_>) -> Outputs {
    let (x, source) = (scope.value("self")?, scope.value("src")?);
    let fact = scope.fact(x);
    let axis = attribute::axis(scope.int("dim", 0)?, fact.rank())?;
    let index = scope.dim("index")?.ok_or(LowerReason::NotConstant { what: "the index" })?;
    let begin = if index.known().is_some_and(|v| v < 0) { fact.shape[axis].add(&index)? } else { index };
    let mut shape = fact.shape.clone();
    shape[axis] = Dim::Known(1);
    let source = scope.cast(source, fact.dtype)?;
    let source = scope.reshape(source, shape)?;
    one(write_slice(scope, x, axis, &begin, 1, source)?)
}

pub fn one_hot(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let classes = scope.int("num_classes", -1)?;
    if classes < 0 {
        return Err(LowerReason::NotConstant { what: "the number of classes" });
    }
    let class_index = scope.count(1, 0, &Dim::Known(classes))?;
    let x = scope.cast(x, DType::I64)?;
    let x = scope.column(x)?;
    one(formula(scope, [x, class_index], |[x, class_index]| x.equals(class_index).cast(DType::I64))?)
}

/// `isin`.
pub fn is_in(scope: &mut Scope<'_>) -> Outputs {
    let (x, list) = (scope.value("elements")?, scope.value("test_elements")?);
    let dtype = promote::promote(scope.fact(x).dtype, scope.fact(list).dtype);
    let (x, list) = (scope.cast(x, dtype)?, scope.cast(list, dtype)?);
    let (axis, invert) = (scope.fact(x).rank(), scope.flag("invert", false)?);
    let x = scope.column(x)?;
    let list = scope.reshape(list, vec![volume(&scope.fact(list).shape)?])?;
    one(formula(scope, [x, list], |[x, list]| {
        let is_none = x.equals(list).cast(DType::I64).sum(&[axis], false).equals(0.0);
        if invert { is_none } else { !is_none }
    })?)
}
