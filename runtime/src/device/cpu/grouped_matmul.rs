//! Grouped matrix products: one product per non-empty group of rows.

use super::matmul::{Matrix, product};
use super::real::{Real, for_real};
use super::{FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::GroupedMatMul;
use compiler::op::grouped_matmul::groups;

pub fn kernel(op: &GroupedMatMul, x: &TensorLayout, w: &TensorLayout, ends: &TensorLayout) -> Option<FastKernel> {
    for_real!(x.dtype, T => Some(product_kernel::<T>(*op, x, w, ends)))
}

/// Gradient with respect to the matrices.
pub fn grad(a: &TensorLayout, b: &TensorLayout, ends: &TensorLayout) -> Option<FastKernel> {
    for_real!(a.dtype, T => Some(grad_kernel::<T>(a, b, ends)))
}

fn product_kernel<T: Real>(op: GroupedMatMul, x: &TensorLayout, w: &TensorLayout, ends: &TensorLayout) -> FastKernel {
    let ([s, k], group_count) = ([x.shape[0], x.shape[1]], ends.shape[0]);
    let n = w.shape[if op.transpose { 1 } else { 2 }];
    let strides = if op.transpose { (1, k) } else { (n, 1) };
    FastKernel::new(move |inputs, outputs, _| {
        let (x, w) = (cast_slice::<u8, T>(inputs[0]), cast_slice::<u8, T>(inputs[1]));
        let ends = &cast_slice::<u8, i64>(inputs[2])[..group_count];
        let y: &mut [T] = cast_slice_mut(outputs[0]);
        let mut end = 0;
        for (g, range) in groups(ends.iter().copied(), s).enumerate() {
            end = range.end;
            if range.is_empty() {
                continue;
            }
            let a = Matrix { values: &x[range.start * k..range.end * k], strides: (k, 1) };
            let b = Matrix { values: &w[g * k * n..(g + 1) * k * n], strides };
            product([range.len(), n, k], a, b, &mut y[range.start * n..range.end * n], n, false);
        }
        y[end * n..].fill(T::ZERO);
    })
}

fn grad_kernel<T: Real>(a: &TensorLayout, b: &TensorLayout, ends: &TensorLayout) -> FastKernel {
    let (s, m, n, group_count) = (a.shape[0], a.shape[1], b.shape[1], ends.shape[0]);
    FastKernel::new(move |inputs, outputs, _| {
        let (a, b) = (cast_slice::<u8, T>(inputs[0]), cast_slice::<u8, T>(inputs[1]));
        let ends = &cast_slice::<u8, i64>(inputs[2])[..group_count];
        let c: &mut [T] = cast_slice_mut(outputs[0]);
        for (g, range) in groups(ends.iter().copied(), s).enumerate() {
            let left = Matrix { values: &a[range.start * m..range.end * m], strides: (1, m) };
            let right = Matrix { values: &b[range.start * n..range.end * n], strides: (n, 1) };
            product([m, n, range.len()], left, right, &mut c[g * m * n..(g + 1) * m * n], n, false);
        }
    })
}
