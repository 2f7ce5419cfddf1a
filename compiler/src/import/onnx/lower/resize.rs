//! `Resize` and `Upsample`: each axis is a gather or a product with a weight matrix.

use super::attribute::axis;
use super::fold::charge;
use super::interpolate::{Axis, Filter, Rounding, Transform};
use super::linear::multiply_axis;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::op::{Gather, Op, Value};
use crate::tensor::Tensor;
use crate::tensor::dim::Dim;

enum Method {
    Nearest(Rounding),
    Weighted(Filter),
}

/// Before operator set 11 the source position is `i/scale`, rounded down, or up for a shrinking axis.
pub fn resize(scope: &mut Scope<'_>) -> Outputs {
    let (transform, method) = match scope.opset {
        ..11 => (Transform::Asymmetric, method(scope, "floor")?),
        _ => (transform(scope)?, method(scope, "round_prefer_floor")?),
    };
    let fill = scope.float("extrapolation_value", 0.0)?;
    let axes = axes(scope, transform)?;
    let mut y = scope.value(0)?;
    for (at, axis) in axes {
        y = resized(scope, y, at, &axis, transform, &method)?;
        let outside_at = axis.outside(transform);
        if outside_at.contains(&true) {
            let mut shape = vec![1; scope.fact(y).rank()];
            shape[at] = axis.to;
            let mask = scope.constant(Tensor::from_bool(&shape, &outside_at))?;
            let value = scope.scalar(scope.fact(y).dtype, fill)?;
            y = scope.select(mask, value, y)?;
        }
    }
    Ok(vec![Known::Value(y)])
}

fn resized(
    scope: &mut Scope<'_>,
    x: Value,
    at: usize,
    axis: &Axis,
    transform: Transform,
    method: &Method,
) -> Result<Value, LowerReason> {
    match method {
        Method::Nearest(rounding) => {
            // Runtimes for the old operator round up for a shrinking axis.
            let rounding = if scope.opset < 11 && axis.scale < 1.0 { Rounding::Ceil } else { *rounding };
            let index = axis.nearest(transform, rounding)?;
            charge(scope, index.len())?;
            let index = scope.constant(Tensor::from_i64(&[index.len()], &index))?;
            scope.add(Op::Gather(Gather { axis: at }), &[x, index])
        }
        Method::Weighted(filter) => {
            let weights = axis.weights(transform, *filter)?;
            charge(scope, weights.len())?;
            let matrix = Tensor::from_f64(&[axis.to, axis.from], &weights);
            multiply_axis(scope, x, at, &matrix)
        }
    }
}

fn transform(scope: &Scope<'_>) -> Result<Transform, LowerReason> {
    let name = scope.text("coordinate_transformation_mode", "half_pixel")?;
    Transform::parse(&name).ok_or_else(|| LowerReason::Unsupported(format!("the coordinate transformation `{name}`")))
}

fn method(scope: &Scope<'_>, rounding: &str) -> Result<Method, LowerReason> {
    let mode = scope.text("mode", "nearest")?;
    let antialias = scope.flag("antialias", false)?;
    let exclude_outside = scope.flag("exclude_outside", false)?;
    let cubic = match mode.as_str() {
        "nearest" => {
            let name = scope.text("nearest_mode", rounding)?;
            let rounding = Rounding::parse(&name);
            return rounding
                .map(Method::Nearest)
                .ok_or_else(|| LowerReason::Unsupported(format!("the rounding `{name}`")));
        }
        // `Upsample` used the name `bilinear`.
        "linear" | "bilinear" => None,
        "cubic" => Some(scope.float("cubic_coeff_a", -0.75)?),
        other => return Err(LowerReason::Unsupported(format!("the interpolation `{other}`"))),
    };
    if !scope.fact_of(0)?.dtype.is_float() {
        return Err(LowerReason::Unsupported("interpolation of integers".to_string()));
    }
    Ok(Method::Weighted(Filter { cubic, antialias, exclude_outside }))
}

fn axes(scope: &Scope<'_>, transform: Transform) -> Result<Vec<(usize, Axis)>, LowerReason> {
    let dims = scope.fact_of(0)?.shape;
    let axis_list = match scope.ints("axes")? {
        Some(list) => list.into_iter().map(|a| axis(a, dims.len())).collect::<Result<Vec<_>, _>>()?,
        None => (0..dims.len()).collect(),
    };
    let regions = regions(scope, axis_list.len(), transform)?;
    let requested = requested_sizes(scope, &dims, &axis_list)?;
    let mut axes = Vec::new();
    for ((at, region), requested) in axis_list.into_iter().zip(regions).zip(requested) {
        let unchanged = match &requested {
            RequestedSize::Size(size, _) => is_same_size(scope, &dims[at], size),
            RequestedSize::Scale(scale) => *scale == 1.0,
        };
        if unchanged && region == [0.0, 1.0] {
            continue;
        }
        let unknown_size = || LowerReason::Unsupported(format!("a resize of an axis of unknown size {}", dims[at]));
        let from = dims[at].known().and_then(|d| usize::try_from(d).ok()).ok_or_else(unknown_size)?;
        if from == 0 {
            return Err(LowerReason::Inputs("an axis without elements cannot be resized".to_string()));
        }
        let (to, scale) = match requested {
            RequestedSize::Size(size, scale) => {
                let to = size.known().and_then(|d| usize::try_from(d).ok()).ok_or_else(unknown_size)?;
                (to, scale.unwrap_or(to as f64 / from as f64))
            }
            // In F32, the precision of the scales: 10 elements times 0.7 are 7, although 0.7 is slightly smaller as a
            // float.
            RequestedSize::Scale(scale) => ((scale as f32 * from as f32 * span(region) as f32).floor() as usize, scale),
        };
        // Aligned corners: PyTorch and onnxruntime map the last element of the result to the last of the input. In the
        // reference implementation of ONNX, that is only so if the scale gives a whole number of elements.
        let is_whole = transform == Transform::AlignCorners && scope.ledger.is_from_pytorch;
        let scale = if is_whole { to as f64 / from as f64 } else { scale };
        axes.push((at, Axis { from, to, scale, region }));
    }
    Ok(axes)
}

enum RequestedSize {
    /// The size, and the scale if it does not follow from the size.
    Size(Dim, Option<f64>),
    Scale(f64),
}

fn requested_sizes(scope: &Scope<'_>, dims: &[Dim], axis_list: &[usize]) -> Result<Vec<RequestedSize>, LowerReason> {
    let slot = if scope.opset < 11 { 1 } else { 2 };
    let what = "the scale of a resize";
    let scales: Vec<f64> = match scope.floats("scales")? {
        Some(list) => list.into_iter().map(f64::from).collect(),
        None => scope.tensor(slot, what)?.map(|t| t.to_f64()).unwrap_or_default(),
    };
    if !scales.is_empty() {
        if scales.iter().any(|s| !s.is_finite() || *s <= 0.0) {
            return Err(LowerReason::Inputs(format!("the scales {scales:?} are not all positive")));
        }
        return check_count(scales.into_iter().map(RequestedSize::Scale).collect(), axis_list.len());
    }
    let sizes = scope.dims(3, "the size of a resize")?.ok_or(LowerReason::Missing { slot })?;
    let sizes = check_count(sizes, axis_list.len())?;
    let ratio = |(size, &at): (&Dim, &usize)| Some(size.known()? as f64 / dims[at].known().filter(|d| *d > 0)? as f64);
    let ratios = || sizes.iter().zip(axis_list).map(ratio).collect::<Option<Vec<f64>>>();
    let scale = match scope.text("keep_aspect_ratio_policy", "stretch")?.as_str() {
        "stretch" => return Ok(sizes.into_iter().map(|size| RequestedSize::Size(size, None)).collect()),
        "not_larger" => ratios().and_then(|list| list.into_iter().reduce(f64::min)),
        "not_smaller" => ratios().and_then(|list| list.into_iter().reduce(f64::max)),
        other => return Err(LowerReason::Unsupported(format!("the aspect ratio policy `{other}`"))),
    };
    let unknown_size = || LowerReason::Unsupported("an aspect ratio with axes of unknown size".to_string());
    let scale = scale.ok_or_else(unknown_size)?;
    // Round half up.
    let size = |&at: &usize| dims[at].known().map(|d| Dim::Known((scale * d as f64 + 0.5).floor() as i64));
    let sizes =
        axis_list.iter().map(|at| Some(RequestedSize::Size(size(at)?, Some(scale)))).collect::<Option<Vec<_>>>();
    sizes.ok_or_else(unknown_size)
}

fn check_count<T>(list: Vec<T>, axes: usize) -> Result<Vec<T>, LowerReason> {
    if list.len() == axes {
        Ok(list)
    } else {
        Err(LowerReason::Inputs(format!("{} sizes for {axes} axes", list.len())))
    }
}

/// The normalised region of each axis; [0, 1] except for a crop.
fn regions(scope: &Scope<'_>, axes: usize, transform: Transform) -> Result<Vec<[f64; 2]>, LowerReason> {
    if transform != Transform::Crop {
        return Ok(vec![[0.0, 1.0]; axes]);
    }
    let bounds = scope.tensor(1, "the region of a resize")?.ok_or(LowerReason::Missing { slot: 1 })?.to_f64();
    if bounds.len() != 2 * axes || bounds.iter().any(|b| !b.is_finite()) {
        return Err(LowerReason::Inputs(format!("a region of {} bounds for {axes} axes", bounds.len())));
    }
    Ok((0..axes).map(|i| [bounds[i], bounds[axes + i]]).collect())
}

fn span(region: [f64; 2]) -> f64 {
    region[1] - region[0]
}

/// True if `want` equals `have`, or its static value in the file.
fn is_same_size(scope: &Scope<'_>, have: &Dim, want: &Dim) -> bool {
    have == want || want.known().is_some() && have.substitute(scope.frozen).is_ok_and(|d| d == *want)
}
