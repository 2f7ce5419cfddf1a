//! The processes of a run that this one started: one for each worker, watched until the end.
//!
//! A child that dies ends the run. So does a signal to this process, which is passed on, unless the run ends behind its step for it. At the end, however it came, no child is
//! left: those that have not ended by themselves are killed. Children also follow this process when it is killed.

use crate::error::Error;
use crate::launch::signals;
use crate::launch::signals::Pauses;
use crate::launch::stop_signal::Stop;
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

/// The variable that tells a child who it is: the parent, its process in the run, the run, how often it was begun again, and where
/// process 0 listens.
pub const VARIABLE: &str = "PIPEC_PROCESS";

/// The variable that tells a child of a run that was begun again from which checkpoint.
pub const RESUMED: &str = "PIPEC_RESUMED";

/// How often the system is asked whether a child is stopped.
const ASK: Duration = Duration::from_millis(500);
/// How much later than the connection that is told.
const LATER: Duration = Duration::from_millis(400);
/// How often children are looked at.
const LOOK: Duration = Duration::from_millis(20);
/// How long the connection may take to say more of a death than the system does.
const DETAIL: Duration = Duration::from_millis(150);
/// How long the system may take to say how a child ended whose connection is lost.
const STATUS: Duration = Duration::from_millis(500);
/// How long children may take to end when the run is over.
const END: Duration = Duration::from_secs(5);
/// What is kept of what a child last said.
const SAID: usize = 2048;

/// Children, and who watches them.
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

/// Starts a child for each of these names, as processes 1 and so on of a run, which may be stopped no longer than the deadline.
pub fn start(
    names: &[String],
    (run, restarts, address): (u64, u32, &str),
    (command_line, resumed): (&[OsString], Option<&Path>),
    deadline: Duration,
    fate: &Arc<RunStatus>,
) -> Result<Children, Error> {
    let fail = |error: std::io::Error| Error::negative("cannot start the processes of the run").because(error);
    let Some((program, arguments)) = command_line.split_first() else {
        return Err(Error::bug("no command is given that would start a worker"));
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
        if let Some(from) = resumed {
            command.env(RESUMED, from);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // A terminal's interrupt comes to this process alone, which passes it on.
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
    let watch = thread::Builder::new().name("watch".into()).spawn(move || shared.watch(&fate, deadline + LATER, stop));
    children.watch = Some(watch.map_err(fail)?);
    Ok(children)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Vec<Started>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The run is over, and nobody is left to look after.
    fn over(&self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.pauses.look_after(false);
    }

    /// Until the run is over: a child that ends, or a signal that the run does not answer by itself, ends it.
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
                let what = format!("{} came", signals::name(signal));
                return fate.end(LinkError::Ended { process: None, what });
            }
            if self.pauses.came() {
                // No child is waited for meanwhile, so that their numbers are nobody else's.
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
                let what = self.lock()[at].told(None);
                return fate.end(LinkError::Ended { process: Some(at + 1), what });
            }
            // Before the run begins there is no heartbeat that would be missed.
            if asked.elapsed() > ASK {
                asked = Instant::now();
                for (at, of) in self.lock().iter_mut().enumerate() {
                    match running(of.child.id()) == STOPPED {
                        true => _ = stopped.entry(at).or_insert(asked),
                        false => _ = stopped.remove(&at),
                    }
                }
                if let Some((&at, _)) = stopped.iter().find(|(_, since)| since.elapsed() > deadline) {
                    let what = self.lock()[at].told(None);
                    return fate.end(LinkError::Ended { process: Some(at + 1), what });
                }
            }
            thread::sleep(LOOK);
        }
    }
}

impl Started {
    /// How it ended, if it has.
    fn status(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().ok().flatten();
        }
        self.ended
    }

    /// How it ended, in words; `doing` is what it was last known to do.
    fn told(&mut self, doing: Option<&str>) -> String {
        let pid = self.child.id();
        let how = match self.status() {
            None => return format!("{}, process {pid}, {}", self.name, running(pid)),
            Some(status) => match killed_by(status) {
                Some(signal) => format!("was killed by {}", signals::name(signal)),
                None => format!("ended with exit code {}", status.code().unwrap_or(-1)),
            },
        };
        let at = doing.map_or(String::new(), |doing| format!("; it was last at `{doing}`"));
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

/// What is said of a process that is stopped.
const STOPPED: &str = "is stopped (SIGSTOP)";

/// What the system says of a process that runs.
fn running(pid: u32) -> &'static str {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before the state may hold anything but ends with the last parenthesis.
    match stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()) {
        Some('T' | 't') => STOPPED,
        Some('D') => "waits for the disk",
        _ => "hangs",
    }
}

impl Children {
    /// The run is over. Waits for the children, kills those that do not end, and tells why the run ended if it ended early.
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
                thread::sleep(LOOK);
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
        // Exit code 1 is that of a run that could not go on, whose reason is told; anything else is a death of its own.
        let died = status.is_some_and(|status| !status.success() && status.code() != Some(1));
        let is_stopped = status.is_none() && running(child.child.id()) == STOPPED;
        let told = match &cause {
            LinkError::Ended { what, .. } => what.clone(),
            _ if died => child.told(doing),
            LinkError::Silent { .. } if status.is_none() => format!("{cause}\n{}", child.told(None)),
            _ if is_stopped => format!("{cause}\n{}", child.told(None)),
            _ => cause.to_string(),
        };
        let failure = Error::negative("training stopped").because(told);
        match (died || status.is_none()) && self.stop.came().is_none() {
            true => Err(failure
                .with_help("`--max-restarts N` starts all processes again when one of them dies")
                .retryable()),
            false => Err(failure),
        }
    }

    /// Waits so long for all children to end.
    fn wait(&self, within: Duration) {
        let until = Instant::now() + within;
        while Instant::now() < until && self.shared.lock().iter_mut().any(|of| of.status().is_none()) {
            thread::sleep(LOOK);
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.shared.over();
        for of in self.shared.lock().iter_mut().filter(|of| of.ended.is_none()) {
            // One that has just ended needs no killing; every one is waited for, so that none is left as a shadow.
            let _ = of.child.kill();
            let _ = of.child.wait();
        }
    }
}
