//! A run that was told to stop before its end, and what the user reads of it.

use crate::failure::Failure;
use crate::training::Prepared;
use std::path::PathBuf;

/// A run that was told to stop.
pub struct Ended {
    /// What told it.
    pub signal: &'static str,
    /// What the process ends with.
    pub code: u8,
    /// Minibatches that are done.
    pub minibatches: u32,
    /// The checkpoint after them, where this process writes it.
    pub checkpoint: Option<PathBuf>,
}

impl Ended {
    /// What the user reads.
    pub fn told(&self, prepared: &Prepared) -> Failure {
        let (done, of) = (self.minibatches, prepared.steps);
        let failure = Failure::stopped(self.code, format!("stopped by {} after step {done} of {of}", self.signal));
        match &self.checkpoint {
            None => failure.because("process 0 of the run writes its checkpoint"),
            Some(folder) if folder.exists() => failure
                .because(format!("wrote {}", folder.display()))
                .help("the same command with `--resume auto` goes on from there"),
            Some(_) => {
                failure.because("its checkpoint could not be written").help("`--resume auto` goes on from the last one")
            }
        }
    }
}
