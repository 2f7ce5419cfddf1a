//! Why training ended early, as the user reads it.

use crate::error::Error;
use compiler::export::quantity;
use compiler::tensor::Tensor;
use runtime::train::losses::Diverged;
use runtime::train::resume::StartError;
use runtime::train::run::TrainError;
use std::collections::BTreeMap;

/// What the user reads.
pub fn describe(error: &TrainError) -> Error {
    match error {
        TrainError::Panic { .. } => Error::bug(&error.to_string()),
        TrainError::TiedParameter { .. } => Error::input("cannot train under this plan").because(error).with_help(
            "`--schedule 1f1b` keeps them equal, and so does 1f1b-rr where the stages have equally many replicas",
        ),
        TrainError::LossScale { .. } => Error::input("cannot train")
            .because(error)
            .with_help("`--schedule 1f1b` flushes; `--dtype bf16` needs no scale"),
        TrainError::Start(StartError::Reads { .. }) => {
            Error::input("cannot train with checkpoints").because(error).with_help("`--schedule 1f1b` flushes")
        }
        TrainError::NoPlace { .. } => {
            Error::input("cannot train").because(error).with_help("`--checkpoint-dir FOLDER` names one")
        }
        TrainError::NoVelocity => {
            Error::input("cannot train").because(error).with_help("`--momentum 0.9`, or `--optimizer adam`")
        }
        TrainError::Diverged(diverged) => self::diverged(diverged),
        TrainError::Worker(_) | TrainError::Link(_) | TrainError::Device(_) => {
            Error::negative("training stopped").because(error)
        }
        _ => Error::input("cannot train").because(error),
    }
}

/// Where the loss stopped being a number.
fn diverged(diverged: &Diverged) -> Error {
    let Diverged { microbatch, microbatches, .. } = diverged;
    let mut why = match microbatches {
        1 => String::new(),
        _ => format!("first in its micro-batch {} of {microbatches}; ", microbatch + 1),
    };
    why += &match diverged.finite {
        Some((step, loss)) => {
            let loss = if loss.abs() < LARGE { quantity::short(loss) } else { format!("{loss:.3e}") };
            format!("the last finite loss is {loss}, of step {}", step + 1)
        }
        None => "no step of this run had a finite loss".to_string(),
    };
    Error::negative(TrainError::Diverged(*diverged))
        .because(why)
        .because("no weights are written; checkpoints stay as they are")
        .with_help(TRY)
}

/// Weights that are no numbers, though all losses are: the last update did it.
pub fn lost(name: &str, steps: u32) -> Error {
    Error::negative("training diverged: the last update made weights that are not finite")
        .because(format!("`{name}` holds NaN or an infinity after step {steps}"))
        .because("no weights are written; checkpoints stay as they are")
        .with_help(TRY)
}

/// From here on a loss is told by its power of ten.
const LARGE: f64 = 1e6;

/// What keeps a run from diverging, the likeliest first.
const TRY: &str = "a smaller `--lr`, `--lr-schedule warmup:100,constant`, `--clip-norm 1`; where floats are narrow, `--dtype f32`, or \
    `--dtype f16`, which scales the loss";

/// A tensor of these, if there is one, that holds NaN or an infinity and is not as it was given.
pub fn not_finite<'a>(weights: &'a BTreeMap<String, Tensor>, given: &BTreeMap<String, Tensor>) -> Option<&'a str> {
    let is_finite = |tensor: &Tensor| {
        let view = tensor.view();
        !tensor.dtype().is_float() || (0..view.len()).all(|at| view.f64(at).is_finite())
    };
    let lost = weights.iter().find(|(name, tensor)| !is_finite(tensor) && given.get(*name) != Some(*tensor));
    lost.map(|(name, _)| name.as_str())
}
