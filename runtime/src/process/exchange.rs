//! The local ends of channels and communicators that span processes, and the threads that serve them.
//!
//! All processes traverse the same program and number channels and communicators alike, so no names are sent.

use crate::checkpoint::StageSnapshot;
use crate::checkpoint::barrier::MinibatchBarrier;
use crate::comm::chain::SendChainMessage;
use crate::comm::channel;
use crate::comm::channel::{Incoming, Outgoing, channel};
use crate::comm::communicator::{Communicator, Forward};
use crate::comm::pipelined_all_reduce::PipelinedAllReduce;
use crate::comm::tensor_group::{GroupRank, Layouts, TensorComm};
use crate::device::buffer::Buffer;
use crate::device::memory_counter::MemoryCounter;
use crate::exec::stage_code::StageCode;
use crate::process::chain_messages::ChainMessages;
use crate::process::connection::{DeadlineReader, Hangup, Outbound, RemoteChannel};
use crate::process::frame::{FrameReader, FrameWriter, Kind};
use crate::process::parts::PartForm;
use crate::process::process_group::{Group, doing};
use crate::process::router::{ContributionSink, Gathering, RemoteCommunicator, Route, Routes};
use crate::process::run_status::{FailureCause, LinkError, RunStatus};
use crate::process::shard_messages::ShardMessages;
use crate::process::stop::StopAgreement;
use crate::process::tensor_links::{Offered, TensorLinks, connect};
use crate::process::tensor_operands::{OperandForm, TensorOperands};
use crate::process::wire::Contribution;
use crate::process::worker_result::Leaving;
use crate::process::{chain_messages, connection, parts, shard_messages, worker_result};
use crate::stage::worker::{Event, WorkerResult};
use crate::zero::gradient_shards::GradientShards;
use crate::zero::remote_replicas::{RemoteReplicas, SendMessage};
use crate::zero::shard::ShardRange;
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

/// The start of a `Part` frame: the number of the communicator, the sequence number, and the member.
fn part_head(number: u32, meeting: u64, member: usize) -> Vec<u8> {
    [&number.to_le_bytes()[..], &meeting.to_le_bytes(), &(member as u32).to_le_bytes()].concat()
}

/// Sends a `Part` frame to a process.
fn send_part(queues: &BTreeMap<usize, Sender<Outbound>>, process: usize, head: Vec<u8>, bodies: Vec<Arc<Buffer>>) {
    // The queue has no reader after the end of the run.
    if let Some(queue) = queues.get(&process) {
        let _ = queue.send(Outbound { kind: Kind::Part, head, bodies });
    }
}

/// This process's connections to its peers.
pub struct Exchange<'a> {
    group: Group,
    program: &'a Program,
    /// Counts the operands of collectives that this process receives over links.
    operands: Arc<MemoryCounter>,
    queues: BTreeMap<usize, Sender<Outbound>>,
    lines: Vec<ConnectionThreads<'a>>,
    channels: u32,
    meetings: u32,
    outcomes: Receiver<(usize, WorkerResult)>,
    released: Receiver<()>,
    /// On other processes: one token for each snapshot that process 0 can take.
    room: Receiver<()>,
    hangups: Vec<Hangup>,
    stopping: Option<Arc<StopAgreement<'a>>>,
    /// Dropped when the workers have ended, which stops the stop-signal thread.
    working: Option<Sender<()>>,
    /// Disconnects when all writer threads have ended.
    writing: Option<(Sender<()>, Receiver<()>)>,
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
    /// snapshots to `keeper`. Either all processes have a `gate` or none has. Without `transport`,
    /// tensors go through the host.
    pub fn new(
        group: Group,
        transport: Option<Offered>,
        program: &'a Program,
        codes: &'a [StageCode],
        events: &Sender<Event>,
        keeper: Option<Sender<StageSnapshot>>,
        gate: Option<&'a MinibatchBarrier<'a>>,
    ) -> Result<Exchange<'a>, LinkError> {
        let mut group = group;
        let operands = Arc::default();
        let mut all_links = connect(&mut group, transport, &operands)?;
        let (leave, outcomes) = unbounded();
        let (release, released) = unbounded();
        let (taken, room) = unbounded();
        // The snapshots of one checkpoint of this process may be in transit.
        let placement = &group.part.placement;
        let own = placement.ranks(group.part.own).map(|rank| placement.worker(rank));
        let parts = own.map(|worker| program.stages_of(program.workers[worker].rank).count()).sum();
        (0..parts).for_each(|_| _ = taken.send(()));
        let (mut queues, mut lines, mut hangups) = (BTreeMap::new(), Vec::new(), Vec::new());
        let most_left = worker_result::most(codes);
        for (process, mut connection) in std::mem::take(&mut group.connections) {
            let (to, queue) = unbounded();
            group.run_status.notify(to.clone());
            queues.insert(process, to);
            // The starting process may be suspended like any job. If it dies, its connection closes and this process
            // ends.
            let is_followed = group.part.follows && process == 0;
            connection.reader.source().renew(if is_followed { Duration::MAX } else { group.part.deadline });
            let ranks: Vec<usize> = group.part.placement.ranks(process).collect();
            let (placement, progress) = (group.part.placement.clone(), group.progress.clone());
            let leaving = ranks.iter().map(|rank| (*rank, Leaving::of(program, codes, placement.worker(*rank))));
            let gathering = (group.part.own == 0).then(|| Gathering {
                ranks: leaving.collect(),
                events: Some(events.clone()).filter(|_| !ranks.is_empty()),
                outcomes: leave.clone(),
                reply: queues[&process].clone(),
                parts: keeper.clone().filter(|_| !ranks.is_empty()),
                form: PartForm::of(program, codes, &placement, process),
            });
            let links = all_links.remove(&process);
            let routes = Routes {
                process,
                name: group.names[process].clone(),
                ranks,
                doing: Box::new(move |process| doing(program, &placement, &progress, process)),
                channels: HashMap::new(),
                posted: HashMap::new(),
                meetings: HashMap::new(),
                link: links.as_ref().map(|links| links.incoming.clone()),
                gathering,
                stopping: None,
                released: Some(release.clone()).filter(|_| process == 0),
                taken: Some(taken.clone()).filter(|_| process == 0),
                progress: group.progress.clone(),
                most_left,
                items: program.items,
                stages: program.stages.len() as u32,
            };
            hangups.push(connection.hangup);
            lines.push(ConnectionThreads {
                reader: connection.reader,
                writer: connection.writer,
                queue,
                routes,
                links,
            });
        }
        let stopping = gate.map(|gate| Arc::new(StopAgreement::new(gate, group.part.own, queues.clone())));
        lines.iter_mut().for_each(|line: &mut ConnectionThreads<'a>| line.routes.stopping = stopping.clone());
        let writing = Some(unbounded());
        Ok(Exchange {
            group,
            program,
            operands,
            queues,
            lines,
            channels: 0,
            meetings: 0,
            outcomes,
            released,
            room,
            hangups,
            stopping,
            working: None,
            writing,
        })
    }

    /// True if the global rank runs in this process.
    pub fn is_here(&self, rank: usize) -> bool {
        self.group.is_here(rank)
    }

    /// True for process 0, which reports the run.
    pub fn reports(&self) -> bool {
        self.group.part.own == 0
    }

    fn run_status(&self) -> Arc<RunStatus> {
        self.group.run_status.clone()
    }

    pub fn progress(&self) -> crate::process::process_group::Progress {
        self.group.progress.clone()
    }

    /// The failure reporter of this process.
    pub fn blame(&self) -> FailureCause {
        let process = self.group.part.own;
        FailureCause { run_status: self.run_status(), process, name: self.group.names[process].clone() }
    }

    /// Ends the run in all processes without blaming any.
    pub fn end(&self, what: &str) {
        self.run_status().end(LinkError::Ended { process: None, what: what.to_string() });
    }

    fn line(&mut self, process: usize) -> Result<(&Sender<Outbound>, &mut Routes<'a>), LinkError> {
        let missing = || LinkError::Bug { what: format!("no connection to process {process} of the run") };
        let queue = self.queues.get(&process).ok_or_else(missing)?;
        let line = self.lines.iter_mut().find(|line| line.routes.process == process).ok_or_else(missing)?;
        Ok((queue, &mut line.routes))
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
        let place = |rank: usize, exchange: &Exchange<'_>| exchange.group.part.placement.of[rank];
        let (there, here) = (place(to, self), place(from, self));
        match (self.is_here(from), self.is_here(to)) {
            (true, true) => {
                let (outgoing, incoming) = channel();
                Ok((Some(outgoing), Some(incoming)))
            }
            (true, false) => {
                let (queue, routes) = self.line(there)?;
                let (outgoing, posted) =
                    channel::outgoing(Box::new(RemoteChannel { queue: queue.clone(), channel: number }));
                routes.posted.insert(number, posted);
                Ok((Some(outgoing), None))
            }
            (false, true) => {
                let (queue, routes) = self.line(here)?;
                let (incoming, to) =
                    channel::incoming(Box::new(RemoteChannel { queue: queue.clone(), channel: number }));
                routes.channels.insert(number, Route { to, tensors });
                Ok((None, Some(incoming)))
            }
            (false, false) => Ok((None, None)),
        }
    }

    /// Creates a communicator of these global ranks, one per member. Sequence numbers are below `meetings`.
    pub fn meeting<T: Contribution + Send + Sync + 'static>(
        &mut self,
        members: &[usize],
        form: T::Form,
        meetings: u64,
    ) -> Result<Arc<Communicator<T>>, LinkError>
    where
        T::Form: 'static,
    {
        self.communicator(members, |place| Arc::new(RemoteCommunicator { place, form, meetings }))
    }

    /// Creates the communicator of a worker's tensor-parallel group, whose stages have this code. `layouts` gives the
    /// sharding of the parameters.
    pub fn tensor_group<'c>(
        &mut self,
        worker: usize,
        degree: usize,
        (stages, layouts): (impl Iterator<Item = &'c StageCode>, &Layouts),
    ) -> Result<Arc<TensorComm>, LinkError> {
        let members: Vec<usize> = (0..degree).map(|rank| GroupRank { degree, rank }.global(worker)).collect();
        let form = OperandForm::of(stages, layouts);
        self.communicator(&members, |group| Arc::new(TensorOperands::new(group, form, degree)))
    }

    /// Creates a communicator of these global ranks. `sink` receives the contributions of other processes.
    fn communicator<T: Contribution + Send + Sync + 'static, S: ContributionSink + 'static>(
        &mut self,
        members: &[usize],
        sink: impl FnOnce(Arc<Communicator<T>>) -> Arc<S>,
    ) -> Result<Arc<Communicator<T>>, LinkError> {
        let number = self.meetings;
        self.meetings += 1;
        let here = members.iter().filter(|rank| self.is_here(**rank)).count();
        let processes = self.processes(members);
        let others: BTreeSet<usize> = processes.iter().flatten().copied().collect();
        if here == 0 || others.is_empty() {
            return Ok(Arc::new(Communicator::new(members.len())));
        }
        let queues = self.queues_to(&others)?;
        let forward: Forward<T> = Box::new(move |meeting, member, part| {
            let (mut head, mut bodies) = (part_head(number, meeting, member), Vec::new());
            part.pack(&mut head, &mut bodies);
            for queue in queues.values() {
                // The queue has no reader after the end of the run.
                let _ = queue.send(Outbound { kind: Kind::Part, head: head.clone(), bodies: bodies.clone() });
            }
        });
        let place = Arc::new(Communicator::among(members.len(), here, Some(forward)));
        self.deliver(number, sink(place.clone()), &processes)?;
        Ok(place)
    }

    /// Creates the all-reduce of a stage's replicas, whose global ranks these are. Sequence numbers are below
    /// `collectives`. `None` if all or none of them are in this process.
    pub fn all_reduce(
        &mut self,
        members: &[usize],
        collectives: u64,
    ) -> Result<Option<Arc<PipelinedAllReduce>>, LinkError> {
        let number = self.meetings;
        self.meetings += 1;
        let processes = self.processes(members);
        let others: BTreeSet<usize> = processes.iter().flatten().copied().collect();
        if others.is_empty() || processes.iter().all(Option::is_some) {
            return Ok(None);
        }
        let queues = self.queues_to(&others)?;
        let send: SendChainMessage = Box::new(move |process, member, message| {
            let (mut content, mut bodies) = (Vec::new(), Vec::new());
            let collective = chain_messages::pack(message, &mut content, &mut bodies);
            send_part(&queues, process, [part_head(number, collective, member), content].concat(), bodies);
        });
        let all_reduce = Arc::new(PipelinedAllReduce::new(processes.clone(), send));
        let sink = ChainMessages { all_reduce: all_reduce.clone(), members: members.len(), collectives };
        self.deliver(number, Arc::new(sink), &processes)?;
        Ok(Some(all_reduce))
    }

    /// The process of each rank; `None` for this one.
    fn processes(&self, ranks: &[usize]) -> Vec<Option<usize>> {
        let there = |rank: &usize| (!self.is_here(*rank)).then(|| self.group.part.placement.of[*rank]);
        ranks.iter().map(there).collect()
    }

    fn queues_to(&mut self, processes: &BTreeSet<usize>) -> Result<BTreeMap<usize, Sender<Outbound>>, LinkError> {
        processes.iter().map(|process| Ok((*process, self.line(*process)?.0.clone()))).collect()
    }

    /// Lets the members of each other process contribute to communicator `number`.
    fn deliver(
        &mut self,
        number: u32,
        sink: Arc<dyn ContributionSink>,
        processes: &[Option<usize>],
    ) -> Result<(), LinkError> {
        for process in processes.iter().flatten().copied().collect::<BTreeSet<_>>() {
            let theirs = (0..processes.len()).filter(|member| processes[*member] == Some(process)).collect();
            self.line(process)?.1.meetings.insert(number, (sink.clone(), theirs));
        }
        Ok(())
    }

    /// Creates the gradient and weight shards of a stage's replicas, whose global ranks these are. Rounds, versions and
    /// micro-batches are below `rounds`; `share` is that of any replica.
    pub fn shards(
        &mut self,
        members: &[usize],
        share: ShardRange,
        code: &StageCode,
        rounds: u32,
    ) -> Result<Arc<GradientShards>, LinkError> {
        let number = self.meetings;
        self.meetings += 1;
        let processes = self.processes(members);
        let here: Vec<usize> = (0..members.len()).filter(|member| processes[*member].is_none()).collect();
        let others: BTreeSet<usize> = processes.iter().flatten().copied().collect();
        if here.is_empty() || others.is_empty() {
            return Ok(Arc::new(GradientShards::new(RemoteReplicas::none(members.len()))));
        }
        let queues = self.queues_to(&others)?;
        let send: SendMessage = Box::new(move |process, member, message| {
            let (mut head, mut bodies) = (part_head(number, 0, member), Vec::new());
            shard_messages::pack(message, &mut head, &mut bodies);
            send_part(&queues, process, head, bodies);
        });
        let shards = Arc::new(GradientShards::new(RemoteReplicas { processes: processes.clone(), send }));
        let sink = Arc::new(ShardMessages::new(shards.clone(), here, share, code, rounds));
        self.deliver(number, sink, &processes)?;
        Ok(shards)
    }

    /// Starts the reader and writer threads.
    pub fn start<'scope, 'env>(&mut self, scope: &'scope Scope<'scope, 'env>)
    where
        'a: 'scope,
    {
        let own: Vec<usize> = self.group.part.placement.ranks(self.group.part.own).collect();
        let none = |error| LinkError::Ended { process: None, what: format!("cannot start a thread: {error}") };
        if let Some(stopping) = self.stopping.take() {
            let (working, over) = bounded(0);
            self.working = Some(working);
            let run_status = self.group.run_status.clone();
            let watch = move || stopping.watch(&over, &run_status);
            if let Err(error) = Builder::new().name("stop".into()).spawn_scoped(scope, watch) {
                self.group.run_status.end(none(error));
            }
        }
        for line in std::mem::take(&mut self.lines) {
            let ConnectionThreads { reader, writer, queue, routes, links } = line;
            let (progress, own, run_status) = (self.group.progress.clone(), own.clone(), self.group.run_status.clone());
            let beat = move || -> Vec<u8> {
                let at = |rank: &usize| progress.get(*rank).map_or(0, |at| at.load(Ordering::Relaxed));
                own.iter().flat_map(|rank| at(rank).to_le_bytes()).collect()
            };
            let alive = self.writing.as_ref().map(|(alive, _)| alive.clone());
            let writing = run_status.clone();
            let writer = move || {
                let link = links.as_ref().map(|links| &*links.outgoing);
                if let Err(fault) = connection::write(writer, &queue, &beat, link) {
                    writing.end(LinkError::Ended { process: None, what: fault.to_string() });
                }
                // Workers may wait for tensors that nobody sends any more.
                if let Some(links) = links.filter(|_| !writing.is_released()) {
                    links.outgoing.abort();
                    links.incoming.abort();
                }
                drop(alive);
            };
            let thread = |what: &str| Builder::new().name(format!("{what} {}", routes.process));
            let wrote = thread("to process").spawn_scoped(scope, writer).map(drop);
            let reading = run_status.clone();
            let name = thread("from process");
            let read = name.spawn_scoped(scope, move || routes.read(reader, &reading)).map(drop);
            if let Err(error) = wrote.and(read) {
                run_status.end(none(error));
            }
        }
    }

    /// Sends the loss of a micro-batch to process 0.
    pub fn loss(&self, item: u32, value: f64) {
        let mut head = item.to_le_bytes().to_vec();
        head.extend(value.to_le_bytes());
        self.send(0, Outbound::of(Kind::Loss, head));
    }

    /// Sends snapshots to process 0. Blocks while process 0 has not taken those of the previous checkpoint; with a slow
    /// disk they would fill this process's memory.
    pub fn parts(&self) -> impl Fn(&StageSnapshot) + Send + 'static {
        let (queue, room, run_status) = (self.queues.get(&0).cloned(), self.room.clone(), self.run_status());
        move |part: &StageSnapshot| {
            // If there are no tokens or readers any more, the run is over.
            if let (Some(queue), Ok(())) = (&queue, room.recv()) {
                match parts::pack(part) {
                    Ok(bytes) => _ = queue.send(Outbound::of(Kind::Checkpoint, bytes)),
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
    /// `is_well` is true if all did. Process 0 returns the results of all ranks in order, others return none. Fails with
    /// the cause if the run ended early.
    pub fn finish(
        mut self,
        mut left: Vec<(usize, WorkerResult)>,
        is_well: bool,
    ) -> Result<Vec<(usize, WorkerResult)>, LinkError> {
        let run_status = self.run_status();
        self.working = None;
        if !is_well {
            run_status.end(LinkError::Ended {
                process: Some(self.group.part.own),
                what: "a worker lost its peer".to_string(),
            });
        }
        // Links keep their buffers, so the largest count is that of the end.
        left.first_mut().into_iter().for_each(|(_, first)| first.peak_memory_bytes += self.operands.peak());
        let mut all = Vec::new();
        if self.reports() {
            all = left;
            all.extend(self.outcomes.try_iter());
            all.sort_by_key(|(rank, _)| *rank);
            if run_status.cause().is_none() && all.len() != self.group.part.placement.of.len() {
                run_status
                    .end(LinkError::Bug { what: "a process ended without the results of its workers".to_string() });
            }
            if run_status.cause().is_none() {
                run_status.release();
            }
        } else {
            let placement = &self.group.part.placement;
            let frames = left.into_iter().flat_map(|(rank, outcome)| {
                worker_result::leave(self.program, (placement.worker(rank), rank), outcome)
            });
            frames.for_each(|frame| self.send(0, frame));
            // Returns when process 0 releases this process or the connection ends.
            let _ = self.released.recv();
        }
        if run_status.is_released() {
            self.queues.keys().for_each(|process| self.send(*process, Outbound::of(Kind::Bye, Vec::new())));
        }
        self.close(if run_status.is_released() { FLUSH_TIME } else { FLUSH_TIME_AFTER_FAILURE });
        match run_status.cause() {
            None => Ok(all),
            Some(cause) => Err(cause),
        }
    }

    /// Waits up to `within` until all queues are written, then closes all connections.
    fn close(&mut self, within: Duration) {
        self.queues.clear();
        if let Some((alive, ended)) = self.writing.take() {
            drop(alive);
            // Nothing is ever sent here: the wait ends when all senders are dropped.
            let _ = ended.recv_timeout(within);
        }
        if !self.group.run_status.is_released() {
            self.hangups.iter().for_each(|hangup| hangup());
        }
    }
}
