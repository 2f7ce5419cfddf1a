//! Random numbers, as every importer lowers them: uniform numbers from the generator of dropout
//! ([`Uniform`](crate::op::Uniform)), and what other distributions make of them.

use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::op::{Binary, Compare, Op, Unary, Uniform, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;
use crate::tensor::fact::Fact;

/// Uniform numbers from 0 to 1, 1 left out.
pub fn uniform(scope: &mut (impl Build + ?Sized), dtype: DType, shape: &[Dim]) -> Result<Value, LowerReason> {
    let counter = scope.counter()?;
    // Streams are numbered when it is known which ops are left.
    let fact = Fact::new(dtype, shape.to_vec());
    scope.add(Op::Uniform(Uniform { fact, stream: 0 }), &[counter])
}

/// Uniform numbers from `low` to `high`, which is left out.
pub fn between(
    scope: &mut (impl Build + ?Sized),
    dtype: DType,
    shape: &[Dim],
    [low, high]: [f64; 2],
) -> Result<Value, LowerReason> {
    let drawn = uniform(scope, dtype, shape)?;
    let scaled = if high - low == 1.0 { drawn } else { scope.with_number(Binary::Mul, drawn, high - low)? };
    if low == 0.0 { Ok(scaled) } else { scope.with_number(Binary::Add, scaled, low) }
}

/// Numbers of the normal distribution: `√(-2 ln(1 - u)) cos(2πv)` of two uniform numbers (Box and Muller 1958).
pub fn normal(
    scope: &mut (impl Build + ?Sized),
    dtype: DType,
    shape: &[Dim],
    mean: f64,
    deviation: f64,
) -> Result<Value, LowerReason> {
    // Half types have too few bits for the tails.
    let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
    let (u, v) = (uniform(scope, wide, shape)?, uniform(scope, wide, shape)?);
    let one = scope.scalar(wide, 1.0)?;
    let rest = scope.binary(Binary::Sub, one, u)?;
    let log = scope.unary(Unary::Log, rest)?;
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

/// 1 with the probability that `probability` gives for each element, which may be stretched, else 0.
pub fn bernoulli(
    scope: &mut (impl Build + ?Sized),
    probability: Value,
    dtype: DType,
    shape: &[Dim],
) -> Result<Value, LowerReason> {
    let wide = if scope.fact(probability).dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let probability = scope.cast(probability, wide)?;
    let drawn = uniform(scope, wide, shape)?;
    let hit = scope.compare(Compare::Less, drawn, probability)?;
    scope.cast(hit, dtype)
}

/// The same with one probability for all.
pub fn coin(
    scope: &mut (impl Build + ?Sized),
    probability: f64,
    dtype: DType,
    shape: &[Dim],
) -> Result<Value, LowerReason> {
    let probability = scope.scalar(DType::F32, probability)?;
    bernoulli(scope, probability, dtype, shape)
}
