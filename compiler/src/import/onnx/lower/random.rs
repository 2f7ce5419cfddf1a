//! `RandomUniform`, `RandomNormal`, their `Like` variants, and `Bernoulli`. The standard does not define the numbers
//! for a seed; here they are derived from the counter also used for dropout.

use super::{LowerReason, Outputs, Scope, one};
use crate::import::random;
use crate::tensor::DType;
use crate::tensor::dim::Dim;

/// The element type in attribute `dtype`, or `natural` if it is absent.
pub fn dtype(scope: &Scope<'_>, natural: DType) -> Result<DType, LowerReason> {
    if scope.is_set("dtype") { scope.element_type("dtype", 0, "a result of") } else { Ok(natural) }
}

/// Element type and shape of the result: with `like` those of the operand, else from attributes.
fn output_type(scope: &Scope<'_>, like: bool) -> Result<(DType, Vec<Dim>), LowerReason> {
    if like {
        let fact = scope.fact_of(0)?;
        return Ok((dtype(scope, fact.dtype)?, fact.shape));
    }
    let shape = scope.ints("shape")?.ok_or(LowerReason::NotConstant { what: "the shape" })?;
    Ok((dtype(scope, DType::F32)?, shape.into_iter().map(Dim::Known).collect()))
}

fn floats(dtype: DType) -> Result<DType, LowerReason> {
    dtype.is_float().then_some(dtype).ok_or_else(|| LowerReason::Unsupported(format!("random numbers of type {dtype}")))
}

pub fn uniform(scope: &mut Scope<'_>, like: bool) -> Outputs {
    let (dtype, shape) = output_type(scope, like)?;
    let range = [scope.float("low", 0.0)?, scope.float("high", 1.0)?];
    one(random::uniform_between(scope, floats(dtype)?, &shape, range)?)
}

pub fn normal(scope: &mut Scope<'_>, like: bool) -> Outputs {
    let (dtype, shape) = output_type(scope, like)?;
    let (mean, scale) = (scope.float("mean", 0.0)?, scope.float("scale", 1.0)?);
    one(random::normal(scope, floats(dtype)?, &shape, mean, scale)?)
}

/// 1 with the probability given by each element of the operand, else 0.
pub fn bernoulli(scope: &mut Scope<'_>) -> Outputs {
    let fact = scope.fact_of(0)?;
    let dtype = dtype(scope, fact.dtype)?;
    let probability = scope.value(0)?;
    one(random::bernoulli(scope, probability, dtype, &fact.shape)?)
}
