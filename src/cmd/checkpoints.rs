//! The flags of `pipec train` that say where checkpoints go, and where a run goes on.

use crate::failure::Failure;
use clap::Args;
use runtime::checkpoint::find;
use std::path::{Path, PathBuf};

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

/// Which checkpoint a run goes on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume<'a> {
    /// The newest complete one in this folder.
    Newest(&'a Path),
    /// This one.
    From(&'a Path),
}

impl CheckpointArguments {
    /// The run is begun again after a part of it died: from the newest checkpoint that it has written, if there is one.
    pub fn go_on(&mut self) {
        if self.checkpoint_dir.as_deref().is_some_and(|folder| find::known(folder).is_ok_and(|found| !found.is_empty()))
        {
            self.resume = Some(PathBuf::from("auto"));
        }
    }

    /// Which checkpoint the run goes on from, if any.
    pub fn resumes(&self) -> Result<Option<Resume<'_>>, Failure> {
        let Some(from) = &self.resume else { return Ok(None) };
        match (from.as_os_str() == "auto", &self.checkpoint_dir) {
            (false, _) => Ok(Some(Resume::From(from))),
            (true, Some(folder)) => Ok(Some(Resume::Newest(folder))),
            (true, None) => Err(Failure::input("`--resume auto` looks for checkpoints in `--checkpoint-dir FOLDER`")
                .help("name that folder, or one checkpoint: `--resume FOLDER/step-00000012`")),
        }
    }
}
