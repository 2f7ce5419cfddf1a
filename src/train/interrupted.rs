//! A run stopped by a signal, and its error message.

use crate::error::Error;
use crate::launch::stop_signal;
use std::path::PathBuf;

/// A run stopped by a signal.
pub struct Ended {
    /// The number of the signal.
    pub signal: i32,
    /// Completed minibatches.
    pub minibatches: u32,
    /// The checkpoint after them, if this process writes it.
    pub checkpoint: Option<PathBuf>,
}

impl Ended {
    /// The error for the user; `steps` is the length of the run.
    pub fn error(&self, steps: u32) -> Error {
        let (completed, total) = (self.minibatches, steps);
        let failure = Error::interrupted(
            self.signal,
            format!("stopped by {} after step {completed} of {total}", stop_signal::name(self.signal)),
        );
        match &self.checkpoint {
            None => failure.because("process 0 of the run writes its checkpoint"),
            Some(folder) if folder.exists() => failure
                .because(format!("wrote {}", folder.display()))
                .with_help("resume with the same command and `--resume auto`"),
            Some(_) => failure
                .because("its checkpoint could not be written")
                .with_help("`--resume auto` resumes from the last one"),
        }
    }
}
