//! Ops that a library of NVIDIA computes in place of pipec's kernels.

use super::gpu::{Gpu, GpuError};
use super::library_convolution::LibraryConvolution;
use super::library_product::LibraryProduct;
use super::queue::Queue;
use crate::device::layout::TensorLayout;
use compiler::op::Op;

/// An op of two inputs and one output on all GPUs that share its kernel.
pub enum LibraryKernel {
    Product(LibraryProduct),
    Convolution(LibraryConvolution),
}

impl LibraryKernel {
    /// `None` if the library is not there, or cannot compute the op on this GPU.
    pub fn new(
        gpu: &Gpu,
        gpus: usize,
        op: &Op,
        inputs: &[TensorLayout],
        outputs: &[TensorLayout],
    ) -> Option<LibraryKernel> {
        match (op, inputs, outputs) {
            (Op::MatMul(op), [a, b], [c]) => LibraryProduct::new(gpu, gpus, op, [a, b, c]).map(LibraryKernel::Product),
            _ => LibraryConvolution::new(gpu, gpus, op, inputs, outputs).map(LibraryKernel::Convolution),
        }
    }

    /// Bytes of the workspace wherever it starts.
    pub fn workspace(&self) -> usize {
        match self {
            LibraryKernel::Product(product) => product.workspace(),
            LibraryKernel::Convolution(convolution) => convolution.workspace(),
        }
    }

    /// Whether the library computes the op on a GPU.
    pub fn works_on(&self, gpu: &Gpu) -> bool {
        match self {
            LibraryKernel::Product(product) => product.works_on(gpu),
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
            LibraryKernel::Convolution(_) if adds => Ok(false),
            // SAFETY: as above.
            LibraryKernel::Convolution(convolution) => unsafe { convolution.run(gpu, queue, addresses, workspace) },
        }
    }
}
