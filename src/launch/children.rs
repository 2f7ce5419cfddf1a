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
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Time after the heartbeat timeout at which a stopped child is reported; the connection reports it first.
const STOP_GRACE: Duration = Duration::from_millis(400);
/// Interval between checks for ended children.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Time for the connection to report the death of a child in more detail than the system.
const DETAIL_TIME: Duration = Duration::from_millis(150);
/// Time for the system to report the exit status of a child whose connection is lost.
const STATUS_TIME: Duration = Duration::from_millis(500);
/// Time for children to end when the run is over.
const END_TIME: Duration = Duration::from_secs(5);
/// Bytes kept of the last standard error output of a child.
const STDERR_TAIL: usize = 2048;

/// Child processes, and the thread that watches them.
pub struct Children {
    shared: Arc<Shared>,
    watcher: Option<JoinHandle<()>>,
    run_status: Arc<RunStatus>,
    stop: &'static Stop,
}

struct Shared {
    children: Mutex<Vec<ChildProcess>>,
    is_over: AtomicBool,
    pauses: &'static Pauses,
}

struct ChildProcess {
    child: Child,
    name: String,
    stderr: Arc<Mutex<VecDeque<u8>>>,
    exit_status: Option<ExitStatus>,
}

/// Starts a child for each of these names, as processes 1, 2, … of a run. A child may be stopped for at most `deadline`.
pub fn start(
    names: &[String],
    (run, restarts, address, token): (u64, u32, &str, &str),
    (command_line, resumed): (&[OsString], Option<&Path>),
    deadline: Duration,
    run_status: &Arc<RunStatus>,
) -> Result<Children, Error> {
    let fail = |error: std::io::Error| Error::negative("cannot start the processes of the run").because(error);
    let Some((program, arguments)) = command_line.split_first() else {
        return Err(Error::bug("no command to start a worker"));
    };
    let listen_error = |error: &str| Error::negative("cannot listen to signals").because(error);
    let (pauses, stop) = (Pauses::listen().map_err(listen_error)?, Stop::listen().map_err(listen_error)?);
    let shared = Arc::new(Shared { children: Mutex::default(), is_over: AtomicBool::new(false), pauses });
    pauses.set_children(true);
    stop.set_awaited(false);
    let mut children = Children { shared: shared.clone(), watcher: None, run_status: run_status.clone(), stop };
    for (process, name) in (1..).zip(names) {
        let mut command = Command::new(program);
        command.args(arguments);
        command.env(VARIABLE, format!("{} {process} {run:x} {restarts} {address}", std::process::id()));
        command.env(run_token::VARIABLE, token);
        if let Some(checkpoint) = resumed {
            command.env(RESUMED, checkpoint);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // Ctrl-C in a terminal reaches only this process, which passes it on.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(fail)?;
        let stderr = Arc::new(Mutex::new(VecDeque::new()));
        let (mut pipe, tail) = (child.stderr.take(), stderr.clone());
        let read_stderr = move || {
            let mut bytes = [0; 512];
            while let Some(Ok(count @ 1..)) = pipe.as_mut().map(|pipe| pipe.read(&mut bytes)) {
                let mut buffer = tail.lock().unwrap_or_else(PoisonError::into_inner);
                buffer.extend(&bytes[..count]);
                let excess = buffer.len().saturating_sub(STDERR_TAIL);
                buffer.drain(..excess);
            }
        };
        shared.lock().push(ChildProcess { child, name: name.clone(), stderr, exit_status: None });
        thread::Builder::new().name(format!("child {process}")).spawn(read_stderr).map_err(fail)?;
    }
    let run_status = run_status.clone();
    let watcher = thread::Builder::new()
        .name("watch".into())
        .spawn(move || shared.watch(&run_status, deadline + STOP_GRACE, stop));
    children.watcher = Some(watcher.map_err(fail)?);
    Ok(children)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<ChildProcess>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the run as over; children need no more watching.
    fn finish(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.pauses.set_children(false);
    }

    /// Watches until the run is over. A child that ends, or a signal that the run does not handle itself, ends the run.
    fn watch(&self, run_status: &RunStatus, deadline: Duration, stop: &Stop) {
        let mut stopped: BTreeMap<usize, Instant> = BTreeMap::new();
        let mut last_check = Instant::now();
        while !self.is_over.load(Ordering::Relaxed) {
            if let Some(signal) = stop.unhandled() {
                for child in self.lock().iter_mut() {
                    if child.status().is_none() {
                        signals::send(signal, child.child.id());
                    }
                }
                let message = format!("received {}", signals::name(signal));
                return run_status.end(LinkError::Ended { process: None, what: message });
            }
            if self.pauses.take_request() {
                // No child is reaped meanwhile, so their process ids cannot be reused.
                let mut children = self.lock();
                let pids = children.iter_mut().filter_map(|child| child.status().is_none().then(|| child.child.id()));
                signals::pause(&pids.collect::<Vec<u32>>());
                stopped.clear();
            }
            let exited = self.lock().iter_mut().position(|child| child.status().is_some());
            if let Some(at) = exited
                && !run_status.is_released()
            {
                thread::sleep(DETAIL_TIME);
                let message = self.lock()[at].describe(None);
                return run_status.end(LinkError::Ended { process: Some(at + 1), what: message });
            }
            // Before the run starts there are no heartbeats, so stopped children are detected here.
            if last_check.elapsed() > STOP_CHECK_INTERVAL {
                last_check = Instant::now();
                for (at, child) in self.lock().iter_mut().enumerate() {
                    match process_state(child.child.id()) == STOPPED {
                        true => _ = stopped.entry(at).or_insert(last_check),
                        false => _ = stopped.remove(&at),
                    }
                }
                if let Some((&at, _)) = stopped.iter().find(|(_, since)| since.elapsed() > deadline) {
                    let message = self.lock()[at].describe(None);
                    return run_status.end(LinkError::Ended { process: Some(at + 1), what: message });
                }
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl ChildProcess {
    /// The exit status, if the child has ended.
    fn status(&mut self) -> Option<ExitStatus> {
        if self.exit_status.is_none() {
            self.exit_status = self.child.try_wait().ok().flatten();
        }
        self.exit_status
    }

    /// Describes the state or the end of the child; `doing` is its last known instruction.
    fn describe(&mut self, instruction: Option<&str>) -> String {
        let pid = self.child.id();
        let state = match self.status() {
            None => return format!("{}, process {pid}, {}", self.name, process_state(pid)),
            Some(status) => match killed_by(status) {
                Some(signal) => format!("was killed by {}", signals::name(signal)),
                None => format!("exited with code {}", status.code().unwrap_or(-1)),
            },
        };
        let last_instruction =
            instruction.map_or(String::new(), |instruction| format!("; the worker was last at {instruction}"));
        let mut stderr = self.stderr.lock().unwrap_or_else(PoisonError::into_inner);
        let stderr = String::from_utf8_lossy(stderr.make_contiguous()).trim().to_string();
        let error =
            stderr.rfind("error: ").map_or(String::new(), |at| format!("\n{}", &stderr[at + "error: ".len()..]));
        format!("{}, process {pid}, {state}{last_instruction}{error}", self.name)
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
fn process_state(pid: u32) -> &'static str {
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
        self.shared.finish();
        self.watcher.take().into_iter().for_each(|watcher| _ = watcher.join());
        if let Some(signal) = self.stop.unhandled() {
            self.wait(END_TIME);
            return Err(Error::interrupted(signal, format!("interrupted by {}", signals::name(signal))));
        }
        let failure = match result {
            Ok(value) => {
                self.wait(END_TIME);
                return Ok(value);
            }
            Err(failure) => failure,
        };
        let Some(cause) = self.run_status.cause() else { return Err(failure) };
        let Some(at) = cause.culprit().and_then(|process| process.checked_sub(1)) else { return Err(failure) };
        if matches!(cause, LinkError::Lost { .. } | LinkError::Reported { .. }) {
            let until = Instant::now() + STATUS_TIME;
            while Instant::now() < until && self.shared.lock().get_mut(at).is_some_and(|child| child.status().is_none())
            {
                thread::sleep(POLL_INTERVAL);
            }
        }
        let instruction = match &cause {
            LinkError::Lost { doing: instruction, .. }
            | LinkError::Silent { doing: instruction, .. }
            | LinkError::Reported { doing: instruction, .. } => instruction.as_deref(),
            _ => None,
        };
        let mut children = self.shared.lock();
        let Some(child) = children.get_mut(at) else { return Err(failure) };
        let status = child.status();
        // Exit code 1 means a run that failed and reported its reason; any other status is a failure of the child itself.
        let failed = status.is_some_and(|status| !status.success() && status.code() != Some(1));
        let is_stopped = status.is_none() && process_state(child.child.id()) == STOPPED;
        let reason = match &cause {
            LinkError::Ended { what, .. } => what.clone(),
            _ if failed => child.describe(instruction),
            LinkError::Silent { .. } if status.is_none() => format!("{cause}\n{}", child.describe(None)),
            _ if is_stopped => format!("{cause}\n{}", child.describe(None)),
            _ => cause.to_string(),
        };
        let failure = Error::negative("training stopped").because(reason);
        match (failed || status.is_none()) && self.stop.received().is_none() {
            true => {
                Err(failure.with_help("`--max-restarts N` restarts all processes when one of them dies").retryable())
            }
            false => Err(failure),
        }
    }

    /// Waits at most `timeout` for all children to end.
    fn wait(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        while Instant::now() < deadline && self.shared.lock().iter_mut().any(|child| child.status().is_none()) {
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.shared.finish();
        for child in self.shared.lock().iter_mut().filter(|child| child.exit_status.is_none()) {
            // Killing an ended child is harmless; waiting for every child leaves no zombies.
            let _ = child.child.kill();
            let _ = child.child.wait();
        }
    }
}
