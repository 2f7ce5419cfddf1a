//! Reductions and softmax.

use super::{Known, NodeOutputs, Outputs, Scope, many, one, promote};
use crate::import::build::Build;
use crate::import::formula::{formula, formulas};
use crate::import::lower_error::LowerReason;
use crate::import::norm;
use crate::import::onnx::lower::reduce::first_extreme;
use crate::op::{ArgReduce, Binary, Compare, Iota, LogSoftmax, Op, ReduceKind, Softmax, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};
use crate::tensor::fact::Fact;

fn axes(scope: &Scope<'_>, rank: usize) -> Result<(Vec<usize>, bool), LowerReason> {
    Ok((scope.axes("dim", rank)?, scope.flag("keepdim", false)?))
}

/// The operand cast to `dtype`; sums and products of integers are `int64`.
fn operand(scope: &mut Scope<'_>, kind: ReduceKind) -> Result<Value, LowerReason> {
    let x = scope.value("self")?;
    let input_type = scope.fact(x).dtype;
    let natural = match kind {
        ReduceKind::Sum | ReduceKind::Prod if !input_type.is_float() => DType::I64,
        _ => input_type,
    };
    let dtype = scope.dtype("dtype")?.unwrap_or(natural);
    scope.cast(x, dtype)
}

pub fn reduce(scope: &mut Scope<'_>, kind: ReduceKind) -> Outputs {
    let x = operand(scope, kind)?;
    let (axes, keep) = axes(scope, scope.fact(x).rank())?;
    one(if axes.is_empty() { x } else { scope.reduce(kind, x, &axes, keep)? })
}

/// `max` or `min`: of all elements, along an axis with the index, or of two tensors.
pub fn extreme(scope: &mut Scope<'_>, largest: bool) -> Outputs {
    let (kind, op) = if largest { (ReduceKind::Max, Binary::Max) } else { (ReduceKind::Min, Binary::Min) };
    if scope.has("other") {
        return super::elementwise::extreme(scope, op);
    }
    if !scope.has("dim") {
        return reduce(scope, kind);
    }
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    let (axis, keep) = (scope.axis("dim", 0, rank)?, scope.flag("keepdim", false)?);
    if rank == 0 {
        return Ok(NodeOutputs::Tensors(vec![Known::Value(x), Known::Absent("an index of a scalar")]));
    }
    let [mut y, mut index] = first_extreme(scope, x, axis, largest)?;
    if !keep {
        let mut shape = scope.fact(y).shape;
        shape.remove(axis);
        (y, index) = (scope.reshape(y, shape.clone())?, scope.reshape(index, shape)?);
    }
    many(vec![y, index])
}

/// `argmax` or `argmin`.
pub fn arg_extreme(scope: &mut Scope<'_>, largest: bool) -> Outputs {
    let mut x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    if !scope.has("dim") {
        x = scope.reshape(x, vec![volume(&scope.fact(x).shape)?])?;
    }
    let (axis, keep) = (scope.axis("dim", 0, scope.fact(x).rank())?, scope.flag("keepdim", false)?);
    let y = scope.add(Op::ArgReduce(ArgReduce { largest, axis, keep }), &[x])?;
    if keep && !scope.has("dim") {
        let ones = vec![Dim::Known(1); rank];
        return one(scope.reshape(y, ones)?);
    }
    one(y)
}

/// `any`, or `all` with `is_all`.
pub fn any_or_all(scope: &mut Scope<'_>, is_all: bool) -> Outputs {
    let x = scope.value("self")?;
    let (axes, keep) = axes(scope, scope.fact(x).rank())?;
    // The maximum of `is zero` is 1 if any element is zero; the minimum is 1 if all are.
    let kind = if is_all { ReduceKind::Max } else { ReduceKind::Min };
    one(formula(scope, [x], |[x]| {
        let counts = x.equals(0.0).cast(DType::I64);
        let total = if axes.is_empty() { counts } else { counts.reduce(kind, &axes, keep) };
        total.equals(0.0)
    })?)
}

/// Variance, or standard deviation with `with_root`; `with_mean` adds the mean as a second output.
pub fn variance(scope: &mut Scope<'_>, with_root: bool, with_mean: bool) -> Outputs {
    let x = scope.value("self")?;
    let fact = scope.fact(x);
    let (axes, keep) = axes(scope, fact.rank())?;
    let correction = match scope.flag("unbiased", true)? {
        true => scope.float("correction", 1.0)?,
        false => 0.0,
    };
    let count = volume(&axes.iter().map(|&a| fact.shape[a].clone()).collect::<Vec<_>>())?;
    let [mean, mut y] = formulas(scope, [x], |[x]| {
        let mean = x.mean(&axes, true);
        [mean, (x - mean).squared().mean(&axes, keep)]
    })?;
    if correction != 0.0 {
        y = match count.known() {
            Some(n) => scope.with_number(Binary::Mul, y, n as f64 / (n as f64 - correction).max(0.0))?,
            None => {
                let n = Build::size(scope, &count)?;
                formula(scope, [y, n], |[y, n]| {
                    let n = n.cast(fact.dtype);
                    let freedom = (n - correction).max(0.0);
                    y * n / freedom
                })?
            }
        };
    }
    if with_root {
        y = scope.root(y, 2.0)?;
    }
    if !with_mean {
        return one(y);
    }
    let shape = scope.fact(y).shape;
    let mean = scope.reshape(mean, shape)?;
    many(vec![y, mean])
}

pub fn log_sum_exp(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let (axes, keep) = axes(scope, scope.fact(x).rank())?;
    one(scope.log_sum_exp(x, &axes, keep)?)
}

/// The norm of a value; see [`norm::norm`].
pub fn reduce_norm(
    scope: &mut Scope<'_>,
    x: Value,
    order: f64,
    axes: &[usize],
    keep: bool,
) -> Result<Value, LowerReason> {
    formula(scope, [x], |[x]| norm::norm(x, order, axes, keep))
}

pub fn vector_norm(scope: &mut Scope<'_>, name: &'static str) -> Outputs {
    let order = scope.float(name, 2.0)?;
    let x = operand(scope, ReduceKind::Mean)?;
    let (axes, keep) = axes(scope, scope.fact(x).rank())?;
    one(reduce_norm(scope, x, order, &axes, keep)?)
}

/// Frobenius norm over two axes.
pub fn matrix_norm(scope: &mut Scope<'_>) -> Outputs {
    let order = scope.text("ord", "fro")?;
    if order != "fro" {
        return Err(LowerReason::Unsupported(format!("a matrix norm of order `{order}`")));
    }
    let x = operand(scope, ReduceKind::Mean)?;
    let dims = scope.ints("dim")?.unwrap_or_else(|| vec![-2, -1]);
    let axes = crate::import::onnx::lower::attribute::axes(&dims, scope.fact(x).rank())?;
    let keep = scope.flag("keepdim", false)?;
    one(reduce_norm(scope, x, 2.0, &axes, keep)?)
}

/// `nansum` or `nanmean`.
pub fn of_numbers(scope: &mut Scope<'_>, mean: bool) -> Outputs {
    let x = operand(scope, ReduceKind::Sum)?;
    let (axes, keep) = axes(scope, scope.fact(x).rank())?;
    one(formula(scope, [x], |[x]| {
        let is_number = x.equals(x);
        let sum = is_number.select(x, 0.0).sum(&axes, keep);
        if mean { sum / is_number.cast(x.dtype()).sum(&axes, keep) } else { sum }
    })?)
}

/// `count_nonzero`.
pub fn count(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let (axes, _) = axes(scope, scope.fact(x).rank())?;
    one(formula(scope, [x], |[x]| (!x.equals(0.0)).cast(DType::I64).sum(&axes, false))?)
}

pub fn min_max(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    let (axes, keep) = match scope.has("dim") {
        true => (vec![scope.axis("dim", 0, rank)?], scope.flag("keepdim", false)?),
        false => ((0..rank).collect(), false),
    };
    many(vec![scope.reduce(ReduceKind::Min, x, &axes, keep)?, scope.reduce(ReduceKind::Max, x, &axes, keep)?])
}

pub fn softmax(scope: &mut Scope<'_>, logarithm: bool) -> Outputs {
    let mut x = scope.value("self")?;
    if let Some(dtype) = scope.dtype("dtype")? {
        x = scope.cast(x, dtype)?;
    }
    let x = promote::real(scope, x)?;
    let shape = scope.fact(x).shape;
    let axis = scope.axis("dim", -1, shape.len())?;
    let row = if shape.is_empty() { scope.reshape(x, vec![Dim::Known(1)])? } else { x };
    let op = if logarithm { Op::LogSoftmax(LogSoftmax { axis }) } else { Op::Softmax(Softmax { axis }) };
    let y = scope.add(op, &[row])?;
    one(scope.reshape(y, shape)?)
}

/// Counts in `bins` equal intervals of `min..max`; the last includes `max`, and elements outside are not counted. Equal
/// limits mean the extremes of the operand.
pub fn histogram(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let fact = scope.fact(x);
    let (bins, low, high) = (scope.int("bins", 100)?, scope.float("min", 0.0)?, scope.float("max", 0.0)?);
    if !(1..=1 << 16).contains(&bins) || low > high {
        return Err(LowerReason::Inputs(format!(
            "histc needs 1 to 65,536 bins and min ≤ max; it has {bins} bins, min {low} and max {high}"
        )));
    }
    // Bins are computed in the operand's element type, as in PyTorch, and rounded down.
    let dtype = if fact.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let x = scope.cast(x, dtype)?;
    let x = scope.reshape(x, vec![volume(&fact.shape)?])?;
    let (low, high) = match low == high {
        true => {
            let [low, high] = formulas(scope, [x], |[x]| {
                let (low, high) = (x.reduce(ReduceKind::Min, &[0], false), x.reduce(ReduceKind::Max, &[0], false));
                // If all elements are equal, the limits are widened by one on both sides.
                let margin = low.equals(high).cast(dtype);
                [low - margin, high + margin]
            })?;
            (low, high)
        }
        false => (scope.scalar(dtype, low)?, scope.scalar(dtype, high)?),
    };
    let bin = formula(scope, [x, low, high], |[x, low, high]| {
        let width = high - low;
        let bin = ((x - low) * bins as f64 / width).floor();
        let last = x.number(bins as f64 - 1.0);
        x.equals(high).select(last, bin)
    })?;
    let column = scope.reshape(bin, vec![volume(&fact.shape)?, Dim::Known(1)])?;
    let spans = Fact::new(dtype, vec![Dim::Known(bins)]);
    let spans = scope.add(Op::Iota(Iota { fact: spans, axis: 0 }), &[])?;
    let in_bin = scope.compare(Compare::Equal, column, spans)?;
    let counts = scope.cast(in_bin, fact.dtype)?;
    one(scope.reduce(ReduceKind::Sum, counts, &[0], false)?)
}
