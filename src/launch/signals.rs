//! Signals to child processes, and the names of signals.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Sends a signal to a process that was started from here and has not been waited for.
#[cfg(unix)]
pub fn send(signal: i32, pid: u32) {
    // SAFETY: plain numbers; the process is a child that was not reaped, so its id cannot belong to another process.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
}

/// Pause requests of the terminal (Ctrl-Z); a signal reaches the process as a whole.
static PAUSES: OnceLock<Result<Pauses, String>> = OnceLock::new();

/// Records whether the terminal asked this process to pause.
pub struct Pauses {
    requested: Arc<AtomicBool>,
    /// Without child processes it pauses at once.
    is_alone: Arc<AtomicBool>,
}

impl Pauses {
    /// Listens from now on, until the process ends.
    pub fn listen() -> Result<&'static Pauses, &'static str> {
        let pauses = PAUSES.get_or_init(|| Pauses::register().map_err(|error| error.to_string()));
        pauses.as_ref().map_err(String::as_str)
    }

    fn register() -> io::Result<Pauses> {
        let pauses = Pauses { requested: Arc::default(), is_alone: Arc::new(AtomicBool::new(true)) };
        #[cfg(unix)]
        {
            use signal_hook::flag::{register, register_conditional_default};
            register_conditional_default(libc::SIGTSTP, pauses.is_alone.clone())?;
            register(libc::SIGTSTP, pauses.requested.clone())?;
        }
        Ok(pauses)
    }

    /// Sets whether there are child processes to pause first.
    pub fn set_children(&self, has_children: bool) {
        self.requested.store(false, Ordering::Relaxed);
        self.is_alone.store(!has_children, Ordering::Relaxed);
    }

    /// True if a pause was requested since the last call.
    pub fn take_request(&self) -> bool {
        self.requested.swap(false, Ordering::Relaxed)
    }
}

/// Pauses these children and this process until it is continued, then continues them. The children are not in a job of the terminal,
/// so the terminal signals only this process.
#[cfg(unix)]
pub fn pause(children: &[u32]) {
    children.iter().for_each(|pid| send(libc::SIGSTOP, *pid));
    // It returns when the process is continued, or at once if the system does not let it pause.
    let _ = signal_hook::low_level::emulate_default_handler(libc::SIGTSTP);
    children.iter().for_each(|pid| send(libc::SIGCONT, *pid));
}

/// Not available on this system.
#[cfg(not(unix))]
pub fn pause(_: &[u32]) {}

/// Not available on this system.
#[cfg(not(unix))]
pub fn send(_: i32, _: u32) {}

pub fn name(signal: i32) -> String {
    let common = [(1, "HUP"), (2, "INT"), (3, "QUIT"), (4, "ILL"), (6, "ABRT"), (7, "BUS"), (8, "FPE"), (9, "KILL")];
    let others = [(11, "SEGV"), (13, "PIPE"), (15, "TERM"), (24, "XCPU")];
    let entry = common.iter().chain(&others).find(|(number, _)| *number == signal);
    entry.map_or(format!("signal {signal}"), |(number, name)| format!("signal {number} (SIG{name})"))
}

/// Lets this process end when its parent ends. Returns true if the parent is still running.
#[cfg(target_os = "linux")]
pub fn follow(parent: u32) -> bool {
    // SAFETY: plain numbers.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong, 0, 0, 0);
        // The parent may have ended before.
        libc::getppid() as u32 == parent
    }
}

/// On other systems, the closed connection ends the child.
#[cfg(not(target_os = "linux"))]
pub fn follow(_: u32) -> bool {
    true
}
