//! Dropout: the mask is recomputed wherever it is used.

use super::half::{self, is_half};
use super::real::{Real, for_real};
use super::wide::wide;
use super::{FastKernel, TensorLayout};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::op::dropout::Mask;
use compiler::op::{Dropout, DropoutPart, KernelError};
use compiler::tensor::DType;

/// Its gradient is the same kernel.
pub fn kernel(op: &Dropout, x: &TensorLayout) -> Option<FastKernel> {
    for_real!(x.dtype, T => Some(piece_kernel::<T>(*op)))
}

/// Dropout of a tensor-parallel shard, with the mask of the whole tensor.
pub fn part(op: &DropoutPart, x: &TensorLayout) -> Option<FastKernel> {
    for_real!(x.dtype, T => Some(part_kernel::<T>(*op)))
}

fn part_kernel<T: Real>(op: DropoutPart) -> FastKernel {
    FastKernel::new(move |inputs, outputs, _| {
        let [counter, index] = [1, 2].map(|i: usize| cast_slice::<u8, i64>(inputs[i])[0]);
        let device = usize::try_from(index).ok().filter(|device| *device < op.devices);
        let device = device.ok_or(KernelError::Index { index, size: op.devices })?;
        let (mask, scale) = (op.whole.mask(counter), op.whole.scale());
        let (x, y) = (cast_slice::<u8, T>(inputs[0]), cast_slice_mut::<u8, T>(outputs[0]));
        for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
            *y = if mask.keeps(op.place(i, device)) { T::of(x.wide() * scale) } else { T::ZERO };
        }
        Ok(())
    })
}

/// Dropout of some adjacent elements of a tensor. A third input is the number of the first one.
pub fn piece(op: &Dropout, x: &TensorLayout) -> Option<FastKernel> {
    match x.dtype {
        DType::F32 => Some(piece_kernel::<f32>(*op)),
        DType::F64 => Some(piece_kernel::<f64>(*op)),
        dtype if is_half(dtype) => {
            let scalar = || TensorLayout { dtype: DType::I64, shape: Vec::new() };
            Some(half::wrap(piece_kernel::<f32>(*op), &[x.clone(), scalar(), scalar()], std::slice::from_ref(x)))
        }
        _ => None,
    }
}

/// Without a third input, the first element is that of the tensor.
fn piece_kernel<T: Real>(op: Dropout) -> FastKernel {
    FastKernel::new(move |inputs, outputs, _| {
        let counter = cast_slice::<u8, i64>(inputs[1])[0];
        let first = inputs.get(2).map_or(0, |first| cast_slice::<u8, i64>(first)[0]);
        let (x, y) = (cast_slice::<u8, T>(inputs[0]), cast_slice_mut(outputs[0]));
        drop_out(x, first as usize, op.mask(counter), op.scale(), y);
    })
}

wide! {
    fn drop_out[T: Real](x: &[T], first: usize, mask: Mask, scale: f64, y: &mut [T]) {
        for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
            *y = if mask.keeps(first + i) { T::of(x.wide() * scale) } else { T::ZERO };
        }
    }
}
