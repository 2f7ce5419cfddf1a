//! Sorting and cumulative operators along an axis.

use super::{Known, NodeOutputs, Outputs, Scope, many, one};
use crate::import::build::Build;
use crate::import::formula::formula;
use crate::import::lower_error::{LowerReason, at_least_one};
use crate::import::onnx::lower::attribute;
use crate::import::onnx::lower::slice::part;
use crate::op::{Compare, Cumulative, CumulativeKind, Op, ReduceKind, TopK, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};

/// The operand (a scalar is reshaped to one element), the axis, and whether the operand had axes before.
fn read_axis(scope: &mut Scope<'_>, default: i64) -> Result<(Value, usize, bool), LowerReason> {
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    let axis = scope.axis("dim", default, rank)?;
    let row = if rank == 0 { scope.reshape(x, vec![Dim::Known(1)])? } else { x };
    Ok((row, axis, rank > 0))
}

/// Restores rank 0 for a scalar operand.
fn restore_scalars(scope: &mut Scope<'_>, values: Vec<Value>, has_axes: bool) -> Outputs {
    let mut outputs = Vec::with_capacity(values.len());
    for value in values {
        outputs.push(if has_axes { value } else { scope.reshape(value, Vec::new())? });
    }
    many(outputs)
}

/// Cumulative sums or products; `int64` for integers.
pub fn cumulative(scope: &mut Scope<'_>, kind: CumulativeKind) -> Outputs {
    let (x, axis, has_axes) = read_axis(scope, 0)?;
    let input_type = scope.fact(x).dtype;
    let natural = if input_type.is_float() { input_type } else { DType::I64 };
    let dtype = scope.dtype("dtype")?.unwrap_or(natural);
    let x = scope.cast(x, dtype)?;
    let y = scope.add(Op::Cumulative(Cumulative { kind, axis, exclusive: false, reverse: false }), &[x])?;
    restore_scalars(scope, vec![y], has_axes)
}

/// Sorted values and indices.
pub fn sort(scope: &mut Scope<'_>) -> Outputs {
    let (x, axis, has_axes) = read_axis(scope, -1)?;
    let largest = scope.flag("descending", false)?;
    let count = scope.fact(x).shape[axis].clone();
    let outputs = scope.add_all(Op::TopK(TopK { axis, count, largest }), &[x])?;
    restore_scalars(scope, outputs, has_axes)
}

/// `argsort`: the indices of [`sort`].
pub fn argsort(scope: &mut Scope<'_>) -> Outputs {
    match sort(scope)? {
        NodeOutputs::Tensors(made) => Ok(NodeOutputs::Tensors(made[1..].to_vec())),
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
    let (x, axis, has_axes) = read_axis(scope, -1)?;
    let largest = scope.flag("largest", true)?;
    let count = scope.dim("k")?.ok_or(LowerReason::NotConstant { what: "the number of elements" })?;
    let outputs = scope.add_all(Op::TopK(TopK { axis, count, largest }), &[x])?;
    restore_scalars(scope, outputs, has_axes)
}

/// The `k`-th smallest element along an axis and its index; `k` counts from 1.
fn kth_smallest(scope: &mut Scope<'_>, x: Value, axis: usize, k: i64, keep: bool) -> Result<Vec<Value>, LowerReason> {
    let mut shape = scope.fact(x).shape;
    let count = Dim::Known(k);
    let outputs = scope.add_all(Op::TopK(TopK { axis, count: count.clone(), largest: false }), &[x])?;
    if keep {
        shape[axis] = Dim::Known(1);
    } else {
        shape.remove(axis);
    }
    let mut results = Vec::with_capacity(outputs.len());
    for value in outputs {
        let last = part(scope, value, axis, Dim::Known(k - 1), count.clone())?;
        results.push(scope.reshape(last, shape.clone())?);
    }
    Ok(results)
}

/// `kthvalue`.
pub fn kth(scope: &mut Scope<'_>) -> Outputs {
    let (x, axis, has_axes) = read_axis(scope, -1)?;
    let keep = scope.flag("keepdim", false)? && has_axes;
    let k = at_least_one("k", scope.int("k", 1)?)?;
    let outputs = kth_smallest(scope, x, axis, k, keep)?;
    many(outputs)
}

/// The lower median of all elements, or the lower medians along an axis and their indices.
pub fn median(scope: &mut Scope<'_>) -> Outputs {
    let (mut x, mut axis, has_axes) = read_axis(scope, 0)?;
    let is_flat = !scope.has("dim");
    if is_flat {
        x = scope.reshape(x, vec![volume(&scope.fact(x).shape)?])?;
        axis = 0;
    }
    let size = scope.fact(x).shape[axis].known().filter(|n| *n > 0);
    let size = size.ok_or(LowerReason::NotConstant { what: "the size of the axis" })?;
    let keep = scope.flag("keepdim", false)? && has_axes;
    let outputs = kth_smallest(scope, x, axis, (size + 1) / 2, keep)?;
    if !is_flat {
        return many(outputs);
    }
    if !scope.fact(x).dtype.is_float() {
        return one(outputs[0]);
    }
    // All elements equal to the median share its gradient. What they add to a finite median is 0.
    let median = scope.stop_gradient(outputs[0])?;
    one(formula(scope, [x, median], |[x, median]| {
        let (equal, offset) = (x.equals(median), x - median);
        let (offset, flags) = (equal.select(offset, 0.0), equal.cast(x.dtype()));
        let sum = median + offset.mean(&[0], false) / flags.mean(&[0], false);
        sum.equals(median).select(sum, median)
    })?)
}

/// `bucketize` or `searchsorted`: the number of boundaries before each value.
pub fn bucket(scope: &mut Scope<'_>, values: &'static str, boundaries: &'static str) -> Outputs {
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
    let dtype = super::promote::promote(fact.dtype, steps.dtype);
    let (x, mut bounds) = (scope.cast(x, dtype)?, scope.cast(bounds, dtype)?);
    let x = scope.column(x)?;
    if steps.rank() > 1 {
        // One row of boundaries per row of values.
        bounds = scope.unsqueeze(bounds, steps.rank() - 1)?;
    }
    let op = if right { Compare::LessEqual } else { Compare::Less };
    let before = scope.compare(op, bounds, x)?;
    let to = if scope.flag("out_int32", false)? { DType::I32 } else { DType::I64 };
    let counts = scope.cast(before, to)?;
    let axis = attribute::axis(-1, scope.fact(counts).rank())?;
    let y = scope.reduce(ReduceKind::Sum, counts, &[axis], false)?;
    Ok(NodeOutputs::Tensors(vec![Known::Value(y)]))
}
