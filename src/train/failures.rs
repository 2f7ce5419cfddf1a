//! Error messages for training that ended early.

use crate::error::Error;
use crate::help;
use compiler::tensor::Tensor;
use compiler::text::name::short_name;
use compiler::text::quantity;
use runtime::train::error::TrainError;
use runtime::train::losses::Diverged;
use runtime::train::resume::ResumeError;
use std::collections::BTreeMap;

/// The error for the user.
pub fn describe(error: &TrainError) -> Error {
    match error {
        TrainError::Panic { .. } => Error::bug(&error.to_string()),
        TrainError::TiedParameter { .. } => Error::input("cannot train under this plan")
            .because(error)
            .with_help("use `--schedule 1f1b`, or 1f1b-rr with equal numbers of replicas of these stages"),
        TrainError::LossScale { .. } => Error::input("cannot train")
            .because(error)
            .with_help("use `--schedule 1f1b`, which has a flush, or `--precision bf16`, which needs no loss scaling"),
        TrainError::Resume(ResumeError::Reads { .. }) => Error::input("cannot train with checkpoints")
            .because(error)
            .with_help("use `--schedule 1f1b`, which has a flush"),
        TrainError::NoPlace { .. } => {
            Error::input("cannot train").because(error).with_help("set it with `--checkpoint-dir FOLDER`")
        }
        TrainError::NotFinite { name, .. } => Error::input("cannot train").because(error).with_help(format!(
            "if it is a constant, such as an attention mask, exclude it from training: `--freeze {}`",
            short_name(name)
        )),
        TrainError::NoVelocity => {
            Error::input("cannot train").because(error).with_help("use `--momentum 0.9` or `--optimizer adam`")
        }
        TrainError::Diverged(diverged) => self::describe_divergence(diverged),
        TrainError::Link(link) => {
            let failure = Error::negative("training stopped").because(error);
            help::link(link).into_iter().fold(failure, Error::with_help)
        }
        TrainError::Worker(_) | TrainError::Device(_) | TrainError::Gather(_) => {
            Error::negative("training stopped").because(error)
        }
        _ => Error::input("cannot train").because(error),
    }
}

/// The error for a loss that is not finite.
fn describe_divergence(diverged: &Diverged) -> Error {
    let Diverged { microbatch, microbatches, .. } = diverged;
    let mut why = match microbatches {
        1 => String::new(),
        _ => format!("first in its micro-batch {} of {microbatches}; ", microbatch + 1),
    };
    why += &match diverged.finite {
        Some((step, loss)) => {
            let loss = if loss.abs() < MIN_EXPONENTIAL { quantity::short(loss) } else { format!("{loss:.3e}") };
            format!("the last finite loss was {loss}, in step {}", step + 1)
        }
        None => "no step of this run had a finite loss".to_string(),
    };
    Error::negative(TrainError::Diverged(*diverged))
        .because(why)
        .because("no weights were written; checkpoints are unchanged")
        .with_help(DIVERGENCE_HELP)
}

/// The error for weights that are not finite although all losses are, because of the last update.
pub fn weights_diverged(name: &str, steps: u32) -> Error {
    Error::negative("training diverged: weights are not finite after the last update")
        .because(format!("`{name}` contains NaN or an infinity after step {steps}"))
        .because("no weights were written; checkpoints are unchanged")
        .with_help(DIVERGENCE_HELP)
}

/// Losses from here on are shown in exponential form.
const MIN_EXPONENTIAL: f64 = 1e6;

/// Help against divergence, most likely remedy first.
const DIVERGENCE_HELP: &str = "try a smaller `--lr`, `--lr-schedule warmup:100,constant` or `--clip-norm 1`; with half precision, `--precision fp32`, or, with a flush, \
    `--precision fp16`, which uses loss scaling";

/// The first tensor that contains NaN or an infinity and differs from its initial value.
pub fn not_finite<'a>(weights: &'a BTreeMap<String, Tensor>, initial: &BTreeMap<String, Tensor>) -> Option<&'a str> {
    let is_finite = |tensor: &Tensor| {
        let view = tensor.view();
        !tensor.dtype().is_float() || (0..view.len()).all(|at| view.f64(at).is_finite())
    };
    let diverged = weights.iter().find(|(name, tensor)| !is_finite(tensor) && initial.get(*name) != Some(*tensor));
    diverged.map(|(name, _)| name.as_str())
}
