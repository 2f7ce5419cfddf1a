//! Elementwise functions composed of core ops. If one branch of a select could overflow or divide by zero, its argument
//! is replaced by a safe one. Otherwise its gradient would be zero times infinity, which is NaN.

use super::argument::Number;
use super::elementwise::{map, map_floats, map_pair, map_real, pair, required};
use super::{Outputs, Scope, one, promote};
use crate::import::build::Build;
use crate::import::formula::{Expr, formula};
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute;
use crate::import::onnx::lower::slice::part;
use crate::op::{Binary, BitCast, Compare, Op, Unary};
use crate::tensor::DType;
use crate::tensor::dim::Dim;
use std::f64::consts::{FRAC_PI_2, LN_2, PI};

/// `e^x - 1 = 2 e^(x/2) sinh(x/2)`, which does not cancel near 0.
pub fn exp_minus_one(x: Expr<'_>) -> Expr<'_> {
    let half = x * 0.5;
    half.exp() * half.sinh() * 2.0
}

/// `log(1 + x)`; near 0 as `2 artanh(x/(2 + x))`, which keeps full precision.
pub fn log_one_plus(x: Expr<'_>) -> Expr<'_> {
    let is_small = x.abs().less(0.5);
    let (large_x, small_x) = (is_small.select(0.0, x), is_small.select(x, 0.0));
    let small = (small_x / (small_x + 2.0)).atanh() * 2.0;
    is_small.select(small, (large_x + 1.0).log())
}

pub fn toward_zero(x: Expr<'_>) -> Expr<'_> {
    if x.dtype().is_float() { x.less(0.0).select(x.ceil(), x.floor()) } else { x }
}

pub fn round(scope: &mut Scope<'_>, op: Unary) -> Outputs {
    let decimals = scope.int("decimals", 0)?;
    let factor = 10f64.powi(decimals.clamp(-400, 400) as i32);
    map(scope, |x| match decimals {
        _ if !x.dtype().is_float() => x,
        0 => x.unary(op),
        _ => (x * factor).unary(op) / factor,
    })
}

/// Tests the sign bit, so that `-0` is negative.
pub fn is_negative(x: Expr<'_>) -> Expr<'_> {
    let to = match x.dtype() {
        DType::F64 => DType::I64,
        DType::F32 => DType::I32,
        DType::F16 | DType::Bf16 => DType::I16,
        _ => return x.less(0.0),
    };
    x.op(Op::BitCast(BitCast { to }), &[]).less(0.0)
}

/// Tests for infinity, or for finite numbers with `negate`.
pub fn infinite(scope: &mut Scope<'_>, negate: bool) -> Outputs {
    let fact = scope.fact_of("self")?;
    if !fact.dtype.is_float() {
        let result = scope.constant(Number::Bool(negate).tensor(DType::Bool))?;
        return one(scope.broadcast(result, fact.shape)?);
    }
    map(scope, |x| x.abs().compare(if negate { Compare::Less } else { Compare::Equal }, f64::INFINITY))
}

pub fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::MAX,
        DType::F16 => 65504.0,
        DType::Bf16 => 3.389_531_389_251_535_5e38,
        _ => f64::from(f32::MAX),
    }
}

pub fn nan_to_num(scope: &mut Scope<'_>) -> Outputs {
    let largest = largest(scope.fact_of("self")?.dtype);
    let nan = scope.float("nan", 0.0)?;
    let (above, below) = (scope.float("posinf", largest)?, scope.float("neginf", -largest)?);
    map(scope, |x| {
        if !x.dtype().is_float() {
            return x;
        }
        let y = x.is_nan().select(nan, x);
        let y = x.equals(f64::INFINITY).select(above, y);
        x.equals(f64::NEG_INFINITY).select(below, y)
    })
}

/// `fmax` or `fmin`: NaN loses against a number.
pub fn number_wins(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    map_pair(scope, |a, b| {
        let extremum = a.binary(op, b);
        let (no_a, no_b) = (a.is_nan(), b.is_nan());
        no_a.select(b, no_b.select(a, extremum))
    })
}

/// `copysign`: `|a|` with the sign of `b`.
pub fn copy_sign<'f>(a: Expr<'f>, b: Expr<'f>) -> Expr<'f> {
    let (sign, size) = (is_negative(b), a.abs());
    sign.select(-size, size)
}

/// `atan2(y, x)`. The smaller coordinate is divided by the larger one, so that quotient and gradient stay bounded.
pub fn angle<'f>(y: Expr<'f>, x: Expr<'f>) -> Expr<'f> {
    let (high, wide) = (y.abs(), x.abs());
    let steep = wide.less(high);
    let (upper, lower) = (steep.select(x, y), steep.select(y, x));
    let lower = lower.equals(0.0).select(1.0, lower);
    let angle = (upper / lower).atan();
    let is_negative = is_negative(y);
    let with_sign_of_y = |size: f64| {
        let (plus, minus) = (y.number(size), y.number(-size));
        is_negative.select(minus, plus)
    };
    let from_axis = with_sign_of_y(FRAC_PI_2) - angle;
    let is_left = x.less(0.0);
    let flat = is_left.select(angle + with_sign_of_y(PI), angle);
    steep.select(from_axis, flat)
}

/// `fmod`: the remainder has the sign of `a`.
pub fn remainder<'f>(a: Expr<'f>, b: Expr<'f>) -> Expr<'f> {
    // Not |a| and the sign of a, whose gradients are 0 at 0.
    let (zero, minus_a) = (a.number(0.0), -a);
    let is_negative = a.less(zero);
    let remainder = is_negative.select(minus_a, a) % b.abs();
    is_negative.select(-remainder, remainder)
}

/// `log(e^a + e^b)`, or in base 2 with `binary`.
pub fn log_of_sum(scope: &mut Scope<'_>, binary: bool) -> Outputs {
    map_floats(scope, |a, b| {
        let (top, difference) = (a.max(b), a - b);
        // Two equal infinities have no difference.
        let distance = a.equals(b).select(0.0, difference).abs();
        let correction = (distance * if binary { -LN_2 } else { -1.0 }).softplus();
        top + if binary { correction / LN_2 } else { correction }
    })
}

/// Heaviside step: 0 below 0, 1 above, `values` at 0.
pub fn step(scope: &mut Scope<'_>) -> Outputs {
    let (x, values) = (scope.value("self")?, scope.value("values")?);
    one(formula(scope, [x, values], |[x, values]| {
        let (below, at) = (x.less(0.0), x.equals(0.0));
        at.select(values, below.select(0.0, x.number(1.0)))
    })?)
}

/// `sin(πx)/(πx)`, and 1 at 0.
pub fn sinc(x: Expr<'_>) -> Expr<'_> {
    let at = x.equals(0.0);
    let angle = at.select(1.0, x) * PI;
    at.select(1.0, angle.sin() / angle)
}

/// `log(x/(1 - x))`, with `x` clamped to `eps .. 1 - eps`.
pub fn logit(scope: &mut Scope<'_>) -> Outputs {
    let eps = scope.number("eps")?.map(Number::float);
    map_real(scope, |x| {
        let x = eps.map_or(x, |eps| x.clamp(eps, 1.0 - eps));
        (x / (1.0 - x)).log()
    })
}

/// `hardshrink`: `x` outside `-lambda..lambda`, else 0. `softshrink` with `soft` moves it toward 0 by lambda.
pub fn shrink(scope: &mut Scope<'_>, soft: bool) -> Outputs {
    let lambda = scope.float("lambd", 0.5)?;
    map(scope, |x| {
        let is_inside = x.abs().at_most(lambda);
        is_inside.select(0.0, if soft { x - x.sign() * lambda } else { x })
    })
}

pub fn threshold(scope: &mut Scope<'_>) -> Outputs {
    let (threshold, value) = (scope.float("threshold", 0.0)?, scope.float("value", 0.0)?);
    map(scope, |x| x.at_most(threshold).select(value, x))
}

/// `x > 0 ? x : weight·x` with one weight, or one per channel.
pub fn prelu(scope: &mut Scope<'_>) -> Outputs {
    let (x, mut weight) = (scope.value("self")?, scope.value("weight")?);
    let (fact, slopes) = (scope.fact(x), scope.fact(weight));
    if fact.rank() > 1 && slopes.rank() == 1 {
        let mut shape = vec![Dim::Known(1); fact.rank()];
        shape[1] = slopes.shape[0].clone();
        weight = scope.reshape(weight, shape)?;
    }
    one(formula(scope, [x, weight], |[x, weight]| {
        let (below, scaled) = (x.at_most(0.0), x * weight);
        below.select(scaled, x).broadcast(scaled.shape())
    })?)
}

/// `glu`: the first half of an axis times the sigmoid of the second.
pub fn gated_linear_unit(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let axis = attribute::axis(scope.int("dim", -1)?, shape.len())?;
    let half = shape[axis].div_exact(&Dim::Known(2))?;
    let value = part(scope, x, axis, Dim::Known(0), half.clone())?;
    let gate = part(scope, x, axis, half, shape[axis].clone())?;
    one(formula(scope, [value, gate], |[value, gate]| value * gate.sigmoid())?)
}

/// `addcmul` or `addcdiv`: `self + value·op(tensor1, tensor2)`.
pub fn with_pair(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    let operands = [required(scope, "self")?, required(scope, "tensor1")?, required(scope, "tensor2")?];
    let dtype = promote::common(scope, &operands);
    let [x, a, b] = operands.map(|operand| promote::value(scope, &operand, dtype));
    let factor = scope.float("value", 1.0)?;
    one(formula(scope, [x?, a?, b?], |[x, a, b]| x + a.binary(op, b).times(factor))?)
}

/// `lerp`: `self + weight·(end - self)`.
pub fn lerp(scope: &mut Scope<'_>) -> Outputs {
    let (x, end) = (scope.value("self")?, scope.value("end")?);
    let distance = scope.binary(Binary::Sub, end, x)?;
    let weight = required(scope, "weight")?;
    let weight = promote::value(scope, &weight, scope.fact(x).dtype)?;
    one(formula(scope, [x, distance, weight], |[x, distance, weight]| x + distance * weight)?)
}

pub fn shift(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    let operands = [required(scope, "self")?, required(scope, "other")?];
    let dtype = promote::common(scope, &operands);
    if !dtype.is_integer() {
        return Err(LowerReason::Unsupported(format!("a shift of {dtype}")));
    }
    let [a, b] = operands.map(|operand| promote::value(scope, &operand, dtype));
    one(scope.binary(op, a?, b?)?)
}

pub fn is_close(scope: &mut Scope<'_>) -> Outputs {
    let (relative, absolute) = (scope.float("rtol", 1e-5)?, scope.float("atol", 1e-8)?);
    let equal_nan = scope.flag("equal_nan", false)?;
    let (a, b) = pair(scope)?;
    one(formula(scope, [a, b], |[a, b]| {
        let equal = a.equals(b);
        if !a.dtype().is_float() {
            return equal;
        }
        let (distance, allowed) = ((a - b).abs(), b.abs() * relative + absolute);
        let is_close = equal | (distance.at_most(allowed) & allowed.less(f64::INFINITY));
        if equal_nan { is_close | (a.is_nan() & b.is_nan()) } else { is_close }
    })?)
}
