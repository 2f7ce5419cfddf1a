//! SIGINT and SIGTERM while checkpoints are made: the first asks the run to end behind its step, the second ends the process at once.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What a process answers that a signal ended: 128 and the signal's number.
const ENDED: i32 = 128;

/// Whether the run is asked to end.
pub struct Stop {
    asked: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
}

impl Stop {
    /// Listens from now on, until the process ends.
    pub fn listen() -> io::Result<Stop> {
        let stop = Stop { asked: Arc::default(), signal: Arc::default() };
        for signal in [SIGINT, SIGTERM] {
            // What is asked first sees what came before this signal.
            flag::register_conditional_shutdown(signal, ENDED + signal, stop.asked.clone())?;
            flag::register_usize(signal, stop.signal.clone(), signal as usize)?;
            flag::register(signal, stop.asked.clone())?;
        }
        Ok(stop)
    }

    /// Set by the first signal.
    pub fn asked(&self) -> &AtomicBool {
        &self.asked
    }

    /// The name of the signal that came, and the exit code that it asks for.
    pub fn came(&self) -> Option<(&'static str, u8)> {
        match self.signal.load(Ordering::Relaxed) as i32 {
            0 => None,
            SIGINT => Some(("SIGINT", (ENDED + SIGINT) as u8)),
            _ => Some(("SIGTERM", (ENDED + SIGTERM) as u8)),
        }
    }
}
