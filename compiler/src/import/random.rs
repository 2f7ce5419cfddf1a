//! Random numbers, shared by all importers: uniform numbers from the dropout generator
//! ([`Uniform`](crate::op::Uniform)), and distributions derived from them.

use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::op::{Binary, Compare, Op, Unary, Uniform, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;

/// Uniform numbers in [0, 1).
pub fn uniform(scope: &mut (impl Build + ?Sized), dtype: DType, shape: &[Dim]) -> Result<Value, LowerReason> {
    let counter = scope.counter()?;
    // RNG streams are numbered after dead ops are removed.
    let fact = Fact::new(dtype, shape.to_vec());
    scope.add(Op::Uniform(Uniform { fact, stream: 0 }), &[counter])
}

/// Uniform numbers in [low, high).
pub fn uniform_between(
    scope: &mut (impl Build + ?Sized),
    dtype: DType,
    shape: &[Dim],
    [low, high]: [f64; 2],
) -> Result<Value, LowerReason> {
    let samples = uniform(scope, dtype, shape)?;
    let scaled = if high - low == 1.0 { samples } else { scope.with_number(Binary::Mul, samples, high - low)? };
    if low == 0.0 { Ok(scaled) } else { scope.with_number(Binary::Add, scaled, low) }
}

/// Normally distributed numbers: `√(-2 ln(1 - u)) cos(2πv)` of two uniform numbers (Box and Muller 1958).
pub fn normal(
    scope: &mut (impl Build + ?Sized),
    dtype: DType,
    shape: &[Dim],
    mean: f64,
    deviation: f64,
) -> Result<Value, LowerReason> {
    // Half precision has too few bits for the tails.
    let sample_type = if dtype == DType::F64 { dtype } else { DType::F32 };
    let (u, v) = (uniform(scope, sample_type, shape)?, uniform(scope, sample_type, shape)?);
    let one = scope.scalar(sample_type, 1.0)?;
    let complement = scope.binary(Binary::Sub, one, u)?;
    let log = scope.unary(Unary::Log, complement)?;
    let square = scope.with_number(Binary::Mul, log, -2.0)?;
    let radius = scope.unary(Unary::Sqrt, square)?;
    let angle = scope.with_number(Binary::Mul, v, std::f64::consts::TAU)?;
    let cos = scope.unary(Unary::Cos, angle)?;
    let mut y = scope.binary(Binary::Mul, radius, cos)?;
    if deviation != 1.0 {
        y = scope.with_number(Binary::Mul, y, deviation)?;
    }
    if mean != 0.0 {
        y = scope.with_number(Binary::Add, y, mean)?;
    }
    scope.cast(y, dtype)
}

/// 1 with the given probability per element (broadcast to the shape), else 0.
pub fn bernoulli(
    scope: &mut (impl Build + ?Sized),
    probability: Value,
    dtype: DType,
    shape: &[Dim],
) -> Result<Value, LowerReason> {
    let sample_type = if scope.fact(probability).dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let probability = scope.cast(probability, sample_type)?;
    let samples = uniform(scope, sample_type, shape)?;
    let is_below = scope.compare(Compare::Less, samples, probability)?;
    scope.cast(is_below, dtype)
}

/// Bernoulli with the same probability for all elements.
pub fn coin(
    scope: &mut (impl Build + ?Sized),
    probability: f64,
    dtype: DType,
    shape: &[Dim],
) -> Result<Value, LowerReason> {
    let probability = scope.scalar(DType::F32, probability)?;
    bernoulli(scope, probability, dtype, shape)
}
