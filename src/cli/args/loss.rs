//! The loss flags.

use clap::{Args, ValueEnum};
use pipec::loss::{CountedLoss, Loss};

/// Loss function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LossName {
    /// Mean cross-entropy of logits against class indices; labels of -100 are ignored
    CrossEntropy,
    /// Mean squared error
    Mse,
    /// Mean binary cross-entropy of logits against targets from 0 to 1
    Bce,
    /// The model's own loss: the scalar output named `loss`, else its first output if that is a scalar, else its only scalar output
    Output,
}

impl From<LossName> for Loss {
    fn from(name: LossName) -> Loss {
        match name {
            LossName::CrossEntropy => Loss::CrossEntropy,
            LossName::Mse => Loss::Mse,
            LossName::Bce => Loss::Bce,
            LossName::Output => Loss::Output,
        }
    }
}

/// Loss flags of the planner.
#[derive(Clone, Debug, Default, Args)]
pub struct LossArguments {
    /// Loss whose cost is added to the stage that computes the predictions: cross-entropy, mse, bce, output, or none [default: the loss that `train` would use; none for inference]
    #[arg(long, value_name = "NAME", value_parser = ["cross-entropy", "mse", "bce", "output", "none"], help_heading = "Costs and memory")]
    pub loss: Option<String>,
    /// Class axis; negative counts from the end [default: -1]
    #[arg(long, value_name = "AXIS", allow_hyphen_values = true, requires = "loss", help_heading = "Costs and memory")]
    pub class_dim: Option<i64>,
}

impl LossArguments {
    /// The requested loss.
    pub fn counted_loss(&self) -> Option<CountedLoss> {
        let name = self.loss.as_deref()?;
        Some(Loss::from_name(name).map_or(CountedLoss::None, |loss| CountedLoss::One(loss, self.class_dim)))
    }
}
