//! The checkpoint flags of `pipec train`.

use clap::Args;
use pipec::train::request::CheckpointRequest;
use std::path::PathBuf;

/// Where checkpoints go, and where a run goes on.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Checkpoints")]
pub struct CheckpointArguments {
    /// Write into this folder, which is made where it is missing, a checkpoint at the end, from which a longer run can go on, and the
    /// trained weights as weights.safetensors, beside the checkpoints of --checkpoint-every and what a program of one's own writes on its
    /// way, as stage-N-version-N.safetensors; over several hosts process 0 writes, and to go on every host must see the folder
    #[arg(long, value_name = "FOLDER")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Write a checkpoint after every N minibatches, too, or as soon behind as the rounds of all stages end [default: at the end, and
    /// when SIGTERM or SIGINT come to any process of the run, which ends behind its step]
    #[arg(long, value_name = "N", requires = "checkpoint_dir", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub checkpoint_every: Option<u32>,
    /// Checkpoints that stay; older ones are removed when a newer one is complete [default: all]
    #[arg(long, value_name = "K", requires = "checkpoint_dir", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub keep: Option<u32>,
    /// Go on from a checkpoint: auto (the newest complete one of --checkpoint-dir, or from the beginning where there is none), or its
    /// folder
    #[arg(long, value_name = "auto|FOLDER")]
    pub resume: Option<PathBuf>,
}

impl From<CheckpointArguments> for CheckpointRequest {
    fn from(arguments: CheckpointArguments) -> CheckpointRequest {
        let CheckpointArguments { checkpoint_dir, checkpoint_every, keep, resume } = arguments;
        CheckpointRequest { folder: checkpoint_dir, every: checkpoint_every, keep, resume }
    }
}
