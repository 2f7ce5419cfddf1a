//! Reductions, ArgMax/ArgMin and softmax.

use super::attribute::{axes, axis};
use super::movement::swapped;
use super::order::last_arg;
use super::reshape::axes_of;
use super::{Known, LowerReason, Outputs, Scope, one};
use crate::import::batched;
use crate::import::build::Build;
use crate::import::formula::{Expr, formula};
use crate::op::{ArgReduce, Op, ReduceKind, Softmax, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};

/// The input, the reduced axes (`None` if nothing is reduced) and `keepdims`. The axes are an input since operator set
/// `since`.
fn read(scope: &mut Scope<'_>, since: i64) -> Result<(Value, Option<Vec<usize>>, bool), LowerReason> {
    let x = scope.value(0)?;
    let rank = scope.fact(x).rank();
    let keep = scope.flag("keepdims", true)?;
    let axis_list = axes_of(scope, 1, since)?.filter(|list| !list.is_empty());
    let list = match axis_list {
        Some(list) => Some(axes(&list, rank)?),
        None if scope.flag("noop_with_empty_axes", false)? => None,
        None => Some((0..rank).collect()),
    };
    Ok((x, list, keep))
}

/// A reduction along axes, which are an input since operator set `since`.
pub fn reduce(scope: &mut Scope<'_>, kind: ReduceKind, since: i64) -> Outputs {
    let (x, list, keep) = read(scope, since)?;
    one(list.map_or(Ok(x), |list| scope.reduce(kind, x, &list, keep))?)
}

/// A reduction of one formula, followed by another.
pub fn sum_around(
    scope: &mut Scope<'_>,
    before: impl FnOnce(Expr<'_>) -> Expr<'_>,
    after: impl FnOnce(Expr<'_>) -> Expr<'_>,
) -> Outputs {
    let (x, list, keep) = read(scope, 18)?;
    one(formula(scope, [x], |[x]| {
        let terms = before(x);
        after(list.map_or(terms, |list| terms.sum(&list, keep)))
    })?)
}

pub fn log_sum_exp(scope: &mut Scope<'_>) -> Outputs {
    let (x, list, keep) = read(scope, 18)?;
    one(list.map_or(Ok(x), |list| scope.log_sum_exp(x, &list, keep))?)
}

/// The index of the maximum or minimum; ties give the first or the last index.
pub fn arg(scope: &mut Scope<'_>, largest: bool) -> Outputs {
    let x = scope.value(0)?;
    let fact = scope.fact(x);
    let axis = axis(scope.int("axis", 0)?, fact.rank())?;
    let keep = scope.flag("keepdims", true)?;
    if scope.flag("select_last_index", false)? {
        return Ok(vec![Known::Value(last_arg(scope, largest, x, axis, keep)?)]);
    }
    Ok(vec![Known::Value(scope.add(Op::ArgReduce(ArgReduce { largest, axis, keep }), &[x])?)])
}

/// Reduces all spatial axes, keeping them with size 1, to the mean or the maximum.
pub fn global(scope: &mut Scope<'_>, largest: bool) -> Outputs {
    let x = scope.value(0)?;
    let rank = scope.fact(x).rank();
    if rank < 3 {
        return Err(LowerReason::Inputs(format!("its input has rank {rank} and therefore no spatial dims")));
    }
    Ok(vec![Known::Value(global_pool(scope, x, largest)?)])
}

/// The mean or the maximum of `[N, C, D…]` over the axes `D`, which stay with size 1.
pub fn global_pool(scope: &mut impl Build, x: Value, largest: bool) -> Result<Value, LowerReason> {
    let axes = 2..scope.fact(x).rank();
    match largest {
        false => scope.reduce(ReduceKind::Mean, x, &axes.collect::<Vec<_>>(), true),
        true => axes.rev().try_fold(x, |y, axis| first_extreme(scope, y, axis, true).map(|[y, _]| y)),
    }
}

/// The largest or smallest element along an axis, which stays with size 1, and its index. Of equal elements, the first
/// gets the gradient. A reduction would divide it among them.
pub fn first_extreme(scope: &mut impl Build, x: Value, axis: usize, largest: bool) -> Result<[Value; 2], LowerReason> {
    let index = scope.add(Op::ArgReduce(ArgReduce { largest, axis, keep: true }), &[x])?;
    let batch = scope.fact(x).rank() - 1;
    let (rows, places) = (swapped(scope, x, axis, batch)?, swapped(scope, index, axis, batch)?);
    let y = batched::gather(scope, rows, places, batch)?;
    Ok([swapped(scope, y, axis, batch)?, index])
}

/// Softmax or LogSoftmax. Before operator set 13 all axes from `axis` on are flattened.
pub fn softmax(scope: &mut Scope<'_>, logarithm: bool) -> Outputs {
    let x = scope.value(0)?;
    let dims = scope.fact(x).shape;
    let op = |axis: usize| match logarithm {
        true => Op::LogSoftmax(crate::op::LogSoftmax { axis }),
        false => Op::Softmax(Softmax { axis }),
    };
    let at = axis(scope.int("axis", if scope.opset < 13 { 1 } else { -1 })?, dims.len())?;
    let is_flattened = scope.opset < 13 && dims[at + 1..].iter().any(|d| !d.is(1));
    if !is_flattened && !logarithm && scope.fact(x).dtype == DType::F16 {
        return Ok(vec![Known::Value(rounded_softmax(scope, x, at)?)]);
    }
    if !is_flattened {
        return Ok(vec![Known::Value(scope.add(op(at), &[x])?)]);
    }
    let mut flat: Vec<Dim> = dims[..at].to_vec();
    flat.push(volume(&dims[at..])?);
    let x = scope.reshape(x, flat)?;
    let y = scope.add(op(at), &[x])?;
    Ok(vec![Known::Value(scope.reshape(y, dims)?)])
}

/// Softmax of F16 as in the standard's function body, which rounds every intermediate result to F16.
fn rounded_softmax(scope: &mut Scope<'_>, x: Value, axis: usize) -> Result<Value, LowerReason> {
    formula(scope, [x], |[x]| {
        let powers = (x - x.reduce(ReduceKind::Max, &[axis], true)).exp();
        powers / powers.sum(&[axis], true)
    })
}
