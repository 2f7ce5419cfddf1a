//! Convolutions and their gradients by cuDNN, where it is installed.
//!
//! Tensors keep pipec's order of dimensions. Tensor cores want channels last, so engines for them reorder operands in
//! the workspace, for which the limit leaves room. One spatial axis becomes two, of which the first has size 1.
//!
//! Results depend only on shapes and inputs: the plan is the first one that the library suggests for the shape and kind
//! of GPU and that adds in a fixed order. Precision is that of the type, so f32 is never rounded to TF32.

use super::cudnn::{Computes, Convolution, Cudnn, Plan};
use super::draft::PACK_BYTES;
use super::gpu::{Gpu, GpuError};
use super::library_product::{WORKSPACE_ALIGNMENT, aligned_workspace};
use super::per_gpu::PerGpu;
use super::queue::Queue;
use crate::device::layout::TensorLayout;
use compiler::op::{Op, Window};
use std::sync::Arc;

/// Bytes of the workspace besides copies of the operands.
const WORKSPACE: usize = 64 << 20;

/// Operands with more elements are left to pipec's kernels: engines of the library index with 32 bits.
const MOST_ELEMENTS: usize = i32::MAX as usize;

/// A convolution on all GPUs that share its kernel.
pub struct LibraryConvolution {
    convolution: Convolution,
    /// Bytes of the workspace without alignment.
    workspace: usize,
    /// `None` where the library cannot compute it.
    plans: PerGpu<Option<Arc<Plan>>>,
}

impl Convolution {
    /// The convolution of an op, from its inputs and output. `None` if the op is none, or its operands are empty or too
    /// large.
    pub fn of(op: &Op, inputs: &[TensorLayout], outputs: &[TensorLayout]) -> Option<Convolution> {
        let ([first, second], [result]) = (inputs, outputs) else { return None };
        let (computes, window, [x, w, y]) = match op {
            Op::Conv(op) => (Computes::Y, &op.window, [first, second, result]),
            Op::ConvInputGrad(op) => (Computes::X, &op.window, [result, second, first]),
            Op::ConvWeightGrad(op) => (Computes::W, &op.window, [second, result, first]),
            _ => return None,
        };
        if [x, w, y].into_iter().any(|operand| operand.is_empty() || operand.len() > MOST_ELEMENTS) {
            return None;
        }
        let Window { strides, pads_begin, pads_end, dilations } = window;
        let is_1d = strides.len() == 1;
        // Numbers of the spatial axes, after a first axis if there is but one.
        let spatial = |numbers: &[usize], first: i64| -> Vec<i64> {
            let first = is_1d.then_some(first).into_iter();
            first.chain(numbers.iter().map(|&number| number as i64)).collect()
        };
        let sizes = |layout: &TensorLayout| {
            let batch_channels = layout.shape[..2].iter().map(|&size| size as i64);
            batch_channels.chain(spatial(&layout.shape[2..], 1)).collect()
        };
        Some(Convolution {
            computes,
            dtype: result.dtype,
            sizes: [sizes(x), sizes(w), sizes(y)],
            strides: spatial(strides, 1),
            pads_begin: spatial(pads_begin, 0),
            pads_end: spatial(pads_end, 0),
            dilations: spatial(dilations, 1),
            alignment: PACK_BYTES as i64,
        })
    }

    /// The most workspace that a plan may use: engines copy operands to reorder them.
    pub fn workspace_limit(&self) -> usize {
        let elements = |sizes: &Vec<i64>| sizes.iter().map(|&size| size as usize).product::<usize>();
        WORKSPACE + self.sizes.iter().map(elements).sum::<usize>() * self.dtype.size()
    }
}

impl LibraryConvolution {
    /// `None` if the op is no convolution, the library is not there, or it cannot compute it on this GPU.
    pub fn new(gpu: &Gpu, op: &Op, inputs: &[TensorLayout], outputs: &[TensorLayout]) -> Option<LibraryConvolution> {
        let convolution = Convolution::of(op, inputs, outputs)?;
        let library = gpu.cudnn()?;
        gpu.bind().ok()?;
        let first = library.known_plan(&convolution, convolution.workspace_limit())?;
        let workspace = first.workspace;
        let plans = PerGpu::default();
        plans.of(gpu).get_or_init(|| Some(first));
        Some(LibraryConvolution { convolution, workspace, plans })
    }

    /// Bytes of the workspace wherever it starts.
    pub fn workspace(&self) -> usize {
        aligned_workspace(self.workspace)
    }

    /// The convolution on a GPU, which is planned on first use there.
    fn on<'a>(&'a self, gpu: &'a Gpu) -> Option<(&'a Cudnn, &'a Plan)> {
        let library = gpu.cudnn()?;
        // Another kind of GPU may not use more than the memory plan has.
        let plan = || gpu.bind().ok().and_then(|()| library.known_plan(&self.convolution, self.workspace));
        Some((library, self.plans.of(gpu).get_or_init(plan).as_deref()?))
    }

    /// Whether the library computes the convolution on a GPU.
    pub fn works_on(&self, gpu: &Gpu) -> bool {
        self.on(gpu).is_some()
    }

    /// Queues the convolution. False if the library cannot compute it on this GPU or at these addresses of both inputs
    /// and the output.
    ///
    /// # Safety
    ///
    /// The addresses are of this GPU and have the sizes of the op's operands and of its workspace.
    pub unsafe fn run(&self, gpu: &Gpu, queue: &Queue, addresses: [u64; 3], workspace: u64) -> Result<bool, GpuError> {
        let is_aligned = |address: &u64| address.is_multiple_of(PACK_BYTES as u64);
        let Some((library, plan)) = self.on(gpu).filter(|_| addresses.iter().all(is_aligned)) else {
            return Ok(false);
        };
        gpu.bind()?;
        let workspace = if plan.workspace == 0 { 0 } else { workspace.next_multiple_of(WORKSPACE_ALIGNMENT) };
        // SAFETY: the context is bound, the caller passes the memory, and alignment was checked.
        unsafe { library.run(plan, addresses, workspace, queue) }?;
        Ok(true)
    }
}
