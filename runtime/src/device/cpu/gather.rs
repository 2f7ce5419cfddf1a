//! Gather and its gradient, also with separate indices for each example of a batch.

use super::real::{Real, for_real};
use super::wide::wide;
use super::{ALIGNMENT, FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::{BatchGather, BatchScatterAdd, Gather, KernelError, ScatterAdd};
use compiler::tensor::DType;
use compiler::tensor::view::View;

/// Slices of `run` elements of `x` or `y`, and the indices that name them: those of one axis, or of one axis per example
/// of a batch.
#[derive(Clone)]
struct Slices {
    indices: TensorLayout,
    /// Number of axes, one after another.
    blocks: usize,
    /// Size of an axis, and indices into it.
    size: usize,
    count: usize,
    run: usize,
    /// True if all axes have the same indices.
    is_shared: bool,
}

impl Slices {
    fn new(axis: usize, shape: &[usize], indices: &TensorLayout, is_shared: bool) -> Slices {
        let blocks = shape[..axis].iter().product();
        let count = if is_shared { &indices.shape[..] } else { &indices.shape[axis..] }.iter().product();
        let run = shape[axis + 1..].iter().product();
        Slices { indices: indices.clone(), blocks, size: shape[axis], count, run, is_shared }
    }

    /// The indices, if all are within their axis.
    fn rows<'a>(&'a self, bytes: &'a [u8]) -> Result<View<'a>, KernelError> {
        let rows = View::new(self.indices.dtype, &self.indices.shape, bytes);
        (0..rows.len()).try_for_each(|i| row(&rows, i, self.size).map(drop))?;
        Ok(rows)
    }

    /// Calls `use_slices` with the first elements of each slice and of that which its index names, in index order.
    #[inline(always)]
    fn for_each(&self, rows: &View<'_>, mut use_slices: impl FnMut(usize, usize)) -> Result<(), KernelError> {
        for block in 0..self.blocks {
            for i in 0..self.count {
                let at = block * self.count + i;
                let named = block * self.size + row(rows, if self.is_shared { i } else { at }, self.size)?;
                use_slices(at * self.run, named * self.run);
            }
        }
        Ok(())
    }
}

/// For any element type.
pub fn gather(op: &Gather, x: &TensorLayout, indices: &TensorLayout) -> Option<FastKernel> {
    Some(copy_slices(Slices::new(op.axis, &x.shape, indices, true), x.dtype))
}

/// Gather with separate indices for each example of a batch, for any element type.
pub fn batch_gather(op: &BatchGather, x: &TensorLayout, indices: &TensorLayout) -> Option<FastKernel> {
    Some(copy_slices(Slices::new(op.batch, &x.shape, indices, false), x.dtype))
}

fn copy_slices(slices: Slices, dtype: DType) -> FastKernel {
    let slices = Slices { run: slices.run * dtype.size(), ..slices };
    FastKernel::new(move |inputs, outputs, _| {
        let (x, y, run) = (inputs[0], &mut *outputs[0], slices.run);
        let rows = slices.rows(inputs[1])?;
        slices.for_each(&rows, |to, from| y[to..to + run].copy_from_slice(&x[from..from + run]))
    })
}

/// Adds slices of `dy` in index order. When accumulating, slices with the same target are summed first and no other
/// element is touched.
pub fn scatter_add(op: &ScatterAdd, dy: &TensorLayout, indices: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    for_real!(dy.dtype, T => Some(scatter::<T>(Slices::new(op.axis, &y.shape, indices, true))))
}

/// The same with separate indices for each example. It does not accumulate.
pub fn batch_scatter_add(
    op: &BatchScatterAdd,
    dy: &TensorLayout,
    indices: &TensorLayout,
    y: &TensorLayout,
) -> Option<FastKernel> {
    for_real!(dy.dtype, T => Some(scatter::<T>(Slices::new(op.batch, &y.shape, indices, false))))
}

fn scatter<T: Real>(slices: Slices) -> FastKernel {
    let Slices { blocks, size, count, run, is_shared, .. } = slices;
    // Workspace to accumulate: sorted (target, source) pairs, and the sum for one target.
    let order_bytes = (count * size_of::<[usize; 2]>()).next_multiple_of(ALIGNMENT);
    let workspace_bytes = if is_shared { order_bytes + run * size_of::<T>() } else { 0 };
    let fast = FastKernel::adding(is_shared, move |inputs, outputs, workspace, adds| {
        let (dy, y) = (cast_slice::<u8, T>(inputs[0]), cast_slice_mut::<u8, T>(outputs[0]));
        let rows = slices.rows(inputs[1])?;
        if adds {
            let (order, sum) = workspace.split_at_mut(order_bytes);
            let order = &mut cast_slice_mut::<u8, [usize; 2]>(order)[..count];
            for (i, entry) in order.iter_mut().enumerate() {
                *entry = [row(&rows, i, size)?, i];
            }
            order.sort_unstable();
            let sum = &mut cast_slice_mut::<u8, T>(sum)[..run];
            for block in 0..blocks {
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
        slices.for_each(&rows, |from, to| add(&dy[from..from + run], &mut y[to..to + run]))
    });
    fast.with_workspace(workspace_bytes)
}

wide! {
    /// `y += x`
    pub fn add[T: Real](x: &[T], y: &mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = *y + x;
        }
    }
}

/// Normalises index `i`: negative indices count from the end.
fn row(indices: &View<'_>, i: usize, size: usize) -> Result<usize, KernelError> {
    let index = indices.i64(i);
    let from_end = || size.checked_sub(index.unsigned_abs() as usize).filter(|_| indices.dtype != DType::U64);
    let row = usize::try_from(index).ok().or_else(from_end);
    row.filter(|&row| row < size).ok_or(KernelError::Index { index, size })
}
