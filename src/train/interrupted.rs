//! A run that was told to stop before its end, and what the user reads of it.

use crate::error::Error;
use crate::launch::stop_signal;
use crate::train::prepare::Prepared;
use std::path::PathBuf;

/// A run that was told to stop.
pub struct Ended {
    /// The number of the signal.
    pub signal: i32,
    /// Minibatches that are done.
    pub minibatches: u32,
    /// The checkpoint after them, where this process writes it.
    pub checkpoint: Option<PathBuf>,
}

impl Ended {
    /// What the user reads.
    pub fn error(&self, prepared: &Prepared) -> Error {
        let (done, of) = (self.minibatches, prepared.steps);
        let failure = Error::interrupted(
            self.signal,
            format!("stopped by {} after step {done} of {of}", stop_signal::name(self.signal)),
        );
        match &self.checkpoint {
            None => failure.because("process 0 of the run writes its checkpoint"),
            Some(folder) if folder.exists() => failure
                .because(format!("wrote {}", folder.display()))
                .with_help("the same command with `--resume auto` goes on from there"),
            Some(_) => failure
                .because("its checkpoint could not be written")
                .with_help("`--resume auto` goes on from the last one"),
        }
    }
}
