//! Why training ended early, as the user reads it.

use crate::failure::Failure;
use runtime::checkpoint::start::StartError;
use runtime::train::TrainError;

/// What the user reads.
pub fn told(error: &TrainError) -> Failure {
    match error {
        TrainError::Panic { .. } => Failure::bug(&error.to_string()),
        TrainError::Tied { .. } => Failure::input("cannot train under this plan").because(error).help(
            "`--schedule 1f1b` keeps them equal, and so does 1f1b-rr where the stages have equally many replicas",
        ),
        TrainError::LossScale { .. } => Failure::input("cannot train")
            .because(error)
            .help("`--schedule 1f1b` flushes; `--dtype bf16` needs no scale"),
        TrainError::Start(StartError::Reads { .. }) => {
            Failure::input("cannot train with checkpoints").because(error).help("`--schedule 1f1b` flushes")
        }
        TrainError::NoPlace { .. } => {
            Failure::input("cannot train").because(error).help("`--checkpoint-dir FOLDER` names one")
        }
        TrainError::NoVelocity => {
            Failure::input("cannot train").because(error).help("`--momentum 0.9`, or `--optimizer adam`")
        }
        TrainError::Worker(_) | TrainError::Link(_) => Failure::no("training stopped").because(error),
        _ => Failure::input("cannot train").because(error),
    }
}
