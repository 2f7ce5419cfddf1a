//! The flags of `pipec train` that say where checkpoints go, and where a run goes on.

use crate::failure::Failure;
use clap::Args;
use runtime::checkpoint::find;
use runtime::checkpoint::manifest::FILE;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The file in the folder of checkpoints that trained weights go to.
pub const WEIGHTS: &str = "weights.safetensors";

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
    /// The checkpoints that are there now, newest first, and when each was written.
    pub fn there(&self) -> Vec<(PathBuf, Option<SystemTime>)> {
        let known = self.checkpoint_dir.as_deref().and_then(|folder| find::known(folder).ok()).unwrap_or_default();
        let dated = |(_, path): (u32, PathBuf)| {
            let written = path.join(FILE).metadata().and_then(|about| about.modified()).ok();
            (path, written)
        };
        known.into_iter().map(dated).collect()
    }

    /// The run is begun again after a part of it died: from the newest checkpoint that it has written, if there is one. What was there before
    /// may be of another branch than the one that it began from.
    pub fn go_on(&mut self, before: &[(PathBuf, Option<SystemTime>)]) {
        let is_named = self.resume.as_ref().is_some_and(|from| from.as_os_str() != "auto");
        let mut there = self.there().into_iter();
        self.resume = match is_named {
            true => there.find(|own| !before.contains(own)).map(|(path, _)| path).or(self.resume.take()),
            false => there.next().map(|_| PathBuf::from("auto")).or(self.resume.take()),
        };
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A run that began from an older checkpoint goes on from its own ones, not from those of another branch.
    #[test]
    fn a_run_goes_on_from_what_it_has_written() {
        let folder = tempfile::tempdir().unwrap();
        let step = |number: u32| {
            let path = folder.path().join(format!("step-{number:08}"));
            fs::create_dir_all(&path).unwrap();
            fs::write(path.join(FILE), "{}").unwrap();
            path
        };
        let run = |resume: Option<PathBuf>| CheckpointArguments {
            checkpoint_dir: Some(folder.path().to_path_buf()),
            checkpoint_every: None,
            keep: None,
            resume,
        };
        let (fourth, eighth) = (step(4), step(8));
        let mut named = run(Some(fourth.clone()));
        let before = named.there();
        assert_eq!(before.iter().map(|(path, _)| path).collect::<Vec<_>>(), [&eighth, &fourth]);
        named.go_on(&before);
        assert_eq!(named.resume, Some(fourth));
        let fifth = step(5);
        named.go_on(&before);
        assert_eq!(named.resume, Some(fifth));
        let mut newest = run(None);
        newest.go_on(&before);
        assert_eq!(newest.resume, Some(PathBuf::from("auto")));
    }
}
