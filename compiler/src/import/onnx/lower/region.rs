//! Bilinear sampling of images: `RoiAlign`, `DeformConv`. A sample is the weighted sum of the four surrounding pixels.
//! Pixels are rows of a gather, so image and weights have gradients.

use super::gather::{add_offset, number, scale_index};
use super::movement::transposed;
use super::slice::part;
use super::window::with_bias;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::import::formula::{Expr, formula, formulas};
use crate::op::{Binary, Gather, MatMul, Op, ReduceKind, Value};
use crate::tensor::dim::{Dim, volume};
use crate::tensor::{DType, Tensor};

/// One coordinate of sample points: the lower and upper pixel with their weights.
struct BilinearAxis {
    pixels: [Value; 2],
    weights: [Value; 2],
}

fn static_size(size: &Dim) -> Result<i64, LowerReason> {
    size.known().ok_or_else(|| LowerReason::Inputs(format!("the image size {size} is unknown")))
}

/// `low <= x <= high` as 1 or 0.
fn is_inside(x: Expr<'_>, low: f64, high: f64) -> Expr<'_> {
    let (low, high) = (x.number(low), x.number(high));
    (low.at_most(x) & x.at_most(high)).cast(x.dtype())
}

/// Samples an axis of `size` pixels with zero padding around the image.
fn sample_with_zeros(scope: &mut Scope<'_>, x: Value, size: i64) -> Result<BilinearAxis, LowerReason> {
    let last = (size - 1) as f64;
    let [low, high, low_weight, high_weight] = formulas(scope, [x], |[x]| {
        let low = x.floor();
        let high = low + 1.0;
        let fraction = x - low;
        let complement = 1.0 - fraction;
        let [(low, low_weight), (high, high_weight)] = [(low, complement), (high, fraction)].map(|(pixel, weight)| {
            let weight = weight * is_inside(pixel, 0.0, last);
            (pixel.clamp(0.0, last).cast(DType::I64), weight)
        });
        [low, high, low_weight, high_weight]
    })?;
    Ok(BilinearAxis { pixels: [low, high], weights: [low_weight, high_weight] })
}

/// Samples an axis of `size` pixels where the border pixels extend by one pixel; beyond that the weights are zero.
fn sample_with_edges(scope: &mut Scope<'_>, x: Value, size: i64) -> Result<BilinearAxis, LowerReason> {
    let last = (size - 1) as f64;
    let [low_weight, high_weight, low, high] = formulas(scope, [x], |[x]| {
        let is_inside = is_inside(x, -1.0, size as f64);
        let x = x.clamp(0.0, last);
        let low = x.floor();
        let high = (low + 1.0).min(last);
        let fraction = x - low;
        let complement = 1.0 - fraction;
        [complement * is_inside, fraction * is_inside, low.cast(DType::I64), high.cast(DType::I64)]
    })?;
    Ok(BilinearAxis { pixels: [low, high], weights: [low_weight, high_weight] })
}

/// The weighted rows of `table` for the four pixels around each point; the row index is `first + y·width + x`.
fn corners(
    scope: &mut Scope<'_>,
    table: Value,
    first: Value,
    width: &Dim,
    [y, x]: [&BilinearAxis; 2],
) -> Result<Vec<Value>, LowerReason> {
    let mut corners = Vec::with_capacity(4);
    for (y_pixel, y_weight) in y.pixels.iter().zip(&y.weights) {
        let row_start = scale_index(scope, *y_pixel, width)?;
        let row_start = scope.binary(Binary::Add, first, row_start)?;
        for (x_pixel, x_weight) in x.pixels.iter().zip(&x.weights) {
            let row = scope.binary(Binary::Add, row_start, *x_pixel)?;
            let rows = scope.add(Op::Gather(Gather { axis: 0 }), &[table, row])?;
            let weight = scope.binary(Binary::Mul, *y_weight, *x_weight)?;
            let weight = scope.column(weight)?;
            corners.push(scope.binary(Binary::Mul, rows, weight)?);
        }
    }
    Ok(corners)
}

fn fold_values(scope: &mut Scope<'_>, op: Binary, list: Vec<Value>) -> Result<Value, LowerReason> {
    let mut list = list.into_iter();
    let mut result = list.next().ok_or_else(|| LowerReason::Inputs("it has no inputs to concatenate".to_string()))?;
    for value in list {
        result = scope.binary(op, result, value)?;
    }
    Ok(result)
}

/// Sample points of regions along one axis, `[R, output·samples]`: centres of equal bins.
fn sample_points(
    scope: &mut Scope<'_>,
    start: Value,
    size: Value,
    output: i64,
    samples: i64,
) -> Result<Value, LowerReason> {
    let points = output.saturating_mul(samples);
    let steps = scope.count(2, 1, &Dim::Known(points))?;
    formula(scope, [start, size, steps], |[start, size, steps]| {
        let fraction = (steps.cast(start.dtype()) + 0.5) * (1.0 / points as f64);
        start + size * fraction
    })
}

/// `RoiAlign`: samples each region and pools it to a fixed size.
pub fn roi_align(scope: &mut Scope<'_>) -> Outputs {
    let (x, rois, batch) = (scope.value(0)?, scope.value(1)?, scope.value(2)?);
    let half = match scope.text("coordinate_transformation_mode", "half_pixel")?.as_str() {
        "half_pixel" => scope.opset >= 16,
        "output_half_pixel" => false,
        other => return Err(LowerReason::Unsupported(format!("the coordinate mode `{other}`"))),
    };
    let largest = match scope.text("mode", "avg")?.as_str() {
        "avg" => false,
        "max" => true,
        other => return Err(LowerReason::Unsupported(format!("the mode `{other}`"))),
    };
    let samples = scope.int("sampling_ratio", 0)?;
    if samples == 0 {
        let what = "a RoiAlign without `sampling_ratio`, whose number of samples depends on values,";
        return Err(LowerReason::Unsupported(what.to_string()));
    }
    let sizes = [scope.int("output_height", 1)?, scope.int("output_width", 1)?];
    if !(1..=256).contains(&samples) || sizes.iter().any(|size| !(1..=4096).contains(size)) {
        return Err(LowerReason::Inputs(format!("regions of {sizes:?} with {samples} samples are too large")));
    }
    let scale = scope.float("spatial_scale", 1.0)?;
    let fact = scope.fact(x);
    let [images, channels, height, width] = fact.shape.as_slice() else {
        return Err(LowerReason::Inputs(format!("its input {fact} does not have rank 4")));
    };
    let rois_fact = scope.fact(rois);
    let [regions, Dim::Known(4)] = rois_fact.shape.as_slice() else {
        return Err(LowerReason::Inputs(format!("its regions are {rois_fact}, expected four coordinates each")));
    };
    let mut edges = Vec::new();
    for at in 0..4 {
        let edge = part(scope, rois, 1, Dim::Known(at), Dim::Known(at + 1))?;
        let edge = scope.with_number(Binary::Mul, edge, scale)?;
        edges.push(if half { scope.with_number(Binary::Sub, edge, 0.5)? } else { edge });
    }
    // Region edges are x, y, x, y; image axes are y, x.
    let mut axes = Vec::new();
    for (at, size) in [(1, height), (0, width)] {
        let mut length = scope.binary(Binary::Sub, edges[at + 2], edges[at])?;
        if !half {
            length = scope.with_number(Binary::Max, length, 1.0)?;
        }
        let points = sample_points(scope, edges[at], length, sizes[1 - at], samples)?;
        let points = scope.cast(points, fact.dtype)?;
        let count = scope.fact(points).shape[1].clone();
        let row = match at {
            1 => vec![regions.clone(), count, Dim::Known(1)],
            _ => vec![regions.clone(), Dim::Known(1), count],
        };
        let points = scope.reshape(points, row)?;
        axes.push(sample_with_edges(scope, points, static_size(size)?)?);
    }
    let table = transposed(scope, x, vec![0, 2, 3, 1])?;
    let image = height.mul(width)?;
    let table = scope.reshape(table, vec![images.mul(&image)?, channels.clone()])?;
    let batch = scope.cast(batch, DType::I64)?;
    let batch = scope.reshape(batch, vec![regions.clone(), Dim::Known(1), Dim::Known(1)])?;
    let first = scale_index(scope, batch, &image)?;
    let corner_values = corners(scope, table, first, width, [&axes[0], &axes[1]])?;
    // [R, height·samples, width·samples, C]
    let points = fold_values(scope, if largest { Binary::Max } else { Binary::Add }, corner_values)?;
    let [rows, columns, samples] = [sizes[0], sizes[1], samples].map(Dim::Known);
    let split_shape = vec![regions.clone(), rows, samples.clone(), columns, samples, channels.clone()];
    let points = scope.reshape(points, split_shape)?;
    let kind = if largest { ReduceKind::Max } else { ReduceKind::Mean };
    let pooled = scope.reduce(kind, points, &[2, 4], false)?;
    Ok(vec![Known::Value(transposed(scope, pooled, vec![0, 3, 1, 2])?)])
}

/// Kernel element offsets along one axis, `[K, 1, 1]`: `tap·dilation - padding`.
fn taps(
    scope: &mut Scope<'_>,
    kernel: &[usize],
    axis: usize,
    dilation: usize,
    pad: usize,
) -> Result<Value, LowerReason> {
    let total = kernel[0].saturating_mul(kernel[1]).min(1 << 16);
    let tap = |k: usize| if axis == 0 { k / kernel[1] } else { k % kernel[1] };
    let list: Vec<f64> = (0..total).map(|k| (tap(k).saturating_mul(dilation)) as f64 - pad as f64).collect();
    scope.constant(Tensor::from_f64(&[total, 1, 1], &list))
}

/// Deformable convolution: each kernel element has a learned offset per output position.
pub fn deform_conv(scope: &mut Scope<'_>) -> Outputs {
    let (x, w, offset) = (scope.value(0)?, scope.value(1)?, scope.value(2)?);
    let (fact, weight, offset_fact) = (scope.fact(x), scope.fact(w), scope.fact(offset));
    let ([batch, channels, height, width], [filters, _, k_y, k_x], [_, _, rows, columns]) =
        (fact.shape.as_slice(), weight.shape.as_slice(), offset_fact.shape.as_slice())
    else {
        return Err(LowerReason::Unsupported("a deformable convolution with other than two spatial axes".to_string()));
    };
    let unknown = || LowerReason::Inputs(format!("the kernel size of its weight {weight} is unknown"));
    let small = |d: &Dim| d.known().and_then(|v| u8::try_from(v).ok()).filter(|v| *v > 0).map(usize::from);
    let kernel = [small(k_y).ok_or_else(unknown)?, small(k_x).ok_or_else(unknown)?];
    let total = Dim::from(kernel[0] * kernel[1]);
    let (strides, dilations) = (scope.sizes_of("strides", 2, 1, 1)?, scope.sizes_of("dilations", 2, 1, 1)?);
    let pads = scope.sizes_of("pads", 4, 0, 0)?;
    let (groups, parts) = (Dim::Known(scope.int("group", 1)?.max(1)), Dim::Known(scope.int("offset_group", 1)?.max(1)));
    let group_channels = channels.div_exact(&parts)?;
    let points = [batch.clone(), parts.clone(), total.clone(), rows.clone(), columns.clone()];
    let split_shape = [&points[..3], &[Dim::Known(2)], &points[3..]].concat();
    let offset = scope.reshape(offset, split_shape)?;
    let mut axes = Vec::new();
    for (axis, (size, windows)) in [(height, rows), (width, columns)].into_iter().enumerate() {
        let axis_offset = part(scope, offset, 3, Dim::from(axis), Dim::from(axis + 1))?;
        let axis_offset = scope.reshape(axis_offset, points.to_vec())?;
        let taps = taps(scope, &kernel, axis, dilations[axis], pads[axis])?;
        let taps = scope.cast(taps, fact.dtype)?;
        let start = scope.count(5, 3 + axis, windows)?;
        let position = formula(scope, [axis_offset, taps, start], |[offset, taps, start]| {
            let start = start.cast(fact.dtype) * strides[axis] as f64;
            offset + taps + start
        })?;
        axes.push(sample_with_zeros(scope, position, static_size(size)?)?);
    }
    // A table row has the channels of one offset group at one pixel.
    let image = height.mul(width)?;
    let table = scope.reshape(x, vec![batch.clone(), parts.clone(), group_channels.clone(), image.clone()])?;
    let table = transposed(scope, table, vec![0, 1, 3, 2])?;
    let table = scope.reshape(table, vec![volume(&[batch.clone(), parts.clone(), image.clone()])?, group_channels])?;
    let mut first = None;
    for (axis, step) in [(0, parts.mul(&image)?), (1, image)] {
        let number = scope.count(5, axis, &points[axis])?;
        let steps = scale_index(scope, number, &step)?;
        first = add_offset(scope, first, steps)?;
    }
    let zero = number(scope, &Dim::Known(0))?;
    let corner_values = corners(scope, table, first.unwrap_or(zero), width, [&axes[0], &axes[1]])?;
    // [N, parts, K, rows, columns, C/parts]
    let mut samples = fold_values(scope, Binary::Add, corner_values)?;
    if let Some(mask) = scope.optional(4)? {
        let mask = scope.reshape(mask, [&points[..], &[Dim::Known(1)]].concat())?;
        samples = scope.binary(Binary::Mul, samples, mask)?;
    }
    // [N, parts, C/parts, K, rows, columns], reshaped to [N, groups, C/groups·K, windows].
    let samples = transposed(scope, samples, vec![0, 1, 5, 2, 3, 4])?;
    let depth = channels.div_exact(&groups)?.mul(&total)?;
    let samples = scope.reshape(samples, vec![batch.clone(), groups.clone(), depth.clone(), rows.mul(columns)?])?;
    let w = scope.reshape(w, vec![Dim::Known(1), groups.clone(), filters.div_exact(&groups)?, depth])?;
    let y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[w, samples])?;
    let y = scope.reshape(y, vec![batch.clone(), filters.clone(), rows.clone(), columns.clone()])?;
    let y = match scope.optional(3)? {
        Some(bias) => with_bias(scope, Binary::Add, y, bias)?,
        None => y,
    };
    Ok(vec![Known::Value(y)])
}
