//! Optimizers with PyTorch's update rules. A step reads one weight version and writes the next.

use crate::device::buffer::Buffer;
use crate::device::cpu::half::widen;
use crate::device::cpu::optimizer::{self as kernel, Adagrad, Adam, RmsProp, Sgd, Weights};
use crate::device::cpu::real::Real;
use crate::optim::lr_schedule::Rate;
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::tensor::DType;

/// An update rule with a learning-rate schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimizer {
    pub rule: Rule,
    pub rate: Rate,
}

impl From<Rule> for Optimizer {
    /// The rule with a constant learning rate.
    fn from(rule: Rule) -> Optimizer {
        Optimizer { rule, rate: Rate::CONSTANT }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// Stochastic gradient descent: `g += weight_decay·w; buffer = momentum·buffer + g; w -= lr·buffer`
    /// (Nesterov: `w -= lr·(g + momentum·buffer)`).
    Sgd {
        learning_rate: f64,
        /// 0 needs no momentum buffer.
        momentum: f64,
        nesterov: bool,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
    },
    /// Adam (Kingma and Ba, 2015) with bias correction and epsilon outside the root. With `decoupled`, AdamW
    /// (Loshchilov and Hutter, 2019): weights are multiplied by `1 - lr·weight_decay` instead.
    Adam {
        learning_rate: f64,
        betas: (f64, f64),
        /// Added to the root of the second moment.
        epsilon: f64,
        /// L2 penalty, or decoupled decay.
        weight_decay: f64,
        /// True for AdamW.
        decoupled: bool,
    },
    /// RMSProp (Tieleman and Hinton, 2012): gradient divided by the root of its moving mean square, with momentum.
    RmsProp {
        learning_rate: f64,
        /// Decay rate of the mean square.
        alpha: f64,
        /// Added to the root of the mean square.
        epsilon: f64,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
        /// 0 needs no momentum buffer.
        momentum: f64,
    },
    /// Adagrad (Duchi et al., JMLR 2011): gradient divided by the root of the sum of its squares.
    Adagrad {
        learning_rate: f64,
        /// Learning-rate decay: divides by `1 + (step - 1)·decay`.
        decay: f64,
        /// Added to the root of the sum.
        epsilon: f64,
        /// L2 penalty, added to the gradient.
        weight_decay: f64,
    },
}

/// The inputs of one optimizer step besides the weights.
#[derive(Clone, Copy)]
pub struct Update<'a> {
    /// Element type of weights, gradient and state.
    pub dtype: DType,
    pub gradient: &'a [u8],
    /// Factor that turns the sum into an average.
    pub scale: f64,
    /// Number of the step, from 1.
    pub step: u32,
    /// Learning-rate scale of this step.
    pub rate: f64,
}

/// The distance of a weight prediction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ahead {
    /// Updates to predict.
    pub steps: u32,
    /// Updates made so far.
    pub made: u32,
    /// Learning-rate scale of the predicted updates.
    pub rate: f64,
}

impl Optimizer {
    /// True if the optimizer state contains an update direction.
    pub fn has_velocity(&self) -> bool {
        match self.rule {
            Rule::Sgd { momentum, .. } | Rule::RmsProp { momentum, .. } => momentum != 0.0,
            Rule::Adam { .. } => true,
            Rule::Adagrad { .. } => false,
        }
    }

    /// Predicts weights after further updates in the direction of the last one: `w − steps·lr·v`. `v` is the momentum
    /// buffer, or Adam's bias-corrected first moment over the root of its second.
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

    /// Number of state tensors per parameter.
    pub fn buffers(&self) -> usize {
        match self.rule {
            Rule::Sgd { momentum, .. } => usize::from(momentum != 0.0),
            Rule::Adam { .. } => 2,
            Rule::RmsProp { momentum, .. } => 1 + usize::from(momentum != 0.0),
            Rule::Adagrad { .. } => 1,
        }
    }

    /// PyTorch's names of the state tensors, in order.
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

    pub fn new_state(&self, bytes: usize) -> Vec<Buffer> {
        (0..self.buffers()).map(|_| Buffer::new(bytes)).collect()
    }

    /// Overwrites the old weight version.
    pub fn in_place(&self, update: Update<'_>, weight: &mut [u8], state: &mut [Buffer]) {
        match update.dtype {
            DType::F64 => self.typed::<f64>(update, Target::InPlace(weight), state),
            _ => self.typed::<f32>(update, Target::InPlace(weight), state),
        }
    }

    /// Writes the new weight version and leaves the old one unchanged.
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

/// True if parameters of this element type can be trained; 16-bit ones have `f32` master weights.
pub fn trains(dtype: DType) -> bool {
    dtype.is_float()
}

/// Elements of a 16-bit gradient that are widened at a time.
const PIECE: usize = 1024;

/// `sum = first + second`, for `f32` or `f64`.
pub fn add(dtype: DType, first: &[u8], second: &[u8], sum: &mut [u8]) {
    match dtype {
        DType::F64 => kernel::add::<f64>(cast_slice(first), cast_slice(second), cast_slice_mut(sum)),
        _ => kernel::add::<f32>(cast_slice(first), cast_slice(second), cast_slice_mut(sum)),
    }
}

/// `sum += gradient`; 16-bit gradients are summed in `f32`.
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
