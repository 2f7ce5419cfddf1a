//! Operators that move or reshape elements. Shape constants of a static export that contain the batch size are opened
//! by the same rule as in ONNX models.

use super::resize;
use super::{Outputs, Scope, many, one};
use crate::import::batch_in_axis::stride_within;
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute::{axes, axis};
use crate::import::onnx::lower::movement::{broadcast_shape, repeated, transposed};
use crate::import::onnx::lower::padding::Mode;
use crate::import::onnx::lower::reshape::target;
use crate::import::onnx::lower::slice::part;
use crate::op::{Flip, Op, Pad};
use crate::tensor::dim::{Dim, volume};
use crate::text::name::short_name;

/// Reshapes to the shape in argument `name`, with -1 inferred.
pub fn view(scope: &mut Scope<'_>, name: &'static str) -> Outputs {
    let target_shape = scope.shape(name)?;
    let input = scope.fact_of("self")?.shape;
    let x = scope.value("self")?;
    let shape = target(&input, &target_shape, true, scope.frozen, &|axis| stride_within(scope.graph(), x, axis))?;
    one(scope.reshape(x, shape)?)
}

pub fn view_as(scope: &mut Scope<'_>) -> Outputs {
    let shape = scope.fact_of("other")?.shape;
    let x = scope.value("self")?;
    one(scope.reshape(x, shape)?)
}

/// `as_strided`, only if it enumerates all elements in order: axes of size 1 come and go, as for the mean of a
/// channels-last image.
pub fn strided(scope: &mut Scope<'_>) -> Outputs {
    let refused = || LowerReason::Unsupported("as_strided, except of all elements in order,".to_string());
    let (sizes, strides) = (scope.shape("size")?, scope.ints("stride")?.unwrap_or_default());
    let x = scope.value("self")?;
    let old_shape = scope.fact(x).shape;
    let wide = |dims: &[Dim]| (0..dims.len()).filter(|at| !dims[*at].is(1)).collect::<Vec<_>>();
    let (from, to) = (wide(&old_shape), wide(&sizes));
    let is_same_size = |(a, b): (&usize, &usize)| -> Result<bool, LowerReason> {
        Ok(old_shape[*a] == sizes[*b] || old_shape[*a].substitute(scope.frozen)? == sizes[*b])
    };
    let same_sizes = from.len() == to.len()
        && from
            .iter()
            .zip(&to)
            .map(is_same_size)
            .collect::<Result<Vec<_>, _>>()?
            .into_iter()
            .all(|is_same_size| is_same_size);
    let steps = scope.strides("self").filter(|steps| steps.len() == old_shape.len() && strides.len() == sizes.len());
    let same_strides = steps.is_some_and(|steps| from.iter().zip(&to).all(|(a, b)| steps[*a] == strides[*b]));
    let offset_changed =
        scope.has("storage_offset") && Some(scope.int("storage_offset", 0)?) != scope.storage_offset("self");
    if !same_sizes || !same_strides || offset_changed {
        return Err(refused());
    }
    let mut shape = sizes;
    for (a, b) in from.iter().zip(&to) {
        shape[*b].clone_from(&old_shape[*a]);
    }
    one(scope.reshape(x, shape)?)
}

pub fn broadcast_tensors(scope: &mut Scope<'_>) -> Outputs {
    let mut values = scope.values("tensors")?;
    scope.align_batch(&mut values, None)?;
    let mut shape = Vec::new();
    for value in &values {
        shape = broadcast_shape(&shape, &scope.fact(*value).shape)?;
    }
    for value in &mut values {
        *value = scope.broadcast(*value, shape.clone())?;
    }
    many(values)
}

pub fn flatten(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let dims = scope.fact(x).shape;
    let (first, last) = (scope.axis("start_dim", 0, dims.len())?, scope.axis("end_dim", -1, dims.len())?);
    if dims.is_empty() {
        return one(scope.reshape(x, vec![Dim::Known(1)])?);
    }
    if first > last {
        return Err(LowerReason::Inputs(format!("it flattens from axis {first} to axis {last}")));
    }
    let mut shape = dims[..first].to_vec();
    shape.push(volume(&dims[first..=last])?);
    shape.extend_from_slice(&dims[last + 1..]);
    one(scope.reshape(x, shape)?)
}

pub fn unflatten(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let dims = scope.fact(x).shape;
    let at = scope.axis("dim", 0, dims.len())?;
    if dims.is_empty() {
        return Err(LowerReason::Inputs("a scalar has no axes".to_string()));
    }
    let new_sizes = scope.shape("sizes")?;
    let sizes = target(&dims[at..=at], &new_sizes, true, scope.frozen, &|_| stride_within(scope.graph(), x, at))?;
    let mut shape = dims[..at].to_vec();
    shape.extend(sizes);
    shape.extend_from_slice(&dims[at + 1..]);
    one(scope.reshape(x, shape)?)
}

pub fn permute(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    let list = scope.ints("dims")?.ok_or(LowerReason::NotConstant { what: "the order of the axes" })?;
    let perm = list.into_iter().map(|a| axis(a, rank)).collect::<Result<Vec<_>, _>>()?;
    one(transposed(scope, x, perm)?)
}

/// `t`: transposes a matrix; a vector is unchanged.
pub fn reverse_axes(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let perm = (0..scope.fact(x).rank()).rev().collect();
    one(transposed(scope, x, perm)?)
}

pub fn unsqueeze(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let at = scope.axis("dim", 0, scope.fact(x).rank() + 1)?;
    one(scope.unsqueeze(x, at)?)
}

/// Removes axes of size 1: the given ones that have that size, or all.
pub fn squeeze(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let dims = scope.fact(x).shape;
    let squeezed_axes = match scope.ints("dim")? {
        Some(list) if !dims.is_empty() => axes(&list, dims.len())?,
        _ => (0..dims.len()).collect(),
    };
    let is_kept = |at: &usize| !dims[*at].is(1) || squeezed_axes.binary_search(at).is_err();
    let shape = (0..dims.len()).filter(is_kept).map(|at| dims[at].clone()).collect();
    one(scope.reshape(x, shape)?)
}

/// Broadcasts to a shape; -1 keeps a size. A size equal to the exported batch size is the batch.
pub fn expand(scope: &mut Scope<'_>) -> Outputs {
    let old_shape = scope.fact_of("self")?.shape;
    let mut target_shape = match scope.has("other") {
        true => scope.fact_of("other")?.shape,
        false => scope.shape("size")?,
    };
    for (have, want) in old_shape.iter().rev().zip(target_shape.iter_mut().rev()) {
        let is_frozen = have.known().is_none() && want.known().is_some() && have.substitute(scope.frozen)? == *want;
        if want.is(-1) || is_frozen {
            want.clone_from(have);
        }
    }
    let shape = broadcast_shape(&old_shape, &target_shape)?;
    let x = scope.value("self")?;
    one(scope.broadcast(x, shape)?)
}

/// `repeat` or `tile`.
pub fn repeat(scope: &mut Scope<'_>) -> Outputs {
    let mut repeats = scope.shape(if scope.has("dims") { "dims" } else { "repeats" })?;
    let x = scope.value("self")?;
    let mut dims = scope.fact(x).shape;
    if scope.has("dims") {
        // `tile` may give fewer repeats than axes.
        while repeats.len() < dims.len() {
            repeats.insert(0, Dim::Known(1));
        }
    }
    while dims.len() < repeats.len() {
        dims.insert(0, Dim::Known(1));
    }
    one(repeated(scope, x, &dims, &repeats)?)
}

/// Concatenation. Empty vectors are skipped, as in PyTorch.
pub fn concat(scope: &mut Scope<'_>) -> Outputs {
    let mut parts = scope.values("tensors")?;
    parts.retain(|v| !matches!(scope.fact(*v).shape.as_slice(), [only] if only.is(0)));
    let Some(&first) = parts.first() else { return Err(LowerReason::Inputs("it concatenates no tensors".to_string())) };
    let axis = scope.axis("dim", 0, scope.fact(first).rank())?;
    let dtype = parts.iter().map(|v| scope.fact(*v).dtype).reduce(super::promote::promote);
    for part in &mut parts {
        *part = scope.cast(*part, dtype.unwrap_or(scope.fact(first).dtype))?;
    }
    scope.align_batch(&mut parts, Some(axis))?;
    one(scope.concat(&parts, axis)?)
}

pub fn stack(scope: &mut Scope<'_>) -> Outputs {
    let parts = scope.values("tensors")?;
    let Some(&first) = parts.first() else { return Err(LowerReason::Inputs("it stacks no tensors".to_string())) };
    let rank = scope.fact(first).rank();
    let axis = scope.axis("dim", 0, rank + 1)?;
    if parts.iter().any(|part| scope.fact(*part).rank() != rank) {
        return Err(LowerReason::Inputs("it stacks tensors of different ranks".to_string()));
    }
    one(scope.stack(&parts, axis)?)
}

pub fn flip(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let list = scope.ints("dims")?.unwrap_or_default();
    let axes = axes(&list, scope.fact(x).rank())?;
    one(if axes.is_empty() { x } else { scope.add(Op::Flip(Flip { axes }), &[x])? })
}

/// Padding; pairs from the last axis on.
pub fn pad(scope: &mut Scope<'_>) -> Outputs {
    match scope.text("mode", "constant")?.as_str() {
        "constant" => {}
        "reflect" => return resize::pad(scope, Mode::Reflect, "pad"),
        "replicate" => return resize::pad(scope, Mode::Edge, "pad"),
        "circular" => return resize::pad(scope, Mode::Wrap, "pad"),
        other => return Err(LowerReason::Unsupported(format!("padding of mode `{}`", short_name(other)))),
    }
    let mut x = scope.value("self")?;
    let (rank, pads, value) = (scope.fact(x).rank(), scope.shape("pad")?, scope.float("value", 0.0)?);
    let is_paired = pads.len() % 2 == 0 && pads.len() / 2 <= rank;
    if !is_paired || pads.iter().any(|d| d.known().is_none()) {
        return Err(LowerReason::Unsupported(format!("a padding of {pads:?}")));
    }
    let (mut low, mut high) = (vec![Dim::Known(0); rank], vec![Dim::Known(0); rank]);
    for (n, pair) in pads.chunks_exact(2).enumerate() {
        let at = rank - 1 - n;
        let zero = Dim::Known(0);
        let crop = |d: &Dim| zero.sub(if d.known().is_some_and(|v| v < 0) { d } else { &zero });
        let (before, after) = (crop(&pair[0])?, crop(&pair[1])?);
        if !before.is(0) || !after.is(0) {
            // A negative padding crops.
            let end = scope.fact(x).shape[at].sub(&after)?;
            x = part(scope, x, at, before.clone(), end)?;
        }
        (low[at], high[at]) = (pair[0].add(&before)?, pair[1].add(&after)?);
    }
    if low.iter().chain(&high).all(|d| d.is(0)) {
        return one(x);
    }
    one(scope.add(Op::Pad(Pad { low, high, interior: vec![0; rank], value }), &[x])?)
}

/// [`detach::settle`](super::detach::settle) removes stops without effect.
pub fn detach(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    one(scope.stop_gradient(x)?)
}
