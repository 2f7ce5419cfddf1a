//! Quantised operators: integers q represent `(q - zero point)·scale`.
//!
//! Products are computed in `f64`, where sums of products of 8-bit integers are exact. Rounding has no gradient, so
//! such models can be evaluated and planned, but layers before a rounding are not trained.

use super::attribute::axis;
use super::linear::product;
use super::slice::part;
use super::weight::dtype_of;
use super::window::convolved;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::op::{Binary, Compare, ReduceKind, Unary, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;

fn range(dtype: DType) -> Result<(f64, f64), LowerReason> {
    Ok(match dtype {
        DType::U8 => (0.0, 255.0),
        DType::I8 => (-128.0, 127.0),
        DType::U16 => (0.0, 65535.0),
        DType::I16 => (-32768.0, 32767.0),
        DType::I32 => (-2147483648.0, 2147483647.0),
        other => return Err(LowerReason::Unsupported(format!("quantisation to {other}"))),
    })
}

/// The element type given by an attribute; `None` for 0.
fn type_of(scope: &Scope<'_>, name: &'static str) -> Result<Option<DType>, LowerReason> {
    match scope.int(name, 0)? {
        0 => Ok(None),
        code => match i32::try_from(code).ok().and_then(dtype_of) {
            Some(dtype) => Ok(Some(dtype)),
            None => Err(LowerReason::Unsupported(format!("the element type {code}"))),
        },
    }
}

/// Expands a scale or zero point to broadcast with `dims`: per tensor, per axis or per block.
fn stretched(scope: &mut Scope<'_>, given: Value, dims: &[Dim]) -> Result<Value, LowerReason> {
    let shape = scope.fact(given).shape;
    if shape.iter().all(|d| d.is(1)) {
        return scope.reshape(given, vec![]);
    }
    let at = axis(scope.int("axis", 1)?, dims.len())?;
    if let [size] = shape.as_slice() {
        // A per-axis scale for a vector can only belong to axis 0, whatever `axis` says.
        let at = if dims.len() == 1 { 0 } else { at };
        let mut row = vec![Dim::Known(1); dims.len()];
        row[at] = size.clone();
        return scope.reshape(given, row);
    }
    let block = scope.int("block_size", 0)?;
    if block < 1 || shape.len() != dims.len() {
        return Err(LowerReason::Inputs(format!("{} is not a scale for {dims:?}", scope.fact(given))));
    }
    let (mut apart, mut joined) = (shape.clone(), shape.clone());
    apart.insert(at + 1, Dim::Known(1));
    let given = scope.reshape(given, apart.clone())?;
    apart[at + 1] = Dim::Known(block);
    let wide = scope.broadcast(given, apart)?;
    joined[at] = shape[at].mul(&Dim::Known(block))?;
    let wide = scope.reshape(wide, joined)?;
    part(scope, wide, at, Dim::Known(0), dims[at].clone())
}

/// Rounds `x`, adds the zero point and saturates to the range of the element type.
fn saturated(scope: &mut Scope<'_>, x: Value, zero: Option<Value>, to: DType) -> Result<Value, LowerReason> {
    let (least, greatest) = range(to)?;
    let mut y = scope.unary(Unary::Round, x)?;
    if scope.fact(y).dtype != DType::F64 {
        y = scope.cast(y, DType::F32)?;
    }
    if let Some(zero) = zero {
        let zero = scope.cast(zero, scope.fact(y).dtype)?;
        y = scope.binary(Binary::Add, y, zero)?;
    }
    let y = scope.with_number(Binary::Max, y, least)?;
    let y = scope.with_number(Binary::Min, y, greatest)?;
    scope.cast(y, to)
}

/// `x / scale`, rounded, plus the zero point.
pub fn quantize(scope: &mut Scope<'_>) -> Outputs {
    let (x, scale) = (scope.value(0)?, scope.value(1)?);
    let dims = scope.fact(x).shape;
    let zero = scope.optional(2)?;
    let to = match (zero, type_of(scope, "output_dtype")?) {
        (Some(zero), _) => scope.fact(zero).dtype,
        (None, given) => given.unwrap_or(DType::U8),
    };
    let inner = type_of(scope, "precision")?.unwrap_or(scope.fact(scale).dtype);
    let scale = stretched(scope, scale, &dims)?;
    let zero = zero.map(|zero| stretched(scope, zero, &dims)).transpose()?;
    let (x, scale) = (scope.cast(x, inner)?, scope.cast(scale, inner)?);
    let y = scope.binary(Binary::Div, x, scale)?;
    Ok(vec![Known::Value(saturated(scope, y, zero, to)?)])
}

/// `(x - zero point)·scale`
pub fn dequantize(scope: &mut Scope<'_>) -> Outputs {
    let (x, scale) = (scope.value(0)?, scope.value(1)?);
    let dims = scope.fact(x).shape;
    let to = type_of(scope, "output_dtype")?.unwrap_or(scope.fact(scale).dtype);
    let mut y = scope.cast(x, DType::I32)?;
    if let Some(zero) = scope.optional(2)? {
        let zero = stretched(scope, zero, &dims)?;
        let zero = scope.cast(zero, DType::I32)?;
        y = scope.binary(Binary::Sub, y, zero)?;
    }
    let scale = stretched(scope, scale, &dims)?;
    let (y, scale) = (scope.cast(y, to)?, scope.cast(scale, to)?);
    Ok(vec![Known::Value(scope.binary(Binary::Mul, y, scale)?)])
}

/// Quantises to 8 bits with scale and zero point computed from the values; the range includes zero.
pub fn dynamic_quantize(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let axes: Vec<usize> = (0..scope.fact(x).rank()).collect();
    let most = scope.reduce(ReduceKind::Max, x, &axes, false)?;
    let most = scope.with_number(Binary::Max, most, 0.0)?;
    let least = scope.reduce(ReduceKind::Min, x, &axes, false)?;
    let least = scope.with_number(Binary::Min, least, 0.0)?;
    let reach = scope.binary(Binary::Sub, most, least)?;
    // For an all-zero input any scale is valid.
    let dtype = scope.fact(x).dtype;
    let (zero, one) = (scope.scalar(dtype, 0.0)?, scope.scalar(dtype, 1.0)?);
    let flat = scope.compare(Compare::Equal, reach, zero)?;
    let scale = scope.with_number(Binary::Div, reach, 255.0)?;
    let scale = scope.select(flat, one, scale)?;
    let below = scope.binary(Binary::Div, least, scale)?;
    let zero = scope.unary(Unary::Neg, below)?;
    let zero = saturated(scope, zero, None, DType::U8)?;
    let y = scope.binary(Binary::Div, x, scale)?;
    let y = saturated(scope, y, Some(zero), DType::U8)?;
    Ok([y, scale, zero].map(Known::Value).to_vec())
}

/// Input `slot` minus the zero point in input `zero`, in `f64`. A vector of zero points belongs to the axis
/// `from_back`, counted from the last.
fn centred(scope: &mut Scope<'_>, slot: usize, zero: usize, from_back: usize) -> Result<Value, LowerReason> {
    let x = scope.value(slot)?;
    let x = scope.cast(x, DType::F64)?;
    let Some(zero) = scope.optional(zero)? else { return Ok(x) };
    let zero = scope.cast(zero, DType::F64)?;
    let zero = listed(scope, zero, from_back)?;
    scope.binary(Binary::Sub, x, zero)
}

/// Reshapes a scalar, or a vector along an axis counted from the last, for broadcasting.
fn listed(scope: &mut Scope<'_>, given: Value, from_back: usize) -> Result<Value, LowerReason> {
    let shape = scope.fact(given).shape;
    match shape.as_slice() {
        dims if dims.iter().all(|d| d.is(1)) => scope.reshape(given, vec![]),
        [size] => {
            let mut row = vec![size.clone()];
            row.extend(vec![Dim::Known(1); from_back]);
            scope.reshape(given, row)
        }
        _ => Ok(given),
    }
}

pub fn matmul_integer(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (centred(scope, 0, 2, 1)?, centred(scope, 1, 3, 0)?);
    let y = product(scope, a, b)?;
    Ok(vec![Known::Value(scope.cast(y, DType::I32)?)])
}

/// Integer convolution in `i32`. Padding has the value zero after subtraction of the zero point.
pub fn conv_integer(scope: &mut Scope<'_>) -> Outputs {
    let axes = scope.fact_of(1)?.rank().saturating_sub(1);
    let (x, w) = (centred(scope, 0, 2, 0)?, centred(scope, 1, 3, axes)?);
    let y = convolved(scope, x, w)?;
    Ok(vec![Known::Value(scope.cast(y, DType::I32)?)])
}

/// `y·(a·b / c)`, quantised again. The quotient has the precision of the scales.
fn requantised(scope: &mut Scope<'_>, y: Value, scales: [Value; 3], zero: Option<Value>) -> Result<Value, LowerReason> {
    let [a, b, c] = scales;
    let product = scope.binary(Binary::Mul, a, b)?;
    let ratio = scope.binary(Binary::Div, product, c)?;
    let ratio = scope.cast(ratio, DType::F64)?;
    let y = scope.binary(Binary::Mul, y, ratio)?;
    let to = zero.map_or(DType::U8, |zero| scope.fact(zero).dtype);
    saturated(scope, y, zero, to)
}

pub fn qlinear_matmul(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (centred(scope, 0, 2, 1)?, centred(scope, 3, 5, 0)?);
    let y = product(scope, a, b)?;
    let mut scales = Vec::new();
    for (slot, from_back) in [(1, 1), (4, 0), (6, 1)] {
        let scale = scope.value(slot)?;
        scales.push(listed(scope, scale, from_back)?);
    }
    let zero = scope.optional(7)?;
    let zero = zero.map(|zero| listed(scope, zero, 1)).transpose()?;
    Ok(vec![Known::Value(requantised(scope, y, [scales[0], scales[1], scales[2]], zero)?)])
}

/// Quantised convolution with quantised result. The unit of the bias is the product of both input scales.
pub fn qlinear_conv(scope: &mut Scope<'_>) -> Outputs {
    let rank = scope.fact_of(3)?.rank();
    let channel = rank.saturating_sub(2);
    let (x, w) = (centred(scope, 0, 2, 0)?, centred(scope, 3, 5, rank.saturating_sub(1))?);
    let mut y = convolved(scope, x, w)?;
    if let Some(bias) = scope.optional(8)? {
        let bias = scope.cast(bias, DType::F64)?;
        let bias = listed(scope, bias, channel)?;
        y = scope.binary(Binary::Add, y, bias)?;
    }
    let mut scales = Vec::new();
    for slot in [1, 4, 6] {
        let scale = scope.value(slot)?;
        scales.push(listed(scope, scale, channel)?);
    }
    let zero = scope.optional(7)?;
    let zero = zero.map(|zero| listed(scope, zero, 0)).transpose()?;
    Ok(vec![Known::Value(requantised(scope, y, [scales[0], scales[1], scales[2]], zero)?)])
}
