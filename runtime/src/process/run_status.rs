//! The status of a multi-process run: the first failure is kept, and all processes learn of it.

use crate::process::connection::Outbound;
use crate::process::fields::{decode, shorten};
use crate::process::frame::{FrameError, Kind};
use crossbeam_channel::Sender;
use parking_lot::Mutex;
use std::time::{Duration, Instant};
use thiserror::Error;

#[derive(Debug, Error, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum LinkError {
    #[error("cannot listen at {address}: {why}")]
    Listen { address: String, why: String },
    #[error("`{address}` is not an address: {why}")]
    Address { address: String, why: String },
    #[error("no answer from {address} within {seconds} s: {why}")]
    Unreachable { address: String, seconds: f64, why: String },
    #[error("{} did not connect to {address} within {seconds} s{}", missing.join("; "), last_refused(refused))]
    Missing { missing: Vec<String>, address: String, seconds: f64, refused: Option<String> },
    #[error("no process of this run answered at {address} within {seconds} s: {why}")]
    Unproved { address: String, seconds: f64, why: String },
    #[error("other machines can reach {address}, but the run has no token: anybody could join it")]
    Exposed { address: String },
    #[error("{address} does not use pipec's protocol: {fault}")]
    Foreign { address: String, fault: FrameError },
    #[error("{address} rejected this process: {why}")]
    Refused { address: String, why: String },
    #[error("process 0 ({address}) did not start the run: {why}")]
    NotStarted { address: String, why: String },
    #[error("{peer} belongs to a different run: {what}")]
    Another { peer: String, what: String },
    #[error("the connection to {peer} is lost: {fault}{}", describe_instruction(doing))]
    Lost { process: usize, peer: String, doing: Option<String>, fault: FrameError },
    #[error("{peer} has sent nothing for {seconds:.1} s{}", describe_instruction(doing))]
    Silent { process: usize, peer: String, doing: Option<String>, seconds: f64 },
    #[error("{peer} has not opened its NCCL {links} after {seconds} s")]
    Unlinked { process: usize, peer: String, links: String, seconds: f64 },
    #[error("a message from {peer} is not valid: {fault}")]
    Broken { process: usize, peer: String, fault: FrameError },
    #[error("{peer} stopped: {what}")]
    Failed { process: usize, peer: String, what: String },
    #[error("{what}{}", reporter(peer, what))]
    Reported { process: Option<usize>, peer: String, doing: Option<String>, what: String },
    #[error("{what}")]
    Ended { process: Option<usize>, what: String },
    #[error("bug in pipec: {what}")]
    Bug { what: String },
}

fn describe_instruction(doing: &Option<String>) -> String {
    doing.as_ref().map_or(String::new(), |doing| format!("; the worker was last at {doing}"))
}

/// The process that reported a failure, unless that was its own.
fn reporter(peer: &str, reason: &str) -> String {
    if reason.starts_with(peer) { String::new() } else { format!("; reported by {peer}") }
}

fn last_refused(refused: &Option<String>) -> String {
    refused.as_ref().map_or(String::new(), |refused| format!("; rejected last: {refused}"))
}

impl LinkError {
    /// The process that caused the failure, if one did.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            LinkError::Lost { process, .. }
            | LinkError::Silent { process, .. }
            | LinkError::Unlinked { process, .. }
            | LinkError::Broken { process, .. }
            | LinkError::Failed { process, .. } => Some(*process),
            LinkError::Reported { process, .. } | LinkError::Ended { process, .. } => *process,
            _ => None,
        }
    }

    /// The failure as first reported.
    fn describe(&self) -> String {
        match self {
            LinkError::Reported { what, .. } => what.clone(),
            other => other.to_string(),
        }
    }
}

/// The first failure of a run, and the queues that must learn of it.
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

/// Time that connections stay open for the last frame of the peer.
const LINGER: Duration = Duration::from_secs(2);

impl RunStatus {
    /// Ends the run early and notifies all processes, unless it has already ended.
    pub fn end(&self, cause: LinkError) {
        let mut state = self.state.lock();
        if state.cause.is_none() && state.released.is_none() {
            // The receiver may be gone.
            state.queues.iter().for_each(|queue| _ = queue.send(abort(&cause)));
            state.cause = Some(cause);
        }
    }

    /// Registers a queue to notify.
    pub fn notify(&self, queue: Sender<Outbound>) {
        let mut state = self.state.lock();
        if let Some(cause) = &state.cause {
            let _ = queue.send(abort(cause));
        }
        state.queues.push(queue);
    }

    /// The failure; `None` while the run continues.
    pub fn cause(&self) -> Option<LinkError> {
        self.state.lock().cause.clone()
    }

    /// Marks the run as successful; connections may now close.
    pub fn release(&self) {
        self.state.lock().released.get_or_insert_with(Instant::now);
    }

    /// True if the run ended successfully.
    pub fn is_released(&self) -> bool {
        self.state.lock().released.is_some()
    }

    /// True if nothing should be read any more: the run failed, or it succeeded more than [`LINGER`] ago.
    pub fn is_over(&self) -> bool {
        let state = self.state.lock();
        state.cause.is_some() || state.released.is_some_and(|instant| instant.elapsed() > LINGER)
    }
}

/// The frame that ends the run in other processes.
pub fn abort(cause: &LinkError) -> Outbound {
    Outbound::of(Kind::Abort, &(cause.culprit(), shorten(&cause.describe())))
}

/// The culprit and the reason in the content of such a frame.
pub fn abort_reason(content: &[u8]) -> Result<(Option<usize>, String), FrameError> {
    let (culprit, what): (_, String) = decode(content, "the reason for the end")?;
    Ok((culprit, shorten(&what).to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_the_culprit_first() {
        let reported = |peer: &str, what: &str| {
            let (peer, what) = (peer.to_string(), what.to_string());
            LinkError::Reported { process: Some(1), peer, doing: None, what }.to_string()
        };
        let own = "worker 1.0, process 7, stopped: the disk is full";
        assert_eq!(reported("worker 1.0, process 7", own), own);
        assert_eq!(reported("worker 2.0", own), format!("{own}; reported by worker 2.0"));
    }

    #[test]
    fn the_first_cause_is_the_one_that_all_learn() {
        let run_status = RunStatus::default();
        let (to, received) = crossbeam_channel::unbounded();
        run_status.notify(to.clone());
        let first = LinkError::Failed { process: 2, peer: "worker 1.0".into(), what: "it broke".into() };
        run_status.end(first.clone());
        run_status.end(LinkError::Ended { process: None, what: "later".into() });
        assert_eq!((run_status.cause(), received.len()), (Some(first), 1));
        let frame = received.recv().unwrap();
        let reason = "worker 1.0 stopped: it broke".to_string();
        assert_eq!((frame.kind, abort_reason(&frame.head)), (Kind::Abort, Ok((Some(2), reason))));
        run_status.notify(to);
        assert_eq!(received.recv().map(|frame| frame.kind), Ok(Kind::Abort));
    }
}
