//! SIGINT and SIGTERM, where a run answers them itself: the first asks it to end, the second ends the process at once.
//!
//! A run that writes checkpoints ends behind its step. Whoever looks after other processes ends them first.

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// What a process answers that a signal ended: 128 and the signal's number.
const ENDED: i32 = 128;

/// What came since this process listens; a signal comes to the process as a whole.
static HEARD: OnceLock<Result<Stop, String>> = OnceLock::new();

/// Whether the run is asked to end.
pub struct Stop {
    signal: Arc<AtomicUsize>,
    /// Whether the next signal ends the process at once.
    asked: Arc<AtomicBool>,
    /// Whether a run that goes on ends behind its step.
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
            // What is asked first sees what came before this signal.
            flag::register_conditional_shutdown(signal, ENDED + signal, asked.clone())?;
            flag::register_usize(signal, signals.clone(), signal as usize)?;
            flag::register(signal, asked.clone())?;
        }
        Ok(Stop { signal: signals, asked, is_awaited: AtomicBool::new(false) })
    }

    /// The number of the signal that came; 0 while none has.
    pub fn signal(&self) -> &AtomicUsize {
        &self.signal
    }

    /// The signal that came, if one has.
    pub fn came(&self) -> Option<i32> {
        i32::try_from(self.signal.load(Ordering::Relaxed)).ok().filter(|signal| *signal != 0)
    }

    /// Says whether a run goes on that ends behind its step when a signal comes.
    pub fn awaited(&self, is_awaited: bool) {
        self.is_awaited.store(is_awaited, Ordering::Relaxed);
    }

    /// Says that nothing is left that would answer a signal: the next one ends the process at once.
    pub fn unanswered(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// The signal that came, unless a run that ends behind its step waits for it.
    pub fn unawaited(&self) -> Option<i32> {
        self.came().filter(|_| !self.is_awaited.load(Ordering::Relaxed))
    }
}

/// The name of a signal that asks a run to stop. It may have come to another process of the run.
pub fn name(signal: i32) -> &'static str {
    if signal == SIGINT { "SIGINT" } else { "SIGTERM" }
}
