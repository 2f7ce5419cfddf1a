//! Elementwise operators.

use super::{Known, LowerReason, Outputs, Scope, one};
use crate::import::activation;
use crate::import::build::Build;
use crate::import::formula::{Expr, formula};
use crate::op::{Binary, Compare, Dropout, Op, Unary};
use crate::tensor::{DType, Tensor};

pub fn identity(scope: &mut Scope<'_>) -> Outputs {
    // ONNX has no operator that stops gradients; the metadata tell what the exporter made an identity.
    if scope.node.torch_arguments("aten.detach").is_some() {
        let x = scope.value(0)?;
        return one(scope.stop_gradient(x)?);
    }
    Ok(vec![scope.known(0)?.clone()])
}

/// A formula of the input.
pub fn map(scope: &mut Scope<'_>, body: impl FnOnce(Expr<'_>) -> Expr<'_>) -> Outputs {
    let x = scope.value(0)?;
    one(formula(scope, [x], |[x]| body(x))?)
}

/// A formula of both inputs.
pub fn map_pair(scope: &mut Scope<'_>, body: impl for<'f> FnOnce(Expr<'f>, Expr<'f>) -> Expr<'f>) -> Outputs {
    let (a, b) = (scope.value(0)?, scope.value(1)?);
    one(formula(scope, [a, b], |[a, b]| body(a, b))?)
}

pub fn unary(scope: &mut Scope<'_>, op: Unary) -> Outputs {
    map(scope, |x| x.unary(op))
}

pub fn binary(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    map_pair(scope, |a, b| a.binary(op, b))
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
    map_pair(scope, |a, b| if swapped { b.compare(op, a) } else { a.compare(op, b) })
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
    let fmod = scope.flag("fmod", false)?;
    map_pair(scope, |a, b| {
        if !fmod {
            return a % b;
        }
        if a.dtype().is_float() {
            let (sign, a, b) = (a.sign(), a.abs(), b.abs());
            return a % b * sign;
        }
        // `remainder` has the sign of b. If a has the other sign and `remainder` is not zero, the result is `remainder
        // - b`. Taking absolute values would overflow for the smallest integer.
        let (remainder, zero) = (a % b, a.number(0.0));
        let differs = remainder.less(zero).binary(Binary::Xor, a.less(zero));
        let is_exact = remainder.equals(zero);
        is_exact.select(remainder, differs.select(remainder - b, remainder))
    })
}

pub fn cast(scope: &mut Scope<'_>) -> Outputs {
    let to = scope.element_type("to", 0, "a cast to")?;
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

pub fn leaky_relu(scope: &mut Scope<'_>) -> Outputs {
    let alpha = scope.float("alpha", 0.01)?;
    map(scope, |x| activation::leaky_relu(x, alpha))
}

/// `x > alpha ? x : 0`
pub fn thresholded_relu(scope: &mut Scope<'_>) -> Outputs {
    let alpha = scope.float("alpha", 1.0)?;
    map(scope, |x| x.greater(alpha).select(x, 0.0))
}

/// `x > 0 ? x : alpha·(e^x - 1)`
pub fn elu(scope: &mut Scope<'_>) -> Outputs {
    let alpha = scope.float("alpha", 1.0)?;
    map(scope, |x| activation::exponential(x, alpha, 1.0, |x| x))
}

/// `x > 0 ? x : alpha·(e^(x/alpha) - 1)`
pub fn celu(scope: &mut Scope<'_>) -> Outputs {
    let alpha = scope.float("alpha", 1.0)?;
    if alpha == 0.0 {
        return Err(LowerReason::Attribute { name: "alpha", found: "0".to_string(), expected: "not 0" });
    }
    map(scope, |x| activation::exponential(x, alpha, 1.0, |x| if alpha == 1.0 { x } else { x / alpha }))
}

/// SELU with the default constants of the ONNX standard.
pub fn selu(scope: &mut Scope<'_>) -> Outputs {
    let alpha = scope.float("alpha", 1.6732632423543772)?;
    let gamma = scope.float("gamma", 1.0507009873554805)?;
    map(scope, |x| activation::exponential(x, alpha, gamma, |x| x))
}

pub fn hard_sigmoid(scope: &mut Scope<'_>) -> Outputs {
    let (alpha, beta) = (scope.float("alpha", 0.2)?, scope.float("beta", 0.5)?);
    map(scope, |x| activation::ramp(x, alpha, beta))
}

/// `x·sigmoid(alpha·x)`
pub fn swish(scope: &mut Scope<'_>) -> Outputs {
    let alpha = scope.float("alpha", 1.0)?;
    map(scope, |x| if alpha == 1.0 { x.unary(Unary::Silu) } else { x * (x * alpha).sigmoid() })
}

/// `a·sigmoid(alpha·a)·b`
pub fn swi_glu(scope: &mut Scope<'_>) -> Outputs {
    let (gate, x) = (swish(scope)?.remove(0), scope.value(1)?);
    let gate = scope.materialise(&gate)?;
    one(scope.binary(Binary::Mul, gate, x)?)
}

/// `x` moved towards zero by `bias` if `|x| > lambd`, else 0.
pub fn shrink(scope: &mut Scope<'_>) -> Outputs {
    let (bias, bound) = (scope.float("bias", 0.0)?, scope.float("lambd", 0.5)?);
    map(scope, |x| {
        let (large, zero) = (x.greater(bound), x.number(0.0));
        let small = x.less(-bound);
        let (lowered, raised) = (x - bias, x + bias);
        small.select(raised, large.select(lowered, zero))
    })
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

/// True for infinities; attributes select the signs.
pub fn is_inf(scope: &mut Scope<'_>) -> Outputs {
    let (below, above) = (scope.flag("detect_negative", true)?, scope.flag("detect_positive", true)?);
    map(scope, |x| match (below, above) {
        (true, true) => x.abs().equals(f64::INFINITY),
        (true, false) => x.equals(f64::NEG_INFINITY),
        (false, true) => x.equals(f64::INFINITY),
        // `x < x` is always false.
        (false, false) => x.less(x),
    })
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
