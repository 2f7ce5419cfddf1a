//! Ops that a library of NVIDIA computes in place of pipec's kernels.
//!
//! A convolution with one tap is a matrix product for each sample, `y = w x`, and the gradient of its input `wᵀ dy`.
//! cuBLASLt takes the tensors as they are, and cuDNN would reorder them for tensor cores, which can take longer than the
//! product. Products do not reach tensor cores where rows are not aligned, so those are left to cuDNN.

use super::draft::PACK_BYTES;
use super::gpu::{Gpu, GpuError};
use super::library_convolution::LibraryConvolution;
use super::library_product::LibraryProduct;
use super::padded_product::{MOST_BYTES, PaddedProduct};
use super::queue::Queue;
use crate::device::layout::TensorLayout;
use compiler::op::{MatMul, Op};

/// An op of two inputs and one output on all GPUs that share its kernel.
pub enum LibraryKernel {
    Product(LibraryProduct),
    Padded(PaddedProduct),
    /// A convolution whose second input, the weight, is the left side of the product.
    Pointwise(LibraryProduct),
    Convolution(LibraryConvolution),
}

impl LibraryKernel {
    /// `None` if the library is not there, or cannot compute the op on this GPU. `tf32` allows matrix products to round
    /// f32 inputs to TF32. The result of a product of 16-bit matrices may be f32.
    pub fn new(
        gpu: &Gpu,
        op: &Op,
        inputs: &[TensorLayout],
        outputs: &[TensorLayout],
        tf32: bool,
    ) -> Option<LibraryKernel> {
        match (op, inputs, outputs) {
            (Op::MatMul(op), [a, b], [c]) => {
                let product = LibraryProduct::new(gpu, op, [a, b, c], tf32)?;
                let padded = PaddedProduct::new(gpu, &product, MOST_BYTES);
                Some(padded.map_or(LibraryKernel::Product(product), LibraryKernel::Padded))
            }
            _ => {
                let pointwise = || {
                    let (product, [a, b, c]) = pointwise(op, inputs, outputs)?;
                    LibraryProduct::new(gpu, &product, [&a, &b, &c], false).map(LibraryKernel::Pointwise)
                };
                let convolution = || LibraryConvolution::new(gpu, op, inputs, outputs);
                pointwise().or_else(|| convolution().map(LibraryKernel::Convolution))
            }
        }
    }

    /// Bytes of the workspace wherever it starts.
    pub fn workspace(&self) -> usize {
        match self {
            LibraryKernel::Product(product) | LibraryKernel::Pointwise(product) => product.workspace(),
            LibraryKernel::Padded(product) => product.workspace(),
            LibraryKernel::Convolution(convolution) => convolution.workspace(),
        }
    }

    /// Whether the library computes the op on a GPU.
    pub fn works_on(&self, gpu: &Gpu) -> bool {
        match self {
            LibraryKernel::Product(product) | LibraryKernel::Pointwise(product) => product.works_on(gpu),
            LibraryKernel::Padded(product) => product.works_on(gpu),
            LibraryKernel::Convolution(convolution) => convolution.works_on(gpu),
        }
    }

    /// Queues the op, added to the output or not. False if the library cannot compute it on this GPU or at these
    /// addresses of both inputs and the output.
    ///
    /// # Safety
    ///
    /// The addresses are of this GPU and have the sizes of the op's operands and of its workspace.
    pub unsafe fn run(
        &self,
        gpu: &Gpu,
        queue: &Queue,
        addresses: [u64; 3],
        workspace: u64,
        adds: bool,
    ) -> Result<bool, GpuError> {
        match self {
            // SAFETY: the caller passes the memory.
            LibraryKernel::Product(product) => unsafe { product.run(gpu, queue, addresses, workspace, adds) },
            // SAFETY: as above.
            LibraryKernel::Padded(product) => unsafe { product.run(gpu, queue, addresses, workspace, adds) },
            _ if adds => Ok(false),
            LibraryKernel::Pointwise(product) => {
                let [data, weight, result] = addresses;
                // SAFETY: as above; the product's operands have the sizes of the convolution's.
                unsafe { product.run(gpu, queue, [weight, data, result], workspace, false) }
            }
            // SAFETY: as above.
            LibraryKernel::Convolution(convolution) => unsafe { convolution.run(gpu, queue, addresses, workspace) },
        }
    }
}

/// The product that computes a convolution with one tap, or the gradient of its input, and its operands: the weight, the
/// data and the result.
fn pointwise(op: &Op, inputs: &[TensorLayout], outputs: &[TensorLayout]) -> Option<(MatMul, [TensorLayout; 3])> {
    let (window, groups, transpose_a) = match op {
        Op::Conv(op) => (&op.window, op.groups, false),
        Op::ConvInputGrad(op) => (&op.window, op.groups, true),
        _ => return None,
    };
    let ([data, weight], [result]) = (inputs, outputs) else { return None };
    let is_plain = groups == 1
        && window.strides.iter().all(|&stride| stride == 1)
        && window.pads_begin.iter().chain(&window.pads_end).all(|&pad| pad == 0)
        && weight.shape[2..].iter().all(|&taps| taps == 1);
    let plane: usize = data.shape[2..].iter().product();
    if !is_plain || plane == 0 || !(plane * data.dtype.size()).is_multiple_of(PACK_BYTES) {
        return None;
    }
    let reshaped = |operand: &TensorLayout, shape: Vec<usize>| TensorLayout { shape, dtype: operand.dtype };
    let planes = |operand: &TensorLayout| reshaped(operand, vec![operand.shape[0], operand.shape[1], plane]);
    let operands = [reshaped(weight, weight.shape[..2].to_vec()), planes(data), planes(result)];
    Some((MatMul { transpose_a, transpose_b: false }, operands))
}
