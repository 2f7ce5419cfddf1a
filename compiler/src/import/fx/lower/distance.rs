//! Elementwise losses, and similarities and distances of vectors.

use super::loss::{reduce, reduction};
use super::reduce::reduce_norm;
use super::{Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::formula::{Expr, formula, formulas};
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute;
use crate::op::{Binary, ReduceKind, Value};

fn reduce_loss(scope: &mut Scope<'_>, losses: Value) -> Outputs {
    let reduction = reduction(scope)?;
    one(reduce(scope, losses, reduction)?)
}

/// A reduced loss per element of `self` and `target`.
pub fn loss(scope: &mut Scope<'_>, body: impl for<'f> FnOnce(Expr<'f>, Expr<'f>) -> Expr<'f>) -> Outputs {
    let (x, target) = (scope.value("self")?, scope.value("target")?);
    let losses = formula(scope, [x, target], |[x, target]| body(x, target))?;
    reduce_loss(scope, losses)
}

/// Huber-like loss: quadratic up to `bend`, linear beyond. The slope beyond is `bend` if `steep`, else 1.
fn huber_like(scope: &mut Scope<'_>, bend: f64, steep: bool) -> Outputs {
    loss(scope, |x, target| {
        let difference = x - target;
        let size = difference.abs();
        if bend == 0.0 && !steep {
            return size;
        }
        let is_linear = size.at_least(bend);
        let quadratic = difference * difference * if steep { 0.5 } else { 0.5 / bend };
        let line = size - bend / 2.0;
        is_linear.select(if steep { line * bend } else { line }, quadratic)
    })
}

/// Smooth L1 loss.
pub fn smooth(scope: &mut Scope<'_>) -> Outputs {
    let beta = scope.float("beta", 1.0)?;
    huber_like(scope, beta, false)
}

pub fn huber(scope: &mut Scope<'_>) -> Outputs {
    let delta = scope.float("delta", 1.0)?;
    huber_like(scope, delta, true)
}

fn weighted(scope: &mut Scope<'_>, losses: Value) -> Outputs {
    let losses = match scope.optional("weight")? {
        Some(weight) => scope.binary(Binary::Mul, losses, weight)?,
        None => losses,
    };
    reduce_loss(scope, losses)
}

/// Binary cross-entropy of probabilities; logarithms are clamped to at least -100, as in PyTorch.
pub fn binary_cross_entropy(scope: &mut Scope<'_>) -> Outputs {
    fn term<'f>(share: Expr<'f>, p: Expr<'f>) -> Expr<'f> {
        share * p.log().max(-100.0)
    }
    let (p, target) = (scope.value("self")?, scope.value("target")?);
    let losses = formula(scope, [p, target], |[p, target]| {
        let unit = p.number(1.0);
        let (not_p, not_target) = (unit - p, unit - target);
        -(term(target, p) + term(not_target, not_p))
    })?;
    weighted(scope, losses)
}

/// Binary cross-entropy of logits: `(1 - t) x + (1 + (w - 1) t) log(1 + e^-x)` with weight `w` of positive targets.
pub fn binary_cross_entropy_with_logits(scope: &mut Scope<'_>) -> Outputs {
    let (x, target) = (scope.value("self")?, scope.value("target")?);
    let [linear, mut soft] =
        formulas(scope, [x, target], |[x, target]| [(x.number(1.0) - target) * x, (-x).softplus()])?;
    if let Some(weight) = scope.optional("pos_weight")? {
        let values = [weight, target, soft];
        soft = formula(scope, values, |[weight, target, soft]| ((weight - 1.0) * target + 1.0) * soft)?;
    }
    let losses = scope.binary(Binary::Add, linear, soft)?;
    weighted(scope, losses)
}

/// KL divergence of log-probabilities `x` from a target: `t (log t - x)`.
pub fn divergence(scope: &mut Scope<'_>) -> Outputs {
    let log_target = scope.flag("log_target", false)?;
    loss(scope, |x, target| {
        let (share, log) = match log_target {
            true => (target.exp(), target),
            false => (target, target.equals(0.0).select(1.0, target).log()),
        };
        share * (log - x)
    })
}

/// Poisson negative log-likelihood, without Stirling's term.
pub fn poisson(scope: &mut Scope<'_>) -> Outputs {
    if scope.flag("full", false)? {
        return Err(LowerReason::Unsupported("a Poisson loss with the Stirling term".to_string()));
    }
    let (x, target) = (scope.value("input")?, scope.value("target")?);
    let (log_input, eps) = (scope.flag("log_input", true)?, scope.float("eps", 1e-8)?);
    let losses = formula(scope, [x, target], |[x, target]| {
        let (rate, log) = if log_input { (x.exp(), x) } else { (x, (x + eps).log()) };
        rate - target * log
    })?;
    reduce_loss(scope, losses)
}

/// Hinge embedding loss: `x` for target 1, `max(0, margin - x)` for target -1.
pub fn hinge(scope: &mut Scope<'_>) -> Outputs {
    let margin = scope.float("margin", 1.0)?;
    loss(scope, |x, target| {
        let shortfall = (margin - x).max(0.0);
        let zero = x.number(0.0);
        let (plus, minus) = (target.number(1.0), target.number(-1.0));
        let (is_positive, is_negative) = (target.equals(plus), target.equals(minus));
        is_positive.select(zero, shortfall) + is_negative.select(zero, x)
    })
}

/// Margin ranking loss: `max(0, -t (a - b) + margin)`.
pub fn ranking(scope: &mut Scope<'_>) -> Outputs {
    let (a, b, target) = (scope.value("input1")?, scope.value("input2")?, scope.value("target")?);
    let margin = scope.float("margin", 0.0)?;
    let losses = formula(scope, [a, b, target], |[a, b, target]| (target * (b - a) + margin).max(0.0))?;
    reduce_loss(scope, losses)
}

pub fn cosine(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (scope.value("x1")?, scope.value("x2")?);
    let product = scope.binary(Binary::Mul, a, b)?;
    let axis = attribute::axis(scope.int("dim", 1)?, scope.fact(product).rank())?;
    let eps = scope.float("eps", 1e-8)?;
    let mut cosine = scope.reduce(ReduceKind::Sum, product, &[axis], false)?;
    for x in [a, b] {
        let x_axis = axis.saturating_sub(scope.fact(product).rank() - scope.fact(x).rank());
        let length = reduce_norm(scope, x, 2.0, &[x_axis], false)?;
        let length = scope.with_number(Binary::Max, length, eps)?;
        cosine = scope.binary(Binary::Div, cosine, length)?;
    }
    one(cosine)
}

/// Norm of the difference of vectors.
pub fn pairwise(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (scope.value("x1")?, scope.value("x2")?);
    let eps = scope.float("eps", 1e-6)?;
    let shifted = formula(scope, [a, b], |[a, b]| a - b + eps)?;
    let axis = attribute::axis(-1, scope.fact(shifted).rank())?;
    let (order, keep) = (scope.float("p", 2.0)?, scope.flag("keepdim", false)?);
    one(reduce_norm(scope, shifted, order, &[axis], keep)?)
}

/// `cdist`: the distance of every row of one matrix from every row of another.
pub fn all_pairs(scope: &mut Scope<'_>) -> Outputs {
    use crate::tensor::dim::Dim;
    let (a, b) = (scope.value("x1")?, scope.value("x2")?);
    let (mut rows, mut columns) = (scope.fact(a).shape, scope.fact(b).shape);
    if rows.len() < 2 || columns.len() < 2 {
        return Err(LowerReason::Inputs(format!("{} and {} are not matrices", scope.fact(a), scope.fact(b))));
    }
    rows.insert(rows.len() - 1, Dim::Known(1));
    columns.insert(columns.len() - 2, Dim::Known(1));
    let (a, b) = (scope.reshape(a, rows)?, scope.reshape(b, columns)?);
    let difference = scope.binary(Binary::Sub, a, b)?;
    let (axis, order) = (scope.fact(difference).rank() - 1, scope.float("p", 2.0)?);
    one(reduce_norm(scope, difference, order, &[axis], false)?)
}
