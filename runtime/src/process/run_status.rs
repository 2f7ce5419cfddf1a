//! The status of a run of several processes: the first failure wins, and all processes learn of it.

use crate::process::connection::Outbound;
use crate::process::fields::put_text;
use crate::process::frame::{FrameError, Kind};
use crossbeam_channel::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Why a run of several processes does not begin or go on.
#[derive(Debug, Error, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum LinkError {
    #[error("cannot listen at {address}: {why}")]
    Listen { address: String, why: String },
    #[error("`{address}` is no address: {why}")]
    Address { address: String, why: String },
    #[error("nothing answers at {address} within {seconds} s: {why}")]
    Unreachable { address: String, seconds: f64, why: String },
    #[error("{} did not come to {address} within {seconds} s", missing.join("; "))]
    Missing { missing: Vec<String>, address: String, seconds: f64 },
    #[error("what answers at {address} does not speak pipec's protocol: {fault}")]
    Foreign { address: String, fault: FrameError },
    #[error("{address} does not let this process take part: {why}")]
    Refused { address: String, why: String },
    #[error("{peer} has prepared another run: {what}")]
    Another { peer: String, what: String },
    #[error("the connection to {peer} is lost: {fault}{}", last(doing))]
    Lost { process: usize, peer: String, doing: Option<String>, fault: FrameError },
    #[error("{peer} has not been heard of for {seconds:.1} s{}", last(doing))]
    Silent { process: usize, peer: String, doing: Option<String>, seconds: f64 },
    #[error("what comes from {peer} does not hold: {fault}")]
    Broken { process: usize, peer: String, fault: FrameError },
    #[error("{peer} stopped: {what}")]
    Failed { process: usize, peer: String, what: String },
    #[error("{peer} ended the run: {what}")]
    Told { process: Option<usize>, peer: String, doing: Option<String>, what: String },
    #[error("{what}")]
    Ended { process: Option<usize>, what: String },
    #[error("bug in pipec: {what}")]
    Bug { what: String },
}

fn last(doing: &Option<String>) -> String {
    doing.as_ref().map_or(String::new(), |doing| format!("; it was last at `{doing}`"))
}

impl LinkError {
    /// The process that is to blame, where one is.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            LinkError::Lost { process, .. }
            | LinkError::Silent { process, .. }
            | LinkError::Broken { process, .. }
            | LinkError::Failed { process, .. } => Some(*process),
            LinkError::Told { process, .. } | LinkError::Ended { process, .. } => *process,
            _ => None,
        }
    }

    /// What ended the run in the words of who found it.
    fn told(&self) -> String {
        match self {
            LinkError::Told { what, .. } => what.clone(),
            other => other.to_string(),
        }
    }
}

/// The first cause for a run's early end, and who is to learn of it.
#[derive(Default)]
pub struct RunStatus {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    cause: Option<LinkError>,
    released: Option<Instant>,
    queues: Vec<Sender<Outbound>>,
}

/// How long connections are kept open for the last word of the other end.
const LINGER: Duration = Duration::from_secs(2);

/// The number in place of a culprit where there is none.
pub const NOBODY: u32 = u32::MAX;

impl RunStatus {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock can panic half way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the run early, unless it has ended already. Everyone who hears of it is told why.
    pub fn end(&self, cause: LinkError) {
        let mut state = self.lock();
        if state.cause.is_none() && state.released.is_none() {
            // Who has hung up needs no word.
            state.queues.iter().for_each(|queue| _ = queue.send(abort(&cause)));
            state.cause = Some(cause);
        }
    }

    /// Whoever reads from this queue is told too.
    pub fn tell(&self, queue: Sender<Outbound>) {
        let mut state = self.lock();
        if let Some(cause) = &state.cause {
            let _ = queue.send(abort(cause));
        }
        state.queues.push(queue);
    }

    /// Why the run ended; nothing while it goes on.
    pub fn cause(&self) -> Option<LinkError> {
        self.lock().cause.clone()
    }

    /// The run is over and well: from now on connections may end.
    pub fn release(&self) {
        self.lock().released.get_or_insert_with(Instant::now);
    }

    /// Whether the run is over and well.
    pub fn is_released(&self) -> bool {
        self.lock().released.is_some()
    }

    /// Whether nothing is read any more: the run ended early, or so long ago that what is to come has come.
    pub fn is_over(&self) -> bool {
        let state = self.lock();
        state.cause.is_some() || state.released.is_some_and(|at| at.elapsed() > LINGER)
    }
}

/// Who is to blame for what goes wrong in this process.
#[derive(Clone)]
pub struct FailureCause {
    /// Who is told.
    pub run_status: Arc<RunStatus>,
    /// Which process this is.
    pub process: usize,
    /// Its name.
    pub name: String,
}

impl FailureCause {
    /// Ends the run because of what went wrong here.
    pub fn end(&self, what: &str) {
        self.run_status.end(LinkError::Failed {
            process: self.process,
            peer: self.name.clone(),
            what: what.to_string(),
        });
    }
}

fn abort(cause: &LinkError) -> Outbound {
    let mut head = cause.culprit().map_or(NOBODY, |process| process as u32).to_le_bytes().to_vec();
    put_text(&mut head, &cause.told());
    Outbound::of(Kind::Abort, head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cause_is_the_one_that_all_learn() {
        let run_status = RunStatus::default();
        let (to, told) = crossbeam_channel::unbounded();
        run_status.tell(to.clone());
        let first = LinkError::Failed { process: 2, peer: "worker 1.0".into(), what: "it broke".into() };
        run_status.end(first.clone());
        run_status.end(LinkError::Ended { process: None, what: "later".into() });
        assert_eq!((run_status.cause(), told.len()), (Some(first), 1));
        let frame = told.recv().unwrap();
        assert_eq!((frame.kind, &frame.head[..4]), (Kind::Abort, &2u32.to_le_bytes()[..]));
        run_status.tell(to);
        assert_eq!(told.recv().map(|frame| frame.kind), Ok(Kind::Abort));
    }
}
