//! Activation functions, shared by all importers.

use crate::import::formula::{Expr, Operand};

/// `x > 0 ? x : slope·x`
pub fn leaky_relu<'f>(x: Expr<'f>, slope: impl Operand<'f>) -> Expr<'f> {
    x.greater(0.0).select(x, x * slope)
}

/// `scale·(x > 0 ? x : alpha·(e^inner(x) - 1))`. Positive `x` is clamped before the exponential: an overflow in the
/// unselected branch would make the gradient NaN.
pub fn exponential<'f>(x: Expr<'f>, alpha: f64, scale: f64, inner: impl FnOnce(Expr<'f>) -> Expr<'f>) -> Expr<'f> {
    let is_positive = x.greater(0.0);
    let negative = (inner(x.min(0.0)).exp() - 1.0).times(alpha);
    is_positive.select(x, negative).times(scale)
}

/// `max(0, min(1, alpha·x + beta))`
pub fn ramp(x: Expr<'_>, alpha: f64, beta: f64) -> Expr<'_> {
    (x * alpha + beta).min(1.0).max(0.0)
}

/// `x/(1 + |x|)`
pub fn softsign(x: Expr<'_>) -> Expr<'_> {
    x / (x.abs() + 1.0)
}
