//! Random numbers, shared by all importers: uniform numbers from the dropout generator
//! ([`Uniform`](crate::op::Uniform)), and distributions derived from them.

use crate::import::build::Build;
use crate::import::formula::formula;
use crate::import::lower_error::LowerReason;
use crate::op::{Compare, Op, Uniform, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;

/// Uniform numbers in [0, 1).
pub fn uniform(scope: &mut impl Build, dtype: DType, shape: &[Dim]) -> Result<Value, LowerReason> {
    let counter = scope.counter()?;
    // RNG streams are numbered after dead ops are removed.
    let fact = Fact::new(dtype, shape.to_vec());
    scope.add(Op::Uniform(Uniform { fact, stream: 0 }), &[counter])
}

/// Uniform numbers in [low, high).
pub fn uniform_between(
    scope: &mut impl Build,
    dtype: DType,
    shape: &[Dim],
    [low, high]: [f64; 2],
) -> Result<Value, LowerReason> {
    let samples = uniform(scope, dtype, shape)?;
    formula(scope, [samples], |[samples]| samples.times(high - low).plus(low))
}

/// Normally distributed numbers: `√(-2 ln(1 - u)) cos(2πv)` of two uniform numbers (Box and Muller 1958).
pub fn normal(
    scope: &mut impl Build,
    dtype: DType,
    shape: &[Dim],
    mean: f64,
    deviation: f64,
) -> Result<Value, LowerReason> {
    // Half precision has too few bits for the tails.
    let sample_type = if dtype == DType::F64 { dtype } else { DType::F32 };
    let (u, v) = (uniform(scope, sample_type, shape)?, uniform(scope, sample_type, shape)?);
    formula(scope, [u, v], |[u, v]| {
        let radius = ((1.0 - u).log() * -2.0).sqrt();
        let y = radius * (v * std::f64::consts::TAU).cos();
        y.times(deviation).plus(mean).cast(dtype)
    })
}

/// 1 with the given probability per element (broadcast to the shape), else 0.
pub fn bernoulli(
    scope: &mut impl Build,
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
pub fn coin(scope: &mut impl Build, probability: f64, dtype: DType, shape: &[Dim]) -> Result<Value, LowerReason> {
    let probability = scope.scalar(DType::F32, probability)?;
    bernoulli(scope, probability, dtype, shape)
}
