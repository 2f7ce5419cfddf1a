//! Constants and sizes: `Constant`, `ConstantOfShape`, `Range`, `Shape`, `Size`.

use super::weight::{fact_of, tensor_of};
use super::{Dims, Known, LowerReason, Outputs, Scope, Weight};
use crate::import::build::Build;
use crate::import::onnx::model::Payload;
use crate::op::{Binary, Iota, Op};
use crate::tensor::dim::{Dim, volume};
use crate::tensor::fact::Fact;
use crate::tensor::{DType, Tensor};

pub fn constant(scope: &mut Scope<'_>) -> Outputs {
    let tensor = if let Some(tensor) = scope.value_of("value")? {
        if let (Payload::Missing { path }, Ok(fact)) = (&tensor.payload, fact_of(&tensor)) {
            // If the external file is missing, the constant is treated like an initializer with a shape and no values.
            let name = scope.node.outputs.first().cloned().unwrap_or_default();
            let weights = &mut scope.ledger.weights;
            weights.push(Weight::new(name, fact, Err(path.clone()), false));
            return Ok(vec![Known::Weight(weights.len() - 1)]);
        }
        tensor_of(&tensor).map_err(LowerReason::Unsupported)?
    } else if scope.is_set("value_int") {
        Tensor::from_i64(&[], &[scope.int("value_int", 0)?])
    } else if let Some(list) = scope.ints("value_ints")? {
        Tensor::from_i64(&[list.len()], &list)
    } else if let Some(list) = scope.floats("value_floats")? {
        Tensor::from_f32(&[list.len()], &list)
    } else if scope.is_set("value_float") {
        Tensor::from_f32(&[], &[scope.float("value_float", 0.0)? as f32])
    } else {
        return Err(LowerReason::Unsupported("a constant without numbers".to_string()));
    };
    Ok(vec![Known::Tensor(tensor)])
}

/// A tensor filled with one value; the shape comes from the input.
pub fn constant_of_shape(scope: &mut Scope<'_>) -> Outputs {
    let shape = scope.dims(0, "the shape")?.ok_or(LowerReason::Missing { slot: 0 })?;
    let value = match scope.value_of("value")? {
        Some(tensor) => tensor_of(&tensor).map_err(LowerReason::Unsupported)?,
        None => Tensor::from_f32(&[1], &[0.0]),
    };
    let value = value
        .reshaped(Vec::new())
        .map_err(|e| LowerReason::Inputs(format!("its value is not a single number: {e}")))?;
    let value = scope.constant(value)?;
    Ok(vec![Known::Value(scope.broadcast(value, shape)?)])
}

/// `start, start + delta, …` below `limit`.
pub fn range(scope: &mut Scope<'_>) -> Outputs {
    let dtype = scope.fact_of(0)?.dtype;
    if scope.inputs.iter().flatten().any(|known| matches!(known, Known::Dims(_))) {
        return range_of_sizes(scope, dtype);
    }
    let mut bounds = [0.0; 3];
    let mut integers = [0i64; 3];
    for slot in 0..3 {
        let tensor = scope.tensor(slot, "a bound of the range")?.ok_or(LowerReason::Missing { slot })?;
        match (tensor.to_f64().as_slice(), tensor.to_i64().as_slice()) {
            (&[float], &[int]) => (bounds[slot], integers[slot]) = (float, int),
            _ => return Err(LowerReason::Inputs("a bound of the range is not one number".to_string())),
        }
    }
    let [start, limit, delta] = bounds;
    if delta == 0.0 || !(start.is_finite() && limit.is_finite() && delta.is_finite()) {
        return Err(LowerReason::Inputs(format!("no range leads from {start} to {limit} with step {delta}")));
    }
    let count = if dtype.is_float() {
        ((limit - start) / delta).ceil().max(0.0) as i64
    } else {
        // In 128 bits the difference of two 64-bit numbers cannot overflow.
        let [start, limit, delta] = integers.map(i128::from);
        let rounded = (limit - start + delta - delta.signum()) / delta;
        i64::try_from(rounded.max(0)).map_err(|_| LowerReason::Inputs("the range is too large".to_string()))?
    };
    let fact = Fact::new(if dtype.is_float() { DType::F64 } else { DType::I64 }, vec![Dim::Known(count)]);
    let steps = scope.add(Op::Iota(Iota { fact: fact.clone(), axis: 0 }), &[])?;
    let number = |scope: &mut Scope<'_>, at: usize| match dtype.is_float() {
        true => scope.constant(Tensor::from_f64(&[], &[bounds[at]])),
        false => scope.constant(Tensor::from_i64(&[], &[integers[at]])),
    };
    let mut y = steps;
    if delta != 1.0 {
        let delta = number(scope, 2)?;
        y = scope.binary(Binary::Mul, y, delta)?;
    }
    if start != 0.0 {
        let start = number(scope, 0)?;
        y = scope.binary(Binary::Add, y, start)?;
    }
    Ok(vec![Known::Value(scope.cast(y, dtype)?)])
}

fn range_of_sizes(scope: &mut Scope<'_>, dtype: DType) -> Outputs {
    let what = "a bound of the range";
    let bound = |scope: &Scope<'_>, slot: usize| match scope.dims(slot, what)?.as_deref() {
        Some([dim]) => Ok(dim.clone()),
        _ => Err(LowerReason::Inputs("a bound of the range is not one number".to_string())),
    };
    let (start, limit, delta) = (bound(scope, 0)?, bound(scope, 1)?, bound(scope, 2)?);
    let count = limit.sub(&start)?.div_exact(&delta)?;
    let steps = scope.count(1, 0, &count)?;
    let mut y = steps;
    for (op, slot, neutral) in [(Binary::Mul, 2, 1), (Binary::Add, 0, 0)] {
        if bound(scope, slot)?.is(neutral) {
            continue;
        }
        let number = scope.value(slot)?;
        let number = scope.cast(number, DType::I64)?;
        y = scope.binary(op, y, number)?;
    }
    Ok(vec![Known::Value(scope.cast(y, dtype)?)])
}

/// The sizes of the axes from `start` to `end`.
pub fn shape(scope: &mut Scope<'_>) -> Outputs {
    let dims = scope.fact_of(0)?.shape;
    let rank = dims.len() as i64;
    let clamp = |at: i64| (if at < 0 { at.saturating_add(rank) } else { at }).clamp(0, rank) as usize;
    let (start, end) = (clamp(scope.int("start", 0)?), clamp(scope.int("end", rank)?));
    let dims = dims.get(start..end).unwrap_or_default().to_vec();
    Ok(vec![Dims { dims, scalar: false, dtype: DType::I64 }.known()])
}

pub fn size(scope: &mut Scope<'_>) -> Outputs {
    let dims = vec![volume(&scope.fact_of(0)?.shape)?];
    Ok(vec![Dims { dims, scalar: true, dtype: DType::I64 }.known()])
}
