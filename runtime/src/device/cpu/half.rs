//! Kernels for `f16` and `bf16`: inputs are widened to `f32`, the `f32` kernel computes, and outputs are rounded once,
//! to nearest. Sums, means and products within an op therefore have `f32` precision.

use super::table::fast;
use super::{ALIGNMENT, FastKernel, TensorLayout, TermBody};
pub use crate::device::layout::is_half;
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::{Cast, Op};
use compiler::tensor::DType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// `to = from`. Panics for other types.
pub fn widen(dtype: DType, from: &[u8], to: &mut [f32]) {
    match dtype {
        DType::F16 => cast_slice::<u8, f16>(from).convert_to_f32_slice(to),
        DType::Bf16 => cast_slice::<u8, bf16>(from).convert_to_f32_slice(to),
        _ => unreachable!("only types of two bytes are widened"),
    }
}

/// `to = from`, rounded to nearest. Panics for other types.
pub fn narrow(dtype: DType, from: &[f32], to: &mut [u8]) {
    match dtype {
        DType::F16 => cast_slice_mut::<u8, f16>(to).convert_from_f32_slice(from),
        DType::Bf16 => cast_slice_mut::<u8, bf16>(to).convert_from_f32_slice(from),
        _ => unreachable!("only types of two bytes are narrowed"),
    }
}

/// The kernel of an op with 16-bit operands, if there is one for `f32`.
pub fn kernel(op: &Op, inputs: &[TensorLayout], outputs: &[TensorLayout]) -> Option<FastKernel> {
    if !inputs.iter().chain(outputs).any(|layout| is_half(layout.dtype)) {
        return None;
    }
    let op = match op {
        Op::Cast(cast) if is_half(cast.to) => Op::Cast(Cast { to: DType::F32 }),
        op => op.clone(),
    };
    let wide = |layouts: &[TensorLayout]| -> Vec<TensorLayout> { layouts.iter().map(widen_layout).collect() };
    let inner = fast(&op, &wide(inputs), &wide(outputs))?;
    // Plans count on no other sums of two-byte types.
    let inner = if matches!(op, Op::MatMul(_)) { inner } else { FastKernel { term: None, ..inner } };
    Some(wrap(inner, inputs, outputs))
}

/// A kernel whose 16-bit operands are `f32` for `inner`.
pub fn wrap(inner: FastKernel, inputs: &[TensorLayout], outputs: &[TensorLayout]) -> FastKernel {
    let scratch: usize = inputs.iter().chain(outputs).filter(|layout| is_half(layout.dtype)).map(room).sum();
    let (from, to) = (inputs.to_vec(), outputs.to_vec());
    let FastKernel { workspace: inner_workspace, body: inner, term } = inner;
    // The sum is f32, as the result of the inner kernel.
    let term = term.map(|term| -> TermBody {
        let from = from.clone();
        Box::new(move |inputs, outputs, workspace, adds| {
            let mut scratch_left = workspace;
            let wide_inputs = widen_all(inputs, &from, &mut scratch_left);
            term(&wide_inputs, outputs, &mut scratch_left[..inner_workspace], adds)
        })
    });
    let body = move |inputs: &[&[u8]], outputs: &mut [&mut [u8]], workspace: &mut [u8]| {
        let mut scratch_left = workspace;
        let wide_inputs = widen_all(inputs, &from, &mut scratch_left);
        let half_layouts = to.iter().filter(|layout| is_half(layout.dtype));
        let mut wide_buffers: Vec<&mut [u8]> = half_layouts.map(|layout| take(&mut scratch_left, layout)).collect();
        {
            let mut wide_buffers = wide_buffers.iter_mut();
            let mut wide_outputs: Vec<&mut [u8]> = Vec::with_capacity(outputs.len());
            for (bytes, layout) in outputs.iter_mut().zip(&to) {
                if is_half(layout.dtype) {
                    wide_outputs.push(wide_buffers.next().expect("every narrow output has its chunk"));
                } else {
                    wide_outputs.push(bytes);
                }
            }
            inner(&wide_inputs, &mut wide_outputs, &mut scratch_left[..inner_workspace])?;
        }
        let half_outputs = outputs.iter_mut().zip(&to).filter(|(_, layout)| is_half(layout.dtype));
        for ((bytes, layout), piece) in half_outputs.zip(wide_buffers) {
            narrow(layout.dtype, cast_slice(piece), bytes);
        }
        Ok(())
    };
    FastKernel { workspace: 0, body: Box::new(body), term }.with_workspace(scratch + inner_workspace)
}

/// The inputs, of which those of 16 bits are widened into the workspace.
fn widen_all<'a>(inputs: &[&'a [u8]], layouts: &[TensorLayout], workspace: &mut &'a mut [u8]) -> Vec<&'a [u8]> {
    let widened = |(bytes, layout): (&&'a [u8], &TensorLayout)| -> &'a [u8] {
        if !is_half(layout.dtype) {
            return bytes;
        }
        let piece = take(workspace, layout);
        widen(layout.dtype, bytes, cast_slice_mut(piece));
        piece
    };
    inputs.iter().zip(layouts).map(widened).collect()
}

fn widen_layout(layout: &TensorLayout) -> TensorLayout {
    let dtype = if is_half(layout.dtype) { DType::F32 } else { layout.dtype };
    TensorLayout { dtype, shape: layout.shape.clone() }
}

/// Scratch bytes of an operand widened to `f32`.
fn room(layout: &TensorLayout) -> usize {
    (layout.len() * size_of::<f32>()).next_multiple_of(ALIGNMENT)
}

/// Splits the operand's part off the scratch.
fn take<'a>(scratch: &mut &'a mut [u8], layout: &TensorLayout) -> &'a mut [u8] {
    let (piece, remainder) = std::mem::take(scratch).split_at_mut(room(layout));
    *scratch = remainder;
    &mut piece[..layout.len() * size_of::<f32>()]
}
