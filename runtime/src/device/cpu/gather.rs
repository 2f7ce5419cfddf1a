//! Gather and its gradient.

use super::real::Real;
use super::wide::wide;
use super::{ALIGNMENT, FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::{Gather, KernelError, ScatterAdd};
use compiler::tensor::DType;
use compiler::tensor::view::View;

/// For any element type.
pub fn gather(op: &Gather, x: &TensorLayout, indices: &TensorLayout) -> Option<FastKernel> {
    let outer: usize = x.shape[..op.axis].iter().product();
    let size = x.shape[op.axis];
    let run = x.shape[op.axis + 1..].iter().product::<usize>() * x.dtype.size();
    let indices = indices.clone();
    Some(FastKernel::new(move |inputs, outputs, _| {
        let (x, y) = (inputs[0], &mut *outputs[0]);
        let rows = View::new(indices.dtype, &indices.shape, inputs[1]);
        check(&rows, size)?;
        for block in 0..outer {
            for i in 0..rows.len() {
                let from = (block * size + row(&rows, i, size)?) * run;
                let to = (block * rows.len() + i) * run;
                y[to..to + run].copy_from_slice(&x[from..from + run]);
            }
        }
        Ok(())
    }))
}

/// Adds slices of `dy` in index order. When accumulating, slices with the same target are summed first and no other
/// element is touched.
pub fn scatter_add(op: &ScatterAdd, dy: &TensorLayout, indices: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    match dy.dtype {
        DType::F32 => Some(scatter::<f32>(op.axis, indices, y)),
        DType::F64 => Some(scatter::<f64>(op.axis, indices, y)),
        _ => None,
    }
}

fn scatter<T: Real>(axis: usize, indices: &TensorLayout, y: &TensorLayout) -> FastKernel {
    let outer: usize = y.shape[..axis].iter().product();
    let size = y.shape[axis];
    let run: usize = y.shape[axis + 1..].iter().product();
    let indices = indices.clone();
    let count: usize = indices.shape.iter().product();
    // Workspace: sorted (target, source) pairs, and the sum for one target.
    let (order_bytes, sum_bytes) =
        ((count * size_of::<[usize; 2]>()).next_multiple_of(ALIGNMENT), run * size_of::<T>());
    let fast = FastKernel::adding(true, move |inputs, outputs, workspace, adds| {
        let (dy, y) = (cast_slice::<u8, T>(inputs[0]), cast_slice_mut::<u8, T>(outputs[0]));
        let rows = View::new(indices.dtype, &indices.shape, inputs[1]);
        check(&rows, size)?;
        if adds {
            let (order, sum) = workspace.split_at_mut(order_bytes);
            let order = &mut cast_slice_mut::<u8, [usize; 2]>(order)[..count];
            for (i, entry) in order.iter_mut().enumerate() {
                *entry = [row(&rows, i, size)?, i];
            }
            order.sort_unstable();
            let sum = &mut cast_slice_mut::<u8, T>(sum)[..run];
            for block in 0..outer {
                let (dy, y) = (&dy[block * count * run..], &mut y[block * size * run..]);
                for target in order.chunk_by(|a, b| a[0] == b[0]) {
                    sum.fill(T::ZERO);
                    target.iter().for_each(|[_, from]| add(&dy[from * run..(from + 1) * run], sum));
                    add(sum, &mut y[target[0][0] * run..(target[0][0] + 1) * run]);
                }
            }
            return Ok(());
        }
        y.fill(T::ZERO);
        for block in 0..outer {
            for i in 0..count {
                let to = (block * size + row(&rows, i, size)?) * run;
                let from = (block * count + i) * run;
                add(&dy[from..from + run], &mut y[to..to + run]);
            }
        }
        Ok(())
    });
    fast.with_workspace(order_bytes + sum_bytes)
}

wide! {
    /// `y += x`
    pub fn add[T: Real](x: &[T], y: &mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = *y + x;
        }
    }
}

/// Rejects indices outside an axis of this size.
pub(super) fn check(indices: &View<'_>, size: usize) -> Result<(), KernelError> {
    (0..indices.len()).try_for_each(|i| row(indices, i, size).map(|_| ()))
}

/// Normalises index `i`: negative indices count from the end.
pub(super) fn row(indices: &View<'_>, i: usize, size: usize) -> Result<usize, KernelError> {
    let index = indices.i64(i);
    let from_end = || size.checked_sub(index.unsigned_abs() as usize).filter(|_| indices.dtype != DType::U64);
    let row = usize::try_from(index).ok().or_else(from_end);
    row.filter(|&row| row < size).ok_or(KernelError::Index { index, size })
}
