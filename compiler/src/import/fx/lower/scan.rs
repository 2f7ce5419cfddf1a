//! Sorting and cumulative operators along an axis.

use super::{Known, Made, Outputs, Scope, many, one};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute;
use crate::import::onnx::lower::slice::part;
use crate::op::{Cumulative, CumulativeKind, Op, TopK, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};

/// The operand (a scalar is reshaped to one element), the axis, and whether the operand had axes before.
fn along(scope: &mut Scope<'_>, default: i64) -> Result<(Value, usize, bool), LowerReason> {
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    let axis = scope.axis("dim", default, rank)?;
    let row = if rank == 0 { scope.reshape(x, vec![Dim::Known(1)])? } else { x };
    Ok((row, axis, rank > 0))
}

/// Restores rank 0 for a scalar operand.
fn finished(scope: &mut Scope<'_>, values: Vec<Value>, had_axes: bool) -> Outputs {
    let mut made = Vec::with_capacity(values.len());
    for value in values {
        made.push(if had_axes { value } else { scope.reshape(value, Vec::new())? });
    }
    many(made)
}

/// Cumulative sums or products; `int64` for integers.
pub fn cumulative(scope: &mut Scope<'_>, kind: CumulativeKind) -> Outputs {
    let (x, axis, had_axes) = along(scope, 0)?;
    let own = scope.fact(x).dtype;
    let natural = if own.is_float() { own } else { DType::I64 };
    let dtype = scope.dtype("dtype")?.unwrap_or(natural);
    let x = scope.cast(x, dtype)?;
    let y = scope.add(Op::Cumulative(Cumulative { kind, axis, exclusive: false, reverse: false }), &[x])?;
    finished(scope, vec![y], had_axes)
}

/// Sorted values and indices.
pub fn sort(scope: &mut Scope<'_>) -> Outputs {
    let (x, axis, had_axes) = along(scope, -1)?;
    let largest = scope.flag("descending", false)?;
    let count = scope.fact(x).shape[axis].clone();
    let made = scope.add_all(Op::TopK(TopK { axis, count, largest }), &[x])?;
    finished(scope, made, had_axes)
}

/// `argsort`: the indices of [`sort`].
pub fn places(scope: &mut Scope<'_>) -> Outputs {
    match sort(scope)? {
        Made::Tensors(made) => Ok(Made::Tensors(made[1..].to_vec())),
        other => Ok(other),
    }
}

/// `msort`: sorts along the first axis.
pub fn sort_first(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let Some(count) = scope.fact(x).shape.first().cloned() else { return one(x) };
    one(scope.add(Op::TopK(TopK { axis: 0, count, largest: false }), &[x])?)
}

/// The `k` largest or smallest elements and their indices.
pub fn top(scope: &mut Scope<'_>) -> Outputs {
    let (x, axis, had_axes) = along(scope, -1)?;
    let largest = scope.flag("largest", true)?;
    let count = scope.dim("k")?.ok_or(LowerReason::NotConstant { what: "the number of elements" })?;
    let made = scope.add_all(Op::TopK(TopK { axis, count, largest }), &[x])?;
    finished(scope, made, had_axes)
}

/// The `k`-th smallest element along an axis and its index; `k` counts from 1.
fn ranked(scope: &mut Scope<'_>, x: Value, axis: usize, k: i64, keep: bool) -> Result<Vec<Value>, LowerReason> {
    let mut shape = scope.fact(x).shape;
    let count = Dim::Known(k);
    let made = scope.add_all(Op::TopK(TopK { axis, count: count.clone(), largest: false }), &[x])?;
    if keep {
        shape[axis] = Dim::Known(1);
    } else {
        shape.remove(axis);
    }
    let mut results = Vec::with_capacity(made.len());
    for value in made {
        let last = part(scope, value, axis, Dim::Known(k - 1), count.clone())?;
        results.push(scope.reshape(last, shape.clone())?);
    }
    Ok(results)
}

/// `kthvalue`.
pub fn kth(scope: &mut Scope<'_>) -> Outputs {
    let (x, axis, had_axes) = along(scope, -1)?;
    let keep = scope.flag("keepdim", false)? && had_axes;
    let k = scope.int("k", 1)?;
    if k < 1 {
        return Err(LowerReason::Attribute { name: "k", found: k.to_string(), expected: "an integer of at least 1" });
    }
    let made = ranked(scope, x, axis, k, keep)?;
    many(made)
}

/// The lower median of all elements, or the lower medians along an axis and their indices.
pub fn median(scope: &mut Scope<'_>) -> Outputs {
    let (mut x, mut axis, had_axes) = along(scope, 0)?;
    let whole = !scope.has("dim");
    if whole {
        x = scope.reshape(x, vec![volume(&scope.fact(x).shape)?])?;
        axis = 0;
    }
    let size = scope.fact(x).shape[axis].known().filter(|n| *n > 0);
    let size = size.ok_or(LowerReason::NotConstant { what: "the size of the axis" })?;
    let keep = scope.flag("keepdim", false)? && had_axes;
    let made = ranked(scope, x, axis, (size + 1) / 2, keep)?;
    if whole { one(made[0]) } else { many(made) }
}

/// `bucketize` or `searchsorted`: the number of boundaries before each value.
pub fn bucket(scope: &mut Scope<'_>, values: &'static str, boundaries: &'static str) -> Outputs {
    use crate::op::{Compare, ReduceKind};
    let right = scope.flag("right", false)? || scope.text("side", "left")? == "right";
    if scope.has("sorter") {
        return Err(LowerReason::Unsupported("boundaries that are not sorted".to_string()));
    }
    let bounds = scope.value(boundaries)?;
    let x = match scope.operand(values)? {
        Some(operand) => super::promote::value(scope, &operand, scope.fact(bounds).dtype)?,
        None => return Err(LowerReason::NotConstant { what: "the value to insert" }),
    };
    let (fact, steps) = (scope.fact(x), scope.fact(bounds));
    let dtype = super::promote::joined(fact.dtype, steps.dtype);
    let (x, mut bounds) = (scope.cast(x, dtype)?, scope.cast(bounds, dtype)?);
    let mut column = fact.shape.clone();
    column.push(Dim::Known(1));
    let x = scope.reshape(x, column)?;
    if steps.rank() > 1 {
        // One row of boundaries per row of values.
        let mut shape = steps.shape.clone();
        shape.insert(steps.rank() - 1, Dim::Known(1));
        bounds = scope.reshape(bounds, shape)?;
    }
    let op = if right { Compare::LessEqual } else { Compare::Less };
    let before = scope.compare(op, bounds, x)?;
    let to = if scope.flag("out_int32", false)? { DType::I32 } else { DType::I64 };
    let counted = scope.cast(before, to)?;
    let axis = attribute::axis(-1, scope.fact(counted).rank())?;
    let y = scope.reduce(ReduceKind::Sum, counted, &[axis], false)?;
    Ok(Made::Tensors(vec![Known::Value(y)]))
}
