//! Optimizers with PyTorch's update rules. A step reads one version of a parameter and writes the next.

use crate::device::buffer::Buffer;
use crate::device::cpu::half::widen;
use crate::device::cpu::optimizer::{self as kernel, Adagrad, Adam, RmsProp, Sgd, Weights};
use crate::device::cpu::real::Real;
use crate::optim::lr_schedule::Rate;
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::tensor::DType;

/// How parameters move.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    /// The rule of one step.
    pub rule: Rule,
    /// How its learning rate changes.
    pub rate: Rate,
}

impl From<Rule> for Optimizer {
    /// The rule with the same learning rate always.
    fn from(rule: Rule) -> Optimizer {
        Optimizer { rule, rate: Rate::CONSTANT }
    }
}

/// How one step moves a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
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
    /// RMSProp (Tieleman and Hinton, 2012): the gradient over the root of its mean square, with momentum.
    RmsProp {
        /// Step length.
        learning_rate: f64,
        /// Share of the mean square that is kept.
        alpha: f64,
        /// Added to the root of the mean square.
        epsilon: f64,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
        /// Share of the buffer that is kept; 0 has no buffer.
        momentum: f64,
    },
    /// Adagrad (Duchi et al., JMLR 2011): the gradient over the root of the sum of its squares.
    Adagrad {
        /// Step length.
        learning_rate: f64,
        /// How the step length falls: over `1 + (step - 1)·decay`.
        decay: f64,
        /// Added to the root of the sum.
        epsilon: f64,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
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
    /// The share of the learning rate that this step has.
    pub rate: f64,
}

/// How far weights are to be predicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ahead {
    /// So many updates from now.
    pub steps: u32,
    /// Updates made so far.
    pub made: u32,
    /// The share of the learning rate that those updates have.
    pub rate: f64,
}

impl Optimizer {
    /// Whether its state knows the direction in which parameters move.
    pub fn has_velocity(&self) -> bool {
        match self.rule {
            Rule::Sgd { momentum, .. } | Rule::RmsProp { momentum, .. } => momentum != 0.0,
            Rule::Adam { .. } => true,
            Rule::Adagrad { .. } => false,
        }
    }

    /// Weights as they will be after more updates in the direction of the last one: `w − steps·lr·v`, where `v` is the buffer of
    /// the momentum, or Adam's corrected first moment over the root of its second.
    pub fn ahead(&self, dtype: DType, ahead: Ahead, weight: &[u8], state: &[Buffer], to: &mut [u8]) {
        match dtype {
            DType::F64 => self.ahead_typed::<f64>(ahead, weight, state, to),
            _ => self.ahead_typed::<f32>(ahead, weight, state, to),
        }
    }

    fn ahead_typed<T: Real>(&self, ahead: Ahead, weight: &[u8], state: &[Buffer], to: &mut [u8]) {
        let (weight, to): (&[T], &mut [T]) = (cast_slice(weight), cast_slice_mut(to));
        let state: Vec<&[T]> = state.iter().map(|buffer| cast_slice(buffer.bytes())).collect();
        let far = f64::from(ahead.steps) * ahead.rate;
        let moved = |far: f64, at: &dyn Fn(usize) -> f64, to: &mut [T]| {
            to.iter_mut().zip(weight).enumerate().for_each(|(i, (to, w))| *to = T::of(w.wide() - far * at(i)));
        };
        match (&self.rule, &state[..]) {
            _ if ahead.made == 0 => to.copy_from_slice(weight),
            (Rule::Sgd { learning_rate, .. }, [buffer]) => moved(far * learning_rate, &|i| buffer[i].wide(), to),
            (Rule::RmsProp { learning_rate, .. }, [_, buffer]) => {
                moved(far * learning_rate, &|i| buffer[i].wide(), to);
            }
            (Rule::Adam { learning_rate, betas, epsilon, .. }, [first, second]) => {
                let correction = |beta: f64| 1.0 - beta.powf(f64::from(ahead.made));
                let (one, two) = (correction(betas.0), correction(betas.1));
                let direction = |i: usize| first[i].wide() / one / ((second[i].wide() / two).sqrt() + epsilon);
                moved(far * learning_rate, &direction, to);
            }
            _ => to.copy_from_slice(weight),
        }
    }

    /// How many tensors of the parameter's size the optimizer keeps beside it.
    pub fn buffers(&self) -> usize {
        match self.rule {
            Rule::Sgd { momentum, .. } => usize::from(momentum != 0.0),
            Rule::Adam { .. } => 2,
            Rule::RmsProp { momentum, .. } => 1 + usize::from(momentum != 0.0),
            Rule::Adagrad { .. } => 1,
        }
    }

    /// What PyTorch calls them, in their order.
    pub fn names(&self) -> &'static [&'static str] {
        match self.rule {
            Rule::Sgd { momentum: 0.0, .. } => &[],
            Rule::Sgd { .. } => &["momentum_buffer"],
            Rule::Adam { .. } => &["exp_avg", "exp_avg_sq"],
            Rule::RmsProp { momentum: 0.0, .. } => &["square_avg"],
            Rule::RmsProp { .. } => &["square_avg", "momentum_buffer"],
            Rule::Adagrad { .. } => &["sum"],
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
        let (scale, step) = (update.scale, u64::from(update.step));
        let mut state = state.iter_mut().map(|b| cast_slice_mut::<u8, T>(b.bytes_mut()));
        let first = state.next().unwrap_or_default();
        let second = state.next().unwrap_or_default();
        match self.rule {
            Rule::Sgd { learning_rate, momentum, nesterov, weight_decay } => {
                let lr = learning_rate * update.rate;
                kernel::sgd(weights, gradient, first, Sgd { lr, momentum, nesterov, weight_decay, scale });
            }
            Rule::Adam { learning_rate, betas, epsilon, weight_decay, decoupled } => {
                let (lr, betas) = (learning_rate * update.rate, betas.into());
                let rule = Adam { lr, betas, epsilon, weight_decay, decoupled, step, scale };
                kernel::adam(weights, gradient, first, second, rule);
            }
            Rule::RmsProp { learning_rate, alpha, epsilon, weight_decay, momentum } => {
                let lr = learning_rate * update.rate;
                let rule = RmsProp { lr, alpha, epsilon, weight_decay, momentum, scale };
                kernel::rmsprop(weights, gradient, first, second, rule);
            }
            Rule::Adagrad { learning_rate, decay, epsilon, weight_decay } => {
                let lr = learning_rate * update.rate;
                let rule = Adagrad { lr, lr_decay: decay, epsilon, weight_decay, step, scale };
                kernel::adagrad(weights, gradient, first, rule);
            }
        }
    }
}

enum Target<'a> {
    InPlace(&'a mut [u8]),
    Beside(&'a [u8], &'a mut [u8]),
}

/// Whether parameters of this element type can be trained. Those of two bytes have masters in `f32`.
pub fn trains(dtype: DType) -> bool {
    dtype.is_float()
}

/// Elements of a narrow gradient that are widened at a time.
const PIECE: usize = 1024;

/// `sum = first + second`, of `f32` or `f64`.
pub fn add(dtype: DType, first: &[u8], second: &[u8], sum: &mut [u8]) {
    match dtype {
        DType::F64 => kernel::add::<f64>(cast_slice(first), cast_slice(second), cast_slice_mut(sum)),
        _ => kernel::add::<f32>(cast_slice(first), cast_slice(second), cast_slice_mut(sum)),
    }
}

/// `sum += gradient`; the sum of gradients of two bytes is in `f32`.
pub fn accumulate(dtype: DType, sum: &mut [u8], gradient: &[u8]) {
    match dtype {
        DType::F64 => kernel::accumulate::<f64>(cast_slice_mut(sum), cast_slice(gradient)),
        DType::F16 | DType::Bf16 => {
            let mut wide = [0.0f32; PIECE];
            let pieces = cast_slice_mut::<u8, f32>(sum).chunks_mut(PIECE);
            for (sum, gradient) in pieces.zip(gradient.chunks(PIECE * dtype.size())) {
                let wide = &mut wide[..sum.len()];
                widen(dtype, gradient, wide);
                kernel::accumulate::<f32>(sum, wide);
            }
        }
        _ => kernel::accumulate::<f32>(cast_slice_mut(sum), cast_slice(gradient)),
    }
}
