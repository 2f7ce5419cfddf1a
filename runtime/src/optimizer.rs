//! Optimizers by PyTorch's rules. A step reads one version of a parameter and writes the next.

use crate::buffer::Buffer;
use crate::device::cpu::optimizer as kernel;
use compiler::tensor::DType;

/// How parameters move. `learning_rate` is the same for all steps.
#[derive(Clone, Debug, PartialEq)]
pub enum Optimizer {
    /// Stochastic gradient descent: `g += weight_decay·w; buffer = momentum·buffer + g; w -= lr·buffer`
    /// (Nesterov: `w -= lr·(g + momentum·buffer)`).
    Sgd {
        /// Step length.
        learning_rate: f64,
        /// Share of the buffer that is kept; 0 has no buffer.
        momentum: f64,
        /// Look ahead along the buffer.
        nesterov: bool,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
    },
    /// Adam (Kingma and Ba, 2015) with bias correction and epsilon outside the root; with `decoupled`, AdamW
    /// (Loshchilov and Hutter, 2019): the weight shrinks by `lr·weight_decay` instead of the gradient growing.
    Adam {
        /// Step length.
        learning_rate: f64,
        /// Shares kept of the first and second moment.
        betas: (f64, f64),
        /// Added to the root of the second moment.
        epsilon: f64,
        /// L2 penalty, or decay when decoupled.
        weight_decay: f64,
        /// AdamW.
        decoupled: bool,
    },
}

/// What a step needs beside the weights.
#[derive(Clone, Copy)]
pub struct Update<'a> {
    /// Element type of weights, gradient and state.
    pub dtype: DType,
    /// The sum of gradients.
    pub gradient: &'a [u8],
    /// What the sum is multiplied by to be an average.
    pub scale: f64,
    /// Counts steps from 1.
    pub step: u32,
}

impl Optimizer {
    /// How many tensors of the parameter's size the optimizer keeps beside it.
    pub fn buffers(&self) -> usize {
        match self {
            Optimizer::Sgd { momentum, .. } => usize::from(*momentum != 0.0),
            Optimizer::Adam { .. } => 2,
        }
    }

    /// The state of a parameter before its first step.
    pub fn new_state(&self, bytes: usize) -> Vec<Buffer> {
        (0..self.buffers()).map(|_| Buffer::new(bytes)).collect()
    }

    /// A step that writes over the old version.
    pub fn in_place(&self, update: Update<'_>, weight: &mut [u8], state: &mut [Buffer]) {
        kernel::in_place(self.rule(update.step), update.dtype, update.scale, update.gradient, weight, &mut slices(state));
    }

    /// A step that leaves the old version as it is.
    pub fn out_of_place(&self, update: Update<'_>, old: &[u8], new: &mut [u8], state: &mut [Buffer]) {
        new.copy_from_slice(old);
        self.in_place(update, new, state);
    }
}

fn slices(state: &mut [Buffer]) -> Vec<&mut [u8]> {
    state.iter_mut().map(Buffer::bytes_mut).collect()
}
