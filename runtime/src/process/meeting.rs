//! A process that joins a run: its configuration, how long it waits, and what it reports meanwhile.

use crate::process::authentication::{Challenge, RunToken};
use crate::process::connection::{DeadlineReader, Stream};
use crate::process::frame::{FrameReader, FrameWriter};
use crate::process::handshake::{HandshakeConnection, Identity};
use crate::process::placement::WorkerPlacement;
use crate::process::run_status::{LinkError, RunStatus};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time from connection to hello.
pub const HANDSHAKE_TIME: Duration = Duration::from_secs(10);
/// Delay before missing processes are reported.
const REPORT_AFTER: Duration = Duration::from_secs(1);
/// Maximum number of refused connections that are reported: a stranger must not fill the log.
const MOST_REFUSALS: usize = 64;

/// The configuration of one process.
#[derive(Clone, Debug)]
pub struct ProcessConfig {
    /// This process's number.
    pub process: usize,
    pub placement: WorkerPlacement,
    /// Inputs that must be equal in all processes.
    pub identity: Identity,
    /// What all processes must know.
    pub token: RunToken,
    /// Address of process 0.
    pub first_address: String,
    /// Listening address; `None` uses any free port.
    pub listen: Option<String>,
    /// Maximum time to wait for the other processes.
    pub connect_timeout: Duration,
    /// Maximum silence of a process during the run.
    pub deadline: Duration,
    /// True if tensors go over NCCL, which every process must then support; else through the host.
    pub nccl: bool,
    /// True if process 0 started this process. The process then ends with process 0, whose silence may only mean that
    /// it is suspended.
    pub follows: bool,
}

/// Progress messages while the group forms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The processes still missing, after a second.
    Waits(String),
    /// A connection that is not part of the run was refused.
    SentAway(String),
}

/// A process joining the run.
pub struct Meeting<'a> {
    pub config: &'a ProcessConfig,
    pub run_status: &'a Arc<RunStatus>,
    pub notice: &'a dyn Fn(Notice),
    pub until: Instant,
    /// Display names, by process.
    pub names: Vec<String>,
    refusals: RefCell<Refusals>,
}

/// Refused connections.
#[derive(Default)]
struct Refusals {
    /// Those that were reported, by address without port, and reason.
    reported: BTreeSet<(String, String)>,
    last: Option<String>,
}

impl<'a> Meeting<'a> {
    pub fn new(
        names: Vec<String>,
        config: &'a ProcessConfig,
        run_status: &'a Arc<RunStatus>,
        notice: &'a dyn Fn(Notice),
    ) -> Meeting<'a> {
        let until = Instant::now() + config.connect_timeout;
        Meeting { config, run_status, notice, until, names, refusals: RefCell::default() }
    }

    pub fn remaining(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// The cause of the run's end if known, else `error`.
    pub fn run_failure_or(&self, error: LinkError) -> LinkError {
        self.run_status.cause().unwrap_or(error)
    }

    /// The challenge of this process on a new connection, `is_exposed` if it is one to another machine over TCP.
    pub fn challenge(&self, is_exposed: bool) -> Result<Challenge, LinkError> {
        let challenge = Challenge::new(self.config.process, self.config.placement.processes, is_exposed);
        challenge.map_err(|what| LinkError::Ended { process: None, what })
    }

    /// After [`REPORT_AFTER`], reports once which processes are missing.
    pub fn report_missing(&self, start: Instant, is_reported: &mut bool, whom: impl FnOnce() -> String) {
        let (waited, remaining) = (start.elapsed(), self.remaining());
        if *is_reported || waited < REPORT_AFTER || remaining.is_zero() {
            return;
        }
        *is_reported = true;
        (self.notice)(Notice::Waits(format!(
            "waits for {}, up to {:.0} s more",
            whom(),
            remaining.as_secs_f64().ceil()
        )));
    }

    /// Reports a refused connection, once for each address and reason.
    pub fn report_refusal(&self, who: &str, from: IpAddr, why: &str) {
        let mut refusals = self.refusals.borrow_mut();
        refusals.last = Some(format!("{who}: {why}"));
        let reported = refusals.reported.len();
        if reported > MOST_REFUSALS || !refusals.reported.insert((from.to_string(), why.to_string())) {
            return;
        }
        (self.notice)(Notice::SentAway(match reported {
            MOST_REFUSALS => "rejected more connections, which are not listed".to_string(),
            _ => format!("rejected {who}: {why}"),
        }));
    }

    /// The connection that was refused last, and why.
    pub fn last_refused(&self) -> Option<String> {
        self.refusals.borrow().last.clone()
    }

    pub fn connection(&self, stream: Stream, within: Duration) -> HandshakeConnection {
        connection(stream, within, self.run_status.clone())
    }
}

/// Prepares a new connection for the handshake.
pub fn connection(stream: Stream, within: Duration, run_status: Arc<RunStatus>) -> HandshakeConnection {
    let Stream { reader, writer, hangup } = stream;
    let reader = DeadlineReader::new(reader, within, Box::new(move || run_status.is_over()));
    HandshakeConnection { reader: FrameReader::new(reader), writer: FrameWriter::new(writer), hangup }
}
