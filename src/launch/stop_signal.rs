//! SIGINT, SIGTERM and SIGHUP, if a run handles them itself: the first requests a stop, the second ends the process at
//! once.
//!
//! A run that writes checkpoints stops after the current step. A process with children ends them first.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::{fs, io};

/// Exit code of a process ended by a signal, minus the signal number.
const SIGNAL_EXIT_BASE: i32 = 128;

/// The signals received since this process listens; a signal reaches the process as a whole.
static STOP: OnceLock<Result<Stop, String>> = OnceLock::new();

/// Records whether the run is requested to stop.
pub struct Stop {
    signal: Arc<AtomicUsize>,
    /// True if the next signal ends the process at once.
    exits_on_next: Arc<AtomicBool>,
    /// True while a run is in progress that stops after its current step.
    is_awaited: AtomicBool,
}

impl Stop {
    /// Listens from now on, until the process ends.
    pub fn listen() -> Result<&'static Stop, &'static str> {
        let stop = STOP.get_or_init(|| Stop::register().map_err(|error| error.to_string()));
        stop.as_ref().map_err(String::as_str)
    }

    fn register() -> io::Result<Stop> {
        let (exits_on_next, received) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let hangup = (!ignores_hangup()).then_some(SIGHUP);
        for signal in [SIGINT, SIGTERM].into_iter().chain(hangup) {
            // Handlers run in order of registration, so the first sees the state before this signal.
            flag::register_conditional_shutdown(signal, SIGNAL_EXIT_BASE + signal, exits_on_next.clone())?;
            flag::register_usize(signal, received.clone(), signal as usize)?;
            flag::register(signal, exits_on_next.clone())?;
        }
        Ok(Stop { signal: received, exits_on_next, is_awaited: AtomicBool::new(false) })
    }

    /// The number of the received signal; 0 if none.
    pub fn signal(&self) -> &AtomicUsize {
        &self.signal
    }

    /// The received signal, if any.
    pub fn received(&self) -> Option<i32> {
        i32::try_from(self.signal.load(Ordering::Relaxed)).ok().filter(|signal| *signal != 0)
    }

    /// Sets whether a run is in progress that stops after its current step when a signal arrives.
    pub fn set_awaited(&self, is_awaited: bool) {
        self.is_awaited.store(is_awaited, Ordering::Relaxed);
    }

    /// Declares that signals are no longer handled: the next one ends the process at once.
    pub fn exit_on_next(&self) {
        self.exits_on_next.store(true, Ordering::Relaxed);
    }

    /// The received signal, unless a run handles it by stopping after its current step.
    pub fn unhandled(&self) -> Option<i32> {
        self.received().filter(|_| !self.is_awaited.load(Ordering::Relaxed))
    }
}

/// True for a process started by `nohup`, which a closed terminal does not end; and where that is not known.
fn ignores_hangup() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_none_or(|mask| mask >> (SIGHUP - 1) & 1 == 1)
}

/// The name of a signal that requests a stop. Another process of the run may have received it.
pub fn name(signal: i32) -> &'static str {
    match signal {
        SIGHUP => "SIGHUP",
        SIGINT => "SIGINT",
        _ => "SIGTERM",
    }
}
