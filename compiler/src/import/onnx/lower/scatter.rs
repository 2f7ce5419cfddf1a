//! `ScatterElements`, `ScatterND`, `TensorScatter`: lowered to one scatter into the flattened tensor, with the flat
//! indices of `gather`.

use super::attribute::axis;
use super::gather::{count, element_places, joined, number, slice_places};
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
    let along = axis(scope.int("axis", 0)?, dims.len())?;
    if kind == ScatterKind::Add
        && scope.fact(updates).shape == scope.fact(index).shape
        && let Some(slices) = batched::slices(scope, &dims, index, along)?
    {
        return Ok(vec![Known::Value(batched::scatter_add(scope, x, slices, updates, along)?)]);
    }
    Ok(vec![Known::Value(written(scope, kind, x, index, updates, along)?)])
}

fn written(
    scope: &mut Scope<'_>,
    kind: ScatterKind,
    x: Value,
    index: Value,
    updates: Value,
    along: usize,
) -> Result<Value, LowerReason> {
    let dims = scope.fact(x).shape;
    let places = element_places(scope, &dims, index, along)?;
    let flat = scope.reshape(x, vec![volume(&dims)?])?;
    let y = scope.add(Op::Scatter(Scatter { kind, axis: 0 }), &[flat, places, updates])?;
    scope.reshape(y, dims)
}

/// Slices selected by the last axis of the index, as in `GatherND`.
pub fn nd(scope: &mut Scope<'_>) -> Outputs {
    let kind = kind(scope)?;
    let (x, index, updates) = (scope.value(0)?, scope.value(1)?, scope.value(2)?);
    let dims = scope.fact(x).shape;
    let (places, indexed) = slice_places(scope, &dims, index, 0)?;
    let flat = joined(scope, x, indexed)?;
    let y = scope.add(Op::Scatter(Scatter { kind, axis: 0 }), &[flat, places, updates])?;
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
    let (dims, piece) = (scope.fact(x).shape, scope.fact(updates).shape);
    let along = axis(scope.int("axis", -2)?, dims.len())?;
    if along == 0 || piece.len() != dims.len() {
        return Err(LowerReason::Inputs(format!("a cache of rank {} has no sequence axis {along}", dims.len())));
    }
    let mut place = count(scope, dims.len(), along, &piece[along])?;
    if let Some(starts) = scope.optional(2)? {
        let mut shape = vec![Dim::Known(1); dims.len()];
        shape[0] = dims[0].clone();
        let starts = scope.reshape(starts, shape)?;
        let starts = scope.cast(starts, DType::I64)?;
        place = scope.binary(Binary::Add, place, starts)?;
    }
    if circular {
        let size = number(scope, &dims[along])?;
        place = scope.binary(Binary::Mod, place, size)?;
    }
    let place = scope.broadcast(place, piece)?;
    Ok(vec![Known::Value(written(scope, ScatterKind::Replace, x, place, updates, along)?)])
}
