//! Resizing of images. Interpolation along one axis is a product with a constant matrix, as is the mean of windows that
//! do not tile. Axes are processed one after another. Nearest-neighbour resizing and padding from the image are
//! gathers.

use super::{Outputs, Scope, one};
use crate::import::build::Build;
use crate::import::lower_error::LowerReason;
use crate::import::onnx::lower::grid::{self, GridSampling, Padding};
use crate::import::onnx::lower::interpolate::Filter;
use crate::import::onnx::lower::movement::swapped;
use crate::import::onnx::lower::padding::Mode;
use crate::import::onnx::lower::reduce::first_extreme;
use crate::import::onnx::lower::slice::part;
use crate::op::{Gather, MatMul, Op, Value};
use crate::tensor::Tensor;
use crate::tensor::dim::Dim;

/// Limit on the side of a resized image.
const MOST: i64 = 1 << 13;

/// Limit on the elements of a constant matrix.
const LARGEST: usize = 1 << 22;

/// Limit on the windows of a max pooling that are reduced one by one.
const WINDOWS: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    /// The source index rounded down.
    Nearest,
    /// The element nearest to the pixel centre.
    NearestExact,
    Linear,
    Cubic,
    /// Antialiased: a triangle filter scaled by the reduction.
    LinearSmooth,
    CubicSmooth,
}

/// One spatial axis: sizes before and after, and the coordinate mapping.
struct Axis {
    from: i64,
    to: i64,
    scale: f64,
    corners: bool,
}

impl Axis {
    /// The source coordinate of output element `i`.
    fn place(&self, i: i64) -> f64 {
        if self.corners {
            return if self.to > 1 { i as f64 * (self.from - 1) as f64 / (self.to - 1) as f64 } else { 0.0 };
        }
        (i as f64 + 0.5) * self.scale - 0.5
    }

    fn weights(&self, way: Way) -> Vec<Vec<(i64, f64)>> {
        let last = self.from - 1;
        let row = |i: i64| match way {
            // In single precision, as PyTorch computes them: the result is rounded down.
            Way::Nearest => vec![(((i as f32 * self.scale as f32).floor() as i64).clamp(0, last), 1.0)],
            Way::NearestExact => {
                let position = (i as f32 + 0.5) * self.scale as f32 - 0.5;
                vec![(((position + 0.5).floor() as i64).clamp(0, last), 1.0)]
            }
            Way::Linear => {
                let position = self.place(i).max(0.0);
                let low = (position.floor() as i64).min(last);
                let share = position - low as f64;
                vec![(low, 1.0 - share), ((low + 1).min(last), share)]
            }
            Way::Cubic => {
                let position = self.place(i);
                let (low, share) = (position.floor() as i64, position - position.floor());
                let tap = |k: i64| ((low + k).clamp(0, last), cubic((share - k as f64).abs(), -0.75));
                (-1..3).map(tap).collect()
            }
            Way::LinearSmooth => self.smooth(i, 1.0, |t| (1.0 - t).max(0.0)),
            Way::CubicSmooth => self.smooth(i, 2.0, |t| cubic(t, -0.5)),
        };
        (0..self.to).map(row).collect()
    }

    /// The normalised weights of a filter with radius `reach`, scaled up when the image shrinks.
    fn smooth(&self, i: i64, reach: f64, filter: impl Fn(f64) -> f64) -> Vec<(i64, f64)> {
        let scale = match self.corners {
            true if self.to > 1 => (self.from - 1) as f64 / (self.to - 1) as f64,
            true => 0.0,
            false => self.scale,
        };
        let stretch = scale.max(1.0);
        let middle = scale * (i as f64 + 0.5);
        let low = ((middle - reach * stretch + 0.5) as i64).max(0);
        let high = ((middle + reach * stretch + 0.5) as i64).min(self.from);
        let weight = |k: i64| filter(((k as f64 - middle + 0.5) / stretch).abs());
        let total: f64 = (low..high).map(weight).sum();
        (low..high).map(|k| (k, if total == 0.0 { 0.0 } else { weight(k) / total })).collect()
    }
}

/// Keys' cubic convolution.
fn cubic(t: f64, a: f64) -> f64 {
    Filter { cubic: Some(a), antialias: false, exclude_outside: false }.weight(t)
}

/// Multiplies every slice along `axis` by the matrix with these rows.
pub fn mixed(
    scope: &mut Scope<'_>,
    x: Value,
    axis: usize,
    from: i64,
    rows: &[Vec<(i64, f64)>],
) -> Result<Value, LowerReason> {
    let fact = scope.fact(x);
    if rows.len().saturating_mul(from as usize) > LARGEST {
        return Err(LowerReason::Unsupported(format!("resizing {from} elements to {}", rows.len())));
    }
    let mut matrix = vec![0.0; rows.len() * from as usize];
    for (i, row) in rows.iter().enumerate() {
        for (at, weight) in row {
            matrix[i * from as usize + *at as usize] += weight;
        }
    }
    let matrix = scope.constant(Tensor::from_f64(&[rows.len(), from as usize], &matrix).cast(fact.dtype))?;
    let last = fact.rank() - 1;
    let permuted = swapped(scope, x, axis, last)?;
    let y = scope.add(Op::MatMul(MatMul { transpose_a: false, transpose_b: true }), &[permuted, matrix])?;
    swapped(scope, y, axis, last)
}

fn side(dim: &Dim) -> Result<i64, LowerReason> {
    dim.known().filter(|v| (1..=MOST).contains(v)).ok_or(LowerReason::NotConstant { what: "the size of the image" })
}

pub fn resize(scope: &mut Scope<'_>, way: Way) -> Outputs {
    let mut x = scope.value(if scope.has("input") { "input" } else { "self" })?;
    let shape = scope.fact(x).shape;
    let axes = shape.len().saturating_sub(2);
    let corners = scope.flag("align_corners", false)?;
    let output_size = scope.dims("output_size")?.filter(|list| list.len() == axes);
    // The overloads give the factors as a list or one by one.
    let mut factors = scope.floats("scale_factors")?.unwrap_or_default();
    let names = ["scales_d", "scales_h", "scales_w"];
    let single = if axes == 1 && scope.has("scales") { &["scales"][..] } else { &names[3 - axes.min(3)..] };
    for name in single.iter().filter(|_| output_size.is_some()) {
        factors.extend(scope.number(name)?.map(super::argument::Number::float));
    }
    for at in 0..axes {
        let from = side(&shape[2 + at])?;
        let factor = factors.get(at).copied().filter(|f| *f > 0.0 && factors.len() == axes);
        let to = match (&output_size, factor) {
            (Some(output_size), _) => side(&output_size[at])?,
            (None, Some(factor)) => side(&Dim::Known((from as f64 * factor).floor() as i64))?,
            (None, None) => return Err(LowerReason::Inputs("no size is given".to_string())),
        };
        let scale = factor.map_or(from as f64 / to as f64, |factor| 1.0 / factor);
        // PyTorch copies some axes that keep their size, whatever the factor.
        let is_copy = match way {
            Way::Nearest => axes == 2,
            Way::NearestExact | Way::Cubic => false,
            Way::Linear | Way::LinearSmooth | Way::CubicSmooth => true,
        };
        if from == to && (is_copy || scale == 1.0) {
            continue;
        }
        let rows = Axis { from, to, scale, corners }.weights(way);
        x = match way {
            Way::Nearest | Way::NearestExact => {
                let indices: Vec<i64> = rows.iter().map(|row| row[0].0).collect();
                let index = scope.constant(Tensor::from_i64(&[indices.len()], &indices))?;
                scope.add(Op::Gather(Gather { axis: 2 + at }), &[x, index])?
            }
            _ => mixed(scope, x, 2 + at, from, &rows)?,
        };
    }
    one(x)
}

pub fn grid_sample(scope: &mut Scope<'_>) -> Outputs {
    let (x, grid) = (scope.value("input")?, scope.value("grid")?);
    let padding = match scope.int("padding_mode", 0)? {
        0 => Padding::Zeros,
        1 => Padding::Border,
        2 => Padding::Reflection,
        other => return Err(LowerReason::Unsupported(format!("padding mode {other}"))),
    };
    let filter_code = match scope.int("interpolation_mode", 0)? {
        0 => 2,
        1 => 0,
        2 => 4,
        other => return Err(LowerReason::Unsupported(format!("interpolation mode {other}"))),
    };
    let (corners, filter) = (scope.flag("align_corners", false)?, grid::filter_of(filter_code));
    let sampling = GridSampling { padding, border_first: filter_code != 4, corners, filter };
    one(grid::grid_sample(scope, x, grid, &sampling)?)
}

/// The windows of an adaptive pooling: `⌊i·from/to⌋ .. ⌈(i + 1)·from/to⌉`.
fn windows(from: i64, to: i64) -> Vec<(i64, i64)> {
    (0..to).map(|i| (i * from / to, ((i + 1) * from + to - 1) / to)).collect()
}

/// Adaptive average or max pooling to the sizes `output_size` of the last axes, for windows that do not tile the input.
pub fn adaptive(scope: &mut Scope<'_>, mut x: Value, output_size: &[Dim], largest: bool) -> Result<Value, LowerReason> {
    let first = scope.fact(x).rank() - output_size.len();
    // From the last axis on: of equal elements, the first in row-major order gets the gradient.
    for (at, to) in output_size.iter().enumerate().rev() {
        let axis = first + at;
        let from = scope.fact(x).shape[axis].clone();
        if from == *to {
            continue;
        }
        let (from, to) = (side(&from)?, side(to)?);
        let spans = windows(from, to);
        if !largest {
            let share = |&(low, high): &(i64, i64)| (low..high).map(|i| (i, 1.0 / (high - low) as f64)).collect();
            let rows: Vec<Vec<(i64, f64)>> = spans.iter().map(share).collect();
            x = mixed(scope, x, axis, from, &rows)?;
            continue;
        }
        if spans.len() > WINDOWS {
            return Err(LowerReason::Unsupported(format!("{} windows that do not tile", spans.len())));
        }
        let mut parts = Vec::with_capacity(spans.len());
        for (low, high) in spans {
            let window = part(scope, x, axis, Dim::Known(low), Dim::Known(high))?;
            parts.push(first_extreme(scope, window, axis, true)?[0]);
        }
        x = scope.concat(&parts, axis)?;
    }
    Ok(x)
}

/// Padding from the image itself; pairs from the last axis on, negative values crop.
pub fn pad(scope: &mut Scope<'_>, edge: Mode, name: &'static str) -> Outputs {
    let mut x = scope.value("self")?;
    let pads = scope.ints(name)?.unwrap_or_default();
    let rank = scope.fact(x).rank();
    if pads.len() % 2 != 0 || pads.len() / 2 > rank {
        return Err(LowerReason::Inputs(format!("paddings of {pads:?} for {rank} axes")));
    }
    for (n, pair) in pads.chunks_exact(2).enumerate() {
        let axis = rank - 1 - n;
        if pair == [0, 0] {
            continue;
        }
        let size = side(&scope.fact(x).shape[axis])?;
        if pair.iter().any(|p| p.saturating_abs() > MOST) {
            return Err(LowerReason::Inputs(format!("paddings of {pads:?}")));
        }
        let indices: Vec<i64> = (-pair[0]..size + pair[1]).map(|at| edge.source(at, size)).collect();
        let index = scope.constant(Tensor::from_i64(&[indices.len()], &indices))?;
        x = scope.add(Op::Gather(Gather { axis }), &[x, index])?;
    }
    one(x)
}
