//! Norms and normalisations, shared by all importers.

use crate::import::build::Build;
use crate::import::formula::{Expr, formula};
use crate::import::lower_error::LowerReason;
use crate::op::{LayerNorm, Op, ReduceKind, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;

/// The terms `|x|^p` of a norm of positive order.
pub fn power(x: Expr<'_>, p: f64) -> Expr<'_> {
    match p {
        1.0 => x.abs(),
        2.0 => x.squared(),
        p => x.abs().pow(p),
    }
}

/// The norm of positive order from the sum of its terms.
pub fn root(sum: Expr<'_>, p: f64) -> Expr<'_> {
    if p == 1.0 { sum } else { sum.root(p) }
}

/// `(Σ |x|^order)^(1/order)`, including orders 0 and ±∞.
pub fn norm<'f>(x: Expr<'f>, order: f64, axes: &[usize], keep: bool) -> Expr<'f> {
    match order {
        f64::INFINITY => x.abs().reduce(ReduceKind::Max, axes, keep),
        f64::NEG_INFINITY => x.abs().reduce(ReduceKind::Min, axes, keep),
        0.0 => (!x.equals(0.0)).cast(x.dtype()).sum(axes, keep),
        order if order > 0.0 => root(power(x, order).sum(axes, keep), order),
        order => x.abs().pow(order).sum(axes, keep).pow(1.0 / order),
    }
}

/// `x/√(mean(x²) + epsilon)` over all axes from `first` on.
pub fn root_mean_square(scope: &mut impl Build, x: Value, first: usize, epsilon: f64) -> Result<Value, LowerReason> {
    let axes: Vec<usize> = (first..scope.fact(x).rank()).collect();
    formula(scope, [x], |[x]| x * (x.squared().mean(&axes, true) + epsilon).rsqrt())
}

/// A constant-valued tensor, in place of an omitted scale or bias.
pub fn filled(scope: &mut impl Build, dtype: DType, shape: &[Dim], value: f64) -> Result<Value, LowerReason> {
    let value = scope.scalar(dtype, value)?;
    scope.broadcast(value, shape.to_vec())
}

/// Normalises `x [N, groups, …]` over all axes after the groups, without scale and bias.
pub fn grouped(scope: &mut impl Build, x: Value, groups: Dim, epsilon: f64) -> Result<Value, LowerReason> {
    let fact = scope.fact(x);
    let [batch, channels, spatial @ ..] = fact.shape.as_slice() else {
        return Err(LowerReason::Inputs(format!("its input {fact} has no channels")));
    };
    let mut inner = vec![channels.div_exact(&groups)?];
    inner.extend(spatial.iter().cloned());
    let mut group_shape = vec![batch.clone(), groups];
    group_shape.extend(inner.iter().cloned());
    let (ones, zeros) = (filled(scope, fact.dtype, &inner, 1.0)?, filled(scope, fact.dtype, &inner, 0.0)?);
    let x = scope.reshape(x, group_shape)?;
    let y = scope.add(Op::LayerNorm(LayerNorm { axis: 2, epsilon }), &[x, ones, zeros])?;
    scope.reshape(y, fact.shape)
}
