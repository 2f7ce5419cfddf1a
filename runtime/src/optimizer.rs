//! Optimizers by PyTorch's rules. A step reads one version of a parameter and writes the next.

use crate::buffer::Buffer;
use crate::device::cpu::optimizer::{self as kernel, Adam, Sgd, Weights};
use crate::device::cpu::real::Real;
use bytemuck::{cast_slice, cast_slice_mut};
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
        match update.dtype {
            DType::F64 => self.typed::<f64>(update, Target::InPlace(weight), state),
            _ => self.typed::<f32>(update, Target::InPlace(weight), state),
        }
    }

    /// A step that leaves the old version as it is.
    pub fn out_of_place(&self, update: Update<'_>, old: &[u8], new: &mut [u8], state: &mut [Buffer]) {
        match update.dtype {
            DType::F64 => self.typed::<f64>(update, Target::Beside(old, new), state),
            _ => self.typed::<f32>(update, Target::Beside(old, new), state),
        }
    }

    fn typed<T: Real>(&self, update: Update<'_>, target: Target<'_>, state: &mut [Buffer]) {
        let gradient: &[T] = cast_slice(update.gradient);
        let weights = match target {
            Target::InPlace(weight) => Weights::InPlace(cast_slice_mut(weight)),
            Target::Beside(old, new) => Weights::Beside { old: cast_slice(old), new: cast_slice_mut(new) },
        };
        let scale = update.scale;
        let mut state = state.iter_mut().map(|b| cast_slice_mut::<u8, T>(b.bytes_mut()));
        let first = state.next().unwrap_or_default();
        let second = state.next().unwrap_or_default();
        match *self {
            Optimizer::Sgd { learning_rate: lr, momentum, nesterov, weight_decay } => {
                kernel::sgd(weights, gradient, first, Sgd { lr, momentum, nesterov, weight_decay, scale });
            }
            Optimizer::Adam { learning_rate: lr, betas, epsilon, weight_decay, decoupled } => {
                let (betas, step) = (betas.into(), u64::from(update.step));
                let rule = Adam { lr, betas, epsilon, weight_decay, decoupled, step, scale };
                kernel::adam(weights, gradient, first, second, rule);
            }
        }
    }
}

enum Target<'a> {
    InPlace(&'a mut [u8]),
    Beside(&'a [u8], &'a mut [u8]),
}

/// Whether parameters of this element type can be trained.
pub fn trains(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64)
}

/// `sum += gradient`
pub fn accumulate(dtype: DType, sum: &mut [u8], gradient: &[u8]) {
    match dtype {
        DType::F64 => kernel::accumulate::<f64>(cast_slice_mut(sum), cast_slice(gradient)),
        _ => kernel::accumulate::<f32>(cast_slice_mut(sum), cast_slice(gradient)),
    }
}
