//! The child processes of a run: one for each rank, watched until the end.
//!
//! A child that dies ends the run. So does a signal to this process, which is passed on, unless the run stops after the current step
//! by itself. At the end, the children still running are killed. Children also end when this process is killed.

use crate::error::Error;
use crate::launch::signals::Pauses;
use crate::launch::stop_signal::Stop;
use crate::launch::{run_token, signals};
use runtime::process::run_status::{LinkError, RunStatus};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The variable that identifies a child: the parent, its process number, the run, the number of restarts, and the address of process 0.
pub const VARIABLE: &str = "PIPEC_PROCESS";

/// The variable with the checkpoint from which a child of a restarted run resumes.
pub const RESUMED: &str = "PIPEC_RESUMED";

/// Interval between checks for stopped children.
const ASK: Duration = Duration::from_millis(500);
/// Time after the heartbeat timeout at which a stopped child is reported; the connection reports it first.
const STOP_GRACE: Duration = Duration::from_millis(400);
/// Interval between checks for ended children.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time for the connection to report the death of a child in more detail than the system.
const DETAIL: Duration = Duration::from_millis(150);
/// Time for the system to report the exit status of a child whose connection is lost.
const STATUS: Duration = Duration::from_millis(500);
/// Time for children to end when the run is over.
const END: Duration = Duration::from_secs(5);
/// Bytes kept of the last standard error output of a child.
const SAID: usize = 2048;

/// Child processes, and the thread that watches them.
pub struct Children {
    shared: Arc<Shared>,
    watch: Option<JoinHandle<()>>,
    fate: Arc<RunStatus>,
    stop: &'static Stop,
}

struct Shared {
    children: Mutex<Vec<Started>>,
    is_over: AtomicBool,
    pauses: &'static Pauses,
}

struct Started {
    child: Child,
    name: String,
    said: Arc<Mutex<VecDeque<u8>>>,
    ended: Option<ExitStatus>,
}

/// Starts a child for each of these names, as processes 1, 2, … of a run. A child may be stopped for at most `deadline`.
pub fn start(
    names: &[String],
    (run, restarts, address, token): (u64, u32, &str, &str),
    (command_line, resumed): (&[OsString], Option<&Path>),
    deadline: Duration,
    fate: &Arc<RunStatus>,
) -> Result<Children, Error> {
    let fail = |error: std::io::Error| Error::negative("cannot start the processes of the run").because(error);
    let Some((program, arguments)) = command_line.split_first() else {
        return Err(Error::bug("no command to start a worker"));
    };
    let deaf = |error: &str| Error::negative("cannot listen to signals").because(error);
    let (pauses, stop) = (Pauses::listen().map_err(deaf)?, Stop::listen().map_err(deaf)?);
    let shared = Arc::new(Shared { children: Mutex::default(), is_over: AtomicBool::new(false), pauses });
    pauses.look_after(true);
    stop.awaited(false);
    let mut children = Children { shared: shared.clone(), watch: None, fate: fate.clone(), stop };
    for (process, name) in (1..).zip(names) {
        let mut command = Command::new(program);
        command.args(arguments);
        command.env(VARIABLE, format!("{} {process} {run:x} {restarts} {address}", std::process::id()));
        command.env(run_token::VARIABLE, token);
        if let Some(from) = resumed {
            command.env(RESUMED, from);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // Ctrl-C in a terminal reaches only this process, which passes it on.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(fail)?;
        let said = Arc::new(Mutex::new(VecDeque::new()));
        let (mut stderr, keep) = (child.stderr.take(), said.clone());
        let listen = move || {
            let mut bytes = [0; 512];
            while let Some(Ok(count @ 1..)) = stderr.as_mut().map(|stderr| stderr.read(&mut bytes)) {
                let mut kept = keep.lock().unwrap_or_else(PoisonError::into_inner);
                kept.extend(&bytes[..count]);
                let more = kept.len().saturating_sub(SAID);
                kept.drain(..more);
            }
        };
        shared.lock().push(Started { child, name: name.clone(), said, ended: None });
        thread::Builder::new().name(format!("child {process}")).spawn(listen).map_err(fail)?;
    }
    let fate = fate.clone();
    let watch =
        thread::Builder::new().name("watch".into()).spawn(move || shared.watch(&fate, deadline + STOP_GRACE, stop));
    children.watch = Some(watch.map_err(fail)?);
    Ok(children)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<Started>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the run as over; children need no more watching.
    fn over(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.pauses.look_after(false);
    }

    /// Watches until the run is over. A child that ends, or a signal that the run does not handle itself, ends the run.
    fn watch(&self, fate: &RunStatus, deadline: Duration, stop: &Stop) {
        let mut stopped: BTreeMap<usize, Instant> = BTreeMap::new();
        let mut asked = Instant::now();
        while !self.is_over.load(Ordering::Relaxed) {
            if let Some(signal) = stop.unawaited() {
                for of in self.lock().iter_mut() {
                    if of.status().is_none() {
                        signals::send(signal, of.child.id());
                    }
                }
                let what = format!("received {}", signals::name(signal));
                return fate.end(LinkError::Ended { process: None, what });
            }
            if self.pauses.came() {
                // No child is reaped meanwhile, so their process ids cannot be reused.
                let mut children = self.lock();
                let here = children.iter_mut().filter_map(|of| of.status().is_none().then(|| of.child.id()));
                signals::pause(&here.collect::<Vec<u32>>());
                stopped.clear();
            }
            let ended = self.lock().iter_mut().position(|of| of.status().is_some());
            if let Some(at) = ended
                && !fate.is_released()
            {
                thread::sleep(DETAIL);
                let what = self.lock()[at].describe(None);
                return fate.end(LinkError::Ended { process: Some(at + 1), what });
            }
            // Before the run starts there are no heartbeats, so stopped children are detected here.
            if asked.elapsed() > ASK {
                asked = Instant::now();
                for (at, of) in self.lock().iter_mut().enumerate() {
                    match running(of.child.id()) == STOPPED {
                        true => _ = stopped.entry(at).or_insert(asked),
                        false => _ = stopped.remove(&at),
                    }
                }
                if let Some((&at, _)) = stopped.iter().find(|(_, since)| since.elapsed() > deadline) {
                    let what = self.lock()[at].describe(None);
                    return fate.end(LinkError::Ended { process: Some(at + 1), what });
                }
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Started {
    /// The exit status, if the child has ended.
    fn status(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
        }
        self.ended
    }

    /// Describes the state or the end of the child; `doing` is its last known instruction.
    fn describe(&mut self, doing: Option<&str>) -> String {
        let pid = self.child.id();
        let how = match self.status() {
            None => return format!("{}, process {pid}, {}", self.name, running(pid)),
            Some(status) => match killed_by(status) {
                Some(signal) => format!("was killed by {}", signals::name(signal)),
                None => format!("exited with code {}", status.code().unwrap_or(-1)),
            },
        };
        let at = doing.map_or(String::new(), |doing| format!("; the worker was last at {doing}"));
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let said = String::from_utf8_lossy(said.make_contiguous()).trim().to_string();
        let error = said.rfind("error: ").map_or(String::new(), |at| format!("\n{}", &said[at + "error: ".len()..]));
        format!("{}, process {pid}, {how}{at}{error}", self.name)
    }
}

#[cfg(unix)]
fn killed_by(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

#[cfg(not(unix))]
fn killed_by(_: ExitStatus) -> Option<i32> {
    None
}

/// Description of a stopped process.
const STOPPED: &str = "is stopped (SIGSTOP)";

/// The state of a running process, from the system.
fn running(pid: u32) -> &'static str {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the state may have any characters, and ends with the last parenthesis.
    match stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
        Some('T' | 't') => STOPPED,
        Some('D') => "waits for the disk",
        _ => "hangs",
    }
}

impl Children {
    /// Ends the run: waits for the children, kills those that do not end, and returns the reason if the run ended early.
    pub fn end<T>(mut self, result: Result<T, Error>) -> Result<T, Error> {
        self.shared.over();
        self.watch.take().into_iter().for_each(|watch| _ = watch.join());
        if let Some(signal) = self.stop.unawaited() {
            self.wait(END);
            return Err(Error::interrupted(signal, format!("interrupted by {}", signals::name(signal))));
        }
        let failure = match result {
            Ok(done) => {
                self.wait(END);
                return Ok(done);
            }
            Err(failure) => failure,
        };
        let Some(cause) = self.fate.cause() else { return Err(failure) };
        let Some(at) = cause.culprit().and_then(|process| process.checked_sub(1)) else { return Err(failure) };
        if matches!(cause, LinkError::Lost { .. } | LinkError::Reported { .. }) {
            let until = Instant::now() + STATUS;
            while Instant::now() < until && self.shared.lock().get_mut(at).is_some_and(|of| of.status().is_none()) {
                thread::sleep(POLL_INTERVAL);
            }
        }
        let doing = match &cause {
            LinkError::Lost { doing, .. } | LinkError::Silent { doing, .. } | LinkError::Reported { doing, .. } => {
                doing.as_deref()
            }
            _ => None,
        };
        let mut children = self.shared.lock();
        let Some(child) = children.get_mut(at) else { return Err(failure) };
        let status = child.status();
        // Exit code 1 means a run that failed and reported its reason; any other status is a failure of the child itself.
        let died = status.is_some_and(|status| !status.success() && status.code() != Some(1));
        let is_stopped = status.is_none() && running(child.child.id()) == STOPPED;
        let reason = match &cause {
            LinkError::Ended { what, .. } => what.clone(),
            _ if died => child.describe(doing),
            LinkError::Silent { .. } if status.is_none() => format!("{cause}\n{}", child.describe(None)),
            _ if is_stopped => format!("{cause}\n{}", child.describe(None)),
            _ => cause.to_string(),
        };
        let failure = Error::negative("training stopped").because(reason);
        match (died || status.is_none()) && self.stop.came().is_none() {
            true => {
                Err(failure.with_help("`--max-restarts N` restarts all processes when one of them dies").retryable())
            }
            false => Err(failure),
        }
    }

    /// Waits at most `within` for all children to end.
    fn wait(&self, within: Duration) {
        let until = Instant::now() + within;
        while Instant::now() < until && self.shared.lock().iter_mut().any(|of| of.status().is_none()) {
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.shared.over();
        for of in self.shared.lock().iter_mut().filter(|of| of.ended.is_none()) {
            // Killing an ended child is harmless; waiting for every child leaves no zombies.
            let _ = of.child.kill();
            let _ = of.child.wait();
        }
    }
}
