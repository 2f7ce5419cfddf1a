//! Signal processing: the discrete Fourier transform as matrix products, window functions, and mel filter banks.

use super::attribute::axis;
use super::fold::charge;
use super::linear::multiply_axis;
use super::slice::part;
use super::{Known, LowerReason, Outputs, Scope};
use crate::import::build::Build;
use crate::op::{Binary, Gather, Op, Unary, Value};
use crate::tensor::dim::Dim;
use crate::tensor::{DType, Tensor};
use std::f64::consts::TAU;

/// Maximum number of elements of a matrix or window.
const LARGEST: usize = 1 << 22;

/// A constant scalar; `None` if omitted.
fn number(scope: &Scope<'_>, slot: usize, what: &'static str) -> Result<Option<f64>, LowerReason> {
    let Some(tensor) = scope.tensor(slot, what)? else { return Ok(None) };
    match tensor.to_f64().as_slice() {
        [one] if one.is_finite() => Ok(Some(*one)),
        _ => Err(LowerReason::Inputs(format!("{what} is not one number"))),
    }
}

/// A constant non-negative integer; `None` if omitted.
fn count(scope: &Scope<'_>, slot: usize, what: &'static str) -> Result<Option<usize>, LowerReason> {
    let in_range = |v: f64| if v >= 0.0 && v <= LARGEST as f64 { Ok(v as usize) } else { Err(v) };
    let count = number(scope, slot, what)?.map(in_range).transpose();
    count.map_err(|v| LowerReason::Inputs(format!("{what} is {v}, expected 0 to {LARGEST}")))
}

fn required<T>(value: Option<T>, slot: usize) -> Result<T, LowerReason> {
    value.ok_or(LowerReason::Missing { slot })
}

/// A discrete Fourier transform along one axis.
#[derive(Clone, Copy)]
struct Transform {
    length: usize,
    inverse: bool,
    /// True to omit the redundant frequencies above the Nyquist frequency.
    onesided: bool,
}

impl Transform {
    /// The matrices of `cos` and `sin` of `2π·row·column/length`, `[rows, columns]`, times `weight(row, column)`.
    fn matrices(
        &self,
        rows: usize,
        columns: usize,
        weight: impl Fn(usize, usize) -> f64,
    ) -> Result<[Tensor; 2], LowerReason> {
        let length = self.length;
        if rows.checked_mul(columns).is_none_or(|count| count > LARGEST) {
            return Err(LowerReason::Unsupported(format!("a Fourier transform of {length} points of {columns}")));
        }
        let angle = |at: usize| TAU * ((at / columns) * (at % columns) % length) as f64 / length as f64;
        let matrix = |f: fn(f64) -> f64| {
            let values = (0..rows * columns).map(|at| f(angle(at)) * weight(at / columns, at % columns));
            Tensor::from_f64(&[rows, columns], &values.collect::<Vec<_>>())
        };
        Ok([matrix(f64::cos), matrix(f64::sin)])
    }
}

/// Transforms `x` along `axis`. The last axis of `x` has the real part, or real and imaginary part.
///
/// With the signal `a + ib` and angles θ, the forward transform is `(cos θ a + sin θ b) + i(cos θ b - sin θ a)`. The
/// inverse negates the sines and scales by `1/length`. The one-sided inverse gives only real parts, and all frequencies
/// except the first and the middle one count twice.
fn transform_axis(scope: &mut Scope<'_>, x: Value, axis: usize, transform: Transform) -> Result<Value, LowerReason> {
    let fact = scope.fact(x);
    let last = fact.rank() - 1;
    let unknown_size = || LowerReason::Unsupported(format!("a Fourier transform of unknown size {}", fact.shape[axis]));
    let size = fact.shape[axis].known().and_then(|d| usize::try_from(d).ok()).ok_or_else(unknown_size)?;
    let complex = match fact.shape[last].known() {
        Some(1) => false,
        Some(2) => true,
        _ => {
            return Err(LowerReason::Inputs(format!("the last axis of {fact} must have size 1 (real) or 2 (complex)")));
        }
    };
    // In F64: a matrix product of this size loses digits that a fast transform keeps.
    let component = |scope: &mut Scope<'_>, at: i64| -> Result<Value, LowerReason> {
        let real_part = part(scope, x, last, Dim::Known(at), Dim::Known(at + 1))?;
        let real_part = scope.reshape(real_part, fact.shape[..last].to_vec())?;
        scope.cast(real_part, DType::F64)
    };
    let a = component(scope, 0)?;
    let b = if complex { Some(component(scope, 1)?) } else { None };
    if transform.length == 0 || size == 0 {
        return Err(LowerReason::Inputs("a Fourier transform of 0 points".to_string()));
    }
    let half = transform.length / 2 + 1;
    let back_to_real = transform.inverse && transform.onesided;
    let share = if transform.inverse { 1.0 / transform.length as f64 } else { 1.0 };
    let rows = if transform.onesided && !transform.inverse { half } else { transform.length };
    // A longer signal is truncated. A shorter one is zero-padded, which needs no columns.
    let used = if back_to_real { half } else { transform.length };
    let counts_twice = |k: usize| back_to_real && k != 0 && 2 * k != transform.length;
    let weight = |_: usize, k: usize| if k >= used { 0.0 } else { share * if counts_twice(k) { 2.0 } else { 1.0 } };
    let [cos, sin] = transform.matrices(rows, size, weight)?;
    charge(scope, cos.len() + sin.len())?;
    // Real part: cosine product of the real input, plus or minus the sine product of the imaginary input.
    let mut real = multiply_axis(scope, a, axis, &cos)?;
    if let Some(b) = b {
        let sin_part = multiply_axis(scope, b, axis, &sin)?;
        real = scope.binary(if transform.inverse { Binary::Sub } else { Binary::Add }, real, sin_part)?;
    }
    let mut parts = vec![real];
    if !back_to_real {
        let mut imaginary = multiply_axis(scope, a, axis, &sin)?;
        if !transform.inverse {
            imaginary = scope.unary(Unary::Neg, imaginary)?;
        }
        if let Some(b) = b {
            let straight = multiply_axis(scope, b, axis, &cos)?;
            imaginary = scope.binary(Binary::Add, straight, imaginary)?;
        }
        parts.push(imaginary);
    }
    let y = scope.stack(&parts, last)?;
    scope.cast(y, fact.dtype)
}

/// `DFT` along one axis. Since operator set 20 the axis is an input.
pub fn dft(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let fact = scope.fact(x);
    let axis_attribute = match scope.opset {
        ..20 => scope.int("axis", 1)?,
        _ => number(scope, 2, "the axis of a Fourier transform")?.unwrap_or(-2.0) as i64,
    };
    let at = axis(axis_attribute, fact.rank())?;
    if fact.rank() < 2 || at == fact.rank() - 1 {
        return Err(LowerReason::Inputs(format!("axis {axis_attribute} of {fact} is the real and imaginary axis")));
    }
    let (inverse, onesided) = (scope.flag("inverse", false)?, scope.flag("onesided", false)?);
    let length = match count(scope, 1, "the length of a Fourier transform")? {
        Some(length) => length,
        None => {
            let size = fact.shape[at].known().and_then(|d| usize::try_from(d).ok());
            let unknown_size =
                || LowerReason::Unsupported(format!("a Fourier transform of unknown size {}", fact.shape[at]));
            let size = size.ok_or_else(unknown_size)?;
            if inverse && onesided { size.saturating_sub(1).saturating_mul(2) } else { size }
        }
    };
    Ok(vec![Known::Value(transform_axis(scope, x, at, Transform { length, inverse, onesided })?)])
}

/// `STFT`: transforms overlapping frames of a signal `[N, T, parts]` to `[N, frames, K, 2]`.
pub fn stft(scope: &mut Scope<'_>) -> Outputs {
    let x = scope.value(0)?;
    let fact = scope.fact(x);
    let [_, steps, parts] = fact.shape.as_slice() else {
        return Err(LowerReason::Inputs(format!("the signal {fact} does not have rank 3")));
    };
    let size = steps.known().and_then(|d| usize::try_from(d).ok());
    let size = size.ok_or_else(|| LowerReason::Unsupported(format!("frames of a signal of unknown length {steps}")))?;
    let step = required(count(scope, 1, "the step between frames")?, 1)?;
    let window = scope.optional(2)?;
    let of_window = match window {
        Some(window) => scope.fact(window).shape.first().and_then(Dim::known).and_then(|d| usize::try_from(d).ok()),
        None => None,
    };
    let length = count(scope, 3, "the length of a frame")?.or(of_window).unwrap_or(size);
    if step == 0 || length == 0 || length > size || of_window.is_some_and(|w| w != length) {
        return Err(LowerReason::Inputs(format!(
            "frames of length {length} with step {step} of a signal of {size} \
            samples"
        )));
    }
    let frames = 1 + (size - length) / step;
    if frames.checked_mul(length).is_none_or(|count| count > LARGEST) {
        return Err(LowerReason::Unsupported(format!("{frames} frames of {length} samples")));
    }
    charge(scope, frames * length)?;
    let indices: Vec<i64> = (0..frames * length).map(|at| (at / length * step + at % length) as i64).collect();
    let indices = scope.constant(Tensor::from_i64(&[frames, length], &indices))?;
    let mut y = scope.add(Op::Gather(Gather { axis: 1 }), &[x, indices])?;
    if let Some(window) = window {
        let window = scope.reshape(window, vec![Dim::from(length), Dim::Known(1)])?;
        y = scope.binary(Binary::Mul, y, window)?;
    }
    // The spectrum of a complex signal is not redundant.
    let onesided = scope.flag("onesided", true)? && parts.is(1);
    let transform = Transform { length, inverse: false, onesided };
    Ok(vec![Known::Value(transform_axis(scope, y, 2, transform)?)])
}

/// Window `a - b·cos(2πn/N) + c·cos(4πn/N)`, where N is the size, or size - 1 for a symmetric window.
pub fn window(scope: &mut Scope<'_>, [a, b, c]: [f64; 3]) -> Outputs {
    let size = required(count(scope, 0, "the size of a window")?, 0)?;
    let dtype = output_type(scope)?;
    charge(scope, size)?;
    let period = if scope.flag("periodic", true)? { size } else { size.saturating_sub(1) };
    let angle = |n: usize| TAU * n as f64 / period.max(1) as f64;
    let values: Vec<f64> = (0..size).map(|n| a - b * angle(n).cos() + c * (2.0 * angle(n)).cos()).collect();
    Ok(vec![Known::Tensor(Tensor::from_f64(&[size], &values).cast(dtype))])
}

fn output_type(scope: &Scope<'_>) -> Result<DType, LowerReason> {
    scope.element_type("output_datatype", 1, "a result of")
}

/// Mel filter bank `[frequencies, bands]`: half-overlapping triangles, equally spaced on the mel scale.
pub fn mel_weight_matrix(scope: &mut Scope<'_>) -> Outputs {
    let bands = required(count(scope, 0, "the number of bands")?, 0)?;
    let length = required(count(scope, 1, "the length of a Fourier transform")?, 1)?;
    let rate = required(number(scope, 2, "the sample rate")?, 2)?;
    let low = required(number(scope, 3, "the lowest frequency")?, 3)?;
    let high = required(number(scope, 4, "the highest frequency")?, 4)?;
    let dtype = output_type(scope)?;
    let rows = length / 2 + 1;
    if rows.checked_mul(bands).is_none_or(|count| count > LARGEST) {
        return Err(LowerReason::Unsupported(format!("{bands} bands of {rows} frequencies")));
    }
    charge(scope, rows * bands)?;
    let edges = band_edges(bands, length, rate, low, high);
    if edges.iter().any(|edge| !(0.0..rows as f64).contains(edge)) {
        return Err(LowerReason::Inputs(format!("bands from {low} to {high} Hz at a sample rate of {rate} Hz")));
    }
    let mut matrix = vec![0.0; rows * bands];
    for (band, edge) in edges.windows(3).enumerate() {
        let [start, top, end] = [edge[0], edge[1], edge[2]];
        for at in start as usize..=end as usize {
            let position = at as f64;
            let rising = if top == start { 1.0 } else { (position - start) / (top - start) };
            let falling = if end == top { 1.0 } else { (end - position) / (end - top) };
            matrix[at * bands + band] = if position <= top { rising } else { falling };
        }
    }
    Ok(vec![Known::Tensor(Tensor::from_f64(&[rows, bands], &matrix).cast(dtype))])
}

/// Edges of the triangles as frequency indices: band i has its start, peak and end at edges i, i + 1 and i + 2.
fn band_edges(bands: usize, length: usize, rate: f64, low: f64, high: f64) -> Vec<f64> {
    let mel = |hertz: f64| 2595.0 * (hertz / 700.0).ln_1p() / std::f64::consts::LN_10;
    let hertz = |mel: f64| 700.0 * (mel / 2595.0 * std::f64::consts::LN_10).exp_m1();
    let step = (mel(high) - mel(low)) / (bands + 2) as f64;
    let edge = |band: usize| ((length + 1) as f64 * hertz(mel(low) + step * band as f64) / rate).floor();
    (0..bands + 2).map(edge).collect()
}

pub const HANN: [f64; 3] = [0.5, 0.5, 0.0];

pub const HAMMING: [f64; 3] = [25.0 / 46.0, 21.0 / 46.0, 0.0];

pub const BLACKMAN: [f64; 3] = [0.42, 0.5, 0.08];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_matrices_turn_four_points() {
        let transform = Transform { length: 4, inverse: false, onesided: false };
        let [cos, sin] = transform.matrices(4, 4, |_, _| 1.0).unwrap();
        let near = |found: &Tensor, expected: [f64; 16]| {
            found.to_f64().iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-15)
        };
        assert!(near(&cos, [1., 1., 1., 1., 1., 0., -1., 0., 1., -1., 1., -1., 1., 0., -1., 0.]));
        assert!(near(&sin, [0., 0., 0., 0., 0., 1., 0., -1., 0., 0., 0., 0., 0., -1., 0., 1.]));
        assert!(transform.matrices(1 << 13, 1 << 13, |_, _| 1.0).is_err());
    }

    #[test]
    fn bands_are_wider_at_higher_frequencies() {
        let edges = band_edges(8, 16, 8192.0, 0.0, 4096.0);
        assert_eq!(edges.len(), 10);
        assert!(edges.windows(3).all(|e| e[2] - e[1] >= (e[1] - e[0]) - 1.0));
        assert_eq!(edges[0], 0.0);
    }
}
