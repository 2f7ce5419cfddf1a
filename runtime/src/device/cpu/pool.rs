//! Max and average pooling and their gradients: one plane at a time, tap by tap.

use super::patches::Grid;
use super::real::{Real, for_real};
use super::sum::{largest, sum_of};
use super::wide::wide;
use super::{ALIGNMENT, FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::{AvgPool, MaxPool};

pub fn max(op: &MaxPool, x: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    let grid = Grid::new(&op.window, &x.shape[2..], &op.kernel, &y.shape[2..])?;
    for_real!(x.dtype, T => Some(max_kernel::<T>(grid)))
}

pub fn max_grad(op: &MaxPool, x: &TensorLayout, dy: &TensorLayout) -> Option<FastKernel> {
    let grid = Grid::new(&op.window, &x.shape[2..], &op.kernel, &dy.shape[2..])?;
    u32::try_from(grid.data_len()).ok()?;
    for_real!(x.dtype, T => Some(max_grad_kernel::<T>(grid)))
}

pub fn avg(op: &AvgPool, x: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    let grid = Grid::new(&op.window, &x.shape[2..], &op.kernel, &y.shape[2..])?;
    let shares = Shares::of(op, &grid, &x.shape[2..]);
    for_real!(x.dtype, T => Some(FastKernel::new(move |inputs, outputs, _| {
        avg_planes(&grid, &shares, cast_slice::<u8, T>(inputs[0]), cast_slice_mut(outputs[0]))
    })))
}

pub fn avg_grad(op: &AvgPool, dy: &TensorLayout, dx: &TensorLayout) -> Option<FastKernel> {
    let grid = Grid::new(&op.window, &dx.shape[2..], &op.kernel, &dy.shape[2..])?;
    let shares = Shares::of(op, &grid, &dx.shape[2..]);
    for_real!(dy.dtype, T => Some(FastKernel::new(move |inputs, outputs, _| {
        avg_grad_planes(&grid, &shares, cast_slice::<u8, T>(inputs[0]), cast_slice_mut(outputs[0]))
    })))
}

/// The weight of an element in the mean of its window, as a product over the axes; 0 for an empty window.
struct Shares([Vec<f64>; 3]);

impl Shares {
    fn of(op: &AvgPool, grid: &Grid, data: &[usize]) -> Shares {
        let leading = 3 - data.len();
        Shares(std::array::from_fn(|axis| {
            let share = |at: usize| {
                let counts = |&tap: &usize| match axis.checked_sub(leading).filter(|_| op.count_padding) {
                    Some(a) => {
                        let padded = op.window.pads_begin[a] + data[a] + op.window.pads_end[a];
                        op.window.padded_position(a, at, tap) < padded
                    }
                    None => grid.element(axis, at, tap).is_some(),
                };
                match (0..grid.kernel[axis]).filter(counts).count() {
                    0 => 0.0,
                    count => 1.0 / count as f64,
                }
            };
            (0..grid.out[axis]).map(share).collect()
        }))
    }

    /// Product of the two outer axes for a window row.
    #[inline(always)]
    fn row(&self, grid: &Grid, row: usize) -> f64 {
        self.0[0][row / grid.out[1]] * self.0[1][row % grid.out[1]]
    }
}

fn max_kernel<T: Real>(grid: Grid) -> FastKernel {
    if grid.is_of_squares() {
        return FastKernel::new(move |inputs, outputs, _| {
            max_of_squares(grid.out[2], cast_slice::<u8, T>(inputs[0]), cast_slice_mut(outputs[0]))
        });
    }
    FastKernel::new(move |inputs, outputs, _| {
        max_planes(&grid, cast_slice::<u8, T>(inputs[0]), cast_slice_mut(outputs[0]))
    })
}

wide! {
    // Window rows, each over two data rows, are consecutive through all planes.
    fn max_of_squares[T: Real](width: usize, x: &[T], y: &mut [T]) {
        for (x, y) in x.chunks_exact((4 * width).max(1)).zip(y.chunks_exact_mut(width.max(1))) {
            let (upper, lower) = x.split_at(2 * width);
            // Pairs of constant length need no bounds checks, so the loop vectorises.
            for ((y, above), below) in y.iter_mut().zip(upper.chunks_exact(2)).zip(lower.chunks_exact(2)) {
                *y = above[0].larger(above[1]).larger(below[0].larger(below[1]));
            }
        }
    }
}

wide! {
    fn max_planes[T: Real](grid: &Grid, x: &[T], y: &mut [T]) {
        let step = grid.row_step();
        let planes = y.chunks_exact_mut(grid.out_len().max(1)).enumerate();
        for (i, y) in planes {
            let x = &x[i * grid.data_len()..(i + 1) * grid.data_len()];
            if grid.is_global() {
                y[0] = largest(x);
                continue;
            }
            y.fill(T::LOWEST);
            for tap in 0..grid.taps() {
                let (run, starts) = grid.runs_at(tap);
                for (to, from) in starts {
                    // Constant strides compile to vector loads.
                    let (y, x) = (&mut y[to..to + run], &x[from..from + (run - 1) * step + 1]);
                    match step {
                        1 => {
                            for (y, &x) in y.iter_mut().zip(x) {
                                *y = y.larger(x);
                            }
                        }
                        2 => {
                            for (i, y) in y.iter_mut().enumerate() {
                                *y = y.larger(x[2 * i]);
                            }
                        }
                        _ => {
                            for (i, y) in y.iter_mut().enumerate() {
                                *y = y.larger(x[i * step]);
                            }
                        }
                    }
                }
            }
        }
    }
}

fn max_grad_kernel<T: Real>(grid: Grid) -> FastKernel {
    if grid.is_of_squares() {
        return FastKernel::new(move |inputs, outputs, _| {
            let (x, dy) = (cast_slice::<u8, T>(inputs[0]), cast_slice::<u8, T>(inputs[1]));
            max_grad_of_squares(grid.out[2], x, dy, cast_slice_mut(outputs[0]));
        });
    }
    let windows = grid.out_len();
    let first = (windows * size_of::<T>()).next_multiple_of(ALIGNMENT);
    let fast = FastKernel::new(move |inputs, outputs, workspace| {
        let (best, index) = workspace.split_at_mut(first);
        let best = &mut cast_slice_mut::<u8, T>(best)[..windows];
        let index = &mut cast_slice_mut::<u8, u32>(&mut index[..windows * size_of::<u32>()])[..];
        let (x, dy) = (cast_slice::<u8, T>(inputs[0]), cast_slice::<u8, T>(inputs[1]));
        max_grad_planes(&grid, x, dy, cast_slice_mut(outputs[0]), best, index);
    });
    fast.with_workspace(first + windows * size_of::<u32>())
}

/// Updates the maximum and its index for each window; NaN wins.
#[inline(always)]
#[allow(clippy::eq_op)]
fn take_larger<T: Real>(best: &mut [T], index: &mut [u32], first: u32, step: u32, value: impl Fn(usize) -> T) {
    for (i, (best, index)) in best.iter_mut().zip(index).enumerate() {
        let v = value(i);
        let wins = (v > *best) | ((v != v) & (*best == *best)) | (*index == u32::MAX);
        *best = if wins { v } else { *best };
        *index = if wins { first + i as u32 * step } else { *index };
    }
}

wide! {
    #[allow(clippy::eq_op)]
    fn max_grad_of_squares[T: Real](width: usize, x: &[T], dy: &[T], dx: &mut [T]) {
        let rows = x.chunks_exact((4 * width).max(1)).zip(dx.chunks_exact_mut((4 * width).max(1)));
        for ((x, dx), dy) in rows.zip(dy.chunks_exact(width.max(1))) {
            let (upper, lower) = x.split_at(2 * width);
            let (dx_upper, dx_lower) = dx.split_at_mut(2 * width);
            let windows = upper.chunks_exact(2).zip(lower.chunks_exact(2));
            let gradients = dx_upper.chunks_exact_mut(2).zip(dx_lower.chunks_exact_mut(2));
            for (((above, below), (dx_above, dx_below)), &dy) in windows.zip(gradients).zip(dy) {
                let (mut best, mut at) = (above[0], 0u32);
                for (tap, v) in [(1, above[1]), (2, below[0]), (3, below[1])] {
                    let wins = (v > best) | ((v != v) & (best == best));
                    best = if wins { v } else { best };
                    at = if wins { tap } else { at };
                }
                dx_above[0] = if at == 0 { dy } else { T::ZERO };
                dx_above[1] = if at == 1 { dy } else { T::ZERO };
                dx_below[0] = if at == 2 { dy } else { T::ZERO };
                dx_below[1] = if at == 3 { dy } else { T::ZERO };
            }
        }
    }
}

wide! {
    fn max_grad_planes[T: Real](grid: &Grid, x: &[T], dy: &[T], dx: &mut [T], best: &mut [T], index: &mut [u32]) {
        let step = grid.row_step();
        dx.fill(T::ZERO);
        for (i, dy) in dy.chunks_exact(grid.out_len().max(1)).enumerate() {
            let plane = i * grid.data_len()..(i + 1) * grid.data_len();
            let (x, dx) = (&x[plane.clone()], &mut dx[plane]);
            // Without an index, the first element becomes the maximum.
            index.fill(u32::MAX);
            best.fill(T::LOWEST);
            for tap in 0..grid.taps() {
                let (run, starts) = grid.runs_at(tap);
                for (to, from) in starts {
                    let (best, index) = (&mut best[to..to + run], &mut index[to..to + run]);
                    let x = &x[from..from + (run - 1) * step + 1];
                    // Constant strides compile to vector loads.
                    match step {
                        1 => take_larger(best, index, from as u32, 1, |i| x[i]),
                        2 => take_larger(best, index, from as u32, 2, |i| x[2 * i]),
                        _ => take_larger(best, index, from as u32, step as u32, |i| x[i * step]),
                    }
                }
            }
            for (&at, &dy) in index.iter().zip(dy).filter(|(at, _)| **at != u32::MAX) {
                dx[at as usize] = dx[at as usize] + dy;
            }
        }
    }
}

wide! {
    fn avg_planes[T: Real](grid: &Grid, shares: &Shares, x: &[T], y: &mut [T]) {
        let step = grid.row_step();
        for (i, y) in y.chunks_exact_mut(grid.out_len().max(1)).enumerate() {
            let x = &x[i * grid.data_len()..(i + 1) * grid.data_len()];
            if grid.is_global() {
                y[0] = T::of(sum_of(x, |v| v) * shares.row(grid, 0) * shares.0[2][0]);
                continue;
            }
            y.fill(T::ZERO);
            for tap in 0..grid.taps() {
                let (run, starts) = grid.runs_at(tap);
                for (to, from) in starts {
                    for (y, &x) in y[to..to + run].iter_mut().zip(x[from..].iter().step_by(step)) {
                        *y = *y + x;
                    }
                }
            }
            for (row, y) in y.chunks_exact_mut(grid.out[2]).enumerate() {
                let share = shares.row(grid, row);
                for (y, part) in y.iter_mut().zip(&shares.0[2]) {
                    *y = T::of(y.wide() * (share * part));
                }
            }
        }
    }
}

wide! {
    fn avg_grad_planes[T: Real](grid: &Grid, shares: &Shares, dy: &[T], dx: &mut [T]) {
        let step = grid.row_step();
        dx.fill(T::ZERO);
        for (i, dy) in dy.chunks_exact(grid.out_len().max(1)).enumerate() {
            let dx = &mut dx[i * grid.data_len()..(i + 1) * grid.data_len()];
            if grid.is_global() {
                dx.fill(T::of(dy[0].wide() * shares.row(grid, 0) * shares.0[2][0]));
                continue;
            }
            for tap in 0..grid.taps() {
                let (run, starts) = grid.runs_at(tap);
                for (to, from) in starts {
                    let (row, windows) = (to / grid.out[2], to % grid.out[2]..to % grid.out[2] + run);
                    let share = shares.row(grid, row);
                    let parts = &shares.0[2][windows];
                    for ((dx, dy), part) in dx[from..].iter_mut().step_by(step).zip(&dy[to..to + run]).zip(parts) {
                        *dx = *dx + T::of(dy.wide() * (share * part));
                    }
                }
            }
        }
    }
}
