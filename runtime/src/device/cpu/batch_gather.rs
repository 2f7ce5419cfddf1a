//! Gather with separate indices for each example of a batch, and its gradient.

use super::gather::{add, check, row};
use super::real::Real;
use super::{FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::{BatchGather, BatchScatterAdd};
use compiler::tensor::DType;
use compiler::tensor::view::View;

/// For any element type.
pub fn gather(op: &BatchGather, x: &TensorLayout, indices: &TensorLayout) -> Option<FastKernel> {
    let size = x.shape[op.batch];
    let per_example: usize = indices.shape[op.batch..].iter().product();
    let run = x.shape[op.batch + 1..].iter().product::<usize>() * x.dtype.size();
    let indices = indices.clone();
    Some(FastKernel::new(move |inputs, outputs, _| {
        let (x, y) = (inputs[0], &mut *outputs[0]);
        let rows = View::new(indices.dtype, &indices.shape, inputs[1]);
        check(&rows, size)?;
        for i in 0..rows.len() {
            let from = (i / per_example * size + row(&rows, i, size)?) * run;
            y[i * run..(i + 1) * run].copy_from_slice(&x[from..from + run]);
        }
        Ok(())
    }))
}

/// Adds slices of `dy` in index order.
pub fn scatter_add(
    op: &BatchScatterAdd,
    dy: &TensorLayout,
    indices: &TensorLayout,
    y: &TensorLayout,
) -> Option<FastKernel> {
    match dy.dtype {
        DType::F32 => Some(scatter::<f32>(op.batch, indices, y)),
        DType::F64 => Some(scatter::<f64>(op.batch, indices, y)),
        _ => None,
    }
}

fn scatter<T: Real>(batch: usize, indices: &TensorLayout, y: &TensorLayout) -> FastKernel {
    let size = y.shape[batch];
    let per_example: usize = indices.shape[batch..].iter().product();
    let run: usize = y.shape[batch + 1..].iter().product();
    let indices = indices.clone();
    FastKernel::new(move |inputs, outputs, _| {
        let (dy, y) = (cast_slice::<u8, T>(inputs[0]), cast_slice_mut::<u8, T>(outputs[0]));
        let rows = View::new(indices.dtype, &indices.shape, inputs[1]);
        check(&rows, size)?;
        y.fill(T::ZERO);
        for i in 0..rows.len() {
            let to = (i / per_example * size + row(&rows, i, size)?) * run;
            add(&dy[i * run..(i + 1) * run], &mut y[to..to + run]);
        }
        Ok(())
    })
}
