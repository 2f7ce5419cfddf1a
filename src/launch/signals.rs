//! What is told to processes that this one started, and what is said of how they end.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Sends a signal to a process that was started from here and has not been waited for.
#[cfg(unix)]
pub fn send(signal: i32, pid: u32) {
    // SAFETY: plain numbers; the process is a child of this one, so that its number is nobody else's.
    unsafe { libc::kill(pid as libc::pid_t, signal) };
}

/// What a terminal asks of this process, as Ctrl-Z does; a signal comes to the process as a whole.
static PAUSES: OnceLock<Result<Pauses, String>> = OnceLock::new();

/// Whether a terminal asks this process to pause.
pub struct Pauses {
    asked: Arc<AtomicBool>,
    /// Without anybody to look after it pauses at once.
    is_alone: Arc<AtomicBool>,
}

impl Pauses {
    /// Listens from now on, until the process ends.
    pub fn listen() -> Result<&'static Pauses, &'static str> {
        let heard = PAUSES.get_or_init(|| Pauses::register().map_err(|error| error.to_string()));
        heard.as_ref().map_err(String::as_str)
    }

    fn register() -> io::Result<Pauses> {
        let pauses = Pauses { asked: Arc::default(), is_alone: Arc::new(AtomicBool::new(true)) };
        #[cfg(unix)]
        {
            use signal_hook::flag::{register, register_conditional_default};
            register_conditional_default(libc::SIGTSTP, pauses.is_alone.clone())?;
            register(libc::SIGTSTP, pauses.asked.clone())?;
        }
        Ok(pauses)
    }

    /// Says whether there are processes to look after.
    pub fn look_after(&self, others: bool) {
        self.asked.store(false, Ordering::Relaxed);
        self.is_alone.store(!others, Ordering::Relaxed);
    }

    /// Whether it was asked since it was last looked.
    pub fn came(&self) -> bool {
        self.asked.swap(false, Ordering::Relaxed)
    }
}

/// Pauses these children and this process until it is told to go on, which they are then told, too. They are in no job of the terminal's,
/// which therefore tells this process alone.
#[cfg(unix)]
pub fn pause(children: &[u32]) {
    children.iter().for_each(|pid| send(libc::SIGSTOP, *pid));
    // It returns when the process goes on; where the system does not let it pause, at once.
    let _ = signal_hook::low_level::emulate_default_handler(libc::SIGTSTP);
    children.iter().for_each(|pid| send(libc::SIGCONT, *pid));
}

/// There is no such thing.
#[cfg(not(unix))]
pub fn pause(_: &[u32]) {}

/// There is nothing to send.
#[cfg(not(unix))]
pub fn send(_: i32, _: u32) {}

/// The name of a signal.
pub fn name(signal: i32) -> String {
    let known = [(1, "HUP"), (2, "INT"), (3, "QUIT"), (4, "ILL"), (6, "ABRT"), (7, "BUS"), (8, "FPE"), (9, "KILL")];
    let more = [(11, "SEGV"), (13, "PIPE"), (15, "TERM"), (24, "XCPU")];
    let found = known.iter().chain(&more).find(|(number, _)| *number == signal);
    found.map_or(format!("signal {signal}"), |(number, name)| format!("signal {number} (SIG{name})"))
}

/// Ends this process when the one that started it ends. Says whether that one is still there.
#[cfg(target_os = "linux")]
pub fn follow(parent: u32) -> bool {
    // SAFETY: plain numbers.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong, 0, 0, 0);
        // It may have ended before.
        libc::getppid() as u32 == parent
    }
}

/// Elsewhere the connection that closes says so.
#[cfg(not(target_os = "linux"))]
pub fn follow(_: u32) -> bool {
    true
}
