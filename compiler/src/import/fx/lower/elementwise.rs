//! Elementwise operators.

use super::argument::{Number, Operand};
use super::function::toward_zero;
use super::{Known, NodeOutputs, Outputs, Scope, one, promote};
use crate::import::activation;
use crate::import::build::Build;
use crate::import::formula::{Expr, formula};
use crate::import::lower_error::LowerReason;
use crate::import::symbolic_batch;
use crate::op::{Binary, Compare, Unary, Value};
use crate::tensor::DType;

pub fn required(scope: &mut Scope<'_>, name: &'static str) -> Result<Operand, LowerReason> {
    let operand = scope.operand(name)?;
    operand.ok_or(LowerReason::Attribute { name, found: "missing".to_string(), expected: "a tensor or a number" })
}

/// A formula of the operand, in its element type.
pub fn map(scope: &mut Scope<'_>, body: impl FnOnce(Expr<'_>) -> Expr<'_>) -> Outputs {
    let x = scope.value("self")?;
    one(formula(scope, [x], |[x]| body(x))?)
}

/// A formula of the operand in floats.
pub fn map_real(scope: &mut Scope<'_>, body: impl FnOnce(Expr<'_>) -> Expr<'_>) -> Outputs {
    let x = scope.value("self")?;
    let x = promote::real(scope, x)?;
    one(formula(scope, [x], |[x]| body(x))?)
}

/// A formula of both operands in their promoted type.
pub fn map_pair(scope: &mut Scope<'_>, body: impl for<'f> FnOnce(Expr<'f>, Expr<'f>) -> Expr<'f>) -> Outputs {
    let (a, b) = pair(scope)?;
    one(formula(scope, [a, b], |[a, b]| body(a, b))?)
}

/// A formula of both operands in their promoted float type.
pub fn map_floats(scope: &mut Scope<'_>, body: impl for<'f> FnOnce(Expr<'f>, Expr<'f>) -> Expr<'f>) -> Outputs {
    let (a, b) = pair(scope)?;
    let (a, b) = (promote::real(scope, a)?, promote::real(scope, b)?);
    one(formula(scope, [a, b], |[a, b]| body(a, b))?)
}

/// `f(x)` in the element type of `x`.
pub fn unary(scope: &mut Scope<'_>, op: Unary) -> Outputs {
    map(scope, |x| x.unary(op))
}

/// `f(x)` in floats.
pub fn real(scope: &mut Scope<'_>, op: Unary) -> Outputs {
    map_real(scope, |x| x.unary(op))
}

pub fn identity(scope: &mut Scope<'_>) -> Outputs {
    let name = if scope.has("self") { "self" } else { "input" };
    Ok(NodeOutputs::Tensors(vec![scope.known(name)?]))
}

/// `clone`: weights become graph values, so that an in-place change affects only the copy.
pub fn duplicate(scope: &mut Scope<'_>) -> Outputs {
    let name = if scope.has("self") { "self" } else { "input" };
    match scope.known(name)? {
        Known::Weight(_) => one(scope.value(name)?),
        known => Ok(NodeOutputs::Tensors(vec![known])),
    }
}

/// Both operands in their promoted type.
pub fn pair(scope: &mut Scope<'_>) -> Result<(Value, Value), LowerReason> {
    let operands = [required(scope, "self")?, required(scope, "other")?];
    let dtype = promote::common(scope, &operands);
    let [a, b] = operands;
    let mut pair_values = [promote::value(scope, &a, dtype)?, promote::value(scope, &b, dtype)?];
    scope.align_batch(&mut pair_values, None)?;
    Ok((pair_values[0], pair_values[1]))
}

/// `maximum` or `minimum`.
pub fn extreme(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    let (a, b) = pair(scope)?;
    one(scope.extreme(op, a, b)?)
}

pub fn binary(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    map_pair(scope, |a, b| a.binary(op, b))
}

/// `a ± alpha·b`, or `rsub` with `reversed`. The sum of booleans is "or".
pub fn add(scope: &mut Scope<'_>, op: Binary, reversed: bool) -> Outputs {
    let alpha = scope.number("alpha")?;
    let (mut a, mut b) = pair(scope)?;
    if reversed {
        (a, b) = (b, a);
    }
    let dtype = scope.fact(a).dtype;
    if let Some(alpha) = alpha.filter(|n| n.float() != 1.0) {
        // `rsub` scales its first operand, now `b`.
        let alpha = scope.constant(alpha.tensor(dtype))?;
        b = scope.binary(Binary::Mul, b, alpha)?;
    }
    let op = if dtype == DType::Bool && op == Binary::Add { Binary::Or } else { op };
    one(scope.binary(op, a, b)?)
}

/// `a·b`; "and" of booleans.
pub fn multiply(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = pair(scope)?;
    let op = if scope.fact(a).dtype == DType::Bool { Binary::And } else { Binary::Mul };
    one(scope.binary(op, a, b)?)
}

/// `a / b` in floats, or rounded down or toward zero.
pub fn divide(scope: &mut Scope<'_>, default: &'static str) -> Outputs {
    match scope.text("rounding_mode", default)?.as_str() {
        "" => map_floats(scope, |a, b| a / b),
        "trunc" => map_pair(scope, |a, b| toward_zero(a / b)),
        // The remainder has the divisor's sign, so `a - remainder` divides exactly to the floor.
        "floor" => map_pair(scope, |a, b| {
            let quotient = (a - a % b) / b;
            if a.dtype().is_float() { quotient.round() } else { quotient }
        }),
        other => Err(LowerReason::Unsupported(format!("a division with rounding mode `{other}`"))),
    }
}

/// `a^b`; small integer exponents become products, as in PyTorch.
pub fn power(scope: &mut Scope<'_>) -> Outputs {
    let operands = [required(scope, "self")?, required(scope, "exponent")?];
    let dtype = promote::common(scope, &operands);
    let a = promote::value(scope, &operands[0], dtype)?;
    let exponent = match &operands[1] {
        Operand::Number(number) => Some(number.float()),
        _ => None,
    };
    let float = dtype.is_float();
    one(match exponent {
        Some(1.0) => a,
        Some(2.0) => scope.binary(Binary::Mul, a, a)?,
        Some(3.0) => {
            let square = scope.binary(Binary::Mul, a, a)?;
            scope.binary(Binary::Mul, square, a)?
        }
        Some(0.5) if float => scope.unary(Unary::Sqrt, a)?,
        Some(-0.5) if float => scope.unary(Unary::Rsqrt, a)?,
        Some(-1.0) if float => scope.unary(Unary::Reciprocal, a)?,
        Some(0.0) => {
            let (shape, number) = (scope.fact(a).shape, scope.scalar(dtype, 1.0)?);
            scope.broadcast(number, shape)?
        }
        _ => {
            let b = promote::value(scope, &operands[1], dtype)?;
            scope.binary(Binary::Pow, a, b)?
        }
    })
}

/// Compares `a` with `b`; "greater" is "less" with `swapped` operands.
pub fn compare(scope: &mut Scope<'_>, op: Compare, swapped: bool) -> Outputs {
    let (a, b) = pair(scope)?;
    one(if swapped { scope.compare(op, b, a)? } else { scope.compare(op, a, b)? })
}

/// `x ≠ 0`.
pub fn to_bool(x: Expr<'_>) -> Expr<'_> {
    if x.dtype() == DType::Bool { x } else { !x.equals(0.0) }
}

pub fn logical(scope: &mut Scope<'_>, op: Binary) -> Outputs {
    map_pair(scope, |a, b| to_bool(a).binary(op, to_bool(b)))
}

pub fn choose(scope: &mut Scope<'_>) -> Outputs {
    let condition = scope.value("condition")?;
    let condition = formula(scope, [condition], |[condition]| to_bool(condition))?;
    let (a, b) = pair(scope)?;
    one(scope.select(condition, a, b)?)
}

/// `mask ? value : self` in the type of `self`.
pub fn masked_fill(scope: &mut Scope<'_>) -> Outputs {
    let (x, mask) = (scope.value("self")?, scope.value("mask")?);
    let value = required(scope, "value")?;
    let value = promote::value(scope, &value, scope.fact(x).dtype)?;
    one(scope.select(mask, value, x)?)
}

/// `min(max(x, low), high)`; bounds are numbers or tensors, and either may be omitted.
pub fn clamp(scope: &mut Scope<'_>, low: &'static str, high: &'static str) -> Outputs {
    let x = Operand::Tensor(scope.value("self")?);
    let (low, high) = (scope.operand(low)?, scope.operand(high)?);
    let operands: Vec<Operand> = [Some(x.clone()), low.clone(), high.clone()].into_iter().flatten().collect();
    let dtype = promote::common(scope, &operands);
    let mut y = promote::value(scope, &x, dtype)?;
    for (op, limit) in [(Binary::Max, low), (Binary::Min, high)] {
        if let Some(limit) = limit {
            let limit = promote::value(scope, &limit, dtype)?;
            y = scope.binary(op, y, limit)?;
        }
    }
    one(y)
}

/// Clamp between `min_val` and `max_val`, with defaults `low` and `high`.
pub fn hardtanh(scope: &mut Scope<'_>, low: f64, high: f64) -> Outputs {
    let (low, high) = (scope.float("min_val", low)?, scope.float("max_val", high)?);
    map(scope, |x| x.clamp(low, high))
}

/// `x·Φ(x)`, exact or with the `tanh` approximation.
pub fn gelu(scope: &mut Scope<'_>) -> Outputs {
    match scope.text("approximate", "none")?.as_str() {
        "none" => real(scope, Unary::Gelu),
        "tanh" => real(scope, Unary::GeluTanh),
        other => Err(LowerReason::Unsupported(format!("the approximation `{other}`"))),
    }
}

pub fn leaky_relu(scope: &mut Scope<'_>) -> Outputs {
    let slope = scope.float("negative_slope", 0.01)?;
    map(scope, |x| activation::leaky_relu(x, slope))
}

/// `scale·(x > 0 ? x : alpha·(e^(input_scale·x) - 1))`
pub fn elu(scope: &mut Scope<'_>) -> Outputs {
    let (alpha, scale) = (scope.float("alpha", 1.0)?, scope.float("scale", 1.0)?);
    let inner = scope.float("input_scale", 1.0)?;
    map(scope, |x| activation::exponential(x, alpha, scale, |x| x.times(inner)))
}

/// ELU with an exponent divided by alpha.
pub fn celu(scope: &mut Scope<'_>) -> Outputs {
    let alpha = scope.float("alpha", 1.0)?;
    map(scope, |x| activation::exponential(x, alpha, 1.0, |x| x.times(1.0 / alpha)))
}

/// ELU with constants that preserve mean and variance (Klambauer et al. 2017).
pub fn selu(x: Expr<'_>) -> Expr<'_> {
    activation::exponential(x, 1.673_263_242_354_377_2, 1.050_700_987_355_480_5, |x| x)
}

/// `max(0, min(1, x/6 + 1/2))`
pub fn hard_sigmoid(x: Expr<'_>) -> Expr<'_> {
    (x + 3.0).min(6.0).max(0.0) / 6.0
}

/// `log(1 + e^(beta·x))/beta`. PyTorch returns `x` above the threshold; above 20, the exact function equals `x` in
/// `f32`.
pub fn softplus(scope: &mut Scope<'_>) -> Outputs {
    let (beta, threshold) = (scope.float("beta", 1.0)?, scope.float("threshold", 20.0)?);
    map(scope, |x| {
        let scaled = x.times(beta);
        let soft = scaled.softplus();
        let y = if beta == 1.0 { soft } else { soft / beta };
        if threshold >= 20.0 { y } else { scaled.greater(threshold).select(x, y) }
    })
}

/// Casts to the element type given, if any.
pub fn cast(scope: &mut Scope<'_>) -> Outputs {
    let to = match scope.has("other") {
        true => Some(scope.fact_of("other")?.dtype),
        false => scope.dtype("dtype")?,
    };
    let fact = scope.fact_of("self")?;
    let Some(to) = to.filter(|to| *to != fact.dtype) else { return identity(scope) };
    let x = scope.value("self")?;
    one(scope.cast(x, to)?)
}

/// `copy_`: `src` in the shape and type of `self`.
pub fn copy(scope: &mut Scope<'_>) -> Outputs {
    let fact = scope.fact_of("self")?;
    let source = scope.value("src")?;
    let source = scope.cast(source, fact.dtype)?;
    let shape = symbolic_batch::shape_with_batch(scope, &fact.shape, &scope.fact(source).shape)?;
    one(scope.broadcast(source, shape)?)
}

/// `fill_`: a number in the shape and type of `self`.
pub fn filled(scope: &mut Scope<'_>, constant: Option<f64>) -> Outputs {
    let fact = scope.fact_of("self")?;
    let value = match constant {
        Some(value) => Operand::Number(Number::Float(value)),
        None => required(scope, "value")?,
    };
    let value = promote::value(scope, &value, fact.dtype)?;
    one(scope.broadcast(value, fact.shape)?)
}
