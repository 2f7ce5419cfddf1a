//! Operators that create tensors from sizes and numbers, and triangular parts.

use super::argument::{Number, Operand};
use super::{NodeOutputs, Outputs, Scope, one, promote};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::movement::triangle;
use crate::op::{Binary, Compare};
use crate::tensor::dim::{Dim, volume};
use crate::tensor::{DType, Tensor};

/// `start, start + step, … < end`.
pub fn arange(scope: &mut Scope<'_>) -> Outputs {
    let floats = ["start", "end", "step"].iter().any(|name| matches!(scope.number(name), Ok(Some(Number::Float(_)))));
    if floats {
        return arange_of_floats(scope);
    }
    let number = |operand: Option<Operand>, default: i64| match operand {
        None => Ok(Dim::Known(default)),
        Some(Operand::Number(Number::Int(value))) => Ok(Dim::Known(value)),
        Some(Operand::Size(dim)) => Ok(dim),
        Some(_) => Err(LowerReason::Unsupported("a range of floats".to_string())),
    };
    let start = scope.operand("start")?;
    let step = scope.operand("step")?;
    let end = scope.operand("end")?;
    let (start, end, step) = (number(start, 0)?, number(end, 0)?, number(step, 1)?);
    let dtype = scope.dtype("dtype")?.unwrap_or(DType::I64);
    let span = end.sub(&start)?;
    let count = match (span.known(), step.known()) {
        (_, Some(0)) | (_, None) => return Err(LowerReason::Inputs(format!("a range with step {step}"))),
        (_, Some(1)) => span,
        (Some(span), Some(step)) => {
            let quotient = span.checked_div_euclid(step).unwrap_or(0);
            let remainder = i64::from(span.checked_rem_euclid(step).unwrap_or(0) != 0);
            // For a negative step, the Euclidean quotient already rounds up.
            Dim::Known(if step > 0 { quotient + remainder } else { quotient })
        }
        (None, Some(step)) => span.div_exact(&Dim::Known(step))?,
    };
    if count.known().is_some_and(|n| n < 0) {
        return Err(LowerReason::Inputs(format!("a range from {start} to {end}")));
    }
    let mut y = scope.count(1, 0, &count)?;
    for (op, dim) in [(Binary::Mul, &step), (Binary::Add, &start)] {
        if !dim.is(if op == Binary::Mul { 1 } else { 0 }) {
            let value = promote::value(scope, &size(dim), DType::I64)?;
            y = scope.binary(op, y, value)?;
        }
    }
    one(scope.cast(y, dtype)?)
}

/// Limit on the elements of a computed constant.
const MOST: f64 = (1 << 20) as f64;

fn arange_of_floats(scope: &mut Scope<'_>) -> Outputs {
    let (start, end, step) = (scope.float("start", 0.0)?, scope.float("end", 0.0)?, scope.float("step", 1.0)?);
    let count = ((end - start) / step).ceil();
    if !(0.0..=MOST).contains(&count) {
        return Err(LowerReason::Inputs(format!("a range from {start} to {end} with step {step}")));
    }
    let values: Vec<f64> = (0..count as usize).map(|i| start + i as f64 * step).collect();
    let dtype = scope.dtype("dtype")?.unwrap_or(DType::F32);
    one(scope.constant(Tensor::from_f64(&[values.len()], &values).cast(dtype))?)
}

/// `linspace`: `steps` numbers from `start` to `end` inclusive; `logspace` with `powers`.
pub fn linspace(scope: &mut Scope<'_>, powers: bool) -> Outputs {
    let (start, end, steps) = (scope.float("start", 0.0)?, scope.float("end", 0.0)?, scope.int("steps", 100)?);
    if !(0.0..=MOST).contains(&(steps as f64)) {
        return Err(LowerReason::Inputs(format!("{steps} numbers")));
    }
    let base = scope.float("base", 10.0)?;
    let intervals = (steps - 1).max(1) as f64;
    let at = |i: i64| if i == steps - 1 && steps > 1 { end } else { start + (end - start) * i as f64 / intervals };
    let values: Vec<f64> = (0..steps).map(|i| if powers { base.powf(at(i)) } else { at(i) }).collect();
    let dtype = scope.dtype("dtype")?.unwrap_or(DType::F32);
    one(scope.constant(Tensor::from_f64(&[values.len()], &values).cast(dtype))?)
}

pub fn eye(scope: &mut Scope<'_>) -> Outputs {
    let rows = scope.dim("n")?.ok_or(LowerReason::NotConstant { what: "the number of rows" })?;
    let columns = scope.dim("m")?.unwrap_or_else(|| rows.clone());
    let (i, j) = (scope.count(2, 0, &rows)?, scope.count(2, 1, &columns)?);
    let is_diagonal = scope.compare(Compare::Equal, i, j)?;
    let dtype = scope.dtype("dtype")?.unwrap_or(DType::F32);
    one(scope.cast(is_diagonal, dtype)?)
}

/// `tril_indices` and `triu_indices`: row indices, then column indices.
pub fn triangle_places(scope: &mut Scope<'_>, upper: bool) -> Outputs {
    let (rows, columns, offset) = (scope.int("row", 0)?, scope.int("col", 0)?, scope.int("offset", 0)?);
    if !(0..=1 << 10).contains(&rows) || !(0..=1 << 10).contains(&columns) {
        return Err(LowerReason::Inputs(format!("a {rows} by {columns} triangular matrix")));
    }
    let pairs = (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j)));
    let selected: Vec<(i64, i64)> =
        pairs.filter(|(i, j)| if upper { j - i >= offset } else { j - i <= offset }).collect();
    let values: Vec<i64> = selected.iter().map(|p| p.0).chain(selected.iter().map(|p| p.1)).collect();
    let dtype = scope.dtype("dtype")?.unwrap_or(DType::I64);
    one(scope.constant(Tensor::from_i64(&[2, selected.len()], &values).cast(dtype))?)
}

fn size(dim: &Dim) -> Operand {
    match dim.known() {
        Some(value) => Operand::Number(Number::Int(value)),
        None => Operand::Size(dim.clone()),
    }
}

/// `full`, `zeros`, `ones` and their `_like` forms. The fill value is `constant`, or else an argument; `like` takes
/// shape and type from `self`.
pub fn full(scope: &mut Scope<'_>, constant: Option<f64>, like: bool) -> Outputs {
    let source = if scope.has("self") { Some(scope.fact_of("self")?) } else { None };
    let shape = match &source {
        Some(fact) if like => fact.shape.clone(),
        _ => scope.shape("size")?,
    };
    let value = match constant {
        Some(value) => Number::Float(value),
        None => scope.number("fill_value")?.ok_or(LowerReason::NotConstant { what: "the fill value" })?,
    };
    let natural = source.map_or(value.dtype(), |fact| fact.dtype);
    let dtype = scope.dtype("dtype")?.unwrap_or(natural);
    let value = scope.constant(value.tensor(dtype))?;
    one(scope.broadcast(value, shape)?)
}

pub fn scalar_tensor(scope: &mut Scope<'_>) -> Outputs {
    let value = scope.operand("s")?.ok_or(LowerReason::NotConstant { what: "the number" })?;
    let dtype = scope.dtype("dtype")?.unwrap_or(DType::F32);
    one(promote::value(scope, &value, dtype)?)
}

/// `triu` or `tril`.
pub fn part(scope: &mut Scope<'_>, upper: bool) -> Outputs {
    let (x, diagonal) = (scope.value("self")?, scope.int("diagonal", 0)?);
    one(triangle(scope, x, upper, diagonal)?)
}

pub fn sym_size(scope: &mut Scope<'_>) -> Outputs {
    let fact = scope.fact_of("self")?;
    if fact.rank() == 0 {
        return Err(LowerReason::Inputs("a scalar has no axes".to_string()));
    }
    Ok(NodeOutputs::Size(fact.shape[scope.axis("dim", 0, fact.rank())?].clone()))
}

pub fn sym_numel(scope: &mut Scope<'_>) -> Outputs {
    Ok(NodeOutputs::Size(volume(&scope.fact_of("self")?.shape)?))
}

/// Arithmetic on sizes. Operands are positional: Python's operators do not name them.
pub fn size_arithmetic(
    scope: &mut Scope<'_>,
    join: fn(&Dim, &Dim) -> Result<Dim, crate::tensor::dim::DimError>,
) -> Outputs {
    use crate::import::fx::schema::{Argument, SymArgument};
    let operand = |at: usize| match scope.node.inputs.get(at).map(|input| &input.arg) {
        Some(Argument::AsInt(value) | Argument::AsSymInt(SymArgument::AsInt(value))) => Ok(Dim::Known(*value)),
        Some(Argument::AsSymInt(SymArgument::AsName(name))) => scope
            .names
            .sizes
            .get(name)
            .cloned()
            .ok_or_else(|| LowerReason::Inputs(format!("operand {at} is not a size"))),
        _ => Err(LowerReason::Inputs(format!("operand {at} is not a size"))),
    };
    Ok(NodeOutputs::Size(join(&operand(0)?, &operand(1)?)?))
}
