//! Random operators: dropout and distributions.
//!
//! PyTorch draws from one generator in call order. Here every number is a function of a counter and its index. A
//! recomputed forward, another cut or another thread count draws the same numbers.

use super::elementwise::identity;
use super::{Known, NodeOutputs, Outputs, Scope, one};
use crate::import::activation;
use crate::import::build::Build;
use crate::import::formula::formula;
use crate::import::lower_error::LowerReason;
use crate::import::random;
use crate::op::{Binary, Broadcast, Dropout, Op, TopK, Unary, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;

/// The name of a dropout's operand: `input`, or `self` in place.
fn operand(scope: &Scope<'_>) -> &'static str {
    if scope.has("self") { "self" } else { "input" }
}

/// Dropout in training mode, of elements, or of whole channels with `channels`; otherwise the identity.
pub fn dropout(scope: &mut Scope<'_>, channels: bool) -> Outputs {
    let p = scope.float("p", 0.5)?;
    if !scope.flag("train", true)? || p == 0.0 {
        let known = match identity(scope)? {
            NodeOutputs::Tensors(known) => known,
            other => return Ok(other),
        };
        return Ok(NodeOutputs::Tensors(vec![known[0], Known::Absent("the mask of a dropout")]));
    }
    let x = scope.value(operand(scope))?;
    let counter = scope.counter()?;
    let op = Op::Dropout(Dropout { ratio: p, stream: 0 });
    let y = match channels {
        false => scope.add(op, &[x, counter])?,
        true => {
            let fact = scope.fact(x);
            let one = scope.scalar(fact.dtype, 1.0)?;
            let ones = scope.add(Op::Broadcast(Broadcast { shape: channel_mask_shape(&fact.shape) }), &[one])?;
            let mask = scope.add(op, &[ones, counter])?;
            scope.binary(Binary::Mul, x, mask)?
        }
    };
    Ok(NodeOutputs::Tensors(vec![Known::Value(y), Known::Absent("the mask of a dropout in training mode")]))
}

/// `[N, C, 1, …]`: one number per channel and example.
fn channel_mask_shape(shape: &[Dim]) -> Vec<Dim> {
    let size = |(axis, dim): (usize, &Dim)| if axis < 2 { dim.clone() } else { Dim::Known(1) };
    shape.iter().enumerate().map(size).collect()
}

/// Dropout that keeps mean and variance (Klambauer et al. 2017): dropped elements become `-αλ`, then all are rescaled.
pub fn alpha_dropout(scope: &mut Scope<'_>, channels: bool) -> Outputs {
    const SATURATION: f64 = 1.758_099_340_847_376_6;
    let p = scope.float("p", 0.5)?;
    if !scope.flag("train", true)? || p == 0.0 {
        return identity(scope);
    }
    let x = scope.value(operand(scope))?;
    let fact = scope.fact(x);
    let shape = if channels { channel_mask_shape(&fact.shape) } else { fact.shape.clone() };
    let mask = random::coin(scope, 1.0 - p, DType::Bool, &shape)?;
    if p == 1.0 {
        let zero = scope.scalar(fact.dtype, 0.0)?;
        return one(scope.broadcast(zero, fact.shape)?);
    }
    let scale = 1.0 / ((1.0 - p) * (1.0 + p * SATURATION * SATURATION)).sqrt();
    one(formula(scope, [mask, x], |[mask, x]| mask.select(x, -SATURATION) * scale + scale * SATURATION * p)?)
}

/// Bernoulli samples; the probability is argument `p`, or else the operand's elements.
pub fn bernoulli(scope: &mut Scope<'_>) -> Outputs {
    let fact = scope.fact_of("self")?;
    if !scope.has("p") && scope.node.target.contains("bernoulli_") {
        return one(random::coin(scope, 0.5, fact.dtype, &fact.shape)?);
    }
    let probability = match scope.operand(if scope.has("p") { "p" } else { "self" })? {
        Some(operand) => super::promote::value(scope, &operand, DType::F32)?,
        None => return Err(LowerReason::NotConstant { what: "the probability" }),
    };
    one(random::bernoulli(scope, probability, fact.dtype, &fact.shape)?)
}

/// Element type and shape of the samples: from the operand if `like`, or from arguments.
fn sample_fact(scope: &mut Scope<'_>, like: bool, natural: DType) -> Result<(DType, Vec<Dim>), LowerReason> {
    let dtype = scope.dtype("dtype")?;
    match like {
        true => {
            let fact = scope.fact_of("self")?;
            Ok((dtype.unwrap_or(fact.dtype), fact.shape))
        }
        false => Ok((dtype.unwrap_or(natural), scope.shape("size")?)),
    }
}

/// Uniform numbers in 0..1, or standard normal ones.
pub fn sample(scope: &mut Scope<'_>, like: bool, normal: bool) -> Outputs {
    let (dtype, shape) = sample_fact(scope, like, DType::F32)?;
    one(match normal {
        true => random::normal(scope, dtype, &shape, 0.0, 1.0)?,
        false => random::uniform(scope, dtype, &shape)?,
    })
}

/// Integers from `low` to `high`, exclusive.
pub fn random_integers(scope: &mut Scope<'_>, like: bool) -> Outputs {
    let (dtype, shape) = sample_fact(scope, like, DType::I64)?;
    let (low, high) = (scope.int("low", 0)?, scope.int("high", 1)?);
    let range = random::uniform_between(scope, DType::F64, &shape, [low as f64, high as f64])?;
    let floor = scope.unary(Unary::Floor, range)?;
    one(scope.cast(floor, dtype)?)
}

/// A random permutation of `0..n`.
pub fn random_permutation(scope: &mut Scope<'_>) -> Outputs {
    let n = scope.dim("n")?.ok_or(LowerReason::NotConstant { what: "the number of elements" })?;
    let dtype = scope.dtype("dtype")?.unwrap_or(DType::I64);
    let samples = random::uniform(scope, DType::F64, std::slice::from_ref(&n))?;
    let sorted = scope.add_all(Op::TopK(TopK { axis: 0, count: n, largest: false }), &[samples])?;
    one(scope.cast(sorted[1], dtype)?)
}

/// Uniform numbers in `from..to` in the operand's shape and type.
pub fn uniform(scope: &mut Scope<'_>) -> Outputs {
    let fact = scope.fact_of("self")?;
    let range = [scope.float("from", 0.0)?, scope.float("to", 1.0)?];
    one(random::uniform_between(scope, fact.dtype, &fact.shape, range)?)
}

/// Normal samples: in the operand's shape and type, or with tensors of means or deviations.
pub fn normal(scope: &mut Scope<'_>) -> Outputs {
    if scope.has("self") {
        let fact = scope.fact_of("self")?;
        let (mean, deviation) = (scope.float("mean", 0.0)?, scope.float("std", 1.0)?);
        return one(random::normal(scope, fact.dtype, &fact.shape, mean, deviation)?);
    }
    let (mean, deviation) = (scope.operand("mean")?, scope.operand("std")?);
    let mut shape = scope.dims("size")?.unwrap_or_default();
    let mut values = Vec::with_capacity(2);
    for (operand, natural) in [(mean, 0.0), (deviation, 1.0)] {
        let operand = operand.unwrap_or(super::argument::Operand::Number(super::argument::Number::Float(natural)));
        let value = super::promote::value(scope, &operand, DType::F32)?;
        shape = crate::import::onnx::lower::movement::broadcast_shape(&shape, &scope.fact(value).shape)?;
        values.push(value);
    }
    let samples = random::normal(scope, DType::F32, &shape, 0.0, 1.0)?;
    one(formula(scope, [samples, values[0], values[1]], |[samples, mean, deviation]| samples * deviation + mean)?)
}

/// Exponential samples: `-ln(1 - u)/λ`.
pub fn exponential(scope: &mut Scope<'_>) -> Outputs {
    let fact = scope.fact_of("self")?;
    let rate = scope.float("lambd", 1.0)?;
    let samples = random::uniform(scope, fact.dtype, &fact.shape)?;
    one(formula(scope, [samples], |[samples]| (1.0 - samples).log() * (-1.0 / rate))?)
}

/// `rrelu`: `x > 0 ? x : slope·x`; the slope is random per element in training and the mean slope otherwise.
pub fn leaky(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let fact = scope.fact(x);
    let range = [scope.float("lower", 1.0 / 8.0)?, scope.float("upper", 1.0 / 3.0)?];
    let slope: Value = match scope.flag("training", false)? {
        true => random::uniform_between(scope, fact.dtype, &fact.shape, range)?,
        false => scope.scalar(fact.dtype, (range[0] + range[1]) / 2.0)?,
    };
    one(formula(scope, [x, slope], |[x, slope]| activation::leaky_relu(x, slope))?)
}
