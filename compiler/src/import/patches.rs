//! Patches of images: an image as columns of windows, and back with overlapping elements summed.

use super::build::Build;
use super::lower_error::LowerReason;
use super::onnx::lower::movement::transposed;
use super::onnx::lower::slice::part;
use crate::op::{Gather, Op, Pad, ScatterAdd, Value, Window};
use crate::tensor::Tensor;
use crate::tensor::dim::{Dim, volume};

/// Limit on the size of a padded image axis and of a constant index.
const MOST: i64 = 1 << 22;

/// The windows of an image.
pub struct Patches {
    window: Window,
    sizes: Vec<Dim>,
    /// Per spatial axis, the index of element `k` of window `c` in the padded image, `[kernel, windows]`.
    indices: Vec<Tensor>,
}

impl Patches {
    /// The windows of an image with these spatial sizes.
    pub fn new(sizes: &[Dim], kernel: &[usize], window: Window) -> Result<Patches, LowerReason> {
        let mut indices = Vec::with_capacity(kernel.len());
        for (i, dim) in sizes.iter().enumerate() {
            let size = dim.known().ok_or(LowerReason::NotConstant { what: "the size of the image" })?;
            let [stride, dilation, kernel] = [window.strides[i], window.dilations[i], kernel[i]].map(|v| v as i64);
            let padded = size.saturating_add((window.pads_begin[i] + window.pads_end[i]) as i64);
            let last_start = padded.saturating_sub(dilation.saturating_mul(kernel - 1)) - 1;
            if size < 0 || last_start < 0 {
                let message = format!("windows of {kernel} elements do not fit an image axis of {padded}");
                return Err(LowerReason::Inputs(message));
            }
            let count = last_start / stride + 1;
            if padded > MOST || count.saturating_mul(kernel) > MOST {
                let message = format!("an image axis of {padded} elements with {count} windows of {kernel}");
                return Err(LowerReason::Unsupported(message));
            }
            let elements = |k: i64| (0..count).map(move |c| k * dilation + c * stride);
            let index: Vec<i64> = (0..kernel).flat_map(elements).collect();
            indices.push(Tensor::from_i64(&[kernel as usize, count as usize], &index));
        }
        Ok(Patches { window, sizes: sizes.to_vec(), indices })
    }

    /// The sizes of the windows, then their numbers, by axis.
    fn dims(&self) -> [Vec<Dim>; 2] {
        [0, 1].map(|at| self.indices.iter().map(|index| Dim::from(index.shape()[at])).collect())
    }

    /// `[N, C, D…]` to `[N, C·kernel, windows]`.
    pub fn unfold(&self, scope: &mut impl Build, x: Value) -> Result<Value, LowerReason> {
        let shape = scope.fact(x).shape;
        let pads = |of: &[usize]| [0, 0].iter().chain(of).map(|&pad| Dim::from(pad)).collect();
        let (low, high) = (pads(&self.window.pads_begin), pads(&self.window.pads_end));
        let mut y = scope.add(Op::Pad(Pad { low, high, interior: vec![0; shape.len()], value: 0.0 }), &[x])?;
        for (i, index) in self.indices.iter().enumerate() {
            let index = scope.constant(index.clone())?;
            y = scope.add(Op::Gather(Gather { axis: 2 + 2 * i }), &[y, index])?;
        }
        let axes = self.sizes.len();
        let perm = [0, 1].into_iter().chain((0..axes).map(|i| 2 + 2 * i)).chain((0..axes).map(|i| 3 + 2 * i));
        let y = transposed(scope, y, perm.collect())?;
        let [kernel, count] = self.dims();
        scope.reshape(y, vec![shape[0].clone(), shape[1].mul(&volume(&kernel)?)?, volume(&count)?])
    }

    /// `[N, C·kernel, windows]` to `[N, C, D…]`, with overlapping elements summed.
    pub fn fold(&self, scope: &mut impl Build, x: Value) -> Result<Value, LowerReason> {
        let fact = scope.fact(x);
        let [kernel, count] = self.dims();
        let wrong = || LowerReason::Inputs(format!("its input {fact} for an image of {:?}", self.sizes));
        let [batch, columns, windows] = &fact.shape[..] else { return Err(wrong()) };
        if *windows != volume(&count)? {
            return Err(wrong());
        }
        let channels = columns.div_exact(&volume(&kernel)?)?;
        let axes = self.sizes.len();
        let y = scope.reshape(x, [vec![batch.clone(), channels], kernel, count].concat())?;
        let perm = [0, 1].into_iter().chain((0..axes).flat_map(|i| [2 + i, 2 + axes + i]));
        let mut y = transposed(scope, y, perm.collect())?;
        for (i, index) in self.indices.iter().enumerate().rev() {
            let (before, after) = (Dim::from(self.window.pads_begin[i]), Dim::from(self.window.pads_end[i]));
            let end = before.add(&self.sizes[i])?;
            let index = scope.constant(index.clone())?;
            y = scope.add(Op::ScatterAdd(ScatterAdd { axis: 2 + 2 * i, size: end.add(&after)? }), &[y, index])?;
            y = part(scope, y, 2 + 2 * i, before, end)?;
        }
        Ok(y)
    }
}
