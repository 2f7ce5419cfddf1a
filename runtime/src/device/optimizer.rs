//! Optimizer steps as a device sees them: the update rule, with PyTorch's definitions, and the arguments of a step.

use compiler::tensor::DType;

/// An update rule.
#[derive(Clone, Debug, PartialEq)]
pub enum UpdateRule {
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

impl UpdateRule {
    /// Number of state tensors per parameter.
    pub fn states(&self) -> usize {
        match *self {
            UpdateRule::Sgd { momentum, .. } => usize::from(momentum != 0.0),
            UpdateRule::Adam { .. } => 2,
            UpdateRule::RmsProp { momentum, .. } => 1 + usize::from(momentum != 0.0),
            UpdateRule::Adagrad { .. } => 1,
        }
    }

    /// PyTorch's names of the state tensors, in order.
    pub fn state_names(&self) -> &'static [&'static str] {
        match *self {
            UpdateRule::Sgd { momentum: 0.0, .. } => &[],
            UpdateRule::Sgd { .. } => &["momentum_buffer"],
            UpdateRule::Adam { .. } => &["exp_avg", "exp_avg_sq"],
            UpdateRule::RmsProp { momentum: 0.0, .. } => &["square_avg"],
            UpdateRule::RmsProp { .. } => &["square_avg", "momentum_buffer"],
            UpdateRule::Adagrad { .. } => &["sum"],
        }
    }
}

/// The arguments of one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepArgs {
    /// Element type of weights, gradient and state: `f32` or `f64`.
    pub dtype: DType,
    /// Factor that turns the gradient sum into an average.
    pub scale: f64,
    /// Number of the step, from 1.
    pub step: u32,
    /// Learning-rate scale of this step.
    pub rate: f64,
}

/// A prediction of weights some updates ahead.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Element type of weights and state: `f32` or `f64`.
    pub dtype: DType,
    /// Updates to predict.
    pub steps: u32,
    /// Updates made so far.
    pub made: u32,
    /// Learning-rate scale of the predicted updates.
    pub rate: f64,
}
