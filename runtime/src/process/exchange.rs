//! The local ends of channels and communicators that span processes, and the threads that serve them.
//!
//! All processes traverse the same program and number channels and communicators alike, so no names are sent.

use crate::checkpoint::StageSnapshot;
use crate::checkpoint::barrier::MinibatchBarrier;
use crate::comm::channel;
use crate::comm::channel::{Disconnected, Incoming, Message, Outgoing, channel};
use crate::comm::members::{Members, encode};
use crate::device::buffer::Buffer;
use crate::device::memory_counter::MemoryCounter;
use crate::exec::stage_code::StageCode;
use crate::process::connection::{DeadlineReader, Hangup, Outbound};
use crate::process::frame::{FrameReader, FrameWriter, Kind};
use crate::process::parts::PartForm;
use crate::process::process_group::Group;
use crate::process::router::{Gathering, GroupReceiver, Route, Routes, frame_limit};
use crate::process::run_status::{LinkError, RunStatus};
use crate::process::stop::StopAgreement;
use crate::process::tensor_links::{Offered, TensorLinks, connect};
use crate::process::worker_result::Leaving;
use crate::process::{connection, parts, worker_result};
use crate::stage::worker::{Event, WorkerResult};
use compiler::op::Value;
use compiler::schedule::Program;
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{Builder, Scope};
use std::time::Duration;

/// Maximum time to flush queues after a run that failed.
const FLUSH_TIME_AFTER_FAILURE: Duration = Duration::from_millis(500);
/// Maximum time to flush queues after a successful run.
const FLUSH_TIME: Duration = Duration::from_secs(3);

/// The frames to send to each process.
type Queues = BTreeMap<usize, Sender<Outbound>>;

/// This process's connections to its peers.
pub struct Exchange<'a> {
    group: Group,
    program: &'a Program,
    /// Counts the operands of collectives that this process receives over links.
    operands: Arc<MemoryCounter>,
    queues: Queues,
    connections: Vec<ConnectionThreads<'a>>,
    channels: u32,
    groups: u32,
    outcomes: Receiver<(usize, WorkerResult)>,
    released: Receiver<()>,
    /// On other processes: one token for each snapshot that process 0 can take.
    snapshot_tokens: Receiver<()>,
    hangups: Vec<Hangup>,
    stop_agreement: Option<Arc<StopAgreement<'a>>>,
    /// Dropped when the workers have ended, which stops the stop-signal thread.
    workers_alive: Option<Sender<()>>,
    /// Disconnects when all writer threads have ended.
    writers_alive: Option<(Sender<()>, Receiver<()>)>,
}

struct ConnectionThreads<'a> {
    reader: FrameReader<DeadlineReader>,
    writer: FrameWriter<Box<dyn Write + Send>>,
    queue: Receiver<Outbound>,
    routes: Routes<'a>,
    links: Option<TensorLinks>,
}

impl<'a> Exchange<'a> {
    /// Creates the exchange of a connected group. Process 0 sends the losses of all workers to `events` and their
    /// snapshots to `snapshot_sender`. Either all processes have a `barrier` or none has. Without `transport`,
    /// tensors go through the host.
    pub fn new(
        group: Group,
        transport: Option<Offered>,
        program: &'a Program,
        codes: &'a [StageCode],
        events: &Sender<Event>,
        snapshot_sender: Option<Sender<StageSnapshot>>,
        barrier: Option<&'a MinibatchBarrier<'a>>,
    ) -> Result<Exchange<'a>, LinkError> {
        let mut group = group;
        let operands = Arc::default();
        let mut all_links = connect(&mut group, transport, &operands)?;
        let (outcome_sender, outcomes) = unbounded();
        let (release_sender, released) = unbounded();
        let (token_sender, snapshot_tokens) = unbounded();
        // The snapshots of one checkpoint of this process may be in transit.
        let placement = &group.config.placement;
        let workers = placement.ranks(group.config.process).map(|rank| placement.worker(rank));
        let snapshots = workers.map(|worker| program.stages_of(program.workers[worker].rank).count()).sum();
        (0..snapshots).for_each(|_| _ = token_sender.send(()));
        let (mut queues, mut connections, mut hangups) = (BTreeMap::new(), Vec::new(), Vec::new());
        for (process, mut connection) in std::mem::take(&mut group.connections) {
            let (sender, queue) = unbounded();
            group.run_status.notify(sender.clone());
            queues.insert(process, sender);
            // The starting process may be suspended like any job. If it dies, its connection closes and this process
            // ends.
            let is_parent = group.config.follows && process == 0;
            connection.reader.source().renew(if is_parent { Duration::MAX } else { group.config.deadline });
            let placement = group.config.placement.clone();
            let has_ranks = placement.ranks(process).next().is_some();
            let results =
                placement.ranks(process).map(|rank| (rank, Leaving::of(program, codes, placement.worker(rank))));
            let gathering = (group.config.process == 0).then(|| Gathering {
                ranks: results.collect(),
                events: Some(events.clone()).filter(|_| has_ranks),
                outcomes: outcome_sender.clone(),
                reply: queues[&process].clone(),
                snapshots: snapshot_sender.clone().filter(|_| has_ranks),
                form: PartForm::of(program, codes, &placement, process),
            });
            let links = all_links.remove(&process);
            let routes = Routes {
                process,
                name: group.names[process].clone(),
                program,
                placement,
                channels: HashMap::new(),
                posted: HashMap::new(),
                groups: HashMap::new(),
                link: links.as_ref().map(|links| links.incoming.clone()),
                gathering,
                stop_agreement: None,
                released: Some(release_sender.clone()).filter(|_| process == 0),
                taken: Some(token_sender.clone()).filter(|_| process == 0),
                progress: group.progress.clone(),
                limit: frame_limit(program, codes),
            };
            hangups.push(connection.hangup);
            connections.push(ConnectionThreads {
                reader: connection.reader,
                writer: connection.writer,
                queue,
                routes,
                links,
            });
        }
        let stop_agreement =
            barrier.map(|barrier| Arc::new(StopAgreement::new(barrier, group.config.process, queues.clone())));
        connections.iter_mut().for_each(|connection: &mut ConnectionThreads<'a>| {
            connection.routes.stop_agreement = stop_agreement.clone()
        });
        let writers_alive = Some(unbounded());
        Ok(Exchange {
            group,
            program,
            operands,
            queues,
            connections,
            channels: 0,
            groups: 0,
            outcomes,
            released,
            snapshot_tokens,
            hangups,
            stop_agreement,
            workers_alive: None,
            writers_alive,
        })
    }

    /// True if the global rank runs in this process.
    pub fn is_here(&self, rank: usize) -> bool {
        self.group.is_here(rank)
    }

    /// True for process 0, which reports the run.
    pub fn is_reporter(&self) -> bool {
        self.group.config.process == 0
    }

    fn run_status(&self) -> Arc<RunStatus> {
        self.group.run_status.clone()
    }

    pub fn progress(&self) -> crate::process::process_group::Progress {
        self.group.progress.clone()
    }

    /// Ends the run because of a failure in this process.
    pub fn blame(&self) -> Box<dyn Fn(&str) + Send> {
        let (run_status, process) = (self.run_status(), self.group.config.process);
        let peer = self.group.names[process].clone();
        Box::new(move |what| run_status.end(LinkError::Failed { process, peer: peer.clone(), what: what.to_string() }))
    }

    /// Ends the run in all processes without blaming any.
    pub fn end(&self, reason: &str) {
        self.run_status().end(LinkError::Ended { process: None, what: reason.to_string() });
    }

    fn connection(&mut self, process: usize) -> Result<(&Sender<Outbound>, &mut Routes<'a>), LinkError> {
        let missing = || LinkError::Bug { what: format!("no connection to process {process} of the run") };
        let queue = self.queues.get(&process).ok_or_else(missing)?;
        let connection =
            self.connections.iter_mut().find(|connection| connection.routes.process == process).ok_or_else(missing)?;
        Ok((queue, &mut connection.routes))
    }

    /// The ends in this process of a channel between two global ranks. `tensors` are those of each message.
    pub fn channel(
        &mut self,
        from: usize,
        to: usize,
        tensors: Vec<(Value, usize, usize)>,
    ) -> Result<(Option<Outgoing>, Option<Incoming>), LinkError> {
        let number = self.channels;
        self.channels += 1;
        let [sender, receiver] = [from, to].map(|rank| self.group.config.placement.processes_of_ranks[rank]);
        match (self.is_here(from), self.is_here(to)) {
            (true, true) => {
                let (outgoing, incoming) = channel();
                Ok((Some(outgoing), Some(incoming)))
            }
            (true, false) => {
                let (queue, routes) = self.connection(receiver)?;
                let queue = queue.clone();
                let (outgoing, posted) = channel::outgoing(Box::new(move |message: Message| {
                    let bodies = message.tensors.into_iter().map(|tensor| tensor.buffer).collect();
                    let frame = Outbound { bodies, ..Outbound::of(Kind::Message, &(number, message.item)) };
                    queue.send(frame).map_err(|_| Disconnected)
                }));
                routes.posted.insert(number, posted);
                Ok((Some(outgoing), None))
            }
            (false, true) => {
                let (queue, routes) = self.connection(sender)?;
                let queue = queue.clone();
                let (incoming, messages) = channel::incoming(Box::new(move |()| {
                    queue.send(Outbound::of(Kind::Posted, &number)).map_err(|_| Disconnected)
                }));
                routes.channels.insert(number, Route { sender: messages, tensors });
                Ok((None, Some(incoming)))
            }
            (false, false) => Ok((None, None)),
        }
    }

    /// Opens a group of these global ranks, of which some are in this process. `make` creates it, and what receives the
    /// messages of members in other processes. `None` if all or none of the ranks are here.
    pub fn open<G, S: GroupReceiver + 'static>(
        &mut self,
        ranks: &[usize],
        make: impl FnOnce(Members) -> (Arc<G>, S),
    ) -> Result<Option<Arc<G>>, LinkError> {
        let number = self.groups;
        self.groups += 1;
        let remote_process =
            |rank: &usize| (!self.is_here(*rank)).then(|| self.group.config.placement.processes_of_ranks[*rank]);
        let processes: Vec<Option<usize>> = ranks.iter().map(remote_process).collect();
        if processes.iter().all(Option::is_some) || processes.iter().all(Option::is_none) {
            return Ok(None);
        }
        let queue = |process: &usize| self.connection(*process).map(|(queue, _)| (*process, queue.clone()));
        let queues = processes.iter().flatten().map(queue).collect::<Result<Queues, _>>()?;
        let link = move |process: usize, member: usize, message: &[u8], bodies: Vec<Arc<Buffer>>| {
            // The queue has no reader after the end of the run.
            if let Some(queue) = queues.get(&process) {
                let head = [&encode(&(number, member)), message].concat();
                let _ = queue.send(Outbound { kind: Kind::Part, head, bodies });
            }
        };
        let members = Members::new(processes, Box::new(link));
        let others: Vec<(usize, BTreeSet<usize>)> =
            members.others().into_iter().map(|process| (process, members.of(Some(process)).collect())).collect();
        let (group, receiver) = make(members);
        let receiver: Arc<dyn GroupReceiver> = Arc::new(receiver);
        for (process, members) in others {
            self.connection(process)?.1.groups.insert(number, (receiver.clone(), members));
        }
        Ok(Some(group))
    }

    /// Starts the reader and writer threads.
    pub fn start<'scope, 'env>(&mut self, scope: &'scope Scope<'scope, 'env>)
    where
        'a: 'scope,
    {
        let local_ranks: Vec<usize> = self.group.config.placement.ranks(self.group.config.process).collect();
        let thread_error = |error| LinkError::Ended { process: None, what: format!("cannot start a thread: {error}") };
        if let Some(stopping) = self.stop_agreement.take() {
            let (workers_alive, workers_ended) = bounded(0);
            self.workers_alive = Some(workers_alive);
            let run_status = self.group.run_status.clone();
            let watch = move || stopping.watch(&workers_ended, &run_status);
            if let Err(error) = Builder::new().name("stop".into()).spawn_scoped(scope, watch) {
                self.group.run_status.end(thread_error(error));
            }
        }
        for connection in std::mem::take(&mut self.connections) {
            let ConnectionThreads { reader, writer, queue, routes, links } = connection;
            let (progress, local_ranks, run_status) =
                (self.group.progress.clone(), local_ranks.clone(), self.group.run_status.clone());
            let heartbeat = move || -> Vec<u8> {
                let instruction =
                    |rank: &usize| progress.get(*rank).map_or(0, |current| current.load(Ordering::Relaxed));
                local_ranks.iter().flat_map(|rank| encode(&instruction(rank))).collect()
            };
            let alive = self.writers_alive.as_ref().map(|(alive, _)| alive.clone());
            let writer_status = run_status.clone();
            let writer = move || {
                let link = links.as_ref().map(|links| &*links.outgoing);
                if let Err(fault) = connection::write(writer, &queue, &heartbeat, link) {
                    writer_status.end(LinkError::Ended { process: None, what: fault.to_string() });
                }
                // Workers may wait for tensors that nobody sends any more.
                if let Some(links) = links.filter(|_| !writer_status.is_released()) {
                    links.outgoing.abort();
                    links.incoming.abort();
                }
                drop(alive);
            };
            let thread = |prefix: &str| Builder::new().name(format!("{prefix} {}", routes.process));
            let writer_thread = thread("to process").spawn_scoped(scope, writer).map(drop);
            let reader_status = run_status.clone();
            let name = thread("from process");
            let reader_thread = name.spawn_scoped(scope, move || routes.read(reader, &reader_status)).map(drop);
            if let Err(error) = writer_thread.and(reader_thread) {
                run_status.end(thread_error(error));
            }
        }
    }

    /// Sends the loss of a micro-batch to process 0.
    pub fn send_loss(&self, item: u32, value: f64) {
        self.send(0, Outbound::of(Kind::Loss, &(item, value)));
    }

    /// Sends snapshots to process 0. Blocks while process 0 has not taken those of the previous checkpoint; with a slow
    /// disk they would fill this process's memory.
    pub fn snapshot_sender(&self) -> impl Fn(&StageSnapshot) + Send + 'static {
        let (queue, tokens, run_status) =
            (self.queues.get(&0).cloned(), self.snapshot_tokens.clone(), self.run_status());
        move |snapshot: &StageSnapshot| {
            // If there are no tokens or readers any more, the run is over.
            if let (Some(queue), Ok(())) = (&queue, tokens.recv()) {
                match parts::pack(snapshot) {
                    Ok(head) => _ = queue.send(Outbound { kind: Kind::Checkpoint, head, bodies: Vec::new() }),
                    Err(fault) => run_status.end(LinkError::Ended { process: None, what: fault.to_string() }),
                }
            }
        }
    }

    fn send(&self, process: usize, frame: Outbound) {
        // The queue has no reader after the end of the run.
        if let Some(queue) = self.queues.get(&process) {
            let _ = queue.send(frame);
        }
    }

    /// Ends the run after the workers of this process, with the results of those that succeeded, by global rank;
    /// `is_success` is true if all did. Process 0 returns the results of all ranks in order, others return none. Fails with
    /// the cause if the run ended early.
    pub fn finish(
        mut self,
        mut outcomes: Vec<(usize, WorkerResult)>,
        is_success: bool,
    ) -> Result<Vec<(usize, WorkerResult)>, LinkError> {
        let run_status = self.run_status();
        self.workers_alive = None;
        if !is_success {
            run_status.end(LinkError::Ended {
                process: Some(self.group.config.process),
                what: "a worker lost its peer".to_string(),
            });
        }
        // Links keep their buffers, so the largest count is that of the end.
        outcomes.first_mut().into_iter().for_each(|(_, first)| first.peak_memory_bytes += self.operands.peak());
        let mut results = Vec::new();
        if self.is_reporter() {
            results = outcomes;
            results.extend(self.outcomes.try_iter());
            results.sort_by_key(|(rank, _)| *rank);
            if run_status.cause().is_none() && results.len() != self.group.config.placement.processes_of_ranks.len() {
                run_status
                    .end(LinkError::Bug { what: "a process ended without the results of its workers".to_string() });
            }
            if run_status.cause().is_none() {
                run_status.release();
            }
        } else {
            let placement = &self.group.config.placement;
            let frames = outcomes.into_iter().flat_map(|(rank, outcome)| {
                worker_result::result_frames(self.program, (placement.worker(rank), rank), outcome)
            });
            frames.for_each(|frame| self.send(0, frame));
            // Returns when process 0 releases this process or the connection ends.
            let _ = self.released.recv();
        }
        if run_status.is_released() {
            self.queues.keys().for_each(|process| self.send(*process, Outbound::of(Kind::Bye, &())));
        }
        self.close(if run_status.is_released() { FLUSH_TIME } else { FLUSH_TIME_AFTER_FAILURE });
        match run_status.cause() {
            None => Ok(results),
            Some(cause) => Err(cause),
        }
    }

    /// Waits up to `within` until all queues are written, then closes all connections.
    fn close(&mut self, within: Duration) {
        self.queues.clear();
        if let Some((alive, writers_ended)) = self.writers_alive.take() {
            drop(alive);
            // Nothing is ever sent here: the wait ends when all senders are dropped.
            let _ = writers_ended.recv_timeout(within);
        }
        if !self.group.run_status.is_released() {
            self.hangups.iter().for_each(|hangup| hangup());
        }
    }
}
