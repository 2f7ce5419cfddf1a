//! `AffineGrid` and `GridSample`: sampling positions and interpolated image values.
//!
//! A sample is a weighted sum of the elements around its position. One gather reads them all as `[N, P, K…, C]`, for
//! `P` positions and `K` elements per spatial axis. The weights are functions of the distances. The image gets its
//! gradient through the gather, the grid through the weights.

use super::fold::charge;
use super::gather::{number, scale_index};
use super::interpolate::Filter;
use super::movement::transposed;
use super::slice::part;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::import::formula::{Expr, formulas};
use crate::op::{Binary, Gather, MatMul, Op, ReduceKind, Value};
use crate::tensor::dim::{Dim, volume};
use crate::tensor::{DType, Tensor};

/// Maximum number of elements of a constant grid.
const LARGEST: usize = 1 << 22;

/// `AffineGrid`: a regular grid of positions from -1 to 1 under an affine map per sample.
pub fn affine(scope: &mut Scope<'_>) -> Outputs {
    let size = scope.dims(1, "the size of the grid")?.ok_or(LowerReason::Missing { slot: 1 })?;
    let corners = scope.flag("align_corners", false)?;
    let theta = scope.value(0)?;
    let fact = scope.fact(theta);
    let spatial: Option<Vec<usize>> =
        size.iter().skip(2).map(|d| d.known().and_then(|d| usize::try_from(d).ok())).collect();
    let spatial = spatial.ok_or_else(|| LowerReason::Unsupported("a grid of unknown size".to_string()))?;
    let rank = spatial.len();
    if rank == 0 || fact.rank() != 3 || !fact.shape[1].is(rank as i64) || !fact.shape[2].is(rank as i64 + 1) {
        return Err(LowerReason::Inputs(format!("the transform {fact} does not fit a grid of {rank} axes")));
    }
    let base = is_regular(&spatial, corners)?;
    charge(scope, base.len())?;
    let base = scope.constant(base.cast(fact.dtype))?;
    let grid = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[base, theta])?;
    let mut shape = vec![fact.shape[0].clone()];
    shape.extend(spatial.iter().map(|&d| Dim::from(d)));
    shape.push(Dim::from(rank));
    Ok(vec![Known::Value(scope.reshape(grid, shape)?)])
}

/// Homogeneous coordinates of a regular grid, last axis first: `[1, P, axes + 1]`.
fn is_regular(spatial: &[usize], corners: bool) -> Result<Tensor, LowerReason> {
    let width = spatial.len() + 1;
    let point_count = spatial.iter().try_fold(1usize, |product, &d| product.checked_mul(d));
    let point_count = point_count.filter(|p| p.checked_mul(width).is_some_and(|count| count <= LARGEST));
    let point_count = point_count.ok_or_else(|| LowerReason::Unsupported(format!("a grid of shape {spatial:?}")))?;
    let mut values = Vec::with_capacity(point_count * width);
    for point in 0..point_count {
        let mut stride = 1;
        for &size in spatial.iter().rev() {
            let (at, size) = ((point / stride % size) as f64, size);
            values.push(match corners {
                true if size == 1 => 0.0,
                true => 2.0 * at / (size - 1) as f64 - 1.0,
                false => (2.0 * at + 1.0) / size as f64 - 1.0,
            });
            stride *= size;
        }
        values.push(1.0);
    }
    Ok(Tensor::from_f64(&[1, point_count, width], &values))
}

#[derive(Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum Padding {
    Zeros,
    Border,
    Reflection,
}

/// Sampling options of a grid.
pub struct GridSampling {
    pub padding: Padding,
    /// True if positions outside are clamped to the border before their neighbours are selected, as in ONNX for all
    /// filters. PyTorch clamps the four neighbours of a bicubic sample instead.
    pub border_first: bool,
    /// True if -1 and 1 are the centres of the first and last element, else their outer edges (`align_corners`).
    pub corners: bool,
    /// Offsets of the neighbours relative to the element left of a position, and their weight function; `None` for
    /// nearest.
    pub filter: Option<(Vec<f64>, Filter)>,
}

/// The filter for a number of neighbours per axis: 0 for nearest, 2 for linear, 4 for cubic.
pub fn filter_of(neighbour_count: usize) -> Option<(Vec<f64>, Filter)> {
    let with_cubic = |cubic| Filter { cubic, antialias: false, exclude_outside: false };
    match neighbour_count {
        0 => None,
        2 => Some((vec![0.0, 1.0], with_cubic(None))),
        _ => Some((vec![-1.0, 0.0, 1.0, 2.0], with_cubic(Some(-0.75)))),
    }
}

/// `GridSample`: the values of `x [N, C, D…]` at the positions of a grid `[N, O…, axes]`. The coordinates are in
/// reverse axis order.
pub fn sample(scope: &mut Scope<'_>) -> Outputs {
    let sampling = read_sampling(scope)?;
    let (x, grid) = (scope.value(0)?, scope.value(1)?);
    Ok(vec![Known::Value(grid_sample(scope, x, grid, &sampling)?)])
}

/// Grid sampling, shared by all importers.
pub fn grid_sample(
    scope: &mut impl Build,
    x: Value,
    grid: Value,
    sampling: &GridSampling,
) -> Result<Value, LowerReason> {
    let (fact, grid_fact) = (scope.fact(x), scope.fact(grid));
    let axes = fact.rank().saturating_sub(2);
    let is_valid = axes > 0 && grid_fact.rank() == fact.rank() && grid_fact.shape[axes + 1].is(axes as i64);
    if !is_valid || grid_fact.shape[0] != fact.shape[0] || !grid_fact.dtype.is_float() {
        return Err(LowerReason::Inputs(format!("a grid {grid_fact} does not sample an input {fact}")));
    }
    let dtype = if grid_fact.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let grid = scope.cast(grid, dtype)?;
    let (batch, channels, spatial) = (fact.shape[0].clone(), fact.shape[1].clone(), fact.shape[2..].to_vec());
    let count_of_places = volume(&grid_fact.shape[1..=axes])?;
    let flat = vec![batch.clone(), count_of_places.clone(), Dim::from(axes)];
    let grid = scope.reshape(grid, flat)?;
    // Flat image index and weight of each neighbour: [N, P, K…].
    let point_count = volume(&spatial)?;
    let images = scope.count(2 + axes, 0, &batch)?;
    let mut base = scale_index(scope, images, &point_count)?;
    let mut weight = None;
    for (at, size) in spatial.iter().enumerate() {
        let column = Dim::from(axes - 1 - at);
        let next = column.add(&Dim::Known(1))?;
        let coordinate = part(scope, grid, 2, column, next)?;
        let (index, share) = sample_corner(scope, coordinate, size, sampling)?;
        let mut shape = vec![batch.clone(), count_of_places.clone()];
        shape.resize(2 + axes, Dim::Known(1));
        shape[2 + at] = scope.fact(index).shape[2].clone();
        let index = scope.reshape(index, shape.clone())?;
        let steps = scale_index(scope, index, &volume(&spatial[at + 1..])?)?;
        base = scope.binary(Binary::Add, base, steps)?;
        if let Some(share) = share {
            let share = scope.reshape(share, shape)?;
            weight = Some(match weight {
                Some(so_far) => scope.binary(Binary::Mul, so_far, share)?,
                None => share,
            });
        }
    }
    // Images in channels-last order, as rows: [N·S, C].
    let rows = scope.reshape(x, vec![batch.clone(), channels.clone(), point_count.clone()])?;
    let rows = transposed(scope, rows, vec![0, 2, 1])?;
    let rows = scope.reshape(rows, vec![batch.mul(&point_count)?, channels.clone()])?;
    let mut y = scope.add(Op::Gather(Gather { axis: 0 }), &[rows, base])?;
    if let Some(weight) = weight {
        let weight = scope.column(weight)?;
        let weight = scope.cast(weight, fact.dtype)?;
        y = scope.binary(Binary::Mul, y, weight)?;
    }
    let y = scope.reduce(ReduceKind::Sum, y, &(2..2 + axes).collect::<Vec<_>>(), false)?;
    let y = transposed(scope, y, vec![0, 2, 1])?;
    let mut shape = vec![batch, channels];
    shape.extend(grid_fact.shape[1..=axes].iter().cloned());
    scope.reshape(y, shape)
}

fn read_sampling(scope: &Scope<'_>) -> Result<GridSampling, LowerReason> {
    let padding = match scope.text("padding_mode", "zeros")?.as_str() {
        "zeros" => Padding::Zeros,
        "border" => Padding::Border,
        "reflection" => Padding::Reflection,
        other => return Err(LowerReason::Unsupported(format!("the padding `{other}`"))),
    };
    let filter = match scope.text("mode", if scope.opset < 20 { "bilinear" } else { "linear" })?.as_str() {
        "nearest" => filter_of(0),
        // Operator set 16 used the names with `bi`.
        "linear" | "bilinear" => filter_of(2),
        "cubic" | "bicubic" => filter_of(4),
        other => return Err(LowerReason::Unsupported(format!("the interpolation `{other}`"))),
    };
    if !scope.fact_of(0)?.dtype.is_float() {
        return Err(LowerReason::Unsupported("sampling an image of integers".to_string()));
    }
    Ok(GridSampling { padding, border_first: true, corners: scope.flag("align_corners", false)?, filter })
}

/// The neighbour indices along one axis, and their weights unless nearest, both `[N, P, K]`; from coordinates
/// `[N, P, 1]`.
fn sample_corner(
    scope: &mut impl Build,
    grid: Value,
    size: &Dim,
    sampling: &GridSampling,
) -> Result<(Value, Option<Value>), LowerReason> {
    let size = number(scope, size)?;
    let is_weighted = sampling.filter.is_some() || sampling.padding == Padding::Zeros;
    let [index, weight] = formulas(scope, [grid, size], |[grid, size]| corner(grid, size, sampling))?;
    Ok((index, is_weighted.then_some(weight)))
}

/// The indices and weights of [`sample_corner`].
fn corner<'f>(grid: Expr<'f>, size: Expr<'f>, sampling: &GridSampling) -> [Expr<'f>; 2] {
    let size = size.cast(grid.dtype());
    let last = size - 1.0;
    // Bounds: reflection mirrors there, and positions beyond them are outside.
    let (low, high) = if sampling.corners { (grid.number(0.0), last) } else { (grid.number(-0.5), size - 0.5) };
    // Maps -1 … 1 to low … high.
    let share = grid * 0.5 + 0.5;
    let mut position = share * (high - low) + low;
    if sampling.filter.is_none() {
        position = position.round();
    }
    let zero = grid.number(0.0);
    if sampling.padding == Padding::Reflection {
        position = reflect(position, low, high);
    }
    if sampling.padding == Padding::Border && sampling.border_first {
        // A position between the bound and the first element centre is not outside.
        let outside = position.less(low) | high.less(position);
        position = outside.select(position.max(zero).min(last), position);
    }
    let (taps, weight) = match &sampling.filter {
        None => (position, None),
        Some((steps, filter)) => {
            let steps = Tensor::from_f64(&[steps.len()], steps).cast(grid.dtype());
            let steps = grid.then(|build, _| build.constant(steps));
            let taps = position.floor() + steps;
            (taps, Some(filter_weights(position - taps, filter)))
        }
    };
    let (index, weight) = match sampling.padding {
        Padding::Zeros => {
            let is_inside = zero.at_most(taps) & taps.at_most(last);
            let inside_weight = match weight {
                Some(weight) => is_inside.select(weight, zero),
                None => is_inside.cast(grid.dtype()),
            };
            (taps, Some(inside_weight))
        }
        Padding::Reflection => (reflect(taps, low, high), weight),
        Padding::Border => (taps, weight),
    };
    let index = index.max(zero).min(last).cast(DType::I64);
    [index, weight.unwrap_or(index)]
}

/// Reflects `x` at `low` and `high` into the range: with `s = high - low`, `low + s - |s - (x - low) mod 2s|`.
fn reflect<'f>(x: Expr<'f>, low: Expr<'f>, high: Expr<'f>) -> Expr<'f> {
    let span = high - low;
    let period = span + span;
    let distance = (span - (x - low) % period).abs();
    let folded = high - distance;
    // With one element and `align_corners` the span is zero.
    span.greater(0.0).select(folded, low)
}

/// Filter weights at signed distances `[…, K]`. The cubic filter has one polynomial for the two inner and one for the
/// two outer neighbours.
fn filter_weights<'f>(distance: Expr<'f>, filter: &Filter) -> Expr<'f> {
    let d = distance.abs();
    let Some(a) = filter.cubic else { return -d + 1.0 };
    let inner = polynomial(d, [a + 2.0, -(a + 3.0), 0.0, 1.0]);
    let outside = polynomial(d, [a, -5.0 * a, 8.0 * a, -4.0 * a]);
    let outer = Tensor::from_bool(&[4], &[true, false, false, true]);
    d.then(|build, _| build.constant(outer)).select(outside, inner)
}

fn polynomial(d: Expr<'_>, [c3, c2, c1, c0]: [f64; 4]) -> Expr<'_> {
    ((d * c3 + c2) * d + c1) * d + c0
}
