//! Operators that rearrange elements: diagonals, unfolding, pixel shuffle, roll and rotation.

use super::argument::Number;
use super::{Outputs, Scope, many, one};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::attribute::{self, axis};
use crate::import::onnx::lower::movement::transposed;
use crate::import::onnx::lower::slice::part;
use crate::op::{Binary, Concat, Flip, Gather, Op, Pad, ReduceKind, ScatterAdd, Value};
use crate::tensor::dim::{Dim, volume};
use crate::tensor::{DType, Tensor};

/// Size limit of a constant index.
const MOST: i64 = 1 << 20;

fn known(dim: &Dim) -> Result<i64, LowerReason> {
    dim.known().filter(|v| (0..=MOST).contains(v)).ok_or(LowerReason::NotConstant { what: "the size of the axis" })
}

/// Gathers constant indices along an axis, which takes `shape`.
fn taken(scope: &mut Scope<'_>, x: Value, axis: usize, shape: &[usize], places: &[i64]) -> Result<Value, LowerReason> {
    let index = scope.constant(Tensor::from_i64(shape, places))?;
    scope.add(Op::Gather(Gather { axis }), &[x, index])
}

/// Swaps two axes; the names of the axis arguments differ between aliases.
pub fn swapped(scope: &mut Scope<'_>, first: &'static str, second: &'static str) -> Outputs {
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    let (a, b) = (scope.axis(first, 0, rank)?, scope.axis(second, 1, rank)?);
    let mut perm: Vec<usize> = (0..rank).collect();
    if rank > 0 {
        perm.swap(a, b);
    }
    one(transposed(scope, x, perm)?)
}

/// Swaps the last two axes.
pub fn matrix_turned(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    if rank < 2 {
        return Err(LowerReason::Inputs(format!("{} is not a matrix", scope.fact(x))));
    }
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(rank - 1, rank - 2);
    one(transposed(scope, x, perm)?)
}

/// `movedim`: moves axes; the others keep their order.
pub fn moved(scope: &mut Scope<'_>) -> Outputs {
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
    let mut rest = (0..rank).filter(|at| !from.contains(at));
    let perm: Option<Vec<usize>> = perm.into_iter().map(|at| at.or_else(|| rest.next())).collect();
    let perm = perm.filter(|_| from.len() == to.len());
    let perm = perm.ok_or_else(|| LowerReason::Inputs("it moves axes to positions that do not exist".to_string()))?;
    one(transposed(scope, x, perm)?)
}

pub fn roll(scope: &mut Scope<'_>) -> Outputs {
    let given = scope.value("self")?;
    let shape = scope.fact(given).shape;
    let (shifts, dims) = (scope.ints("shifts")?.unwrap_or_default(), scope.ints("dims")?.unwrap_or_default());
    let mut x = given;
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
        let ahead = match size.known() {
            Some(0) => 0,
            Some(size) => shift.rem_euclid(size),
            None => return Err(LowerReason::NotConstant { what: "the size of the axis" }),
        };
        if ahead != 0 {
            let middle = size.sub(&Dim::Known(ahead))?;
            let front = part(scope, x, axis, middle.clone(), size)?;
            let back = part(scope, x, axis, Dim::Known(0), middle)?;
            x = scope.add(Op::Concat(Concat { axis }), &[front, back])?;
        }
    }
    one(scope.reshape(x, shape)?)
}

/// Reverses one axis.
pub fn flipped(scope: &mut Scope<'_>, axis: usize) -> Outputs {
    let x = scope.value("self")?;
    one(scope.add(Op::Flip(Flip { axes: vec![axis] }), &[x])?)
}

/// `rot90`: rotates a plane by multiples of 90°.
pub fn turned(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let rank = scope.fact(x).rank();
    let dims = scope.ints("dims")?.unwrap_or_else(|| vec![0, 1]);
    let [a, b] = dims[..] else { return Err(LowerReason::Inputs("a plane needs two axes".to_string())) };
    let (a, b) = (axis(a, rank)?, axis(b, rank)?);
    let mut perm: Vec<usize> = (0..rank).collect();
    perm.swap(a, b);
    one(match scope.int("k", 1)?.rem_euclid(4) {
        1 => {
            let y = scope.add(Op::Flip(Flip { axes: vec![b] }), &[x])?;
            transposed(scope, y, perm)?
        }
        2 => scope.add(Op::Flip(Flip { axes: vec![a.min(b), a.max(b)] }), &[x])?,
        3 => {
            let y = transposed(scope, x, perm)?;
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
    let sizes = [known(&shape[a])?, known(&shape[b])?];
    let mut perm: Vec<usize> = (0..rank).filter(|at| *at != a && *at != b).collect();
    perm.extend([a, b]);
    let y = transposed(scope, x, perm)?;
    let mut flat = scope.fact(y).shape[..rank - 2].to_vec();
    flat.push(Dim::Known(sizes[0] * sizes[1]));
    Ok((scope.reshape(y, flat)?, [a, b], sizes))
}

/// Indices of a diagonal in the flattened plane.
fn diagonal_places([rows, columns]: [i64; 2], offset: i64) -> Vec<i64> {
    let (row, column) = (offset.saturating_neg().max(0), offset.max(0));
    let count = (rows.saturating_sub(row)).min(columns.saturating_sub(column)).max(0);
    (0..count).map(|i| (row + i) * columns + column + i).collect()
}

pub fn diagonal(scope: &mut Scope<'_>) -> Outputs {
    let offset = scope.int("offset", 0)?;
    let (flat, _, sizes) = plane(scope)?;
    let places = diagonal_places(sizes, offset);
    let axis = scope.fact(flat).rank() - 1;
    one(taken(scope, flat, axis, &[places.len()], &places)?)
}

pub fn trace(scope: &mut Scope<'_>) -> Outputs {
    let (flat, _, sizes) = plane(scope)?;
    let places = diagonal_places(sizes, 0);
    let y = taken(scope, flat, 0, &[places.len()], &places)?;
    one(scope.reduce(ReduceKind::Sum, y, &[0], false)?)
}

/// `diagonal_scatter`: replaces a diagonal of a plane.
pub fn diagonal_written(scope: &mut Scope<'_>) -> Outputs {
    use crate::op::{Scatter, ScatterKind};
    let offset = scope.int("offset", 0)?;
    let shape = scope.fact_of("self")?.shape;
    let (flat, [a, b], sizes) = plane(scope)?;
    let source = scope.value("src")?;
    let source = scope.cast(source, scope.fact(flat).dtype)?;
    let places = diagonal_places(sizes, offset);
    let axis = scope.fact(flat).rank() - 1;
    let index = scope.constant(Tensor::from_i64(&[places.len()], &places))?;
    let y = scope.add(Op::Scatter(Scatter { kind: ScatterKind::Replace, axis }), &[flat, index, source])?;
    let mut apart = scope.fact(y).shape[..axis].to_vec();
    apart.extend(sizes.map(Dim::Known));
    let y = scope.reshape(y, apart)?;
    let order: Vec<usize> = (0..shape.len()).filter(|at| *at != a && *at != b).chain([a, b]).collect();
    let mut back = vec![0; shape.len()];
    for (at, from) in order.into_iter().enumerate() {
        back[from] = at;
    }
    one(transposed(scope, y, back)?)
}

/// `diag_embed`: the last axis as the diagonal of a zero matrix.
pub fn diagonal_spread(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let offset = scope.int("offset", 0)?;
    let Some((last, lead)) = shape.split_last() else {
        return Err(LowerReason::Inputs("a scalar has no diagonal".to_string()));
    };
    let (count, rank) = (known(last)?, shape.len() + 1);
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
    let mut apart = lead.to_vec();
    apart.extend([Dim::Known(size), Dim::Known(size)]);
    let y = scope.reshape(y, apart)?;
    let (a, b) = (axis(scope.int("dim1", -2)?, rank)?, axis(scope.int("dim2", -1)?, rank)?);
    let mut perm: Vec<Option<usize>> = vec![None; rank];
    (perm[a], perm[b]) = (Some(rank - 2), Some(rank - 1));
    let mut rest = 0..rank - 2;
    let perm = perm.into_iter().map(|at| at.or_else(|| rest.next()).unwrap_or(0)).collect();
    one(transposed(scope, y, perm)?)
}

/// `unfold` of a tensor: sliding windows of an axis, their elements as a new last axis.
pub fn windows(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let at = attribute::axis(scope.int("dimension", 0)?, shape.len())?;
    let (size, step, length) = (scope.int("size", 1)?, scope.int("step", 1)?, known(&shape[at])?);
    if size < 0 || size > length || step < 1 {
        return Err(LowerReason::Inputs(format!(
            "windows of size {size} and step {step} on an axis of length {length}"
        )));
    }
    let count = (length - size) / step + 1;
    if count.saturating_mul(size) > MOST {
        return Err(LowerReason::Inputs("too many window elements".to_string()));
    }
    let places: Vec<i64> = (0..count).flat_map(|w| (0..size).map(move |i| w * step + i)).collect();
    let y = taken(scope, x, at, &[count as usize, size as usize], &places)?;
    let mut perm: Vec<usize> = (0..=shape.len()).filter(|axis| *axis != at + 1).collect();
    perm.push(at + 1);
    one(transposed(scope, y, perm)?)
}

/// The patches of an image: per spatial axis, the index of every element of every window.
struct Patches {
    kernel: [i64; 2],
    count: [i64; 2],
    pads: [i64; 2],
    places: [Vec<i64>; 2],
}

impl Patches {
    fn read(scope: &Scope<'_>, sizes: [i64; 2]) -> Result<Patches, LowerReason> {
        let pair = |name: &'static str, default: i64| -> Result<[i64; 2], LowerReason> {
            let list = scope.ints(name)?.unwrap_or_else(|| vec![default]);
            match list[..] {
                [both] => Ok([both; 2]),
                [a, b] => Ok([a, b]),
                _ => Err(LowerReason::Attribute { name, found: format!("{list:?}"), expected: "two numbers" }),
            }
        };
        let (kernel, dilation) = (pair("kernel_size", 1)?, pair("dilation", 1)?);
        let (pads, stride) = (pair("padding", 0)?, pair("stride", 1)?);
        let (mut count, mut places) = ([0; 2], [Vec::new(), Vec::new()]);
        for i in 0..2 {
            let in_range = |v: i64, least: i64| (least..=MOST).contains(&v);
            let fits = in_range(kernel[i], 1) && in_range(dilation[i], 1) && in_range(pads[i], 0);
            let room = sizes[i] + 2 * pads[i] - dilation[i].saturating_mul(kernel[i] - 1) - 1;
            if !fits || !in_range(stride[i], 1) || room < 0 {
                return Err(LowerReason::Inputs(format!("windows of {kernel:?} on an image of {sizes:?}")));
            }
            count[i] = room / stride[i] + 1;
            if count[i].saturating_mul(kernel[i]) > MOST {
                return Err(LowerReason::Inputs("too many window elements".to_string()));
            }
            let window = |k: i64| (0..count[i]).map(move |o| k * dilation[i] + o * stride[i]);
            places[i] = (0..kernel[i]).flat_map(window).collect();
        }
        Ok(Patches { kernel, count, pads, places })
    }

    fn index(&self, scope: &mut Scope<'_>, axis: usize) -> Result<Value, LowerReason> {
        let shape = [self.kernel[axis] as usize, self.count[axis] as usize];
        scope.constant(Tensor::from_i64(&shape, &self.places[axis]))
    }
}

/// `im2col`: `[N, C, H, W]` to `[N, C·kernel, windows]`; `N` may be missing.
pub fn columns(scope: &mut Scope<'_>) -> Outputs {
    let given = scope.value("self")?;
    let mut shape = scope.fact(given).shape;
    let single = shape.len() == 3;
    if single {
        shape.insert(0, Dim::Known(1));
    }
    let [batch, channels, height, width] = &shape[..] else {
        return Err(LowerReason::Inputs(format!("its input is {}", scope.fact(given))));
    };
    let patches = Patches::read(scope, [known(height)?, known(width)?])?;
    let mut x = scope.reshape(given, shape.clone())?;
    let pads = vec![Dim::Known(0), Dim::Known(0), Dim::Known(patches.pads[0]), Dim::Known(patches.pads[1])];
    x = scope.add(Op::Pad(Pad { low: pads.clone(), high: pads, interior: vec![0; 4], value: 0.0 }), &[x])?;
    let (rows, across) = (patches.index(scope, 0)?, patches.index(scope, 1)?);
    x = scope.add(Op::Gather(Gather { axis: 2 }), &[x, rows])?;
    x = scope.add(Op::Gather(Gather { axis: 4 }), &[x, across])?;
    x = transposed(scope, x, vec![0, 1, 2, 4, 3, 5])?;
    let of = |pair: [i64; 2]| Dim::Known(pair[0] * pair[1]);
    let mut wide = vec![batch.clone(), channels.mul(&of(patches.kernel))?, of(patches.count)];
    if single {
        wide.remove(0);
    }
    one(scope.reshape(x, wide)?)
}

/// `col2im`: `[N, C·kernel, windows]` to an image, with overlapping elements summed. The adjoint of [`columns`].
pub fn image(scope: &mut Scope<'_>) -> Outputs {
    let given = scope.value("self")?;
    let mut shape = scope.fact(given).shape;
    let single = shape.len() == 2;
    if single {
        shape.insert(0, Dim::Known(1));
    }
    let ([batch, wide, windows], [height, width]) = (&shape[..], &scope.shape("output_size")?[..]) else {
        return Err(LowerReason::Inputs(format!("its input is {}", scope.fact(given))));
    };
    let sizes = [known(height)?, known(width)?];
    let patches = Patches::read(scope, sizes)?;
    let [kernel, count] = [patches.kernel, patches.count];
    if !windows.is(count[0] * count[1]) {
        return Err(LowerReason::Inputs(format!("{windows} windows for an image of {sizes:?}")));
    }
    let channels = wide.div_exact(&Dim::Known(kernel[0] * kernel[1]))?;
    let mut apart = vec![batch.clone(), channels.clone()];
    apart.extend([kernel[0], kernel[1], count[0], count[1]].map(Dim::Known));
    let x = scope.reshape(given, apart)?;
    let x = transposed(scope, x, vec![0, 1, 2, 4, 3, 5])?;
    let (rows, across) = (patches.index(scope, 0)?, patches.index(scope, 1)?);
    let padded = |i: usize| Dim::Known(sizes[i] + 2 * patches.pads[i]);
    let x = scope.add(Op::ScatterAdd(ScatterAdd { axis: 4, size: padded(1) }), &[x, across])?;
    let x = scope.add(Op::ScatterAdd(ScatterAdd { axis: 2, size: padded(0) }), &[x, rows])?;
    let from = patches.pads.map(Dim::Known);
    let x = part(scope, x, 2, from[0].clone(), from[0].add(height)?)?;
    let x = part(scope, x, 3, from[1].clone(), from[1].add(width)?)?;
    let mut whole = vec![batch.clone(), channels, height.clone(), width.clone()];
    if single {
        whole.remove(0);
    }
    one(scope.reshape(x, whole)?)
}

/// Pixel shuffle, or pixel unshuffle with `back`.
pub fn blocks(scope: &mut Scope<'_>, back: bool) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let factor = Dim::Known(scope.int(if back { "downscale_factor" } else { "upscale_factor" }, 1)?);
    let [lead @ .., channels, height, width] = &shape[..] else {
        return Err(LowerReason::Inputs(format!("its input is {}", scope.fact(x))));
    };
    let n = lead.len();
    let square = factor.mul(&factor)?;
    let (sizes, order, whole) = if back {
        let (high, wide) = (height.div_exact(&factor)?, width.div_exact(&factor)?);
        let whole = vec![channels.mul(&square)?, high.clone(), wide.clone()];
        (vec![channels.clone(), high, factor.clone(), wide, factor], [0, 2, 4, 1, 3], whole)
    } else {
        let fewer = channels.div_exact(&square)?;
        let whole = vec![fewer.clone(), height.mul(&factor)?, width.mul(&factor)?];
        (vec![fewer, factor.clone(), factor, height.clone(), width.clone()], [0, 3, 1, 4, 2], whole)
    };
    let apart = [lead, &sizes[..]].concat();
    let y = scope.reshape(x, apart)?;
    let y = transposed(scope, y, (0..n).chain(order.map(|at| n + at)).collect())?;
    one(scope.reshape(y, [lead, &whole[..]].concat())?)
}

/// `channel_shuffle`: interleaves the channels of groups.
pub fn shuffled(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let groups = Dim::Known(scope.int("groups", 1)?);
    let [batch, channels, rest @ ..] = &shape[..] else {
        return Err(LowerReason::Inputs(format!("its input is {}", scope.fact(x))));
    };
    let mut apart = vec![batch.clone(), groups.clone(), channels.div_exact(&groups)?];
    apart.extend_from_slice(rest);
    let y = scope.reshape(x, apart)?;
    let mut perm: Vec<usize> = (0..shape.len() + 1).collect();
    perm.swap(1, 2);
    let y = transposed(scope, y, perm)?;
    one(scope.reshape(y, shape)?)
}

/// `repeat_interleave`: repeats every element of an axis, or of the flattened tensor.
pub fn repeated(scope: &mut Scope<'_>) -> Outputs {
    let mut x = scope.value("self")?;
    let repeats = scope.dim("repeats")?.ok_or(LowerReason::NotConstant { what: "the number of repeats" })?;
    if !scope.has("dim") {
        x = scope.reshape(x, vec![volume(&scope.fact(x).shape)?])?;
    }
    let shape = scope.fact(x).shape;
    let at = attribute::axis(scope.int("dim", 0)?, shape.len())?;
    let (mut apart, mut stretched, mut joined) = (shape.clone(), shape.clone(), shape.clone());
    apart.insert(at + 1, Dim::Known(1));
    stretched.insert(at + 1, repeats.clone());
    joined[at] = shape[at].mul(&repeats)?;
    let x = scope.reshape(x, apart)?;
    let x = scope.broadcast(x, stretched)?;
    one(scope.reshape(x, joined)?)
}

/// `hstack` and similar: concatenates along `axis` after padding to `rank` axes. A vector becomes a row, or a column
/// with `columns`.
pub fn joined(scope: &mut Scope<'_>, axis: usize, rank: usize, columns: bool) -> Outputs {
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
    let dtype = parts.iter().map(|v| scope.fact(*v).dtype).reduce(super::promote::joined);
    for part in &mut parts {
        *part = scope.cast(*part, dtype.unwrap_or(scope.fact(first).dtype))?;
    }
    one(if parts.len() == 1 { parts[0] } else { scope.add(Op::Concat(Concat { axis }), &parts)? })
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
pub fn nearly_equal(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value("self")?;
    let shape = scope.fact(x).shape;
    let at = attribute::axis(scope.int("dim", 0)?, shape.len())?;
    let size = known(&shape[at])?;
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

/// `meshgrid`: broadcasts every vector along its own axis.
pub fn grids(scope: &mut Scope<'_>) -> Outputs {
    let mut parts = scope.values("tensors")?;
    let exchanged = scope.text("indexing", "ij")? == "xy" && parts.len() > 1;
    if exchanged {
        parts.swap(0, 1);
    }
    let mut shape = Vec::with_capacity(parts.len());
    for part in &parts {
        shape.push(volume(&scope.fact(*part).shape)?);
    }
    let mut made = Vec::with_capacity(parts.len());
    for (at, part) in parts.iter().enumerate() {
        let mut own = vec![Dim::Known(1); shape.len()];
        own[at].clone_from(&shape[at]);
        let grid = scope.reshape(*part, own)?;
        let grid = scope.broadcast(grid, shape.clone())?;
        let mut perm: Vec<usize> = (0..shape.len()).collect();
        if exchanged {
            perm.swap(0, 1);
        }
        made.push(transposed(scope, grid, perm)?);
    }
    if exchanged {
        made.swap(0, 1);
    }
    many(made)
}

/// `diff`: differences of neighbours, `n` times.
pub fn differences(scope: &mut Scope<'_>) -> Outputs {
    let mut x = scope.value("self")?;
    let at = attribute::axis(scope.int("dim", -1)?, scope.fact(x).rank())?;
    let times = scope.number("n")?.map_or(1.0, Number::float);
    if !(0.0..=64.0).contains(&times) {
        return Err(LowerReason::Unsupported(format!("a difference of order {times}")));
    }
    if scope.has("prepend") || scope.has("append") {
        let (before, behind) = (scope.optional("prepend")?, scope.optional("append")?);
        let dtype = scope.fact(x).dtype;
        let mut parts = Vec::with_capacity(3);
        for part in [before, Some(x), behind].into_iter().flatten() {
            parts.push(scope.cast(part, dtype)?);
        }
        x = scope.add(Op::Concat(Concat { axis: at }), &parts)?;
    }
    let truths = scope.fact(x).dtype == DType::Bool;
    for _ in 0..times as i64 {
        let size = scope.fact(x).shape[at].clone();
        let next = part(scope, x, at, Dim::Known(1), size.clone())?;
        let own = part(scope, x, at, Dim::Known(0), size.sub(&Dim::Known(1))?)?;
        let join = if truths { Binary::Xor } else { Binary::Sub };
        x = scope.binary(join, next, own)?;
    }
    one(x)
}
