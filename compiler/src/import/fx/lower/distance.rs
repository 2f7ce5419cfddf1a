//! Elementwise losses, and similarities and distances of vectors.

use super::loss::{reduce, reduction};
use super::reduce::reduce_norm;
use super::{Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute;
use crate::op::{Binary, Compare, ReduceKind, Unary, Value};

fn difference(scope: &mut Scope<'_>) -> Result<Value, LowerReason> {
    let (a, b) = (scope.value("self")?, scope.value("target")?);
    scope.binary(Binary::Sub, a, b)
}

fn reduce_loss(scope: &mut Scope<'_>, losses: Value) -> Outputs {
    let reduction = reduction(scope)?;
    one(reduce(scope, losses, reduction)?)
}

fn number(scope: &mut Scope<'_>, like: Value, value: f64) -> Result<Value, LowerReason> {
    scope.scalar(scope.fact(like).dtype, value)
}

/// Squared or absolute error.
pub fn plain(scope: &mut Scope<'_>, squared: bool) -> Outputs {
    let difference = difference(scope)?;
    let losses = match squared {
        true => scope.binary(Binary::Mul, difference, difference)?,
        false => scope.unary(Unary::Abs, difference)?,
    };
    reduce_loss(scope, losses)
}

/// Huber-like loss: quadratic up to `bend`, linear beyond. The slope beyond is `bend` if `steep`, else 1.
fn huber_like(scope: &mut Scope<'_>, bend: f64, steep: bool) -> Outputs {
    let difference = difference(scope)?;
    let size = scope.unary(Unary::Abs, difference)?;
    if bend == 0.0 && !steep {
        return reduce_loss(scope, size);
    }
    let limit = number(scope, size, bend)?;
    let is_linear = scope.compare(Compare::LessEqual, limit, size)?;
    let square = scope.binary(Binary::Mul, difference, difference)?;
    let quadratic = scope.with_number(Binary::Mul, square, if steep { 0.5 } else { 0.5 / bend })?;
    let line = scope.with_number(Binary::Sub, size, bend / 2.0)?;
    let line = if steep { scope.with_number(Binary::Mul, line, bend)? } else { line };
    let losses = scope.select(is_linear, line, quadratic)?;
    reduce_loss(scope, losses)
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
    let (p, target) = (scope.value("self")?, scope.value("target")?);
    let unit = number(scope, p, 1.0)?;
    let (not_p, not_target) = (scope.binary(Binary::Sub, unit, p)?, scope.binary(Binary::Sub, unit, target)?);
    let mut terms = Vec::with_capacity(2);
    for (share, p) in [(target, p), (not_target, not_p)] {
        let log = scope.unary(Unary::Log, p)?;
        let clamped = scope.with_number(Binary::Max, log, -100.0)?;
        terms.push(scope.binary(Binary::Mul, share, clamped)?);
    }
    let sum = scope.binary(Binary::Add, terms[0], terms[1])?;
    let losses = scope.unary(Unary::Neg, sum)?;
    weighted(scope, losses)
}

/// Binary cross-entropy of logits: `(1 - t) x + (1 + (w - 1) t) log(1 + e^-x)` with weight `w` of positive targets.
pub fn binary_cross_entropy_with_logits(scope: &mut Scope<'_>) -> Outputs {
    let (x, target) = (scope.value("self")?, scope.value("target")?);
    let unit = number(scope, x, 1.0)?;
    let not_target = scope.binary(Binary::Sub, unit, target)?;
    let linear = scope.binary(Binary::Mul, not_target, x)?;
    let negated = scope.unary(Unary::Neg, x)?;
    let mut soft = scope.unary(Unary::Softplus, negated)?;
    if let Some(weight) = scope.optional("pos_weight")? {
        let extra_weight = scope.with_number(Binary::Sub, weight, 1.0)?;
        let of_target = scope.binary(Binary::Mul, extra_weight, target)?;
        let factor = scope.with_number(Binary::Add, of_target, 1.0)?;
        soft = scope.binary(Binary::Mul, factor, soft)?;
    }
    let losses = scope.binary(Binary::Add, linear, soft)?;
    weighted(scope, losses)
}

/// KL divergence of log-probabilities `x` from a target: `t (log t - x)`.
pub fn divergence(scope: &mut Scope<'_>) -> Outputs {
    let (x, target) = (scope.value("self")?, scope.value("target")?);
    let (share, log) = if scope.flag("log_target", false)? {
        (scope.unary(Unary::Exp, target)?, target)
    } else {
        let zero = number(scope, target, 0.0)?;
        let is_zero = scope.compare(Compare::Equal, target, zero)?;
        let unit = number(scope, target, 1.0)?;
        let safe_target = scope.select(is_zero, unit, target)?;
        (target, scope.unary(Unary::Log, safe_target)?)
    };
    let difference = scope.binary(Binary::Sub, log, x)?;
    let losses = scope.binary(Binary::Mul, share, difference)?;
    reduce_loss(scope, losses)
}

/// `log(1 + e^(-t x))`
pub fn soft_margin(scope: &mut Scope<'_>) -> Outputs {
    let (x, target) = (scope.value("self")?, scope.value("target")?);
    let product = scope.binary(Binary::Mul, x, target)?;
    let negated = scope.unary(Unary::Neg, product)?;
    let losses = scope.unary(Unary::Softplus, negated)?;
    reduce_loss(scope, losses)
}

/// Poisson negative log-likelihood, without Stirling's term.
pub fn poisson(scope: &mut Scope<'_>) -> Outputs {
    if scope.flag("full", false)? {
        return Err(LowerReason::Unsupported("a Poisson loss with the Stirling term".to_string()));
    }
    let (x, target) = (scope.value("input")?, scope.value("target")?);
    let (rate, log) = if scope.flag("log_input", true)? {
        (scope.unary(Unary::Exp, x)?, x)
    } else {
        let shifted = scope.with_number(Binary::Add, x, scope.float("eps", 1e-8)?)?;
        (x, scope.unary(Unary::Log, shifted)?)
    };
    let product = scope.binary(Binary::Mul, target, log)?;
    let losses = scope.binary(Binary::Sub, rate, product)?;
    reduce_loss(scope, losses)
}

/// Hinge embedding loss: `x` for target 1, `max(0, margin - x)` for target -1.
pub fn hinge(scope: &mut Scope<'_>) -> Outputs {
    let (x, target) = (scope.value("self")?, scope.value("target")?);
    let margin = number(scope, x, scope.float("margin", 1.0)?)?;
    let shortfall = scope.binary(Binary::Sub, margin, x)?;
    let shortfall = scope.with_number(Binary::Max, shortfall, 0.0)?;
    let zero = number(scope, x, 0.0)?;
    let (plus, minus) = (number(scope, target, 1.0)?, number(scope, target, -1.0)?);
    let (is_positive, is_negative) =
        (scope.compare(Compare::Equal, target, plus)?, scope.compare(Compare::Equal, target, minus)?);
    let of_margin = scope.select(is_positive, zero, shortfall)?;
    let of_self = scope.select(is_negative, zero, x)?;
    let losses = scope.binary(Binary::Add, of_margin, of_self)?;
    reduce_loss(scope, losses)
}

/// Margin ranking loss: `max(0, -t (a - b) + margin)`.
pub fn ranking(scope: &mut Scope<'_>) -> Outputs {
    let (a, b, target) = (scope.value("input1")?, scope.value("input2")?, scope.value("target")?);
    let difference = scope.binary(Binary::Sub, b, a)?;
    let product = scope.binary(Binary::Mul, target, difference)?;
    let shortfall = scope.with_number(Binary::Add, product, scope.float("margin", 0.0)?)?;
    let losses = scope.with_number(Binary::Max, shortfall, 0.0)?;
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
    let difference = scope.binary(Binary::Sub, a, b)?;
    let shifted = scope.with_number(Binary::Add, difference, scope.float("eps", 1e-6)?)?;
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
