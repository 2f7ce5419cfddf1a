//! Reductions and softmax.

use super::{Known, Made, Outputs, Scope, many, one, promote};
use crate::import::build::Build;
use crate::import::reason::Reason;
use crate::op::{ArgReduce, Binary, LogSoftmax, Op, ReduceKind, Softmax, Unary, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};

/// The axes that go away, and whether they stay as 1.
fn axes(scope: &Scope<'_>, rank: usize) -> Result<(Vec<usize>, bool), Reason> {
    Ok((scope.axes("dim", rank)?, scope.flag("keepdim", false)?))
}

/// The operand in the type that `dtype` names; sums of whole numbers are `int64`.
fn operand(scope: &mut Scope<'_>, kind: ReduceKind) -> Result<Value, Reason> {
    let x = scope.value("self")?;
    let own = scope.fact(x).dtype;
    let natural = match kind {
        ReduceKind::Sum | ReduceKind::Prod if !own.is_float() => DType::I64,
        _ => own,
    };
    let dtype = scope.dtype("dtype")?.unwrap_or(natural);
    scope.cast(x, dtype)
}

/// One value for all elements along the axes.
pub fn reduce(scope: &mut Scope<'_>, kind: ReduceKind) -> Outputs {
    let x = operand(scope, kind)?;
    let (axes, keep) = axes(scope, scope.fact(x).rank())?;
    one(if axes.is_empty() { x } else { scope.reduce(kind, x, &axes, keep)? })
}

/// The largest or smallest of all elements, or along an axis with the place where it is, or of two tensors.
pub fn extreme(scope: &mut Scope<'_>, largest: bool) -> Outputs {
    let (kind, op) = if largest { (ReduceKind::Max, Binary::Max) } else { (ReduceKind::Min, Binary::Min) };
    if scope.has("other") {
        return super::elementwise::binary(scope, op);
    }
    if !scope.has("dim") {
        return reduce(scope, kind);
    }
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    let (axis, keep) = (scope.axis("dim", 0, rank)?, scope.flag("keepdim", false)?);
    if rank == 0 {
        return Ok(Made::Tensors(vec![Known::Value(x), Known::Absent("the place of a number in itself")]));
    }
    let y = scope.reduce(kind, x, &[axis], keep)?;
    let place = scope.add(Op::ArgReduce(ArgReduce { largest, axis, keep }), &[x])?;
    many(vec![y, place])
}

/// The place of the largest or smallest element.
pub fn place(scope: &mut Scope<'_>, largest: bool) -> Outputs {
    let mut x = scope.value("self")?;
    if !scope.has("dim") {
        x = scope.reshape(x, vec![volume(&scope.fact(x).shape)?])?;
    }
    let (axis, keep) = (scope.axis("dim", 0, scope.fact(x).rank())?, scope.flag("keepdim", false)?);
    one(scope.add(Op::ArgReduce(ArgReduce { largest, axis, keep }), &[x])?)
}

/// Whether any, or every, element is not zero.
pub fn truth(scope: &mut Scope<'_>, every: bool) -> Outputs {
    let x = scope.value("self")?;
    let (axes, keep) = axes(scope, scope.fact(x).rank())?;
    let zero = scope.scalar(scope.fact(x).dtype, 0.0)?;
    let is_zero = scope.compare(crate::op::Compare::Equal, x, zero)?;
    let counted = scope.cast(is_zero, DType::I64)?;
    // The largest of `is zero` is 1 where some element is; the smallest is 1 where all are.
    let kind = if every { ReduceKind::Max } else { ReduceKind::Min };
    let met = if axes.is_empty() { counted } else { scope.reduce(kind, counted, &axes, keep)? };
    let zero = scope.scalar(DType::I64, 0.0)?;
    one(scope.compare(crate::op::Compare::Equal, met, zero)?)
}

/// The variance (its root with `root`), and the mean as a second output with `mean`.
pub fn variance(scope: &mut Scope<'_>, root: bool, with_mean: bool) -> Outputs {
    let x = scope.value("self")?;
    let fact = scope.fact(x);
    let (axes, keep) = axes(scope, fact.rank())?;
    let correction = match scope.flag("unbiased", true)? {
        true => scope.float("correction", 1.0)?,
        false => 0.0,
    };
    let count = volume(&axes.iter().map(|&a| fact.shape[a].clone()).collect::<Vec<_>>())?;
    let mean = scope.reduce(ReduceKind::Mean, x, &axes, true)?;
    let centred = scope.binary(Binary::Sub, x, mean)?;
    let square = scope.binary(Binary::Mul, centred, centred)?;
    let mut y = scope.reduce(ReduceKind::Mean, square, &axes, keep)?;
    if correction != 0.0 {
        let n = count.known().ok_or_else(|| Reason::Unsupported("an unbiased variance over the batch".to_string()))?;
        y = scope.with_number(Binary::Mul, y, n as f64 / (n as f64 - correction).max(0.0))?;
    }
    if root {
        y = scope.unary(Unary::Sqrt, y)?;
    }
    if !with_mean {
        return one(y);
    }
    let shape = scope.fact(y).shape;
    let mean = scope.reshape(mean, shape)?;
    many(vec![y, mean])
}

/// `log Σ e^x`, without overflow.
pub fn log_sum_exp(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let (axes, keep) = axes(scope, scope.fact(x).rank())?;
    let top = scope.reduce(ReduceKind::Max, x, &axes, true)?;
    let centred = scope.binary(Binary::Sub, x, top)?;
    let exp = scope.unary(Unary::Exp, centred)?;
    let sum = scope.reduce(ReduceKind::Sum, exp, &axes, keep)?;
    let log = scope.unary(Unary::Log, sum)?;
    let shape = scope.fact(log).shape;
    let top = scope.reshape(top, shape)?;
    one(scope.binary(Binary::Add, log, top)?)
}

/// The norm of order 1, 2 or infinity.
pub fn vector_norm(scope: &mut Scope<'_>, name: &'static str) -> Outputs {
    let order = scope.float(name, 2.0)?;
    let x = operand(scope, ReduceKind::Mean)?;
    let (axes, keep) = axes(scope, scope.fact(x).rank())?;
    let size = scope.unary(Unary::Abs, x)?;
    let y = match order {
        1.0 => scope.reduce(ReduceKind::Sum, size, &axes, keep)?,
        2.0 => {
            let square = scope.binary(Binary::Mul, x, x)?;
            let sum = scope.reduce(ReduceKind::Sum, square, &axes, keep)?;
            scope.unary(Unary::Sqrt, sum)?
        }
        f64::INFINITY => scope.reduce(ReduceKind::Max, size, &axes, keep)?,
        other => return Err(Reason::Unsupported(format!("a norm of order {other}"))),
    };
    one(y)
}

/// Softmax along an axis, or its logarithm.
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
