//! Data movement ops, for any element type by its size.

use super::walk::{Walk, broadcast_strides, merge_dims, row_major};
use super::wide::wide;
use super::{FastKernel, TensorLayout};
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use compiler::op::{Concat, Flip, Iota, OpRule, Pad, Slice, Transpose};
use compiler::tensor::dim::Dim;
use compiler::tensor::view::ViewMut;

/// Side of a transposition tile: a cache line of 4-byte elements.
const TILE: usize = 16;

/// Copies the first input.
pub fn copy() -> FastKernel {
    FastKernel::new(|inputs, outputs, _| outputs[0].copy_from_slice(inputs[0]))
}

/// Writes constant bytes.
pub fn constant(bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> FastKernel {
    FastKernel::new(move |_, outputs, _| outputs[0].copy_from_slice(bytes.as_ref()))
}

/// Iota; the values are computed once.
pub fn iota(op: &Iota, y: &TensorLayout) -> Option<FastKernel> {
    let mut bytes = vec![0; y.bytes()];
    op.reference(&[], &mut [ViewMut::new(y.dtype, &y.shape, &mut bytes)]).ok()?;
    Some(constant(bytes))
}

pub fn transpose(op: &Transpose, x: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    let x_strides = row_major(&x.shape);
    let strides: Vec<isize> = op.perm.iter().map(|&axis| x_strides[axis]).collect();
    copy_strided(y, &strides, 0)
}

pub fn broadcast(x: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    copy_strided(y, &broadcast_strides(&x.shape, &y.shape), 0)
}

pub fn slice(op: &Slice, x: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    let x_strides = row_major(&x.shape);
    if y.is_empty() {
        return Some(copy_nothing());
    }
    // For a single element the step is irrelevant, and may be too large to multiply.
    let step = |axis: usize| if y.shape[axis] > 1 { x_strides[axis] * op.step[axis] as isize } else { 0 };
    let strides: Vec<isize> = (0..x_strides.len()).map(step).collect();
    copy_strided(y, &strides, origin(&op.begin, &x_strides)?)
}

pub fn flip(op: &Flip, x: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    let mut strides = row_major(&x.shape);
    if y.is_empty() {
        return Some(copy_nothing());
    }
    let mut start = 0;
    for &axis in &op.axes {
        start += (x.shape[axis] as isize - 1) * strides[axis];
        strides[axis] = -strides[axis];
    }
    copy_strided(y, &strides, start)
}

/// Edge and interior padding.
pub fn pad(op: &Pad, x: &TensorLayout, y: &TensorLayout) -> Option<FastKernel> {
    let y_strides = row_major(&y.shape);
    let mut value = vec![0; y.dtype.size()];
    ViewMut::new(y.dtype, &[], &mut value).set_f64(0, op.value);
    let step = |axis: usize| if x.shape[axis] > 1 { y_strides[axis] * (op.interior[axis] as isize + 1) } else { 0 };
    let strides: Vec<isize> = (0..y_strides.len()).map(step).collect();
    let walk = Walk::new(&x.shape, [&row_major(&x.shape), &strides], [0, origin(&op.low, &y_strides)?])?;
    Some(match y.dtype.size() {
        1 => pad_as::<u8>(walk, &value),
        2 => pad_as::<u16>(walk, &value),
        4 => pad_as::<u32>(walk, &value),
        _ => pad_as::<u64>(walk, &value),
    })
}

fn pad_as<T: Pod + Send + Sync>(walk: Walk<2>, value: &[u8]) -> FastKernel {
    let value: T = bytemuck::pod_read_unaligned(value);
    FastKernel::new(move |inputs, outputs, _| {
        let (x, y) = (cast_slice::<u8, T>(inputs[0]), cast_slice_mut::<u8, T>(outputs[0]));
        y.fill(value);
        for [x_at, y_at] in walk.runs() {
            let x = &x[x_at..x_at + walk.inner];
            match walk.steps[1] as usize {
                1 => y[y_at..y_at + walk.inner].copy_from_slice(x),
                step => x.iter().enumerate().for_each(|(i, &v)| y[y_at + i * step] = v),
            }
        }
    })
}

pub fn concat(op: &Concat, inputs: &[TensorLayout], y: &TensorLayout) -> Option<FastKernel> {
    let outer: usize = y.shape[..op.axis].iter().product();
    let run = |layout: &TensorLayout| layout.shape[op.axis..].iter().product::<usize>() * layout.dtype.size();
    let (runs, whole): (Vec<usize>, usize) = (inputs.iter().map(run).collect(), run(y));
    Some(FastKernel::new(move |inputs, outputs, _| {
        for block in 0..outer {
            let mut at = block * whole;
            for (x, &run) in inputs.iter().zip(&runs) {
                outputs[0][at..at + run].copy_from_slice(&x[block * run..(block + 1) * run]);
                at += run;
            }
        }
    }))
}

fn copy_nothing() -> FastKernel {
    FastKernel::new(|_, _, _| {})
}

fn origin(at: &[Dim], strides: &[isize]) -> Option<isize> {
    at.iter().zip(strides).map(|(dim, &stride)| Some(isize::try_from(dim.known()?).ok()? * stride)).sum()
}

/// Writes `y` in order from `x` read with strides.
fn copy_strided(y: &TensorLayout, strides: &[isize], start: isize) -> Option<FastKernel> {
    match y.dtype.size() {
        1 => copy_strided_as::<u8>(y, strides, start),
        2 => copy_strided_as::<u16>(y, strides, start),
        4 => copy_strided_as::<u32>(y, strides, start),
        _ => copy_strided_as::<u64>(y, strides, start),
    }
}

fn copy_strided_as<T: Pod + Send + Sync>(y: &TensorLayout, strides: &[isize], start: isize) -> Option<FastKernel> {
    let y_strides = row_major(&y.shape);
    let mut dims = merge_dims(&y.shape, [&y_strides, strides]);
    // If another axis is contiguous in x, transpose in square tiles, so that both sides use whole cache lines.
    let dense_axis = dims.iter().position(|(_, [_, x])| *x == 1).filter(|&axis| axis + 1 < dims.len());
    if let (Some(dense_axis), Some(&(columns, [_, step]))) = (dense_axis, dims.last())
        && step > 1
    {
        dims.pop();
        let (rows, [row, _]) = dims.remove(dense_axis);
        let (shape, outer): (Vec<usize>, Vec<[isize; 2]>) = dims.into_iter().unzip();
        let [y_outer, x_outer] = [0, 1].map(|i| outer.iter().map(|s| s[i]).collect::<Vec<_>>());
        let matrices = Walk::new(&shape, [&y_outer, &x_outer], [0, start])?;
        return Some(transpose_each::<T>(matrices, [rows, columns], [row as usize, step as usize]));
    }
    let walk = Walk::new(&y.shape, [&y_strides, strides], [0, start])?;
    Some(FastKernel::new(move |inputs, outputs, _| {
        let (x, y) = (cast_slice::<u8, T>(inputs[0]), cast_slice_mut::<u8, T>(outputs[0]));
        let n = walk.inner;
        for [y_at, x_at] in walk.runs() {
            let y = &mut y[y_at..y_at + n];
            match walk.steps[1] {
                1 => y.copy_from_slice(&x[x_at..x_at + n]),
                0 => y.fill(x[x_at]),
                step => {
                    y.iter_mut().enumerate().for_each(|(i, v)| *v = x[(x_at as isize + i as isize * step) as usize])
                }
            }
        }
    }))
}

/// Transposes a matrix at each pair of start indices.
fn transpose_each<T: Pod>(matrices: Walk<2>, sizes: [usize; 2], [row, step]: [usize; 2]) -> FastKernel {
    FastKernel::new(move |inputs, outputs, _| {
        let (x, y) = (cast_slice::<u8, T>(inputs[0]), cast_slice_mut::<u8, T>(outputs[0]));
        for [y_at, x_at] in matrices.elements() {
            transpose_matrix(&x[x_at..], step, &mut y[y_at..], row, sizes);
        }
    })
}

wide! {
    /// `y[r·row + c] = x[c·step + r]` for `r` and `c` below the two sizes.
    pub fn transpose_matrix[T: Pod](x: &[T], step: usize, y: &mut [T], row: usize, sizes: [usize; 2]) {
        let [rows, columns] = sizes;
        for r0 in (0..rows).step_by(TILE) {
            let height = TILE.min(rows - r0);
            for c0 in (0..columns).step_by(TILE) {
                let width = TILE.min(columns - c0);
                // A local tile reads and writes each line of x and y once: lines a power of two apart evict each other
                // from the cache.
                let mut square = [[T::zeroed(); TILE]; TILE];
                for (c, line) in square.iter_mut().enumerate().take(width) {
                    let from = r0 + (c0 + c) * step;
                    line[..height].copy_from_slice(&x[from..from + height]);
                }
                for r in 0..height {
                    let to = (r0 + r) * row + c0;
                    if width == TILE {
                        let line: [T; TILE] = std::array::from_fn(|c| square[c][r]);
                        y[to..to + TILE].copy_from_slice(&line);
                    } else {
                        for (v, line) in y[to..to + width].iter_mut().zip(&square) {
                            *v = line[r];
                        }
                    }
                }
            }
        }
    }
}
