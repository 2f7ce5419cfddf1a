//! The checkpoint flags of `pipec train`.

use clap::Args;
use pipec::train::request::CheckpointRequest;
use std::path::PathBuf;

/// Checkpoint flags.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Checkpoints")]
pub struct CheckpointArguments {
    /// Folder of checkpoints, created if missing. A run writes a checkpoint at its end, from which a longer run can resume, and the
    /// trained weights as weights.safetensors. A custom program writes its checkpoints as stage-N-version-N.safetensors. Over several
    /// hosts process 0 writes, and every host must see the folder to resume
    #[arg(long, value_name = "FOLDER")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Write a checkpoint every N minibatches, at the next point where all stages have finished their round [default: at the end, and
    /// after the current step when any process of the run receives SIGTERM, SIGINT or SIGHUP]
    #[arg(long, value_name = "N", requires = "checkpoint_dir", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub checkpoint_every: Option<u32>,
    /// Number of checkpoints to keep; older ones are removed once a newer one is complete [default: all]
    #[arg(long, value_name = "K", requires = "checkpoint_dir", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub keep: Option<u32>,
    /// Resume from a checkpoint: auto (the newest complete one of --checkpoint-dir, or start from the beginning if there is none), or its
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
