//! `ScatterElements`, `ScatterND`, `TensorScatter`: lowered to one scatter into the flattened tensor, with the flat
//! indices of `gather`.

use super::attribute::axis;
use super::gather::{check_rows, element_places, number, read_joined, slice_places};
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::batched;
use crate::import::build::Build;
use crate::op::{Binary, Op, Scatter, ScatterKind, Value};
use crate::tensor::DType;
use crate::tensor::dim::{Dim, volume};

fn kind(scope: &Scope<'_>) -> Result<ScatterKind, LowerReason> {
    Ok(match scope.text("reduction", "none")?.as_str() {
        "none" => ScatterKind::Replace,
        "add" => ScatterKind::Add,
        "mul" => ScatterKind::Mul,
        "max" => ScatterKind::Max,
        "min" => ScatterKind::Min,
        other => return Err(LowerReason::Unsupported(format!("the reduction `{other}`"))),
    })
}

/// `y[i, index[i, j, …], …] = updates[i, j, …]`, with the index at `axis`.
pub fn elements(scope: &mut Scope<'_>) -> Outputs {
    let kind = kind(scope)?;
    let (x, index, updates) = (scope.value(0)?, scope.value(1)?, scope.value(2)?);
    let dims = scope.fact(x).shape;
    let index_axis = axis(scope.int("axis", 0)?, dims.len())?;
    if kind == ScatterKind::Add
        && scope.fact(updates).shape == scope.fact(index).shape
        && let Some(slices) = batched::slices(scope, &dims, index, index_axis)?
    {
        return Ok(vec![Known::Value(batched::scatter_add(scope, x, slices, updates, index_axis)?)]);
    }
    check_rows(scope, &dims, index, index_axis)?;
    let flat_index = element_places(scope, &dims, index, index_axis)?;
    Ok(vec![Known::Value(into_flat(scope, kind, x, flat_index, updates)?)])
}

/// Scatters `updates` into the flattened `x` at flat indices `flat_index` of the same shape.
pub fn into_flat(
    scope: &mut impl Build,
    kind: ScatterKind,
    x: Value,
    flat_index: Value,
    updates: Value,
) -> Result<Value, LowerReason> {
    let shape = scope.fact(x).shape;
    let flat = scope.reshape(x, vec![volume(&shape)?])?;
    let y = scope.add(Op::Scatter(Scatter { kind, axis: 0 }), &[flat, flat_index, updates])?;
    scope.reshape(y, shape)
}

/// Slices selected by the last axis of the index, as in `GatherND`.
pub fn nd(scope: &mut Scope<'_>) -> Outputs {
    let kind = kind(scope)?;
    let (x, index, updates) = (scope.value(0)?, scope.value(1)?, scope.value(2)?);
    let dims = scope.fact(x).shape;
    let (flat_index, indexed) = slice_places(scope, &dims, index, 0)?;
    let flat = read_joined(scope, x, indexed)?;
    let y = scope.add(Op::Scatter(Scatter { kind, axis: 0 }), &[flat, flat_index, updates])?;
    Ok(vec![Known::Value(scope.reshape(y, dims)?)])
}

/// `TensorScatter`: writes a piece of a sequence into the cache of each sample, at its own start position.
pub fn tensor(scope: &mut Scope<'_>) -> Outputs {
    let circular = match scope.text("mode", "linear")?.as_str() {
        "linear" => false,
        "circular" => true,
        other => return Err(LowerReason::Unsupported(format!("the mode `{other}`"))),
    };
    let (x, updates) = (scope.value(0)?, scope.value(1)?);
    let (dims, update_shape) = (scope.fact(x).shape, scope.fact(updates).shape);
    let index_axis = axis(scope.int("axis", -2)?, dims.len())?;
    if index_axis == 0 || update_shape.len() != dims.len() {
        return Err(LowerReason::Inputs(format!("a cache of rank {} has no sequence axis {index_axis}", dims.len())));
    }
    let mut position = scope.count(dims.len(), index_axis, &update_shape[index_axis])?;
    if let Some(starts) = scope.optional(2)? {
        let mut shape = vec![Dim::Known(1); dims.len()];
        shape[0] = dims[0].clone();
        let starts = scope.reshape(starts, shape)?;
        let starts = scope.cast(starts, DType::I64)?;
        position = scope.binary(Binary::Add, position, starts)?;
    }
    if circular {
        let size = number(scope, &dims[index_axis])?;
        position = scope.binary(Binary::Mod, position, size)?;
    }
    let position = scope.broadcast(position, update_shape)?;
    check_rows(scope, &dims, position, index_axis)?;
    let flat_index = element_places(scope, &dims, position, index_axis)?;
    Ok(vec![Known::Value(into_flat(scope, ScatterKind::Replace, x, flat_index, updates)?)])
}
