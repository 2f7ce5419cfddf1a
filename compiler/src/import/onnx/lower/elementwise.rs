//! Elementwise operators.

use super::weight::dtype_of;
use super::{Known, LowerReason, Outputs, Scope, one};
use crate::import::build::Build;
use crate::op::{Binary, Compare, Dropout, Op, Unary, Value};
use crate::tensor::{DType, Tensor};

pub fn identity(scope: &mut Scope<'_>) -> Outputs {
    // ONNX has no operator that stops gradients; the metadata tell what the exporter made an identity.
    if scope.node.torch_arguments("aten.detach").is_some() {
        let x = scope.value(0)?;
        return one(scope.stop_gradient(x)?);
    }
    Ok(vec![scope.known(0)?.clone()])
}

pub fn unary(scope: &mut Scope<'_>, op: Unary) -> Outputs {
    let x = scope.value(0)?;
    one(scope.unary(op, x)?)
}

pub fn binary(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    let (a, b) = (scope.value(0)?, scope.value(1)?);
    one(scope.binary(op, a, b)?)
}

/// Left fold over any number of inputs: `f(… f(f(a, b), c) …)`.
pub fn fold_inputs(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    let mut y = scope.value(0)?;
    for slot in 1..scope.inputs.len() {
        let x = scope.value(slot)?;
        y = if op == Binary::Add { scope.binary(op, y, x)? } else { scope.extreme(op, y, x)? };
    }
    one(y)
}

pub fn mean(scope: &mut Scope<'_>) -> Outputs {
    let count = scope.inputs.len();
    let Some(Known::Value(sum)) = fold_inputs(scope, Binary::Add)?.into_iter().next() else {
        return Err(LowerReason::Missing { slot: 0 });
    };
    one(scope.with_number(Binary::Mul, sum, 1.0 / count.max(1) as f64)?)
}

/// Comparison of `a` and `b`; `swapped` swaps the operands, which turns less into greater.
pub fn compare(scope: &mut Scope<'_>, op: Compare, swapped: bool) -> Outputs {
    let (a, b) = (scope.value(0)?, scope.value(1)?);
    one(if swapped { scope.compare(op, b, a)? } else { scope.compare(op, a, b)? })
}

pub fn select(scope: &mut Scope<'_>) -> Outputs {
    let (condition, a, b) = (scope.value(0)?, scope.value(1)?, scope.value(2)?);
    one(scope.select(condition, a, b)?)
}

/// `a^b`. The exponent may have a different element type in ONNX. An integer to a float power is computed in F64 and
/// truncated.
pub fn pow(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (scope.value(0)?, scope.value(1)?);
    let (base, exponent) = (scope.fact(a).dtype, scope.fact(b).dtype);
    let product_type = if exponent.is_float() && !base.is_float() { DType::F64 } else { base };
    let (a, b) = (scope.cast(a, product_type)?, scope.cast(b, product_type)?);
    let y = scope.binary(Binary::Pow, a, b)?;
    one(scope.cast(y, base)?)
}

/// Remainder with the sign of the divisor, or with `fmod` that of the dividend.
pub fn modulo(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (scope.value(0)?, scope.value(1)?);
    if !scope.flag("fmod", false)? {
        return one(scope.binary(Binary::Mod, a, b)?);
    }
    let dtype = scope.fact(a).dtype;
    if !dtype.is_float() {
        // `remainder` has the sign of b. If a has the other sign and `remainder` is not zero, the result is `remainder
        // - b`. Taking absolute values would overflow for the smallest integer.
        let (remainder, zero) = (scope.binary(Binary::Mod, a, b)?, scope.scalar(dtype, 0.0)?);
        let (below, of_a) = (scope.compare(Compare::Less, remainder, zero)?, scope.compare(Compare::Less, a, zero)?);
        let (differs, is_exact) =
            (scope.binary(Binary::Xor, below, of_a)?, scope.compare(Compare::Equal, remainder, zero)?);
        let shifted = scope.binary(Binary::Sub, remainder, b)?;
        let floored = scope.select(differs, shifted, remainder)?;
        return one(scope.select(is_exact, remainder, floored)?);
    }
    let (sign, a, b) = (scope.unary(Unary::Sign, a)?, scope.unary(Unary::Abs, a)?, scope.unary(Unary::Abs, b)?);
    let remainder = scope.binary(Binary::Mod, a, b)?;
    one(scope.binary(Binary::Mul, remainder, sign)?)
}

pub fn tan(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let (sin, cos) = (scope.unary(Unary::Sin, x)?, scope.unary(Unary::Cos, x)?);
    one(scope.binary(Binary::Div, sin, cos)?)
}

pub fn cast(scope: &mut Scope<'_>) -> Outputs {
    let code = scope.int("to", 0)?;
    let to = i32::try_from(code).ok().and_then(dtype_of);
    let to = to.ok_or_else(|| LowerReason::Unsupported(format!("a cast to element type {code}")))?;
    cast_to(scope, to)
}

pub fn cast_like(scope: &mut Scope<'_>) -> Outputs {
    let to = scope.fact_of(1)?.dtype;
    cast_to(scope, to)
}

fn cast_to(scope: &mut Scope<'_>, to: DType) -> Outputs {
    if scope.fact_of(0)?.dtype == to {
        return identity(scope);
    }
    let x = scope.value(0)?;
    one(scope.cast(x, to)?)
}

/// `x·Φ(x)`, exact or with the tanh approximation.
pub fn gelu(scope: &mut Scope<'_>) -> Outputs {
    match scope.text("approximate", "none")?.as_str() {
        "none" => unary(scope, Unary::Gelu),
        "tanh" => unary(scope, Unary::GeluTanh),
        other => Err(LowerReason::Unsupported(format!("the approximation `{other}`"))),
    }
}

/// `x > bound`
fn is_above(scope: &mut Scope<'_>, x: Value, bound: f64) -> Result<Value, LowerReason> {
    let bound = scope.scalar(scope.graph.fact(x).dtype, bound)?;
    scope.compare(Compare::Less, bound, x)
}

/// `x > 0 ? x : slope·x`
pub fn leaky_relu(scope: &mut Scope<'_>) -> Outputs {
    let (x, alpha) = (scope.value(0)?, scope.float("alpha", 0.01)?);
    let positive = is_above(scope, x, 0.0)?;
    let scaled = scope.with_number(Binary::Mul, x, alpha)?;
    one(scope.select(positive, x, scaled)?)
}

/// `x > 0 ? x : slope·x` with a trained slope.
pub fn prelu(scope: &mut Scope<'_>) -> Outputs {
    let (x, slope) = (scope.value(0)?, scope.value(1)?);
    let positive = is_above(scope, x, 0.0)?;
    let scaled = scope.binary(Binary::Mul, x, slope)?;
    one(scope.select(positive, x, scaled)?)
}

/// `x > alpha ? x : 0`
pub fn thresholded_relu(scope: &mut Scope<'_>) -> Outputs {
    let (x, alpha) = (scope.value(0)?, scope.float("alpha", 1.0)?);
    let large = is_above(scope, x, alpha)?;
    let zero = scope.scalar(scope.graph.fact(x).dtype, 0.0)?;
    one(scope.select(large, x, zero)?)
}

/// `gamma·(x > 0 ? x : alpha·(e^(x/width) - 1))`. The exponent is clamped to at most 0: for positive `x`, where the
/// result is not selected, it could overflow in the forward or backward pass.
fn exponential_branch(scope: &mut Scope<'_>, alpha: f64, gamma: f64, width: f64) -> Outputs {
    let x = scope.value(0)?;
    let positive = is_above(scope, x, 0.0)?;
    let mut negative = scope.with_number(Binary::Min, x, 0.0)?;
    if width != 1.0 {
        negative = scope.with_number(Binary::Div, negative, width)?;
    }
    let exp = scope.unary(Unary::Exp, negative)?;
    let shifted = scope.with_number(Binary::Sub, exp, 1.0)?;
    let scaled = if alpha == 1.0 { shifted } else { scope.with_number(Binary::Mul, shifted, alpha)? };
    let y = scope.select(positive, x, scaled)?;
    one(if gamma == 1.0 { y } else { scope.with_number(Binary::Mul, y, gamma)? })
}

/// `x > 0 ? x : alpha·(e^x - 1)`
pub fn elu(scope: &mut Scope<'_>) -> Outputs {
    let alpha = scope.float("alpha", 1.0)?;
    exponential_branch(scope, alpha, 1.0, 1.0)
}

/// `x > 0 ? x : alpha·(e^(x/alpha) - 1)`
pub fn celu(scope: &mut Scope<'_>) -> Outputs {
    let alpha = scope.float("alpha", 1.0)?;
    if alpha == 0.0 {
        return Err(LowerReason::Attribute { name: "alpha", found: "0".to_string(), expected: "not 0" });
    }
    exponential_branch(scope, alpha, 1.0, alpha)
}

/// SELU with the default constants of the ONNX standard.
pub fn selu(scope: &mut Scope<'_>) -> Outputs {
    let alpha = scope.float("alpha", 1.6732632423543772)?;
    let gamma = scope.float("gamma", 1.0507009873554805)?;
    exponential_branch(scope, alpha, gamma, 1.0)
}

/// `max(0, min(1, alpha·x + beta))`
fn ramp(scope: &mut Scope<'_>, x: Value, alpha: f64, beta: f64) -> Result<Value, LowerReason> {
    let scaled = scope.with_number(Binary::Mul, x, alpha)?;
    let shifted = scope.with_number(Binary::Add, scaled, beta)?;
    let below = scope.with_number(Binary::Min, shifted, 1.0)?;
    scope.with_number(Binary::Max, below, 0.0)
}

pub fn hard_sigmoid(scope: &mut Scope<'_>) -> Outputs {
    let (x, alpha, beta) = (scope.value(0)?, scope.float("alpha", 0.2)?, scope.float("beta", 0.5)?);
    one(ramp(scope, x, alpha, beta)?)
}

/// `x·max(0, min(1, x/6 + 1/2))`
pub fn hard_swish(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let gate = ramp(scope, x, 1.0 / 6.0, 0.5)?;
    one(scope.binary(Binary::Mul, x, gate)?)
}

fn swished(scope: &mut Scope<'_>) -> Result<Value, LowerReason> {
    let (x, alpha) = (scope.value(0)?, scope.float("alpha", 1.0)?);
    if alpha == 1.0 {
        return scope.unary(Unary::Silu, x);
    }
    let scaled = scope.with_number(Binary::Mul, x, alpha)?;
    let gate = scope.unary(Unary::Sigmoid, scaled)?;
    scope.binary(Binary::Mul, x, gate)
}

/// `x·sigmoid(alpha·x)`
pub fn swish(scope: &mut Scope<'_>) -> Outputs {
    one(swished(scope)?)
}

/// `a·sigmoid(alpha·a)·b`
pub fn swi_glu(scope: &mut Scope<'_>) -> Outputs {
    let (gate, x) = (swished(scope)?, scope.value(1)?);
    one(scope.binary(Binary::Mul, gate, x)?)
}

/// `x` moved towards zero by `bias` if `|x| > lambd`, else 0.
pub fn shrink(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let (bias, bound) = (scope.float("bias", 0.0)?, scope.float("lambd", 0.5)?);
    let dtype = scope.fact(x).dtype;
    let (large, zero) = (is_above(scope, x, bound)?, scope.scalar(dtype, 0.0)?);
    let bound = scope.scalar(dtype, -bound)?;
    let small = scope.compare(Compare::Less, x, bound)?;
    let (lowered, raised) = (scope.with_number(Binary::Sub, x, bias)?, scope.with_number(Binary::Add, x, bias)?);
    let y = scope.select(large, lowered, zero)?;
    one(scope.select(small, raised, y)?)
}

/// `x·tanh(softplus(x))`
pub fn mish(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let soft = scope.unary(Unary::Softplus, x)?;
    let gate = scope.unary(Unary::Tanh, soft)?;
    one(scope.binary(Binary::Mul, x, gate)?)
}

pub fn softsign(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let size = scope.unary(Unary::Abs, x)?;
    let below = scope.with_number(Binary::Add, size, 1.0)?;
    one(scope.binary(Binary::Div, x, below)?)
}

/// `min(max(x, low), high)`; the bounds are attributes before operator set 11.
pub fn clip(scope: &mut Scope<'_>) -> Outputs {
    let mut y = scope.value(0)?;
    for (slot, name, op) in [(1, "min", Binary::Max), (2, "max", Binary::Min)] {
        if scope.opset >= 11 {
            if let Some(bound) = scope.optional(slot)? {
                y = scope.binary(op, y, bound)?;
            }
        } else if scope.is_set(name) {
            let bound = scope.float(name, 0.0)?;
            y = scope.with_number(op, y, bound)?;
        }
    }
    one(y)
}

pub fn is_nan(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let equals_self = scope.compare(Compare::Equal, x, x)?;
    one(scope.unary(Unary::Not, equals_self)?)
}

/// True for infinities; attributes select the signs.
pub fn is_inf(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let (below, above) = (scope.flag("detect_negative", true)?, scope.flag("detect_positive", true)?);
    let (x, infinity) = match (below, above) {
        (true, true) => (scope.unary(Unary::Abs, x)?, f64::INFINITY),
        (true, false) => (x, f64::NEG_INFINITY),
        (false, true) => (x, f64::INFINITY),
        // `x < x` is always false.
        (false, false) => return one(scope.compare(Compare::Less, x, x)?),
    };
    let infinity = scope.scalar(scope.graph.fact(x).dtype, infinity)?;
    one(scope.compare(Compare::Equal, x, infinity)?)
}

/// Dropout: active only in training mode, otherwise the identity.
pub fn dropout(scope: &mut Scope<'_>) -> Outputs {
    let is_true = |t: Option<Tensor>| t.is_some_and(|t| t.to_i64().iter().any(|v| *v != 0));
    if scope.opset >= 12 && is_true(scope.tensor(2, "the training mode")?) {
        let ratio_input = scope.tensor(1, "the ratio")?.and_then(|t| t.cast(DType::F32).to_f32().first().copied());
        // Converted through the shortest decimal: 0.1 in the source stays 0.1.
        let ratio = ratio_input.unwrap_or(0.5);
        let ratio = ratio.to_string().parse().unwrap_or(f64::from(ratio));
        if ratio != 0.0 {
            if scope.is_set("seed") {
                let what = "a dropout with a seed (the standard does not define its random numbers)";
                return Err(LowerReason::Unsupported(what.to_string()));
            }
            let (x, counter) = (scope.value(0)?, scope.counter()?);
            // RNG streams are numbered later, when unused dropouts have been removed.
            let y = scope.add(Op::Dropout(Dropout { ratio, stream: 0 }), &[x, counter])?;
            return Ok(vec![Known::Value(y), Known::Absent("the mask of a dropout in training mode")]);
        }
    }
    let shape = scope.fact_of(0)?.shape;
    let mut outputs = identity(scope)?;
    if scope.node.outputs.get(1).is_some_and(|name| !name.is_empty()) {
        let is_true = scope.constant(Tensor::from_bool(&[], &[true]))?;
        outputs.push(Known::Value(scope.broadcast(is_true, shape)?));
    }
    Ok(outputs)
}
