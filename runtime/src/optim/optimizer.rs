//! Optimizers with PyTorch's update rules. A step reads one weight version and writes the next.

pub use crate::device::optimizer::UpdateRule as Rule;
use crate::optim::lr_schedule::Rate;
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

impl Optimizer {
    /// True if the optimizer state contains an update direction.
    pub fn has_velocity(&self) -> bool {
        match self.rule {
            Rule::Sgd { momentum, .. } | Rule::RmsProp { momentum, .. } => momentum != 0.0,
            Rule::Adam { .. } => true,
            Rule::Adagrad { .. } => false,
        }
    }

    /// Number of state tensors per parameter.
    pub fn buffers(&self) -> usize {
        self.rule.states()
    }

    /// PyTorch's names of the state tensors, in order.
    pub fn names(&self) -> &'static [&'static str] {
        self.rule.state_names()
    }
}

/// True if parameters of this element type can be trained; 16-bit ones have `f32` master weights.
pub fn is_trainable(dtype: DType) -> bool {
    dtype.is_float()
}
