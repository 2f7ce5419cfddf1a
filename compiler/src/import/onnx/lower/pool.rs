//! Pooling operators beyond max and average pooling: max-pool indices, `MaxUnpool`, Lp pooling, `LpNormalization`,
//! `Col2Im`.

use super::gather::scale_index;
use super::slice::full_slice;
use super::window::{pool_window, spatial_of};
use super::{Known, LowerReason, Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::formula::formula;
use crate::import::lower_error::at_least_one;
use crate::import::norm;
use crate::import::patches::Patches;
use crate::op::{ArgReduce, Binary, Conv, Gather, Op, Pad, ScatterAdd, Value, Window};
use crate::tensor::dim::{Dim, volume};
use crate::tensor::{DType, Tensor};

/// Maximum window size for max-pool indices: each window element is a slice of the input.
const TAPS: usize = 1024;

fn dims_of(kernel: &[usize]) -> Vec<Dim> {
    kernel.iter().map(|&k| Dim::from(k)).collect()
}

/// Flat index in `x` of the maximum of each window; ties give the first. `by_columns` numbers the spatial axes in
/// column-major order.
pub fn places(
    scope: &mut Scope<'_>,
    x: Value,
    kernel: &[usize],
    window: &Window,
    ceil: bool,
    by_columns: bool,
) -> Result<Value, LowerReason> {
    let shape = scope.fact(x).shape;
    let spatial = shape[2..].to_vec();
    let axes = spatial.len();
    let taps = kernel.iter().try_fold(1usize, |n, k| n.checked_mul(*k)).filter(|n| *n <= TAPS);
    let taps = taps.ok_or_else(|| LowerReason::Unsupported(format!("indices in windows of {kernel:?} elements")))?;
    let windows = window.output(&spatial, &dims_of(kernel), ceil).map_err(|e| LowerReason::Inputs(e.to_string()))?;
    let mut pad = Pad {
        low: vec![Dim::Known(0); axes + 2],
        high: vec![Dim::Known(0); axes + 2],
        interior: vec![0; axes + 2],
        value: f64::NEG_INFINITY,
    };
    for axis in 0..axes {
        // Pads up to the end of the last window.
        let last_start = windows[axis].sub(&Dim::Known(1))?.mul(&Dim::from(window.strides[axis]))?;
        let extent =
            last_start.add(&Dim::from(window.dilations[axis].saturating_mul(kernel[axis] - 1)))?.add(&Dim::Known(1))?;
        let low = Dim::from(window.pads_begin[axis]);
        let high = extent.sub(&spatial[axis])?.sub(&low)?;
        pad.low[axis + 2] = low;
        pad.high[axis + 2] = if high.known().is_some_and(|v| v < 0) { Dim::Known(0) } else { high };
    }
    let padded = scope.add(Op::Pad(pad), &[x])?;
    // Flat-index strides of the spatial axes.
    let mut strides = Vec::with_capacity(axes);
    for axis in 0..axes {
        strides.push(if by_columns { volume(&spatial[..axis])? } else { volume(&spatial[axis + 1..])? });
    }
    let static_strides: Option<Vec<i64>> = strides.iter().map(Dim::known).collect();
    let static_strides = static_strides
        .ok_or_else(|| LowerReason::Inputs("the indices for an image of symbolic size are unknown".to_string()))?;
    let (mut parts, mut table) = (Vec::with_capacity(taps), Vec::with_capacity(taps));
    let column: Vec<Dim> = [&shape[..2], &windows, &[Dim::Known(1)]].concat();
    for tap in 0..taps {
        let mut slice = full_slice(&scope.fact(padded).shape);
        let (mut remaining_tap, mut index) = (tap, 0i64);
        for axis in (0..axes).rev() {
            let at = (remaining_tap % kernel[axis]).saturating_mul(window.dilations[axis]);
            remaining_tap /= kernel[axis];
            let last_start = windows[axis].sub(&Dim::Known(1))?.mul(&Dim::from(window.strides[axis]))?;
            slice.begin[axis + 2] = Dim::from(at);
            slice.end[axis + 2] = last_start.add(&Dim::from(at + 1))?;
            slice.step[axis + 2] = window.strides[axis];
            index =
                index.saturating_add((at as i64 - window.pads_begin[axis] as i64).saturating_mul(static_strides[axis]));
        }
        let elements = scope.add(Op::Slice(slice), &[padded])?;
        parts.push(scope.reshape(elements, column.clone())?);
        table.push(index);
    }
    let elements = scope.concat(&parts, axes + 2)?;
    let winner = scope.add(Op::ArgReduce(ArgReduce { largest: true, axis: axes + 2, keep: false }), &[elements])?;
    let table = scope.constant(Tensor::from_i64(&[taps], &table))?;
    let mut index = scope.add(Op::Gather(Gather { axis: 0 }), &[table, winner])?;
    // Add the flat offset of each sample, channel and window.
    let image = volume(&spatial)?;
    let mut steps = vec![shape[1].mul(&image)?, image];
    for (stride, &last_start) in strides.iter().zip(&window.strides) {
        steps.push(stride.mul(&Dim::from(last_start))?);
    }
    for (axis, step) in steps.iter().enumerate() {
        let size = scope.fact(index).shape[axis].clone();
        let number = scope.count(axes + 2, axis, &size)?;
        let start = scale_index(scope, number, step)?;
        index = scope.binary(Binary::Add, index, start)?;
    }
    Ok(index)
}

/// `MaxUnpool`: puts each value at its index; other elements are zero.
pub fn max_unpool(scope: &mut Scope<'_>) -> Outputs {
    let (x, index) = (scope.value(0)?, scope.value(1)?);
    let sizes = spatial_of(scope, x)?;
    let axes = sizes.len();
    let kernel = scope.sizes_of("kernel_shape", axes, 1, 1)?;
    let strides = scope.sizes_of("strides", axes, 1, 1)?;
    let pads = scope.sizes_of("pads", 2 * axes, 0, 0)?;
    let fact = scope.fact(x);
    let mut shape = fact.shape[..2].to_vec();
    for axis in 0..axes {
        let full_size =
            sizes[axis].sub(&Dim::Known(1))?.mul(&Dim::from(strides[axis]))?.add(&Dim::from(kernel[axis]))?;
        shape.push(full_size.sub(&Dim::from(pads[axis]))?.sub(&Dim::from(pads[axes + axis]))?);
    }
    let (count, size) = (volume(&fact.shape)?, volume(&shape)?);
    let index = scope.cast(index, DType::I64)?;
    let index = scope.reshape(index, vec![count.clone()])?;
    let flat = scope.reshape(x, vec![count.clone()])?;
    let scatter = ScatterAdd { axis: 0, size };
    let mut y = scope.add(Op::ScatterAdd(scatter.clone()), &[flat, index])?;
    if (0..axes).any(|axis| strides[axis] < kernel[axis]) {
        // Overlapping windows may share a maximum, which would be added several times; divide by the count.
        let one = scope.scalar(fact.dtype, 1.0)?;
        let ones = scope.broadcast(one, vec![count])?;
        let counts = scope.add(Op::ScatterAdd(scatter), &[ones, index])?;
        let counts = scope.with_number(Binary::Max, counts, 1.0)?;
        y = scope.binary(Binary::Div, y, counts)?;
    }
    y = scope.reshape(y, shape.clone())?;
    if let Some(target_shape) = scope.dims(2, "the shape of the output")? {
        if target_shape.len() != shape.len() {
            return Err(LowerReason::Inputs(format!(
                "an output of rank {} for an input of rank {}",
                target_shape.len(),
                shape.len()
            )));
        }
        let mut high = Vec::with_capacity(shape.len());
        for (want, have) in target_shape.iter().zip(&shape) {
            high.push(want.sub(have)?);
        }
        if high.iter().any(|d| d.known().is_some_and(|v| v < 0)) {
            return Err(LowerReason::Inputs("the requested output is smaller than the unpooled result".to_string()));
        }
        let rank = shape.len();
        let pad = Pad { low: vec![Dim::Known(0); rank], high, interior: vec![0; rank], value: 0.0 };
        y = scope.add(Op::Pad(pad), &[y])?;
    }
    Ok(vec![Known::Value(y)])
}

/// The order of a p-norm.
fn order(scope: &Scope<'_>) -> Result<f64, LowerReason> {
    Ok(at_least_one("p", scope.int("p", 2)?)? as f64)
}

/// The p-norm of each window: a convolution of the powers with ones.
pub fn lp_pool(scope: &mut Scope<'_>) -> Outputs {
    let (x, p) = (scope.value(0)?, order(scope)?);
    let (kernel, mut window, ceil) = pool_window(scope, x)?;
    let fact = scope.fact(x);
    let spatial = fact.shape[2..].to_vec();
    if ceil {
        // Extend the padding so that the windows added by `ceil_mode` see zeros.
        let windows =
            window.output(&spatial, &dims_of(&kernel), true).map_err(|e| LowerReason::Inputs(e.to_string()))?;
        for axis in 0..spatial.len() {
            let known = |d: &Dim| d.known().and_then(|v| usize::try_from(v).ok());
            if let (Some(windows), Some(size)) = (known(&windows[axis]), known(&spatial[axis])) {
                let span = window.dilations[axis].saturating_mul(kernel[axis] - 1) + 1;
                let extent = windows.saturating_sub(1).saturating_mul(window.strides[axis]).saturating_add(span);
                let padded = size.saturating_add(window.pads_begin[axis]);
                window.pads_end[axis] = window.pads_end[axis].max(extent.saturating_sub(padded));
            }
        }
    }
    let power = formula(scope, [x], |[x]| norm::power(x, p))?;
    let alone = [vec![fact.shape[0].mul(&fact.shape[1])?, Dim::Known(1)], spatial].concat();
    let power = scope.reshape(power, alone)?;
    let unit = scope.scalar(fact.dtype, 1.0)?;
    let ones = scope.broadcast(unit, [vec![Dim::Known(1); 2], dims_of(&kernel)].concat())?;
    let sum = scope.add(Op::Conv(Conv { window, groups: 1 }), &[power, ones])?;
    let windows = scope.fact(sum).shape[2..].to_vec();
    let sum = scope.reshape(sum, [fact.shape[..2].to_vec(), windows].concat())?;
    one(formula(scope, [sum], |[sum]| norm::root(sum, p))?)
}

pub fn global_lp_pool(scope: &mut Scope<'_>) -> Outputs {
    let (x, p) = (scope.value(0)?, order(scope)?);
    spatial_of(scope, x)?;
    let axes: Vec<usize> = (2..scope.fact(x).rank()).collect();
    one(formula(scope, [x], |[x]| norm::norm(x, p, &axes, true))?)
}

/// `x / ‖x‖` along an axis; zeros where the norm is zero.
pub fn lp_normalization(scope: &mut Scope<'_>) -> Outputs {
    let (x, p) = (scope.value(0)?, order(scope)?);
    let at = super::attribute::axis(scope.int("axis", -1)?, scope.fact(x).rank())?;
    one(formula(scope, [x], |[x]| {
        let sum = norm::power(x, p).sum(&[at], true);
        // The root has no finite gradient at zero, so the sum is replaced by one there.
        let (zero, unit) = (sum.number(0.0), sum.number(1.0));
        let sum = sum.equals(zero).select(unit, sum);
        x / norm::root(sum, p)
    })?)
}

/// `Col2Im`: sums columns `[N, C·block, windows]` into an image.
pub fn col2im(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let spatial = scope.dims(1, "the shape of the image")?.ok_or(LowerReason::Missing { slot: 1 })?;
    let block = scope.integers(2, "the shape of the block")?.ok_or(LowerReason::Missing { slot: 2 })?;
    let axes = spatial.len();
    let sizes = block.iter().map(|&k| u32::try_from(k).ok().filter(|k| *k > 0).map(|k| k as usize));
    let kernel = sizes.collect::<Option<Vec<usize>>>().filter(|k| k.len() == axes && axes > 0);
    let kernel =
        kernel.ok_or_else(|| LowerReason::Inputs(format!("a block of {block:?} for an image of {axes} axes")))?;
    let pads = scope.sizes_of("pads", 2 * axes, 0, 0)?;
    let window = Window {
        strides: scope.sizes_of("strides", axes, 1, 1)?,
        pads_begin: pads[..axes].to_vec(),
        pads_end: pads[axes..].to_vec(),
        dilations: scope.sizes_of("dilations", axes, 1, 1)?,
    };
    Ok(vec![Known::Value(Patches::new(&spatial, &kernel, window)?.fold(scope, x)?)])
}
