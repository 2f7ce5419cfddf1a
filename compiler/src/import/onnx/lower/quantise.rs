//! Quantised operators: integers q represent `(q - zero point)·scale`.
//!
//! Products are computed in `f64`, where sums of products of 8-bit integers are exact. Rounding has no gradient, so
//! such models can be evaluated and planned, but layers before a rounding are not trained.

use super::attribute::axis;
use super::linear::product;
use super::slice::part;
use super::window::convolve;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::import::formula::{formula, formulas};
use crate::op::{Binary, ReduceKind, Unary, Value};
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
        _ => scope.element_type(name, 0, "the").map(Some),
    }
}

/// Expands a scale or zero point to broadcast with `dims`: per tensor, per axis or per block.
fn expand_scale(scope: &mut Scope<'_>, scale: Value, dims: &[Dim]) -> Result<Value, LowerReason> {
    let shape = scope.fact(scale).shape;
    if shape.iter().all(|d| d.is(1)) {
        return scope.reshape(scale, vec![]);
    }
    let at = axis(scope.int("axis", 1)?, dims.len())?;
    if let [size] = shape.as_slice() {
        // A per-axis scale for a vector can only belong to axis 0, whatever `axis` says.
        let at = if dims.len() == 1 { 0 } else { at };
        let mut row = vec![Dim::Known(1); dims.len()];
        row[at] = size.clone();
        return scope.reshape(scale, row);
    }
    let block = scope.int("block_size", 0)?;
    if block < 1 || shape.len() != dims.len() {
        return Err(LowerReason::Inputs(format!("{} is not a scale for {dims:?}", scope.fact(scale))));
    }
    let (mut block_shape, mut merged_shape) = (shape.clone(), shape.clone());
    block_shape.insert(at + 1, Dim::Known(1));
    let scale = scope.reshape(scale, block_shape.clone())?;
    block_shape[at + 1] = Dim::Known(block);
    let expanded = scope.broadcast(scale, block_shape)?;
    merged_shape[at] = shape[at].mul(&Dim::Known(block))?;
    let expanded = scope.reshape(expanded, merged_shape)?;
    part(scope, expanded, at, Dim::Known(0), dims[at].clone())
}

/// Rounds `x`, adds the zero point and saturates to the range of the element type.
fn saturate(scope: &mut Scope<'_>, x: Value, zero: Option<Value>, to: DType) -> Result<Value, LowerReason> {
    let (lowest, greatest) = range(to)?;
    let mut y = scope.unary(Unary::Round, x)?;
    if scope.fact(y).dtype != DType::F64 {
        y = scope.cast(y, DType::F32)?;
    }
    if let Some(zero) = zero {
        let zero = scope.cast(zero, scope.fact(y).dtype)?;
        y = scope.binary(Binary::Add, y, zero)?;
    }
    formula(scope, [y], |[y]| y.clamp(lowest, greatest).cast(to))
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
    let scale = expand_scale(scope, scale, &dims)?;
    let zero = zero.map(|zero| expand_scale(scope, zero, &dims)).transpose()?;
    let (x, scale) = (scope.cast(x, inner)?, scope.cast(scale, inner)?);
    let y = scope.binary(Binary::Div, x, scale)?;
    Ok(vec![Known::Value(saturate(scope, y, zero, to)?)])
}

/// `(x - zero point)·scale`
pub fn dequantize(scope: &mut Scope<'_>) -> Outputs {
    let (x, scale) = (scope.value(0)?, scope.value(1)?);
    let dims = scope.fact(x).shape;
    let to = type_of(scope, "output_dtype")?.unwrap_or(scope.fact(scale).dtype);
    let mut y = scope.cast(x, DType::I32)?;
    if let Some(zero) = scope.optional(2)? {
        let zero = expand_scale(scope, zero, &dims)?;
        let zero = scope.cast(zero, DType::I32)?;
        y = scope.binary(Binary::Sub, y, zero)?;
    }
    let scale = expand_scale(scope, scale, &dims)?;
    let (y, scale) = (scope.cast(y, to)?, scope.cast(scale, to)?);
    Ok(vec![Known::Value(scope.binary(Binary::Mul, y, scale)?)])
}

/// Quantises to 8 bits with scale and zero point computed from the values; the range includes zero.
pub fn dynamic_quantize(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let axes: Vec<usize> = (0..scope.fact(x).rank()).collect();
    let [scale, zero] = formulas(scope, [x], |[x]| {
        let maximum = x.reduce(ReduceKind::Max, &axes, false).max(0.0);
        let minimum = x.reduce(ReduceKind::Min, &axes, false).min(0.0);
        let reach = maximum - minimum;
        // For an all-zero input any scale is valid.
        let (zero, one) = (reach.number(0.0), reach.number(1.0));
        let flat = reach.equals(zero);
        let scale = flat.select(one, reach / 255.0);
        [scale, -(minimum / scale)]
    })?;
    let zero = saturate(scope, zero, None, DType::U8)?;
    let y = scope.binary(Binary::Div, x, scale)?;
    let y = saturate(scope, y, Some(zero), DType::U8)?;
    Ok([y, scale, zero].map(Known::Value).to_vec())
}

/// Input `slot` minus the zero point in input `zero`, in `f64`. A vector of zero points belongs to the axis
/// `from_back`, counted from the last.
fn subtract_zero_point(
    scope: &mut Scope<'_>,
    slot: usize,
    zero: usize,
    from_back: usize,
) -> Result<Value, LowerReason> {
    let x = scope.value(slot)?;
    let x = scope.cast(x, DType::F64)?;
    let Some(zero) = scope.optional(zero)? else { return Ok(x) };
    let zero = scope.cast(zero, DType::F64)?;
    let zero = expand_axis(scope, zero, from_back)?;
    scope.binary(Binary::Sub, x, zero)
}

/// Reshapes a scalar, or a vector along an axis counted from the last, for broadcasting.
fn expand_axis(scope: &mut Scope<'_>, value: Value, from_back: usize) -> Result<Value, LowerReason> {
    let shape = scope.fact(value).shape;
    match shape.as_slice() {
        dims if dims.iter().all(|d| d.is(1)) => scope.reshape(value, vec![]),
        [size] => {
            let mut row = vec![size.clone()];
            row.extend(vec![Dim::Known(1); from_back]);
            scope.reshape(value, row)
        }
        _ => Ok(value),
    }
}

pub fn matmul_integer(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (subtract_zero_point(scope, 0, 2, 1)?, subtract_zero_point(scope, 1, 3, 0)?);
    let y = product(scope, a, b)?;
    Ok(vec![Known::Value(scope.cast(y, DType::I32)?)])
}

/// Integer convolution in `i32`. Padding has the value zero after subtraction of the zero point.
pub fn conv_integer(scope: &mut Scope<'_>) -> Outputs {
    let axes = scope.fact_of(1)?.rank().saturating_sub(1);
    let (x, w) = (subtract_zero_point(scope, 0, 2, 0)?, subtract_zero_point(scope, 1, 3, axes)?);
    let y = convolve(scope, x, w)?;
    Ok(vec![Known::Value(scope.cast(y, DType::I32)?)])
}

/// `y·(a·b / c)`, quantised again. The quotient has the precision of the scales.
fn requantise(scope: &mut Scope<'_>, y: Value, scales: [Value; 3], zero: Option<Value>) -> Result<Value, LowerReason> {
    let [a, b, c] = scales;
    let y = formula(scope, [y, a, b, c], |[y, a, b, c]| y * (a * b / c).cast(DType::F64))?;
    let to = zero.map_or(DType::U8, |zero| scope.fact(zero).dtype);
    saturate(scope, y, zero, to)
}

pub fn qlinear_matmul(scope: &mut Scope<'_>) -> Outputs {
    let (a, b) = (subtract_zero_point(scope, 0, 2, 1)?, subtract_zero_point(scope, 3, 5, 0)?);
    let y = product(scope, a, b)?;
    let mut scales = Vec::new();
    for (slot, from_back) in [(1, 1), (4, 0), (6, 1)] {
        let scale = scope.value(slot)?;
        scales.push(expand_axis(scope, scale, from_back)?);
    }
    let zero = scope.optional(7)?;
    let zero = zero.map(|zero| expand_axis(scope, zero, 1)).transpose()?;
    Ok(vec![Known::Value(requantise(scope, y, [scales[0], scales[1], scales[2]], zero)?)])
}

/// Quantised convolution with quantised result. The unit of the bias is the product of both input scales.
pub fn qlinear_conv(scope: &mut Scope<'_>) -> Outputs {
    let rank = scope.fact_of(3)?.rank();
    let channel = rank.saturating_sub(2);
    let (x, w) = (subtract_zero_point(scope, 0, 2, 0)?, subtract_zero_point(scope, 3, 5, rank.saturating_sub(1))?);
    let mut y = convolve(scope, x, w)?;
    if let Some(bias) = scope.optional(8)? {
        let bias = scope.cast(bias, DType::F64)?;
        let bias = expand_axis(scope, bias, channel)?;
        y = scope.binary(Binary::Add, y, bias)?;
    }
    let mut scales = Vec::new();
    for slot in [1, 4, 6] {
        let scale = scope.value(slot)?;
        scales.push(expand_axis(scope, scale, channel)?);
    }
    let zero = scope.optional(7)?;
    let zero = zero.map(|zero| expand_axis(scope, zero, 0)).transpose()?;
    Ok(vec![Known::Value(requantise(scope, y, [scales[0], scales[1], scales[2]], zero)?)])
}
