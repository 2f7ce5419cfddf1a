//! Operators that move elements: `Transpose`, `Expand`, `Concat`, `Gather`, `Pad`, `Tile`, `Trilu`, `DepthToSpace`,
//! `SpaceToDepth`.

use super::attribute::axis;
use super::padding::{self, Mode};
use super::slice::part;
use super::{Known, LowerReason, Outputs, Scope, one, symbol};
use crate::import::build::Build;
use crate::import::embedding;
use crate::import::equal_sizes::agree;
use crate::import::lower_error::at_least_one;
use crate::import::symbolic_batch::{sample, with_batch_of};
use crate::op::{Binary, Compare, Gather, Op, Pad, Transpose, Value};
use crate::tensor::dim::Dim;
use crate::tensor::{DType, Tensor};
use std::cmp::Ordering;

/// Permutes the axes; reverses them by default.
pub fn transpose(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let rank = scope.fact(x).rank();
    let perm = match scope.ints("perm")? {
        Some(list) => list.into_iter().map(|a| axis(a, rank)).collect::<Result<Vec<_>, _>>()?,
        None => (0..rank).rev().collect(),
    };
    transposed(scope, x, perm).and_then(one)
}

pub fn transposed(scope: &mut impl Build, x: Value, perm: Vec<usize>) -> Result<Value, LowerReason> {
    if perm.iter().copied().eq(0..scope.fact(x).rank()) {
        return Ok(x);
    }
    scope.add(Op::Transpose(Transpose { perm }), &[x])
}

/// `x` with two axes exchanged.
pub fn swapped(scope: &mut impl Build, x: Value, a: usize, b: usize) -> Result<Value, LowerReason> {
    let mut perm: Vec<usize> = (0..scope.fact(x).rank()).collect();
    perm.swap(a, b);
    transposed(scope, x, perm)
}

/// `x` with its axes back where they were before they were permuted by `perm`.
pub fn permuted_back(scope: &mut impl Build, x: Value, perm: &[usize]) -> Result<Value, LowerReason> {
    let mut inverse = vec![0; perm.len()];
    perm.iter().enumerate().for_each(|(at, from)| inverse[*from] = at);
    transposed(scope, x, inverse)
}

/// The broadcast shape of two shapes. A symbol and a number other than 1 do not broadcast.
pub fn broadcast_shape(a: &[Dim], b: &[Dim]) -> Result<Vec<Dim>, LowerReason> {
    let rank = a.len().max(b.len());
    let at = |dims: &[Dim], i: usize| (i + dims.len()).checked_sub(rank).map_or(Dim::Known(1), |at| dims[at].clone());
    let meet = |(a, b): (Dim, Dim)| match (a.is(1), b.is(1)) {
        (true, _) => Ok(b),
        (_, true) => Ok(a),
        _ if a == b => Ok(a),
        _ => {
            agree(&a, &b)?;
            Err(LowerReason::Inputs(format!("sizes {a} and {b} do not broadcast")))
        }
    };
    (0..rank).map(|i| meet((at(a, i), at(b, i)))).collect()
}

/// `Expand`: broadcasts the input with the requested shape. Where that is 1, the input's size remains.
pub fn expand(scope: &mut Scope<'_>) -> Outputs {
    let mut target_shape = scope.dims(1, "the shape")?.ok_or(LowerReason::Missing { slot: 1 })?;
    let x = match open_batch(scope, 0, &target_shape)? {
        Some(value) => value,
        None => scope.value(0)?,
    };
    let x = match target_shape.len().checked_sub(scope.fact(x).rank()) {
        Some(ahead) => with_batch_of(scope, x, &target_shape[ahead..])?,
        None => x,
    };
    let old_shape = scope.fact(x).shape;
    // Only axes of size 1 expand, so a constant equal to the static batch size means the symbolic batch here.
    for (have, want) in old_shape.iter().rev().zip(target_shape.iter_mut().rev()) {
        if have.known().is_none() && want.known().is_some() && have.substitute(scope.frozen)? == *want {
            want.clone_from(have);
        }
    }
    let shape = broadcast_shape(&old_shape, &target_shape)?;
    scope.broadcast(x, shape).and_then(one)
}

/// Input `slot` with size 1 in place of the static batch size. Applies to a constant that has the static batch size
/// where `target_shape` (right-aligned) has the symbol, and equal values for all samples; else `None`.
pub fn open_batch(scope: &mut Scope<'_>, slot: usize, target_shape: &[Dim]) -> Result<Option<Value>, LowerReason> {
    let Some(Some(Known::Tensor(tensor))) = scope.inputs.get(slot) else { return Ok(None) };
    let mut batch_axis = None;
    for (at, want) in (0..tensor.shape().len()).rev().zip(target_shape.iter().rev()) {
        let size = tensor.shape()[at];
        let frozen = want.known().is_none() && size > 1 && want.substitute(scope.frozen)?.is(size as i64);
        if let Some(sample) = if frozen { sample(tensor, at) } else { None } {
            batch_axis = Some(sample);
            break;
        }
    }
    batch_axis.map(|sample| scope.constant(sample)).transpose()
}

pub fn concat(scope: &mut Scope<'_>) -> Outputs {
    let rank = scope.fact_of(0)?.rank();
    let axis = axis(scope.int("axis", 1)?, rank)?;
    let parts = (0..scope.inputs.len()).map(|slot| scope.value(slot)).collect::<Result<Vec<_>, _>>()?;
    scope.concat(&parts, axis).and_then(one)
}

pub fn gather(scope: &mut Scope<'_>) -> Outputs {
    let rank = scope.fact_of(0)?.rank();
    let axis = axis(scope.int("axis", 0)?, rank)?;
    let single = match scope.known(1)? {
        Known::Tensor(t) if t.shape().is_empty() => t.to_i64().first().copied(),
        _ => None,
    };
    let x = scope.value(0)?;
    // A single constant index becomes a slice, which is a view and whose gradient is a padding.
    if let Some(index) = single {
        let mut shape = scope.fact(x).shape;
        let begin = if index < 0 { shape[axis].add(&Dim::Known(index))? } else { Dim::Known(index) };
        let end = begin.add(&Dim::Known(1))?;
        let in_bounds = symbol::at_most(&Dim::Known(0), &begin) && symbol::at_most(&end, &shape[axis]);
        if shape[axis].known().is_some() && !in_bounds {
            return Err(LowerReason::Inputs(format!("index {index} is outside an axis of size {}", shape[axis])));
        }
        if in_bounds {
            let y = part(scope, x, axis, begin, end)?;
            shape.remove(axis);
            return scope.reshape(y, shape).and_then(one);
        }
    }
    let index = scope.value(1)?;
    let mut rows = scope.add(Op::Gather(Gather { axis }), &[x, index])?;
    // ONNX has no embeddings; the metadata tell what options the exporter left out.
    if let Some(arguments) = scope.node.torch_arguments("aten.embedding") {
        let padding = arguments.get(2).and_then(|text| text.parse().ok());
        let scaled = arguments.get(3) == Some(&"True");
        rows = embedding::with_options(scope, rows, [x, index], scaled, padding)?;
    }
    one(rows)
}

/// Pads with a constant value or with input elements; negative padding crops.
pub fn pad(scope: &mut Scope<'_>) -> Outputs {
    let mode = match scope.text("mode", "constant")?.as_str() {
        "constant" => None,
        name => Some(Mode::parse(name).ok_or_else(|| LowerReason::Unsupported(format!("padding of mode `{name}`")))?),
    };
    let pads = match scope.opset {
        ..11 => scope.ints("pads")?.map(|list| list.into_iter().map(Dim::Known).collect()),
        _ => scope.dims(1, "the padding")?,
    };
    let pads = pads.ok_or(LowerReason::Missing { slot: 1 })?;
    let mut x = scope.value(0)?;
    let rank = scope.fact(x).rank();
    let axes = match scope.integers(3, "the list of axes")? {
        Some(list) => list.into_iter().map(|a| axis(a, rank)).collect::<Result<Vec<_>, _>>()?,
        None => (0..rank).collect(),
    };
    if pads.len() != 2 * axes.len() {
        return Err(LowerReason::Inputs(format!("{} paddings for {} axes", pads.len(), axes.len())));
    }
    if let Some(mode) = mode {
        for (n, &at) in axes.iter().enumerate() {
            x = padding::pad_by_repetition(scope, x, at, [&pads[n], &pads[n + axes.len()]], mode)?;
        }
        return one(x);
    }
    let zero = Dim::Known(0);
    let (mut low, mut high) = (vec![zero.clone(); rank], vec![zero.clone(); rank]);
    for (n, &at) in axes.iter().enumerate() {
        let (before, after) = (&pads[n], &pads[n + axes.len()]);
        let negative = |d: &Dim| symbol::compare(d, &zero) == Some(Ordering::Less);
        if negative(before) || negative(after) {
            let size = scope.fact(x).shape[at].clone();
            let begin = if negative(before) { zero.sub(before)? } else { zero.clone() };
            let end = if negative(after) { size.add(after)? } else { size };
            x = part(scope, x, at, begin, end)?;
        }
        low[at] = if negative(before) { zero.clone() } else { before.clone() };
        high[at] = if negative(after) { zero.clone() } else { after.clone() };
    }
    if low.iter().chain(&high).all(|d| d.is(0)) {
        return one(x);
    }
    let value = match scope.opset {
        ..11 => scope.float("value", 0.0)?,
        _ if !scope.has(2) => 0.0,
        _ => match scope.known(2)? {
            Known::Tensor(t) => t.to_f64().first().copied().unwrap_or(0.0),
            _ => {
                let value = scope.value(2)?;
                return padding::pad_with(scope, x, low, high, value).and_then(one);
            }
        },
    };
    scope.add(Op::Pad(Pad { low, high, interior: vec![0; rank], value }), &[x]).and_then(one)
}

pub fn tile(scope: &mut Scope<'_>) -> Outputs {
    let repeats = scope.dims(1, "the number of repeats")?.ok_or(LowerReason::Missing { slot: 1 })?;
    let x = scope.value(0)?;
    let dims = scope.fact(x).shape;
    repeated(scope, x, &dims, &repeats).and_then(one)
}

/// `x`, of shape `dims` with added axes of size 1, repeated along each axis: `[a, b]` is broadcast to `[r, a, s, b]` and
/// reshaped to `[r·a, s·b]`.
pub fn repeated(scope: &mut impl Build, x: Value, dims: &[Dim], repeats: &[Dim]) -> Result<Value, LowerReason> {
    if repeats.len() != dims.len() {
        return Err(LowerReason::Inputs(format!("{} repeats for {} axes", repeats.len(), dims.len())));
    }
    let (mut unit_shape, mut expanded_shape, mut merged_shape) = (Vec::new(), Vec::new(), Vec::new());
    for (dim, repeat) in dims.iter().zip(repeats) {
        if !repeat.is(1) {
            unit_shape.push(Dim::Known(1));
            expanded_shape.push(repeat.clone());
        }
        unit_shape.push(dim.clone());
        expanded_shape.push(dim.clone());
        merged_shape.push(dim.mul(repeat)?);
    }
    let x = scope.reshape(x, unit_shape)?;
    let x = scope.broadcast(x, expanded_shape)?;
    scope.reshape(x, merged_shape)
}

/// `x` with every element of an axis repeated.
pub fn repeat_elements(scope: &mut impl Build, x: Value, axis: usize, repeats: &Dim) -> Result<Value, LowerReason> {
    let shape = scope.fact(x).shape;
    let (mut expanded_shape, mut merged_shape) = (shape.clone(), shape.clone());
    expanded_shape.insert(axis + 1, repeats.clone());
    merged_shape[axis] = shape[axis].mul(repeats)?;
    let x = scope.unsqueeze(x, axis + 1)?;
    let x = scope.broadcast(x, expanded_shape)?;
    scope.reshape(x, merged_shape)
}

pub fn trilu(scope: &mut Scope<'_>) -> Outputs {
    let upper = scope.flag("upper", true)?;
    let x = scope.value(0)?;
    match scope.integers(1, "the diagonal") {
        Err(LowerReason::NotConstant { .. } | LowerReason::Follows { .. }) => {
            let diagonal = scope.value(1)?;
            let diagonal = scope.cast(diagonal, DType::I64)?;
            let diagonal = scope.reshape(diagonal, vec![])?;
            triangle_at(scope, x, upper, Some(diagonal)).and_then(one)
        }
        known => triangle(scope, x, upper, known?.and_then(|k| k.first().copied()).unwrap_or(0)).and_then(one),
    }
}

/// The upper or lower triangle of the last two axes, relative to a constant diagonal.
pub fn triangle(scope: &mut impl Build, x: Value, upper: bool, diagonal: i64) -> Result<Value, LowerReason> {
    let diagonal = match diagonal {
        0 => None,
        diagonal => Some(scope.constant(Tensor::from_i64(&[], &[diagonal]))?),
    };
    triangle_at(scope, x, upper, diagonal)
}

/// Like [`triangle`], with the diagonal as a graph value; `None` is the main diagonal.
fn triangle_at(scope: &mut impl Build, x: Value, upper: bool, diagonal: Option<Value>) -> Result<Value, LowerReason> {
    let fact = scope.fact(x);
    let [.., rows, columns] = fact.shape.as_slice() else {
        return Err(LowerReason::Inputs(format!("a tensor of rank {} has no diagonal", fact.rank())));
    };
    let (mut i, j) = (scope.count(2, 0, rows)?, scope.count(2, 1, columns)?);
    if let Some(diagonal) = diagonal {
        i = scope.binary(Binary::Add, i, diagonal)?;
    }
    let (a, b) = if upper { (i, j) } else { (j, i) };
    let is_inside = scope.compare(Compare::LessEqual, a, b)?;
    let zero = scope.scalar(fact.dtype, 0.0)?;
    scope.select(is_inside, x, zero)
}

/// `[N, C, H, W]`: moves blocks of channels to height and width.
pub fn depth_to_space(scope: &mut Scope<'_>) -> Outputs {
    let perm = match scope.text("mode", "DCR")?.as_str() {
        "DCR" => vec![0, 3, 4, 1, 5, 2],
        "CRD" => vec![0, 1, 4, 2, 5, 3],
        other => return Err(LowerReason::Unsupported(format!("the mode `{other}`"))),
    };
    let (x, b, [n, c, h, w]) = blocks(scope)?;
    let out_channels = c.div_exact(&b.mul(&b)?)?;
    let split_shape = match perm[1] {
        3 => vec![n.clone(), b.clone(), b.clone(), out_channels.clone(), h.clone(), w.clone()],
        _ => vec![n.clone(), out_channels.clone(), b.clone(), b.clone(), h.clone(), w.clone()],
    };
    let x = scope.reshape(x, split_shape)?;
    let x = transposed(scope, x, perm)?;
    scope.reshape(x, vec![n, out_channels, h.mul(&b)?, w.mul(&b)?]).and_then(one)
}

/// `[N, C, H, W]`: moves blocks of height and width to channels.
pub fn space_to_depth(scope: &mut Scope<'_>) -> Outputs {
    let (x, b, [n, c, h, w]) = blocks(scope)?;
    let (out_height, out_width) = (h.div_exact(&b)?, w.div_exact(&b)?);
    let split_shape = vec![n.clone(), c.clone(), out_height.clone(), b.clone(), out_width.clone(), b.clone()];
    let x = scope.reshape(x, split_shape)?;
    let perm = match scope.text("mode", "DCR")?.as_str() {
        "DCR" => vec![0, 3, 5, 1, 2, 4],
        "CRD" => vec![0, 1, 3, 5, 2, 4],
        other => return Err(LowerReason::Unsupported(format!("the mode `{other}`"))),
    };
    let x = transposed(scope, x, perm)?;
    scope.reshape(x, vec![n, c.mul(&b)?.mul(&b)?, out_height, out_width]).and_then(one)
}

fn blocks(scope: &mut Scope<'_>) -> Result<(Value, Dim, [Dim; 4]), LowerReason> {
    let size = at_least_one("blocksize", scope.int("blocksize", 1)?)?;
    let x = scope.value(0)?;
    let dims: Result<[Dim; 4], _> = scope.fact(x).shape.try_into();
    let dims = dims.map_err(|_| LowerReason::Inputs("the input does not have rank 4".to_string()))?;
    Ok((x, Dim::Known(size), dims))
}
