//! Elementwise functions composed of core ops. If one branch of a select could overflow or divide by zero, its argument
//! is replaced by a safe one. Otherwise its gradient would be zero times infinity, which is NaN.

use super::argument::Number;
use super::elementwise::{pair, required};
use super::{Outputs, Scope, one, promote};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute;
use crate::import::onnx::lower::slice::part;
use crate::op::{Binary, BitCast, Compare, Op, Unary, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;
use std::f64::consts::{FRAC_PI_2, LN_2, PI};

/// The operand `self` in floats.
fn operand(scope: &mut Scope<'_>) -> Result<Value, LowerReason> {
    let x = scope.value("self")?;
    promote::real(scope, x)
}

/// Both operands in their promoted float type.
fn floats(scope: &mut Scope<'_>) -> Result<(Value, Value), LowerReason> {
    let (a, b) = pair(scope)?;
    Ok((promote::real(scope, a)?, promote::real(scope, b)?))
}

fn compared(scope: &mut Scope<'_>, op: Compare, x: Value, number: f64) -> Result<Value, LowerReason> {
    let number = scope.scalar(scope.fact(x).dtype, number)?;
    scope.compare(op, x, number)
}

/// `condition ? number : x`
fn replace(scope: &mut Scope<'_>, condition: Value, number: f64, x: Value) -> Result<Value, LowerReason> {
    let number = scope.scalar(scope.fact(x).dtype, number)?;
    scope.select(condition, number, x)
}

pub fn times(scope: &mut Scope<'_>, factor: f64) -> Outputs {
    let x = operand(scope)?;
    one(scope.with_number(Binary::Mul, x, factor)?)
}

/// `e^x - 1 = 2 e^(x/2) sinh(x/2)`, which does not cancel near 0.
pub fn exp_minus_one(scope: &mut Scope<'_>) -> Outputs {
    let x = operand(scope)?;
    let half = scope.with_number(Binary::Mul, x, 0.5)?;
    let (exp, sinh) = (scope.unary(Unary::Exp, half)?, scope.unary(Unary::Sinh, half)?);
    let product = scope.binary(Binary::Mul, exp, sinh)?;
    one(scope.with_number(Binary::Mul, product, 2.0)?)
}

pub fn power_of_two(scope: &mut Scope<'_>) -> Outputs {
    let x = operand(scope)?;
    let two = scope.scalar(scope.fact(x).dtype, 2.0)?;
    one(scope.binary(Binary::Pow, two, x)?)
}

/// `log(1 + x)`; near 0 as `2 artanh(x/(2 + x))`, which keeps full precision.
pub fn log_one_plus(scope: &mut Scope<'_>) -> Outputs {
    let x = operand(scope)?;
    let size = scope.unary(Unary::Abs, x)?;
    let is_small = compared(scope, Compare::Less, size, 0.5)?;
    let inner = replace(scope, is_small, 0.0, x)?;
    let zero = scope.scalar(scope.fact(x).dtype, 0.0)?;
    let small_x = scope.select(is_small, x, zero)?;
    let denominator = scope.with_number(Binary::Add, small_x, 2.0)?;
    let ratio = scope.binary(Binary::Div, small_x, denominator)?;
    let area = scope.unary(Unary::Atanh, ratio)?;
    let small = scope.with_number(Binary::Mul, area, 2.0)?;
    let shifted = scope.with_number(Binary::Add, inner, 1.0)?;
    let large = scope.unary(Unary::Log, shifted)?;
    one(scope.select(is_small, small, large)?)
}

pub fn complementary_error(scope: &mut Scope<'_>) -> Outputs {
    let x = operand(scope)?;
    let erf = scope.unary(Unary::Erf, x)?;
    let one_value = scope.scalar(scope.fact(x).dtype, 1.0)?;
    one(scope.binary(Binary::Sub, one_value, erf)?)
}

pub fn tangent(scope: &mut Scope<'_>) -> Outputs {
    let x = operand(scope)?;
    let (sin, cos) = (scope.unary(Unary::Sin, x)?, scope.unary(Unary::Cos, x)?);
    one(scope.binary(Binary::Div, sin, cos)?)
}

pub fn toward_zero(scope: &mut Scope<'_>, x: Value) -> Result<Value, LowerReason> {
    if !scope.fact(x).dtype.is_float() {
        return Ok(x);
    }
    let below = compared(scope, Compare::Less, x, 0.0)?;
    let (ceil, floor) = (scope.unary(Unary::Ceil, x)?, scope.unary(Unary::Floor, x)?);
    scope.select(below, ceil, floor)
}

/// `trunc`, or the fractional part with `fraction`.
pub fn truncate(scope: &mut Scope<'_>, fraction: bool) -> Outputs {
    let x = scope.value("self")?;
    let integral = toward_zero(scope, x)?;
    one(if fraction { scope.binary(Binary::Sub, x, integral)? } else { integral })
}

pub fn round(scope: &mut Scope<'_>, op: Unary) -> Outputs {
    let x = scope.value("self")?;
    if !scope.fact(x).dtype.is_float() {
        return one(x);
    }
    let decimals = scope.int("decimals", 0)?;
    if decimals == 0 {
        return one(scope.unary(op, x)?);
    }
    let factor = 10f64.powi(decimals.clamp(-400, 400) as i32);
    let scaled = scope.with_number(Binary::Mul, x, factor)?;
    let rounded = scope.unary(op, scaled)?;
    one(scope.with_number(Binary::Div, rounded, factor)?)
}

/// Tests the sign bit, so that `-0` is negative.
fn negative(scope: &mut Scope<'_>, x: Value) -> Result<Value, LowerReason> {
    let bits = match scope.fact(x).dtype {
        DType::F64 => DType::I64,
        DType::F32 => DType::I32,
        DType::F16 | DType::Bf16 => DType::I16,
        _ => return compared(scope, Compare::Less, x, 0.0),
    };
    let bits = scope.add(Op::BitCast(BitCast { to: bits }), &[x])?;
    compared(scope, Compare::Less, bits, 0.0)
}

pub fn sign_bit(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    one(negative(scope, x)?)
}

/// Tests for infinity, or for finite numbers with `negate`.
pub fn infinite(scope: &mut Scope<'_>, negate: bool) -> Outputs {
    let x = scope.value("self")?;
    if !scope.fact(x).dtype.is_float() {
        let shape = scope.fact(x).shape;
        let result = scope.constant(Number::Bool(negate).tensor(DType::Bool))?;
        return one(scope.broadcast(result, shape)?);
    }
    let size = scope.unary(Unary::Abs, x)?;
    one(compared(scope, if negate { Compare::Less } else { Compare::Equal }, size, f64::INFINITY)?)
}

pub fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::MAX,
        DType::F16 => 65504.0,
        DType::Bf16 => 3.389_531_389_251_535_5e38,
        _ => f64::from(f32::MAX),
    }
}

fn is_nan(scope: &mut Scope<'_>, x: Value) -> Result<Value, LowerReason> {
    let equals_self = scope.compare(Compare::Equal, x, x)?;
    scope.unary(Unary::Not, equals_self)
}

pub fn nan_to_num(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let dtype = scope.fact(x).dtype;
    if !dtype.is_float() {
        return one(x);
    }
    let nan = is_nan(scope, x)?;
    let mut y = replace(scope, nan, scope.float("nan", 0.0)?, x)?;
    for (name, from, to) in [("posinf", f64::INFINITY, largest(dtype)), ("neginf", f64::NEG_INFINITY, -largest(dtype))]
    {
        let at = compared(scope, Compare::Equal, x, from)?;
        y = replace(scope, at, scope.float(name, to)?, y)?;
    }
    one(y)
}

/// `fmax` or `fmin`: NaN loses against a number.
pub fn number_wins(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    let (a, b) = pair(scope)?;
    let extremum = scope.binary(op, a, b)?;
    let (no_a, no_b) = (is_nan(scope, a)?, is_nan(scope, b)?);
    let y = scope.select(no_b, a, extremum)?;
    one(scope.select(no_a, b, y)?)
}

/// `copysign`: `|a|` with the sign of `b`.
pub fn copy_sign(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = floats(scope)?;
    let sign = negative(scope, b)?;
    let size = scope.unary(Unary::Abs, a)?;
    let negated = scope.unary(Unary::Neg, size)?;
    one(scope.select(sign, negated, size)?)
}

/// `atan2(self, other)`. The smaller coordinate is divided by the larger one, so that quotient and gradient stay
/// bounded.
pub fn angle(scope: &mut Scope<'_>) -> Outputs {
    let (y, x) = floats(scope)?;
    let dtype = scope.fact(y).dtype;
    let (high, wide) = (scope.unary(Unary::Abs, y)?, scope.unary(Unary::Abs, x)?);
    let steep = scope.compare(Compare::Less, wide, high)?;
    let (upper, lower) = (scope.select(steep, x, y)?, scope.select(steep, y, x)?);
    let is_zero = compared(scope, Compare::Equal, lower, 0.0)?;
    let lower = replace(scope, is_zero, 1.0, lower)?;
    let ratio = scope.binary(Binary::Div, upper, lower)?;
    let angle = scope.unary(Unary::Atan, ratio)?;
    let is_negative = negative(scope, y)?;
    let (plus, minus) = (scope.scalar(dtype, FRAC_PI_2)?, scope.scalar(dtype, -FRAC_PI_2)?);
    let quarter = scope.select(is_negative, minus, plus)?;
    let from_axis = scope.binary(Binary::Sub, quarter, angle)?;
    let is_left = compared(scope, Compare::Less, x, 0.0)?;
    let (plus, minus) = (scope.scalar(dtype, PI)?, scope.scalar(dtype, -PI)?);
    let half = scope.select(is_negative, minus, plus)?;
    let shifted = scope.binary(Binary::Add, angle, half)?;
    let flat = scope.select(is_left, shifted, angle)?;
    one(scope.select(steep, from_axis, flat)?)
}

pub fn hypotenuse(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = floats(scope)?;
    let (a, b) = (scope.binary(Binary::Mul, a, a)?, scope.binary(Binary::Mul, b, b)?);
    let sum = scope.binary(Binary::Add, a, b)?;
    one(scope.unary(Unary::Sqrt, sum)?)
}

/// `fmod`: the remainder has the sign of `a`.
pub fn remainder(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = pair(scope)?;
    // Not |a| and the sign of a, whose gradients are 0 at 0.
    let (zero, negated) = (scope.scalar(scope.fact(a).dtype, 0.0)?, scope.unary(Unary::Neg, a)?);
    let is_negative = scope.compare(Compare::Less, a, zero)?;
    let size = scope.select(is_negative, negated, a)?;
    let divisor = scope.unary(Unary::Abs, b)?;
    let remainder = scope.binary(Binary::Mod, size, divisor)?;
    let negated = scope.unary(Unary::Neg, remainder)?;
    one(scope.select(is_negative, negated, remainder)?)
}

pub fn scaled_by_power(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = floats(scope)?;
    let two = scope.scalar(scope.fact(b).dtype, 2.0)?;
    let power = scope.binary(Binary::Pow, two, b)?;
    one(scope.binary(Binary::Mul, a, power)?)
}

/// `log(e^a + e^b)`, or in base 2 with `binary`.
pub fn log_of_sum(scope: &mut Scope<'_>, binary: bool) -> Outputs {
    let (a, b) = floats(scope)?;
    let top = scope.binary(Binary::Max, a, b)?;
    let difference = scope.binary(Binary::Sub, a, b)?;
    // Two equal infinities have no difference.
    let is_equal = scope.compare(Compare::Equal, a, b)?;
    let difference = replace(scope, is_equal, 0.0, difference)?;
    let distance = scope.unary(Unary::Abs, difference)?;
    let below = scope.with_number(Binary::Mul, distance, if binary { -LN_2 } else { -1.0 })?;
    let mut correction = scope.unary(Unary::Softplus, below)?;
    if binary {
        correction = scope.with_number(Binary::Div, correction, LN_2)?;
    }
    one(scope.binary(Binary::Add, top, correction)?)
}

/// `a·log b`, and 0 where `a` is 0.
pub fn times_log(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = floats(scope)?;
    let is_zero = compared(scope, Compare::Equal, a, 0.0)?;
    let safe_b = replace(scope, is_zero, 1.0, b)?;
    let log = scope.unary(Unary::Log, safe_b)?;
    one(scope.binary(Binary::Mul, a, log)?)
}

/// Heaviside step: 0 below 0, 1 above, `values` at 0.
pub fn step(scope: &mut Scope<'_>) -> Outputs {
    let (x, values) = (scope.value("self")?, scope.value("values")?);
    let (above, at) = (compared(scope, Compare::Less, x, 0.0)?, compared(scope, Compare::Equal, x, 0.0)?);
    let one_value = scope.scalar(scope.fact(x).dtype, 1.0)?;
    let unit_step = replace(scope, above, 0.0, one_value)?;
    one(scope.select(at, values, unit_step)?)
}

/// `sin(πx)/(πx)`, and 1 at 0.
pub fn sinc(scope: &mut Scope<'_>) -> Outputs {
    let x = operand(scope)?;
    let at = compared(scope, Compare::Equal, x, 0.0)?;
    let safe_x = replace(scope, at, 1.0, x)?;
    let angle = scope.with_number(Binary::Mul, safe_x, PI)?;
    let sin = scope.unary(Unary::Sin, angle)?;
    let y = scope.binary(Binary::Div, sin, angle)?;
    one(replace(scope, at, 1.0, y)?)
}

/// `log(x/(1 - x))`, with `x` clamped to `eps .. 1 - eps`.
pub fn logit(scope: &mut Scope<'_>) -> Outputs {
    let mut x = operand(scope)?;
    if let Some(eps) = scope.number("eps")?.map(Number::float) {
        x = scope.with_number(Binary::Max, x, eps)?;
        x = scope.with_number(Binary::Min, x, 1.0 - eps)?;
    }
    let one_value = scope.scalar(scope.fact(x).dtype, 1.0)?;
    let complement = scope.binary(Binary::Sub, one_value, x)?;
    let odds = scope.binary(Binary::Div, x, complement)?;
    one(scope.unary(Unary::Log, odds)?)
}

/// `log σ(x) = -log(1 + e^-x)`
pub fn log_sigmoid(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let negated = scope.unary(Unary::Neg, x)?;
    let soft = scope.unary(Unary::Softplus, negated)?;
    one(scope.unary(Unary::Neg, soft)?)
}

/// `hardshrink`: `x` outside `-lambda..lambda`, else 0. `softshrink` with `soft` moves it toward 0 by lambda.
pub fn shrink(scope: &mut Scope<'_>, soft: bool) -> Outputs {
    let (x, lambda) = (scope.value("self")?, scope.float("lambd", 0.5)?);
    let size = scope.unary(Unary::Abs, x)?;
    let is_inside = compared(scope, Compare::LessEqual, size, lambda)?;
    if !soft {
        return one(replace(scope, is_inside, 0.0, x)?);
    }
    let sign = scope.unary(Unary::Sign, x)?;
    let offset = scope.with_number(Binary::Mul, sign, lambda)?;
    let y = scope.binary(Binary::Sub, x, offset)?;
    one(replace(scope, is_inside, 0.0, y)?)
}

pub fn threshold(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let (threshold, value) = (scope.float("threshold", 0.0)?, scope.float("value", 0.0)?);
    let below = compared(scope, Compare::LessEqual, x, threshold)?;
    one(replace(scope, below, value, x)?)
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
    let below = compared(scope, Compare::LessEqual, x, 0.0)?;
    let scaled = scope.binary(Binary::Mul, x, weight)?;
    let shape = scope.fact(scaled).shape;
    let y = scope.select(below, scaled, x)?;
    one(scope.broadcast(y, shape)?)
}

/// `glu`: the first half of an axis times the sigmoid of the second.
pub fn gated_linear_unit(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let axis = attribute::axis(scope.int("dim", -1)?, shape.len())?;
    let half = shape[axis].div_exact(&Dim::Known(2))?;
    let value = part(scope, x, axis, Dim::Known(0), half.clone())?;
    let gate = part(scope, x, axis, half, shape[axis].clone())?;
    let gate = scope.unary(Unary::Sigmoid, gate)?;
    one(scope.binary(Binary::Mul, value, gate)?)
}

/// `addcmul` or `addcdiv`: `self + value·op(tensor1, tensor2)`.
pub fn with_pair(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    let operands = [required(scope, "self")?, required(scope, "tensor1")?, required(scope, "tensor2")?];
    let dtype = promote::common(scope, &operands);
    let mut values = Vec::with_capacity(3);
    for operand in &operands {
        values.push(promote::value(scope, operand, dtype)?);
    }
    let factor = scope.float("value", 1.0)?;
    let mut result = scope.binary(op, values[1], values[2])?;
    if factor != 1.0 {
        result = scope.with_number(Binary::Mul, result, factor)?;
    }
    one(scope.binary(Binary::Add, values[0], result)?)
}

/// `lerp`: `self + weight·(end - self)`.
pub fn lerp(scope: &mut Scope<'_>) -> Outputs {
    let (x, end) = (scope.value("self")?, scope.value("end")?);
    let distance = scope.binary(Binary::Sub, end, x)?;
    let weight = required(scope, "weight")?;
    let weight = promote::value(scope, &weight, scope.fact(x).dtype)?;
    let step = scope.binary(Binary::Mul, distance, weight)?;
    one(scope.binary(Binary::Add, x, step)?)
}

pub fn shift(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    let operands = [required(scope, "self")?, required(scope, "other")?];
    let dtype = promote::common(scope, &operands);
    if !dtype.is_integer() {
        return Err(LowerReason::Unsupported(format!("a shift of {dtype}")));
    }
    let [a, b] = operands;
    let (a, b) = (promote::value(scope, &a, dtype)?, promote::value(scope, &b, dtype)?);
    one(scope.binary(op, a, b)?)
}

pub fn is_close(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = pair(scope)?;
    let (relative, absolute) = (scope.float("rtol", 1e-5)?, scope.float("atol", 1e-8)?);
    let equal = scope.compare(Compare::Equal, a, b)?;
    if !scope.fact(a).dtype.is_float() {
        return one(equal);
    }
    let difference = scope.binary(Binary::Sub, a, b)?;
    let distance = scope.unary(Unary::Abs, difference)?;
    let size = scope.unary(Unary::Abs, b)?;
    let scaled = scope.with_number(Binary::Mul, size, relative)?;
    let allowed = scope.with_number(Binary::Add, scaled, absolute)?;
    let is_near = scope.compare(Compare::LessEqual, distance, allowed)?;
    let is_finite = compared(scope, Compare::Less, allowed, f64::INFINITY)?;
    let is_near = scope.binary(Binary::And, is_near, is_finite)?;
    let mut is_close = scope.binary(Binary::Or, equal, is_near)?;
    if scope.flag("equal_nan", false)? {
        let (a, b) = (is_nan(scope, a)?, is_nan(scope, b)?);
        let both_nan = scope.binary(Binary::And, a, b)?;
        is_close = scope.binary(Binary::Or, is_close, both_nan)?;
    }
    one(is_close)
}
