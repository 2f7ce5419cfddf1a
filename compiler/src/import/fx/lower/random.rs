//! Operators that draw random numbers: dropouts and distributions.
//!
//! PyTorch draws from one generator in the order of calls; here every number follows from a counter and its place, so
//! that a second forward pass, another cut and other threads draw the same.

use super::elementwise::identity;
use super::{Known, Made, Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::random;
use crate::op::{Binary, Broadcast, Compare, Dropout, Op, TopK, Unary, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;

/// What a dropout calls its operand: `input`, or `self` where it changes it in place.
fn operand(scope: &Scope<'_>) -> &'static str {
    if scope.has("self") { "self" } else { "input" }
}

/// Dropout in training mode, of single elements, or with `channels` of whole channels; else its operand.
pub fn dropout(scope: &mut Scope<'_>, channels: bool) -> Outputs {
    let p = scope.float("p", 0.5)?;
    if !scope.flag("train", true)? || p == 0.0 {
        let known = match identity(scope)? {
            Made::Tensors(known) => known,
            other => return Ok(other),
        };
        return Ok(Made::Tensors(vec![known[0], Known::Absent("the mask of a dropout")]));
    }
    let x = scope.value(operand(scope))?;
    let counter = scope.counter()?;
    let op = Op::Dropout(Dropout { ratio: p, stream: 0 });
    let y = match channels {
        false => scope.add(op, &[x, counter])?,
        true => {
            let fact = scope.fact(x);
            let one = scope.scalar(fact.dtype, 1.0)?;
            let ones = scope.add(Op::Broadcast(Broadcast { shape: of_channels(&fact.shape) }), &[one])?;
            let mask = scope.add(op, &[ones, counter])?;
            scope.binary(Binary::Mul, x, mask)?
        }
    };
    Ok(Made::Tensors(vec![Known::Value(y), Known::Absent("the mask of a dropout in training mode")]))
}

/// The shape of one number for each channel of each example.
fn of_channels(shape: &[Dim]) -> Vec<Dim> {
    let size = |(axis, dim): (usize, &Dim)| if axis < 2 { dim.clone() } else { Dim::Known(1) };
    shape.iter().enumerate().map(size).collect()
}

/// Dropout that keeps mean and variance (Klambauer and others 2017): what is dropped becomes `-αλ`, and all is scaled.
pub fn alpha_dropout(scope: &mut Scope<'_>, channels: bool) -> Outputs {
    const SATURATION: f64 = 1.758_099_340_847_376_6;
    let p = scope.float("p", 0.5)?;
    if !scope.flag("train", true)? || p == 0.0 {
        return identity(scope);
    }
    let x = scope.value(operand(scope))?;
    let fact = scope.fact(x);
    let shape = if channels { of_channels(&fact.shape) } else { fact.shape.clone() };
    let kept = random::coin(scope, 1.0 - p, DType::Bool, &shape)?;
    if p == 1.0 {
        let zero = scope.scalar(fact.dtype, 0.0)?;
        return one(scope.broadcast(zero, fact.shape)?);
    }
    let scale = 1.0 / ((1.0 - p) * (1.0 + p * SATURATION * SATURATION)).sqrt();
    let saturated = scope.scalar(fact.dtype, -SATURATION)?;
    let y = scope.select(kept, x, saturated)?;
    let y = scope.with_number(Binary::Mul, y, scale)?;
    one(scope.with_number(Binary::Add, y, scale * SATURATION * p)?)
}

/// 1 with a probability, else 0: the argument `p`, a number or a tensor, or else each element of the operand.
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

/// The element type and shape of what is drawn: those of the operand, or as arguments say.
fn asked(scope: &mut Scope<'_>, like: bool, natural: DType) -> Result<(DType, Vec<Dim>), LowerReason> {
    let dtype = scope.dtype("dtype")?;
    match like {
        true => {
            let fact = scope.fact_of("self")?;
            Ok((dtype.unwrap_or(fact.dtype), fact.shape))
        }
        false => Ok((dtype.unwrap_or(natural), scope.shape("size")?)),
    }
}

/// Numbers from 0 to 1, or with `normal`, of the normal distribution.
pub fn drawn(scope: &mut Scope<'_>, like: bool, normal: bool) -> Outputs {
    let (dtype, shape) = asked(scope, like, DType::F32)?;
    one(match normal {
        true => random::normal(scope, dtype, &shape, 0.0, 1.0)?,
        false => random::uniform(scope, dtype, &shape)?,
    })
}

/// Whole numbers from `low` to `high`, which is left out.
pub fn whole(scope: &mut Scope<'_>, like: bool) -> Outputs {
    let (dtype, shape) = asked(scope, like, DType::I64)?;
    let (low, high) = (scope.int("low", 0)?, scope.int("high", 1)?);
    let range = random::between(scope, DType::F64, &shape, [low as f64, high as f64])?;
    let floor = scope.unary(Unary::Floor, range)?;
    one(scope.cast(floor, dtype)?)
}

/// The numbers from 0 to `n` in a random order.
pub fn order(scope: &mut Scope<'_>) -> Outputs {
    let n = scope.dim("n")?.ok_or(LowerReason::NotConstant { what: "how many there are" })?;
    let dtype = scope.dtype("dtype")?.unwrap_or(DType::I64);
    let drawn = random::uniform(scope, DType::F64, std::slice::from_ref(&n))?;
    let sorted = scope.add_all(Op::TopK(TopK { axis: 0, count: n, largest: false }), &[drawn])?;
    one(scope.cast(sorted[1], dtype)?)
}

/// Numbers from `from` to `to` in the shape and type of the operand.
pub fn uniform(scope: &mut Scope<'_>) -> Outputs {
    let fact = scope.fact_of("self")?;
    let range = [scope.float("from", 0.0)?, scope.float("to", 1.0)?];
    one(random::between(scope, fact.dtype, &fact.shape, range)?)
}

/// Numbers of the normal distribution: in the shape and type of the operand, or with the means or deviations of
/// tensors.
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
        shape = crate::import::onnx::lower::movement::met(&shape, &scope.fact(value).shape)?;
        values.push(value);
    }
    let drawn = random::normal(scope, DType::F32, &shape, 0.0, 1.0)?;
    let scaled = scope.binary(Binary::Mul, drawn, values[1])?;
    one(scope.binary(Binary::Add, scaled, values[0])?)
}

/// Numbers of the exponential distribution: `-ln(1 - u)/λ`.
pub fn exponential(scope: &mut Scope<'_>) -> Outputs {
    let fact = scope.fact_of("self")?;
    let rate = scope.float("lambd", 1.0)?;
    let drawn = random::uniform(scope, fact.dtype, &fact.shape)?;
    let one_value = scope.scalar(fact.dtype, 1.0)?;
    let rest = scope.binary(Binary::Sub, one_value, drawn)?;
    let log = scope.unary(Unary::Log, rest)?;
    one(scope.with_number(Binary::Mul, log, -1.0 / rate)?)
}

/// `x > 0 ? x : slope·x` with a slope that is drawn for each element in training mode, and the middle one else.
pub fn leaky(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let fact = scope.fact(x);
    let range = [scope.float("lower", 1.0 / 8.0)?, scope.float("upper", 1.0 / 3.0)?];
    let slope: Value = match scope.flag("training", false)? {
        true => random::between(scope, fact.dtype, &fact.shape, range)?,
        false => scope.scalar(fact.dtype, (range[0] + range[1]) / 2.0)?,
    };
    let zero = scope.scalar(fact.dtype, 0.0)?;
    let positive = scope.compare(Compare::Less, zero, x)?;
    let scaled = scope.binary(Binary::Mul, x, slope)?;
    one(scope.select(positive, x, scaled)?)
}
