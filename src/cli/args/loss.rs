//! The loss flags.

use crate::cli::args::named;
use clap::Args;
use clap::builder::TypedValueParser;
use compiler::pass::loss::Loss;
use pipec::loss::CountedLoss;

/// What [`Loss::Output`] is.
const OUTPUT: &str = "The model's own loss: the scalar output named `loss`, else its first output if that is a scalar, else its only scalar output";

/// A parser of the names of losses.
pub fn losses() -> impl TypedValueParser<Value = Loss> {
    named(&[
        (
            "cross-entropy",
            "Mean cross-entropy of logits against class indices; labels of -100 are ignored",
            Loss::CrossEntropy,
        ),
        ("mse", "Mean squared error", Loss::Mse),
        ("bce", "Mean binary cross-entropy of logits against targets from 0 to 1", Loss::Bce),
        ("output", OUTPUT, Loss::Output),
    ])
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
