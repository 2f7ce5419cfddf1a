//! SIGINT and SIGTERM, if a run handles them itself: the first requests a stop, the second ends the process at once.
//!
//! A run that writes checkpoints stops after the current step. A process with children ends them first.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Exit code of a process ended by a signal, minus the signal number.
const ENDED: i32 = 128;

/// The signals received since this process listens; a signal reaches the process as a whole.
static HEARD: OnceLock<Result<Stop, String>> = OnceLock::new();

/// Records whether the run is requested to stop.
pub struct Stop {
    signal: Arc<AtomicUsize>,
    /// True if the next signal ends the process at once.
    asked: Arc<AtomicBool>,
    /// True while a run is in progress that stops after its current step.
    is_awaited: AtomicBool,
}

impl Stop {
    /// Listens from now on, until the process ends.
    pub fn listen() -> Result<&'static Stop, &'static str> {
        let heard = HEARD.get_or_init(|| Stop::register().map_err(|error| error.to_string()));
        heard.as_ref().map_err(String::as_str)
    }

    fn register() -> io::Result<Stop> {
        let (asked, signals) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        for signal in [SIGINT, SIGTERM] {
            // Handlers run in order of registration, so the first sees the state before this signal.
            flag::register_conditional_shutdown(signal, ENDED + signal, asked.clone())?;
            flag::register_usize(signal, signals.clone(), signal as usize)?;
            flag::register(signal, asked.clone())?;
        }
        Ok(Stop { signal: signals, asked, is_awaited: AtomicBool::new(false) })
    }

    /// The number of the received signal; 0 if none.
    pub fn signal(&self) -> &AtomicUsize {
        &self.signal
    }

    /// The received signal, if any.
    pub fn came(&self) -> Option<i32> {
        i32::try_from(self.signal.load(Ordering::Relaxed)).ok().filter(|signal| *signal != 0)
    }

    /// Sets whether a run is in progress that stops after its current step when a signal arrives.
    pub fn awaited(&self, is_awaited: bool) {
        self.is_awaited.store(is_awaited, Ordering::Relaxed);
    }

    /// Declares that signals are no longer handled: the next one ends the process at once.
    pub fn unanswered(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// The received signal, unless a run handles it by stopping after its current step.
    pub fn unawaited(&self) -> Option<i32> {
        self.came().filter(|_| !self.is_awaited.load(Ordering::Relaxed))
    }
}

/// The name of a signal that requests a stop. Another process of the run may have received it.
pub fn name(signal: i32) -> &'static str {
    if signal == SIGINT { "SIGINT" } else { "SIGTERM" }
}
