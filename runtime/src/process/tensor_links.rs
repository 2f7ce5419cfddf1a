//! Links between the devices of connected processes (NCCL): how processes agree on them.
//!
//! With `--nccl`, every process offers its device to all that it is connected to. Two that exchange tensors open a link in
//! each direction. The lower-numbered makes the ids. All open the links of pairs in the same order. No process begins
//! the run before all have all their links, and none waits longer than for connections.

use crate::comm::members::encode;
use crate::device::api::Device;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use crate::device::tensor_link::{LinkEnd, TensorLink, Transport};
use crate::process::connection::{DeadlineReader, POLL_INTERVAL};
use crate::process::fields::decode;
use crate::process::frame::{FrameError, FrameReader, FrameWriter, Kind};
use crate::process::handshake::LONGEST;
use crate::process::process_group::{Group, read_failure};
use crate::process::run_status::{LinkError, RunStatus, abort, abort_reason};
use crossbeam_channel::{Receiver, unbounded};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, Write};
use std::sync::Arc;
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

/// Time after a failure in which process 0 hears the reports of others.
const GRACE: Duration = Duration::from_millis(500);
/// Time that a process leaves others to report who is missing, if they know better.
const REPORT_TIME: Duration = Duration::from_secs(2);

/// The links to a process.
#[derive(Clone)]
pub struct TensorLinks {
    pub outgoing: Arc<dyn TensorLink>,
    pub incoming: Arc<dyn TensorLink>,
}

/// What a process offers to another: its device's identity, and ids of links to and from it. Empty for a process
/// that it exchanges no tensors with.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Offer {
    identity: Vec<u8>,
    ids: [Vec<u8>; 2],
}

/// The transport of a process, or why it has none. A process without workers needs none.
pub type Offered = Result<Option<Arc<dyn Transport>>, String>;

/// The transport of a process whose workers share one device.
pub fn transport(devices: &[Arc<dyn Device>], workers: impl Iterator<Item = usize>) -> Offered {
    let mut worker_devices = workers.filter_map(|worker| devices.get(worker % devices.len().max(1)));
    let Some(first) = worker_devices.next() else { return Ok(None) };
    if !worker_devices.all(|other| Arc::ptr_eq(first, other)) {
        return Err("`--nccl` requires one GPU for each process, but this one has several".to_string());
    }
    first
        .transport()
        .map(Some)
        .ok_or_else(|| format!("`--nccl` requires a GPU and NCCL 2.7 or later: {}", first.info().name))
}

type Links = BTreeMap<usize, TensorLinks>;

/// Opens the links of this process; none if the run did not ask for them. Returns when all processes of the run have
/// opened theirs. A process that cannot ends the run.
/// `operands` counts the memory of received operands of collectives.
pub fn connect(group: &mut Group, offer: Option<Offered>, operands: &Arc<MemoryCounter>) -> Result<Links, LinkError> {
    let (process, peer) = (group.config.process, group.names[group.config.process].clone());
    let links = match offer {
        None => return Ok(Links::new()),
        Some(Ok(transport)) => pairs(group, transport.as_deref())
            .and_then(|pairs| open(group, transport.map(|transport| (transport, pairs)), operands)),
        Some(Err(what)) => Err(LinkError::Failed { process, peer, what }),
    };
    if let Err(cause) = &links {
        let end = abort(cause);
        // A peer may have ended already.
        group.connections.values_mut().for_each(|connection| drop(connection.send_frame(end.kind, &end.head)));
    }
    links
}

/// Ids of the links to and from a process, in the order in which both open them.
struct Pair {
    process: usize,
    ids: [Vec<u8>; 2],
    ends: [LinkEnd; 2],
}

impl Pair {
    /// Waits for the other process.
    fn open(&self, transport: &dyn Transport, operands: &Arc<MemoryCounter>) -> Result<TensorLinks, DeviceError> {
        let first = transport.open(&self.ids[0], self.ends[0], operands)?;
        let second = transport.open(&self.ids[1], self.ends[1], operands)?;
        Ok(match self.ends[0] {
            LinkEnd::Sending => TensorLinks { outgoing: first, incoming: second },
            LinkEnd::Receiving => TensorLinks { outgoing: second, incoming: first },
        })
    }
}

/// Agrees with all processes on the links between them.
fn pairs(group: &mut Group, transport: Option<&dyn Transport>) -> Result<Vec<Pair>, LinkError> {
    let own_process = group.config.process;
    let (names, lines) = (group.names.clone(), group.lines.clone());
    let exchanges = |process: usize| lines.contains(&(own_process.min(process), own_process.max(process)));
    let failed = |process: usize, what: String| LinkError::Failed { process, peer: names[process].clone(), what };
    let lost = |process: usize, fault| LinkError::Lost { process, peer: names[process].clone(), doing: None, fault };
    let device_failed = |fault: DeviceError| failed(own_process, fault.to_string());
    let mut own_offers = BTreeMap::new();
    for (&process, connection) in &mut group.connections {
        let offer = match transport.filter(|_| exchanges(process)) {
            Some(transport) if own_process < process => Offer {
                identity: transport.identity(),
                ids: [transport.new_id().map_err(device_failed)?, transport.new_id().map_err(device_failed)?],
            },
            Some(transport) => Offer { identity: transport.identity(), ids: Default::default() },
            None => Offer::default(),
        };
        connection.send_frame(Kind::Devices, &encode(&offer)).map_err(|fault| lost(process, fault))?;
        own_offers.insert(process, offer);
    }
    let mut pairs = Vec::new();
    for (&process, connection) in &mut group.connections {
        let content = connection.expect(Kind::Devices).map_err(|fault| lost(process, fault))?;
        let content = content.map_err(|what| failed(process, what))?;
        let theirs: Offer = decode(&content, "an offer").map_err(|fault| lost(process, fault))?;
        let Some(ours) = own_offers.remove(&process) else { continue };
        if ours.identity.is_empty() || theirs.identity.is_empty() {
            continue;
        }
        if ours.identity == theirs.identity {
            let what = format!("`--nccl` requires a GPU for each process, but {} has the same one", names[process]);
            return Err(failed(own_process, what));
        }
        pairs.push(match own_process < process {
            true => Pair { process, ids: ours.ids, ends: [LinkEnd::Sending, LinkEnd::Receiving] },
            false => Pair { process, ids: theirs.ids, ends: [LinkEnd::Receiving, LinkEnd::Sending] },
        });
    }
    Ok(pairs)
}

/// What a process learns while links are opened.
enum Event {
    /// The links to a process are open, or why not.
    Opened(usize, Result<TensorLinks, DeviceError>),
    /// All links of a process are open, or of all processes if it is process 0. Or why the run ends.
    Linked(usize, Result<(), LinkError>),
}

/// Opens the links, and waits until all processes have. Each tells process 0, which then tells all.
///
/// NCCL waits for a peer without a limit. It does so on a thread of its own, which a failed run leaves behind.
fn open(
    group: &mut Group,
    opening: Option<(Arc<dyn Transport>, Vec<Pair>)>,
    operands: &Arc<MemoryCounter>,
) -> Result<Links, LinkError> {
    let (sender, events) = unbounded();
    let process_number = group.config.process;
    let missing: VecDeque<usize> = opening.iter().flat_map(|(_, pairs)| pairs).map(|pair| pair.process).collect();
    let thread_error =
        |error: io::Error| LinkError::Ended { process: None, what: format!("cannot start a thread: {error}") };
    if let Some((transport, pairs)) = opening.filter(|_| !missing.is_empty()) {
        let (sender, operands) = (sender.clone(), operands.clone());
        // All links in order, until one fails.
        let open_all = move || {
            for pair in pairs {
                let links = pair.open(&*transport, &operands);
                let is_open = links.is_ok();
                // The receiver is gone if the wait was too long.
                if sender.send(Event::Opened(pair.process, links)).is_err() || !is_open {
                    return;
                }
            }
        };
        Builder::new().name("links".into()).spawn(open_all).map_err(thread_error)?;
    }
    let Group { connections, names, config: part, run_status, .. } = group;
    let names = &*names;
    thread::scope(|scope| {
        let mut writers = BTreeMap::new();
        for (&process, connection) in
            connections.iter_mut().filter(|(process, _)| process_number == 0 || **process == 0)
        {
            // The wait below has the limit.
            connection.reader.source().renew(Duration::MAX);
            let (reader, sender) = (&mut connection.reader, sender.clone());
            writers.insert(process, &mut connection.writer);
            let report =
                move || drop(sender.send(Event::Linked(process, wait_linked(reader, process, &names[process]))));
            Builder::new()
                .name(format!("from process {process}"))
                .spawn_scoped(scope, report)
                .map_err(thread_error)
                .inspect_err(|cause| run_status.end(cause.clone()))?;
        }
        let mut wait = Wait {
            process: process_number,
            names,
            run_status,
            connect_timeout: part.connect_timeout,
            events,
            missing,
            links: Links::new(),
        };
        let result = wait.run(writers);
        // Ends the readers.
        result.as_ref().err().into_iter().for_each(|cause| run_status.end(cause.clone()));
        result
    })
}

/// Reads the frame of a process that has all its links.
fn wait_linked(reader: &mut FrameReader<DeadlineReader>, process: usize, name: &str) -> Result<(), LinkError> {
    let ended = || LinkError::Ended { process: None, what: "the run is over".to_string() };
    let fault = match reader.read(LONGEST) {
        Ok((Kind::Linked, _)) => return Ok(()),
        Ok((Kind::Abort, content)) => match abort_reason(content) {
            Ok((process, what)) => {
                return Err(LinkError::Reported { process, peer: name.to_string(), doing: None, what });
            }
            Err(fault) => fault,
        },
        Ok((kind, _)) => FrameError::Unexpected { kind },
        Err(fault) => fault,
    };
    Err(read_failure(fault, process, name, None, Duration::ZERO).unwrap_or_else(ended))
}

type Writers<'a> = BTreeMap<usize, &'a mut FrameWriter<Box<dyn Write + Send>>>;

/// The wait of a process for its own links and those of others.
struct Wait<'a> {
    process: usize,
    names: &'a [String],
    run_status: &'a RunStatus,
    connect_timeout: Duration,
    events: Receiver<Event>,
    /// Processes whose links are not open, in the order of opening.
    missing: VecDeque<usize>,
    links: Links,
}

impl Wait<'_> {
    fn run(&mut self, mut writers: Writers<'_>) -> Result<Links, LinkError> {
        // Each link has the whole time.
        let mut last_event = Instant::now();
        let mut unlinked: BTreeSet<usize> = writers.keys().copied().collect();
        let mut is_reported = false;
        loop {
            if !is_reported && self.missing.is_empty() && (self.process > 0 || unlinked.is_empty()) {
                is_reported = true;
                for (&process, writer) in &mut writers {
                    let system = |error: io::Error| FrameError::System { kind: error.kind(), why: error.to_string() };
                    writer.write(Kind::Linked, &[]).map_err(|error| self.lost(process, system(error)))?;
                }
            }
            if is_reported && unlinked.is_empty() {
                return Ok(std::mem::take(&mut self.links));
            }
            let first = match self.events.recv_timeout(POLL_INTERVAL) {
                Ok(Event::Linked(process, Ok(()))) => {
                    unlinked.remove(&process);
                    last_event = Instant::now();
                    continue;
                }
                Ok(Event::Opened(process, Ok(links))) => {
                    self.links.insert(process, links);
                    self.missing.retain(|other| *other != process);
                    last_event = Instant::now();
                    continue;
                }
                Ok(event) => self.failure(event),
                Err(_) => self.late_process(Instant::now().saturating_duration_since(last_event), unlinked.first()),
            };
            if let Some(cause) = self.run_status.cause() {
                return Err(cause);
            }
            if let Some(first) = first {
                return Err(self.root(first));
            }
        }
    }

    /// The failure in an event, with the process that reports it.
    fn failure(&self, event: Event) -> Option<(usize, LinkError)> {
        match event {
            Event::Opened(_, Ok(_)) | Event::Linked(_, Ok(())) => None,
            Event::Opened(_, Err(fault)) => {
                let (process, peer) = (self.process, self.names[self.process].clone());
                Some((self.process, LinkError::Failed { process, peer, what: fault.to_string() }))
            }
            Event::Linked(process, Err(error @ LinkError::Reported { .. })) => Some((process, error)),
            Event::Linked(_, Err(error)) => Some((self.process, error)),
        }
    }

    /// The first failure; on process 0 the root of all that are reported shortly after it. If a process is lost, others
    /// blame the one that they wait for, which waits in turn. The root is blamed, and blames nobody else.
    fn root(&self, first: (usize, LinkError)) -> LinkError {
        let mut reports = vec![first];
        let until = Instant::now() + GRACE;
        while let Ok(event) = self.events.recv_deadline(until) {
            reports.extend(self.failure(event).filter(|_| self.process == 0));
        }
        // Of each reporter, the other process that it blames.
        let blamed: Vec<(usize, Option<usize>)> = reports
            .iter()
            .map(|(reporter, error)| (*reporter, error.culprit().filter(|process| process != reporter)))
            .collect();
        let blames_another =
            |process: usize| blamed.iter().any(|(reporter, culprit)| *reporter == process && culprit.is_some());
        let root = blamed.iter().position(|(_, culprit)| culprit.is_some_and(|process| !blames_another(process)));
        // Or two blame each other.
        let mutual = |(reporter, culprit): &(usize, Option<usize>)| {
            culprit.is_some_and(|culprit| blamed.contains(&(culprit, Some(*reporter))))
        };
        let root = root.or_else(|| blamed.iter().position(mutual));
        reports.swap_remove(root.unwrap_or(0)).1
    }

    /// Who is late after this time, if anyone is. Who opens a link reports first, as it knows whom it waits for; then
    /// process 0, which knows who still opens links; then those that wait for process 0.
    fn late_process(&self, waited: Duration, absent: Option<&usize>) -> Option<(usize, LinkError)> {
        let (process, links, limit) = match (self.missing.front(), absent) {
            (Some(process), _) => (*process, format!("link to {}", self.names[self.process]), self.connect_timeout),
            (None, Some(0)) => (0, "links".to_string(), self.connect_timeout + 2 * REPORT_TIME),
            (None, absent) => (*absent?, "links".to_string(), self.connect_timeout + REPORT_TIME),
        };
        let (peer, seconds) = (self.names[process].clone(), self.connect_timeout.as_secs_f64());
        (waited >= limit).then_some((self.process, LinkError::Unlinked { process, peer, links, seconds }))
    }

    fn lost(&self, process: usize, fault: FrameError) -> LinkError {
        LinkError::Lost { process, peer: self.names[process].clone(), doing: None, fault }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The culprit that process 0 finds: its own failure comes first, then reports of others.
    fn culprit(first: LinkError, later: Vec<(usize, LinkError)>) -> Option<usize> {
        let names: Vec<String> = (0..4).map(|process| format!("process {process}")).collect();
        let (to, events) = unbounded();
        for (by, error) in later {
            let (process, what) = (error.culprit(), error.to_string());
            let reported = LinkError::Reported { process, peer: names[by].clone(), doing: None, what };
            to.send(Event::Linked(by, Err(if by == 0 { error } else { reported }))).unwrap();
        }
        drop(to);
        let (run_status, connect_timeout) = (RunStatus::default(), Duration::ZERO);
        let (missing, links) = (VecDeque::new(), Links::new());
        let wait = Wait { process: 0, names: &names, run_status: &run_status, connect_timeout, events, missing, links };
        wait.root((0, first)).culprit()
    }

    #[test]
    fn the_root_is_who_waits_for_nobody() {
        let peer = String::new;
        let late = |process| LinkError::Unlinked { process, peer: peer(), links: peer(), seconds: 1.0 };
        let failed = |process| LinkError::Failed { process, peer: peer(), what: peer() };
        let lost = |process| LinkError::Lost { process, peer: peer(), doing: None, fault: FrameError::Closed };
        assert_eq!(culprit(late(1), vec![]), Some(1));
        assert_eq!(culprit(late(1), vec![(1, late(2)), (2, late(3))]), Some(3));
        assert_eq!(culprit(late(1), vec![(1, late(2)), (2, late(1))]), Some(2));
        assert_eq!(culprit(failed(0), vec![(0, lost(2))]), Some(2));
        assert_eq!(culprit(failed(0), vec![(1, failed(1))]), Some(0));
        assert_eq!(culprit(late(1), vec![(1, failed(1))]), Some(1));
    }

    #[test]
    fn a_process_waits_longer_for_those_that_know_more() {
        let names: Vec<String> = (0..3).map(|process| format!("process {process}")).collect();
        let (run_status, connect_timeout) = (RunStatus::default(), Duration::from_secs(10));
        let late_process = |own_process: usize, missing: &[usize], absent: usize, waited: Duration| {
            let missing = missing.iter().copied().collect();
            let (events, links) = (unbounded().1, Links::new());
            let wait = Wait {
                process: own_process,
                names: &names,
                run_status: &run_status,
                connect_timeout,
                events,
                missing,
                links,
            };
            wait.late_process(waited, Some(&absent)).and_then(|(_, error)| error.culprit())
        };
        assert_eq!(
            (late_process(1, &[2], 0, connect_timeout), late_process(1, &[2], 0, connect_timeout / 2)),
            (Some(2), None)
        );
        assert_eq!(
            (late_process(0, &[], 1, connect_timeout), late_process(0, &[], 1, connect_timeout + REPORT_TIME)),
            (None, Some(1))
        );
        assert_eq!(
            (
                late_process(2, &[], 0, connect_timeout + REPORT_TIME),
                late_process(2, &[], 0, connect_timeout + 2 * REPORT_TIME)
            ),
            (None, Some(0))
        );
    }
}
