//! Operators that rearrange elements: diagonals, unfolding, pixel shuffle, roll and rotation.

use super::argument::Number;
use super::window::{self, with_batch, without_batch};
use super::{Outputs, Scope, many, one};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute::{self, axis};
use crate::import::onnx::lower::movement::{permuted_back, repeat_elements, swapped, transposed};
use crate::import::onnx::lower::slice::part;
use crate::import::patches::Patches;
use crate::op::{Binary, Flip, Gather, Op, Pad, ReduceKind, Value};
use crate::tensor::dim::{Dim, volume};
use crate::tensor::{DType, Tensor};

/// Size limit of a constant index.
const MOST: i64 = 1 << 20;

fn static_size(dim: &Dim) -> Result<i64, LowerReason> {
    dim.known().filter(|v| (0..=MOST).contains(v)).ok_or(LowerReason::NotConstant { what: "the size of the axis" })
}

/// Gathers constant indices along an axis, which takes `shape`.
fn gather_constant(
    scope: &mut Scope<'_>,
    x: Value,
    axis: usize,
    shape: &[usize],
    indices: &[i64],
) -> Result<Value, LowerReason> {
    let index = scope.constant(Tensor::from_i64(shape, indices))?;
    scope.add(Op::Gather(Gather { axis }), &[x, index])
}

/// Swaps two axes; the names of the axis arguments differ between aliases.
pub fn swap_axes(scope: &mut Scope<'_>, first: &'static str, second: &'static str) -> Outputs {
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    let (a, b) = (scope.axis(first, 0, rank)?, scope.axis(second, 1, rank)?);
    one(if rank > 0 { swapped(scope, x, a, b)? } else { x })
}

pub fn transpose_matrix(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    if rank < 2 {
        return Err(LowerReason::Inputs(format!("{} is not a matrix", scope.fact(x))));
    }
    one(swapped(scope, x, rank - 1, rank - 2)?)
}

/// `movedim`: moves axes; the others keep their order.
pub fn move_axes(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    let list = |scope: &Scope<'_>, name| -> Result<Vec<usize>, LowerReason> {
        scope.ints(name)?.unwrap_or_default().into_iter().map(|a| axis(a, rank)).collect()
    };
    let (from, to) = (list(scope, "source")?, list(scope, "destination")?);
    let mut perm: Vec<Option<usize>> = vec![None; rank];
    for (from, to) in from.iter().zip(&to) {
        perm[*to] = Some(*from);
    }
    let mut other_axes = (0..rank).filter(|at| !from.contains(at));
    let perm: Option<Vec<usize>> = perm.into_iter().map(|at| at.or_else(|| other_axes.next())).collect();
    let perm = perm.filter(|_| from.len() == to.len());
    let perm = perm.ok_or_else(|| LowerReason::Inputs("it moves axes to positions that do not exist".to_string()))?;
    one(transposed(scope, x, perm)?)
}

pub fn roll(scope: &mut Scope<'_>) -> Outputs {
    let input = scope.value("self")?;
    let shape = scope.fact(input).shape;
    let (shifts, dims) = (scope.ints("shifts")?.unwrap_or_default(), scope.ints("dims")?.unwrap_or_default());
    let mut x = input;
    let mut axes = Vec::with_capacity(dims.len());
    if dims.is_empty() {
        x = scope.reshape(x, vec![volume(&shape)?])?;
        axes.push(0);
    } else {
        for dim in &dims {
            axes.push(axis(*dim, shape.len())?);
        }
    }
    if shifts.len() != axes.len() {
        return Err(LowerReason::Inputs(format!("{} shifts for {} axes", shifts.len(), axes.len())));
    }
    for (shift, axis) in shifts.into_iter().zip(axes) {
        let size = scope.fact(x).shape[axis].clone();
        let offset = match size.known() {
            Some(0) => 0,
            Some(size) => shift.rem_euclid(size),
            None => return Err(LowerReason::NotConstant { what: "the size of the axis" }),
        };
        if offset != 0 {
            let middle = size.sub(&Dim::Known(offset))?;
            let front = part(scope, x, axis, middle.clone(), size)?;
            let back = part(scope, x, axis, Dim::Known(0), middle)?;
            x = scope.concat(&[front, back], axis)?;
        }
    }
    one(scope.reshape(x, shape)?)
}

pub fn flip_axis(scope: &mut Scope<'_>, axis: usize) -> Outputs {
    let x = scope.value("self")?;
    one(scope.add(Op::Flip(Flip { axes: vec![axis] }), &[x])?)
}

/// `rot90`: rotates a plane by multiples of 90°.
pub fn rotate(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    let dims = scope.ints("dims")?.unwrap_or_else(|| vec![0, 1]);
    let [a, b] = dims[..] else { return Err(LowerReason::Inputs("a plane needs two axes".to_string())) };
    let (a, b) = (axis(a, rank)?, axis(b, rank)?);
    one(match scope.int("k", 1)?.rem_euclid(4) {
        1 => {
            let y = scope.add(Op::Flip(Flip { axes: vec![b] }), &[x])?;
            swapped(scope, y, a, b)?
        }
        2 => scope.add(Op::Flip(Flip { axes: vec![a.min(b), a.max(b)] }), &[x])?,
        3 => {
            let y = swapped(scope, x, a, b)?;
            scope.add(Op::Flip(Flip { axes: vec![b] }), &[y])?
        }
        _ => x,
    })
}

/// Reads the two axes of a plane; returns the operand with the plane flattened into its last axis, the axes, and the
/// plane's sizes.
fn plane(scope: &mut Scope<'_>) -> Result<(Value, [usize; 2], [i64; 2]), LowerReason> {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let rank = shape.len();
    let a = attribute::axis(scope.int("dim1", 0)?, rank)?;
    let b = attribute::axis(scope.int("dim2", 1)?, rank)?;
    if a == b {
        return Err(LowerReason::Inputs("a plane needs two axes".to_string()));
    }
    let sizes = [static_size(&shape[a])?, static_size(&shape[b])?];
    let mut perm: Vec<usize> = (0..rank).filter(|at| *at != a && *at != b).collect();
    perm.extend([a, b]);
    let y = transposed(scope, x, perm)?;
    let mut flat = scope.fact(y).shape[..rank - 2].to_vec();
    flat.push(Dim::Known(sizes[0] * sizes[1]));
    Ok((scope.reshape(y, flat)?, [a, b], sizes))
}

/// Indices of a diagonal in the flattened plane.
fn diagonal_indices([rows, columns]: [i64; 2], offset: i64) -> Vec<i64> {
    let (row, column) = (offset.saturating_neg().max(0), offset.max(0));
    let count = (rows.saturating_sub(row)).min(columns.saturating_sub(column)).max(0);
    (0..count).map(|i| (row + i) * columns + column + i).collect()
}

pub fn diagonal(scope: &mut Scope<'_>) -> Outputs {
    let offset = scope.int("offset", 0)?;
    let (flat, _, sizes) = plane(scope)?;
    let indices = diagonal_indices(sizes, offset);
    let axis = scope.fact(flat).rank() - 1;
    one(gather_constant(scope, flat, axis, &[indices.len()], &indices)?)
}

pub fn trace(scope: &mut Scope<'_>) -> Outputs {
    let (flat, _, sizes) = plane(scope)?;
    let indices = diagonal_indices(sizes, 0);
    let y = gather_constant(scope, flat, 0, &[indices.len()], &indices)?;
    one(scope.reduce(ReduceKind::Sum, y, &[0], false)?)
}

/// `diagonal_scatter`: replaces a diagonal of a plane.
pub fn diagonal_scatter(scope: &mut Scope<'_>) -> Outputs {
    use crate::op::{Scatter, ScatterKind};
    let offset = scope.int("offset", 0)?;
    let shape = scope.fact_of("self")?.shape;
    let (flat, [a, b], sizes) = plane(scope)?;
    let source = scope.value("src")?;
    let source = scope.cast(source, scope.fact(flat).dtype)?;
    let indices = diagonal_indices(sizes, offset);
    let axis = scope.fact(flat).rank() - 1;
    let index = scope.constant(Tensor::from_i64(&[indices.len()], &indices))?;
    let y = scope.add(Op::Scatter(Scatter { kind: ScatterKind::Replace, axis }), &[flat, index, source])?;
    let mut split_shape = scope.fact(y).shape[..axis].to_vec();
    split_shape.extend(sizes.map(Dim::Known));
    let y = scope.reshape(y, split_shape)?;
    let perm: Vec<usize> = (0..shape.len()).filter(|at| *at != a && *at != b).chain([a, b]).collect();
    one(permuted_back(scope, y, &perm)?)
}

/// `diag_embed`: the last axis as the diagonal of a zero matrix.
pub fn diagonal_embed(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let offset = scope.int("offset", 0)?;
    let Some((last, lead)) = shape.split_last() else {
        return Err(LowerReason::Inputs("a scalar has no diagonal".to_string()));
    };
    let (count, rank) = (static_size(last)?, shape.len() + 1);
    let size = count.checked_add(offset.saturating_abs()).filter(|m| *m <= 1 << 15 && count > 0);
    let size = size.ok_or_else(|| LowerReason::Inputs(format!("a diagonal of {count} elements at {offset}")))?;
    // In the flattened plane, neighbours on the diagonal are `size + 1` apart.
    let low = if offset >= 0 { offset } else { -offset * size };
    let high = size * size - low - ((count - 1) * (size + 1) + 1);
    let mut pad = Pad {
        low: vec![Dim::Known(0); shape.len()],
        high: vec![Dim::Known(0); shape.len()],
        interior: vec![0; shape.len()],
        value: 0.0,
    };
    let at = shape.len() - 1;
    (pad.low[at], pad.high[at], pad.interior[at]) = (Dim::Known(low), Dim::Known(high), size as usize);
    let y = scope.add(Op::Pad(pad), &[x])?;
    let mut matrix_shape = lead.to_vec();
    matrix_shape.extend([Dim::Known(size), Dim::Known(size)]);
    let y = scope.reshape(y, matrix_shape)?;
    let (a, b) = (axis(scope.int("dim1", -2)?, rank)?, axis(scope.int("dim2", -1)?, rank)?);
    let mut perm: Vec<Option<usize>> = vec![None; rank];
    (perm[a], perm[b]) = (Some(rank - 2), Some(rank - 1));
    let mut other_axes = 0..rank - 2;
    let perm = perm.into_iter().map(|at| at.or_else(|| other_axes.next()).unwrap_or(0)).collect();
    one(transposed(scope, y, perm)?)
}

/// `unfold` of a tensor: sliding windows of an axis, their elements as a new last axis.
pub fn windows(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let at = attribute::axis(scope.int("dimension", 0)?, shape.len())?;
    let (size, step, length) = (scope.int("size", 1)?, scope.int("step", 1)?, static_size(&shape[at])?);
    if size < 0 || size > length || step < 1 {
        return Err(LowerReason::Inputs(format!(
            "windows of size {size} and step {step} on an axis of length {length}"
        )));
    }
    let count = (length - size) / step + 1;
    if count.saturating_mul(size) > MOST {
        return Err(LowerReason::Inputs("too many window elements".to_string()));
    }
    let indices: Vec<i64> = (0..count).flat_map(|w| (0..size).map(move |i| w * step + i)).collect();
    let y = gather_constant(scope, x, at, &[count as usize, size as usize], &indices)?;
    let mut perm: Vec<usize> = (0..=shape.len()).filter(|axis| *axis != at + 1).collect();
    perm.push(at + 1);
    one(transposed(scope, y, perm)?)
}

fn patches(scope: &Scope<'_>, sizes: &[Dim]) -> Result<Patches, LowerReason> {
    let (window, _) = window::convolution_window(scope, sizes.len())?;
    Patches::new(sizes, &window::each(scope, "kernel_size", sizes.len(), 1, 1)?, window)
}

/// `im2col`: `[N, C, H, W]` to `[N, C·kernel, windows]`; `N` may be missing.
pub fn unfold_image(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let (rank, x) = (shape.len(), with_batch(scope, x, 4)?);
    let patches = patches(scope, &shape[rank - 2..])?;
    let y = patches.unfold(scope, x)?;
    one(without_batch(scope, y, rank == 3)?)
}

/// `col2im`: `[N, C·kernel, windows]` to an image, with overlapping elements summed. The adjoint of [`unfold_image`].
pub fn fold(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let (rank, x) = (scope.fact(x).rank(), with_batch(scope, x, 3)?);
    let sizes = scope.shape("output_size")?;
    if sizes.len() != 2 {
        return Err(LowerReason::Inputs(format!("an image of {} axes", sizes.len())));
    }
    let y = patches(scope, &sizes)?.fold(scope, x)?;
    one(without_batch(scope, y, rank == 2)?)
}

/// Pixel shuffle, or pixel unshuffle with `inverse`.
pub fn pixel_shuffle(scope: &mut Scope<'_>, inverse: bool) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let factor = Dim::Known(scope.int(if inverse { "downscale_factor" } else { "upscale_factor" }, 1)?);
    let [lead @ .., channels, height, width] = &shape[..] else {
        return Err(LowerReason::Inputs(format!("its input is {}", scope.fact(x))));
    };
    let n = lead.len();
    let square = factor.mul(&factor)?;
    let (sizes, order, output_shape) = if inverse {
        let (out_height, out_width) = (height.div_exact(&factor)?, width.div_exact(&factor)?);
        let output_shape = vec![channels.mul(&square)?, out_height.clone(), out_width.clone()];
        (vec![channels.clone(), out_height, factor.clone(), out_width, factor], [0, 2, 4, 1, 3], output_shape)
    } else {
        let out_channels = channels.div_exact(&square)?;
        let output_shape = vec![out_channels.clone(), height.mul(&factor)?, width.mul(&factor)?];
        (vec![out_channels, factor.clone(), factor, height.clone(), width.clone()], [0, 3, 1, 4, 2], output_shape)
    };
    let split_shape = [lead, &sizes[..]].concat();
    let y = scope.reshape(x, split_shape)?;
    let y = transposed(scope, y, (0..n).chain(order.map(|at| n + at)).collect())?;
    one(scope.reshape(y, [lead, &output_shape[..]].concat())?)
}

/// `channel_shuffle`: interleaves the channels of groups.
pub fn channel_shuffle(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let groups = Dim::Known(scope.int("groups", 1)?);
    let [batch, channels, spatial @ ..] = &shape[..] else {
        return Err(LowerReason::Inputs(format!("its input is {}", scope.fact(x))));
    };
    let mut split_shape = vec![batch.clone(), groups.clone(), channels.div_exact(&groups)?];
    split_shape.extend_from_slice(spatial);
    let y = scope.reshape(x, split_shape)?;
    let y = swapped(scope, y, 1, 2)?;
    one(scope.reshape(y, shape)?)
}

/// `repeat_interleave`: repeats every element of an axis, or of the flattened tensor.
pub fn repeat_interleave(scope: &mut Scope<'_>) -> Outputs {
    let mut x = scope.value("self")?;
    let repeats = scope.dim("repeats")?.ok_or(LowerReason::NotConstant { what: "the number of repeats" })?;
    if !scope.has("dim") {
        x = scope.reshape(x, vec![volume(&scope.fact(x).shape)?])?;
    }
    let at = attribute::axis(scope.int("dim", 0)?, scope.fact(x).rank())?;
    one(repeat_elements(scope, x, at, &repeats)?)
}

/// `hstack` and similar: concatenates along `axis` after padding to `rank` axes. A vector becomes a row, or a column
/// with `columns`.
pub fn stack(scope: &mut Scope<'_>, axis: usize, rank: usize, columns: bool) -> Outputs {
    let mut parts = scope.values("tensors")?;
    for part in &mut parts {
        let mut shape = scope.fact(*part).shape;
        while shape.len() < rank {
            match columns {
                true => shape.push(Dim::Known(1)),
                false => shape.insert(0, Dim::Known(1)),
            }
        }
        *part = scope.reshape(*part, shape)?;
    }
    let Some(&first) = parts.first() else { return Err(LowerReason::Inputs("it concatenates no tensors".to_string())) };
    let axis = axis.min(scope.fact(first).rank().saturating_sub(1));
    let dtype = parts.iter().map(|v| scope.fact(*v).dtype).reduce(super::promote::promote);
    for part in &mut parts {
        *part = scope.cast(*part, dtype.unwrap_or(scope.fact(first).dtype))?;
    }
    one(scope.concat(&parts, axis)?)
}

/// `atleast_nd`: extends the shape to at least `rank` axes.
pub fn at_least(scope: &mut Scope<'_>, rank: usize) -> Outputs {
    let x = scope.value("self")?;
    let mut shape = scope.fact(x).shape;
    match (shape.len(), rank) {
        (1, 3) => shape = vec![Dim::Known(1), shape[0].clone(), Dim::Known(1)],
        _ => {
            while shape.len() < rank {
                if shape.len() == 2 { shape.push(Dim::Known(1)) } else { shape.insert(0, Dim::Known(1)) }
            }
        }
    }
    one(scope.reshape(x, shape)?)
}

/// `tensor_split`: parts of an axis that differ by at most one element, or cut at indices.
pub fn tensor_split(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let at = attribute::axis(scope.int("dim", 0)?, shape.len())?;
    let size = static_size(&shape[at])?;
    let mut cuts = vec![0];
    match scope.ints("indices")? {
        Some(list) => {
            cuts.extend(list.into_iter().map(|i| if i < 0 { i.saturating_add(size) } else { i }.clamp(0, size)));
        }
        None => {
            let sections = scope.int("sections", 1)?;
            if !(1..=1 << 20).contains(&sections) {
                return Err(LowerReason::Inputs(format!("{sections} sections of an axis")));
            }
            cuts.extend((1..sections).map(|n| n * (size / sections) + n.min(size % sections)));
        }
    }
    cuts.push(size);
    let mut parts = Vec::with_capacity(cuts.len());
    for pair in cuts.windows(2) {
        parts.push(part(scope, x, at, Dim::Known(pair[0]), Dim::Known(pair[1].max(pair[0])))?);
    }
    many(parts)
}

/// `meshgrid`: broadcasts every vector along its own axis; with `xy`, the first one along axis 1, the second along axis 0.
pub fn meshgrid(scope: &mut Scope<'_>) -> Outputs {
    let mut vectors = scope.values("tensors")?;
    let is_xy = scope.text("indexing", "ij")? == "xy" && vectors.len() > 1;
    if is_xy {
        vectors.swap(0, 1);
    }
    let mut shape = Vec::with_capacity(vectors.len());
    for vector in &vectors {
        shape.push(volume(&scope.fact(*vector).shape)?);
    }
    let mut grids = Vec::with_capacity(vectors.len());
    for (at, vector) in vectors.iter().enumerate() {
        let mut vector_shape = vec![Dim::Known(1); shape.len()];
        vector_shape[at].clone_from(&shape[at]);
        let grid = scope.reshape(*vector, vector_shape)?;
        grids.push(scope.broadcast(grid, shape.clone())?);
    }
    if is_xy {
        grids.swap(0, 1);
    }
    many(grids)
}

/// `diff`: differences of neighbours, `n` times.
pub fn differences(scope: &mut Scope<'_>) -> Outputs {
    let mut x = scope.value("self")?;
    let axis = attribute::axis(scope.int("dim", -1)?, scope.fact(x).rank())?;
    let order = scope.number("n")?.map_or(1.0, Number::float);
    if !(0.0..=64.0).contains(&order) {
        return Err(LowerReason::Unsupported(format!("a difference of order {order}")));
    }
    if scope.has("prepend") || scope.has("append") {
        let (prepend, append) = (scope.optional("prepend")?, scope.optional("append")?);
        let dtype = scope.fact(x).dtype;
        let mut parts = Vec::with_capacity(3);
        for part in [prepend, Some(x), append].into_iter().flatten() {
            parts.push(scope.cast(part, dtype)?);
        }
        x = scope.concat(&parts, axis)?;
    }
    let is_bool = scope.fact(x).dtype == DType::Bool;
    for _ in 0..order as i64 {
        let size = scope.fact(x).shape[axis].clone();
        let tail = part(scope, x, axis, Dim::Known(1), size.clone())?;
        let head = part(scope, x, axis, Dim::Known(0), size.sub(&Dim::Known(1))?)?;
        let op = if is_bool { Binary::Xor } else { Binary::Sub };
        x = scope.binary(op, tail, head)?;
    }
    one(x)
}
