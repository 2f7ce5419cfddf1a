//! The simulator: an event queue over the workers' programs.
//!
//! A worker runs its list until it computes or waits. A transfer starts when its Send and Recv are posted and the
//! previous transfer of its channel has ended; then both Waits end. A collective starts when the last replica joins and
//! the stage's previous collective is done. A replica that posts an all-reduce before the backward that produces its
//! gradients joins when that has produced them. Transfers contend for ports, see
//! [`link_sharing`](crate::simulate::link_sharing).
//!
//! With fewer cores than computing workers, n running actions on C cores each run at rate min(1, C / n). All have the
//! same rate, so a single virtual clock suffices. An action of d microseconds that starts at virtual time v ends at v +
//! d, whatever else starts or ends. Every event then costs one queue operation.
//!
//! Millions of items are simulated in seconds, so instructions need no hashing. Tokens and items index lists, channels
//! are numbered, and the queues are radix heaps over the bits of times, which sort like the times.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::op::dropout::mix;
use crate::plan::StageId;
use crate::schedule::channel::{Channel, Channels};
use crate::schedule::collective::{Collective, CollectiveId};
use crate::schedule::dense_map::DenseMap;
use crate::schedule::event_queue::EventQueue;
use crate::schedule::semantics::{Rule, dealt};
use crate::schedule::{Bucket, Instruction, MicrobatchId, Payload, Pipeline, Program, StageSpec, Token, WorkerId};
use crate::simulate::link_sharing::{Flows, LinkRoute};
use crate::simulate::memory::StageMemoryState;
use crate::simulate::network::Network;
use crate::simulate::{Activity, SimulateError, Span, Timeline, Track};

#[derive(Clone, PartialEq, Debug)]
pub struct Machine {
    pub network: Network,
    /// Cores shared by all workers; `None` if each worker has its own device.
    pub cores: Option<u32>,
    /// Random variation of times; `None` for exact times.
    pub jitter: Option<Jitter>,
}

/// Every compute action and transfer takes a uniformly distributed 1 - share to 1 + share of its time. The factor
/// depends only on the seed, the worker or channel and its count, so a seed reproduces a run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Jitter {
    /// Largest relative variation, below 1.
    pub share: f64,
    pub seed: u64,
}

impl Jitter {
    /// The factor of the n-th time of one worker or channel.
    fn factor(self, whose: u64, n: u64) -> f64 {
        let drawn = mix(mix(mix(self.seed) ^ whose) ^ n);
        // 53 bits give a number in [0, 1).
        let unit = (drawn >> 11) as f64 / (1u64 << 53) as f64;
        1.0 + self.share.clamp(0.0, 1.0) * (2.0 * unit - 1.0)
    }
}

impl Machine {
    pub fn of(pipeline: &Pipeline) -> Self {
        Self { network: Network::of(pipeline), cores: None, jitter: None }
    }
}

/// Simulates the program with the pipeline's compute times. Fails on a deadlock or if the two do not match.
pub fn simulate(program: &Program, pipeline: &Pipeline, machine: &Machine) -> Result<Timeline, SimulateError> {
    checked(program, pipeline)?;
    Simulation::new(program, pipeline, machine, true).run()
}

/// As [`simulate`], without tracks and memory: only when items end.
pub fn simulate_ends(program: &Program, pipeline: &Pipeline, machine: &Machine) -> Result<Timeline, SimulateError> {
    checked(program, pipeline)?;
    Simulation::new(program, pipeline, machine, false).run()
}

fn checked(program: &Program, pipeline: &Pipeline) -> Result<(), SimulateError> {
    let shape = |stages: usize, edges: usize| format!("{stages} stages and {edges} edges");
    let edges = pipeline.edges.iter().map(|edge| (edge.from, edge.to));
    let ranks = pipeline.ranks.iter().zip(&pipeline.stages).map(|(&rank, stage)| (rank, stage.replicas));
    let is_same = ranks.eq(program.stages.iter().map(|stage| (stage.rank, stage.replicas)));
    if !is_same || !edges.eq(program.edges.iter().copied()) {
        let [a, b] = [(program.stages.len(), program.edges.len()), (pipeline.stages.len(), pipeline.edges.len())];
        return Err(SimulateError::Mismatch { program: shape(a.0, a.1), pipeline: shape(b.0, b.1) });
    }
    Ok(pipeline.validate()?)
}

/// Random streams of channels are distinct from those of workers.
const CHANNELS: u64 = 1 << 32;

/// Queue key of a time. Bits of nonnegative floats have the order of the floats.
fn bits(time: f64) -> u64 {
    time.max(0.0).to_bits()
}

#[derive(Clone, Copy)]
struct Name {
    worker: WorkerId,
    token: Token,
}

#[derive(Clone, Copy)]
enum Arrival {
    Transfer(u32, Token, Token),
    Part(CollectiveId, usize),
}

#[derive(Clone, Copy)]
enum Progress {
    Computed(WorkerId),
    /// A running backward has produced the gradients of a collective.
    Made(CollectiveId, Name),
}

/// A channel: operations posted at one end only, and completed transfers.
struct Line {
    sends: VecDeque<(Token, MicrobatchId)>,
    recvs: VecDeque<Token>,
    way: LinkRoute,
    carries: Option<(Activity, f64)>,
    carried: u64,
    spans: Vec<Span>,
}

/// The collectives of a stage, run one at a time.
#[derive(Default)]
struct Reducing {
    /// The levels of an all-reduce: fraction of its time, and ports.
    parts: Vec<(f64, LinkRoute)>,
    /// Collectives that all replicas have joined, in order; the first is running.
    met: VecDeque<CollectiveId>,
    began: f64,
    spans: Vec<Span>,
}

struct WorkerState {
    at: usize,
    /// Posted tokens; true if complete.
    tokens: DenseMap<bool>,
    blocked: Option<Token>,
    computing: Option<(Activity, f64)>,
    computed: u64,
    spans: Vec<Span>,
    in_flight: u32,
    peak: u32,
    holds: Vec<StageMemoryState>,
    memory: Vec<(f64, u64)>,
}

struct Simulation<'a> {
    program: &'a Program,
    pipeline: &'a Pipeline,
    rule: Rule,
    machine: &'a Machine,
    hands: Vec<WorkerState>,
    channels: Channels,
    /// By channel number.
    lines: Vec<Line>,
    joined: HashMap<CollectiveId, Vec<Name>>,
    reductions: BTreeMap<StageId, Reducing>,
    flows: Flows<Arrival>,
    /// Running actions by their virtual end time, and their number.
    computing: EventQueue<Progress>,
    busy: usize,
    now: f64,
    virtual_now: f64,
    /// True if spans and memory are recorded.
    is_recorded: bool,
    /// End of each item's last action; NaN before its first.
    finished: Vec<f64>,
    /// `finished` for items out of range: an unchecked program may name any.
    foreign: BTreeMap<MicrobatchId, f64>,
}

impl<'a> Simulation<'a> {
    fn new(program: &'a Program, pipeline: &'a Pipeline, machine: &'a Machine, is_recorded: bool) -> Self {
        let sizes = is_recorded && pipeline.stages.iter().any(|stage| stage.param_bytes > 0 || stage.saved_bytes > 0);
        let hands = program.workers.iter().map(|worker| {
            let stages = program.stages_of(worker.rank);
            let holds: Vec<StageMemoryState> = stages.map(StageMemoryState::new).collect();
            let weights = holds.iter().map(|of| pipeline.stages[of.stage.index()].param_bytes);
            let weights = weights.fold(0, u64::saturating_add);
            WorkerState {
                at: 0,
                tokens: DenseMap::new(worker.instructions.len()),
                blocked: None,
                computing: None,
                computed: 0,
                spans: Vec::new(),
                in_flight: 0,
                peak: 0,
                holds,
                memory: if sizes { vec![(0.0, weights)] } else { Vec::new() },
            }
        });
        let instructions: usize = program.workers.iter().map(|worker| worker.instructions.len()).sum();
        let items = instructions.min(program.items as usize);
        Self {
            program,
            pipeline,
            rule: Rule::of(program),
            machine,
            hands: hands.collect(),
            channels: Channels::new(program.workers.len()),
            lines: Vec::new(),
            joined: HashMap::new(),
            reductions: BTreeMap::new(),
            flows: Flows::new(),
            computing: EventQueue::new(),
            busy: 0,
            now: 0.0,
            virtual_now: 0.0,
            is_recorded,
            finished: vec![f64::NAN; items],
            foreign: BTreeMap::new(),
        }
    }

    fn run(mut self) -> Result<Timeline, SimulateError> {
        for worker in 0..self.hands.len() as u32 {
            self.advance(WorkerId(worker));
        }
        loop {
            let rate = self.rate();
            let ends = self.computing.next_time().map(f64::from_bits);
            // Rounding may move the virtual clock past the end of an action; real time must not go back.
            let computed = ends.map(|at| self.now + ((at - self.virtual_now) / rate).max(0.0));
            let carried = self.flows.next_time().map(f64::from_bits);
            let next = match (computed, carried) {
                (None, None) => break,
                (Some(computed), Some(carried)) => computed.min(carried),
                (Some(time), None) | (None, Some(time)) => time,
            };
            if carried.is_some_and(|carried| carried <= next) {
                if let Some(arrival) = self.flows.take() {
                    self.virtual_now += (next - self.now) * rate;
                    self.now = next;
                    self.arrive(arrival);
                }
            } else if let Some((at, progress)) = self.computing.take() {
                self.virtual_now = f64::from_bits(at);
                self.now = next;
                match progress {
                    Progress::Computed(worker) => self.computed(worker),
                    Progress::Made(meeting, name) => self.join(meeting, name),
                }
            }
        }
        for (index, hands) in self.hands.iter().enumerate() {
            if let Some(instruction) = self.program.workers[index].instructions.get(hands.at) {
                let worker = self.program.worker_name(WorkerId(index as u32));
                let instruction = self.program.show(instruction);
                return Err(SimulateError::Stuck { worker, at: hands.at, instruction });
            }
        }
        Ok(self.timeline())
    }

    fn rate(&self) -> f64 {
        match self.machine.cores {
            Some(cores) if (cores as usize) < self.busy => f64::from(cores.max(1)) / self.busy as f64,
            _ => 1.0,
        }
    }

    /// Runs the worker's list until it computes, waits or ends.
    fn advance(&mut self, worker: WorkerId) {
        let index = worker.index();
        while let Some(&instruction) = self.program.workers[index].instructions.get(self.hands[index].at) {
            match instruction {
                // Profiles have no time for these.
                Instruction::Load { .. } | Instruction::Checkpoint { .. } => {}
                Instruction::Forward { stage, item, .. } => {
                    if self.program.schedule.trains() {
                        let hands = &mut self.hands[index];
                        hands.in_flight += 1;
                        hands.peak = hands.peak.max(hands.in_flight);
                        self.change(worker, stage, |of| of.in_flight += 1);
                    }
                    return self.compute(worker, Activity::Forward(stage, item));
                }
                Instruction::Backward { stage, item, .. } => {
                    self.change(worker, stage, StageMemoryState::sum);
                    return self.compute(worker, Activity::Backward(stage, item));
                }
                Instruction::Recompute { stage, item, .. } => {
                    self.change(worker, stage, |of| _ = of.again.insert(item));
                    return self.compute(worker, Activity::Recompute(stage, item));
                }
                Instruction::BackwardInput { stage, item, .. } => {
                    return self.compute(worker, Activity::BackwardInput(stage, item));
                }
                Instruction::BackwardWeight { stage, item, .. } => {
                    self.change(worker, stage, StageMemoryState::sum);
                    return self.compute(worker, Activity::BackwardWeight(stage, item));
                }
                Instruction::Step { stage, round, in_place, .. } => {
                    self.change(worker, stage, |of| of.versions += u64::from(!in_place));
                    return self.compute(worker, Activity::Step(stage, round));
                }
                Instruction::Drop { stage, .. } => {
                    self.change(worker, stage, |of| of.versions = of.versions.saturating_sub(1));
                }
                Instruction::Send { edge, item, kind, peer, token } => {
                    let channel = Channel { from: worker, to: peer, edge, kind };
                    let line = self.post(worker, token, channel);
                    self.lines[line as usize].sends.push_back((token, item));
                    self.begin(line);
                }
                Instruction::Recv { edge, kind, peer, token, .. } => {
                    let channel = Channel { from: peer, to: worker, edge, kind };
                    let line = self.post(worker, token, channel);
                    self.lines[line as usize].recvs.push_back(token);
                    self.begin(line);
                }
                Instruction::AllReduce { stage, round, .. } | Instruction::ReduceScatter { stage, round, .. } => {
                    self.reduce_bucket(worker, stage, round, instruction);
                }
                Instruction::AllGather { .. } => self.meet(worker, instruction),
                Instruction::Wait { token } => {
                    if self.hands[index].tokens.get(token.0) != Some(&true) {
                        self.hands[index].blocked = Some(token);
                        return;
                    }
                    self.hands[index].tokens.remove(token.0);
                }
            }
            self.hands[index].at += 1;
        }
    }

    fn compute(&mut self, worker: WorkerId, activity: Activity) {
        // An unchecked program may name any stage.
        let pipeline = self.pipeline;
        let of = |stage: StageId, time: fn(&StageSpec) -> f64| pipeline.stages.get(stage.index()).map_or(0.0, time);
        let time = match activity {
            Activity::Forward(stage, _) => of(stage, |shape| shape.forward),
            Activity::Backward(stage, item) => of(stage, |shape| shape.backward) - self.spared(worker, stage, item),
            Activity::BackwardInput(stage, item) => {
                of(stage, |shape| (shape.backward - shape.weight).max(0.0)) - self.spared(worker, stage, item)
            }
            Activity::Recompute(stage, _) => of(stage, |shape| shape.recompute.unwrap_or(shape.forward)),
            Activity::BackwardWeight(stage, _) => of(stage, |shape| shape.weight),
            Activity::Step(stage, _) => of(stage, |shape| shape.step),
            _ => 0.0,
        };
        let hands = &mut self.hands[worker.index()];
        hands.computing = Some((activity, self.now));
        let nth = hands.computed;
        hands.computed += 1;
        let time = time * self.machine.jitter.map_or(1.0, |jitter| jitter.factor(u64::from(worker.0), nth));
        if let Activity::Backward(stage, _) | Activity::BackwardWeight(stage, _) = activity {
            self.make_due(worker, stage, time);
        }
        self.busy += 1;
        self.computing.post(bits(self.virtual_now + time), Progress::Computed(worker));
    }

    /// Schedules the completion of posted buckets within the backward that starts now.
    fn make_due(&mut self, worker: WorkerId, stage: StageId, time: f64) {
        let hands = &mut self.hands[worker.index()];
        let Some(holding) = hands.holds.iter_mut().find(|of| of.stage == stage) else { return };
        for (meeting, token) in std::mem::take(&mut holding.due) {
            let at = bits(self.virtual_now + time * self.bucket(stage, meeting.bucket).ready.min(1.0));
            self.computing.post(at, Progress::Made(meeting, Name { worker, token }));
        }
    }

    /// Recomputation time within a backward that a separate Recompute has already spent.
    fn spared(&mut self, worker: WorkerId, stage: StageId, item: MicrobatchId) -> f64 {
        let holding = self.hands[worker.index()].holds.iter_mut().find(|of| of.stage == stage);
        let is_spared = holding.is_some_and(|of| !of.again.is_empty() && of.again.remove(&item));
        let shape = self.pipeline.stages.get(stage.index()).filter(|_| is_spared);
        let within = |shape: &StageSpec| shape.recompute.unwrap_or(0.0).min((shape.backward - shape.weight).max(0.0));
        shape.map_or(0.0, within)
    }

    fn computed(&mut self, worker: WorkerId) {
        let now = self.now;
        self.busy -= 1;
        let hands = &mut self.hands[worker.index()];
        if let Some((activity, start)) = hands.computing.take() {
            // Zero-length steps would clutter a trace.
            if self.is_recorded && (now > start || !matches!(activity, Activity::Step(..))) {
                hands.spans.push(Span { activity, start, end: now });
            }
            match activity {
                Activity::Forward(_, item) | Activity::BackwardInput(_, item) => {
                    self.finish(item);
                }
                Activity::Backward(stage, item) | Activity::BackwardWeight(stage, item) => {
                    hands.in_flight = hands.in_flight.saturating_sub(1);
                    self.finish(item);
                    let buckets = self.program.stages.get(stage.index()).map_or(1, |stage| stage.buckets);
                    self.change(worker, stage, |of| {
                        of.in_flight = of.in_flight.saturating_sub(1);
                        of.summed += 1;
                        // All buckets were posted before this last backward.
                        of.close_if(of.posted == buckets);
                    });
                }
                Activity::Step(stage, _) => self.change(worker, stage, |of| {
                    of.gradients = of.gradients.saturating_sub(1);
                    of.summing &= of.gradients > 0;
                }),
                _ => {}
            }
        }
        self.hands[worker.index()].at += 1;
        self.advance(worker);
    }

    fn finish(&mut self, item: MicrobatchId) {
        match self.finished.get_mut(item.index()) {
            Some(finished) => *finished = self.now,
            None => _ = self.foreign.insert(item, self.now),
        }
    }

    /// Opens a token for one end of a transfer; returns its channel's number.
    fn post(&mut self, worker: WorkerId, token: Token, channel: Channel) -> u32 {
        self.hands[worker.index()].tokens.insert(token.0, false);
        let line = self.channels.number(worker, channel);
        if line as usize == self.lines.len() {
            let Channel { from, to, edge, .. } = channel;
            let way = self.flows.way(self.machine.network.ports.message(edge.index(), from.index(), to.index()));
            let (sends, recvs) = (VecDeque::new(), VecDeque::new());
            self.lines.push(Line { sends, recvs, way, carries: None, carried: 0, spans: Vec::new() });
        }
        line
    }

    /// Starts the channel's next transfer if both ends are posted and none is running.
    fn begin(&mut self, number: u32) {
        let Channel { edge, kind, .. } = self.channels.channel(number);
        let Some(&(from, to)) = self.program.edges.get(edge.index()) else { return };
        let line = &mut self.lines[number as usize];
        let (Some(&(sender, item)), Some(&receiver)) = (line.sends.front(), line.recvs.front()) else { return };
        if line.carries.is_none() {
            line.sends.pop_front();
            line.recvs.pop_front();
            let maker = if kind == Payload::Activation { from } else { to };
            line.carries = Some((Activity::Transfer(maker, kind, item), self.now));
            let (line_of, nth) = (CHANNELS + u64::from(number), line.carried);
            line.carried += 1;
            let stray = self.machine.jitter.map_or(1.0, |jitter| jitter.factor(line_of, nth));
            let time = self.machine.network.transfer(edge.index(), kind) * stray;
            self.flows.begin(self.now, time, line.way, Arrival::Transfer(number, sender, receiver));
        }
    }

    /// Posts one bucket of a round. It is due until the worker has done all its backwards of the round.
    fn reduce_bucket(&mut self, worker: WorkerId, stage: StageId, round: u32, instruction: Instruction) {
        let Some((meeting, token)) = instruction.meeting() else { return };
        let Some(&of) = self.program.stages.get(stage.index()) else { return };
        let replica = self.program.workers[worker.index()].replica;
        let items = dealt(self.rule.count(stage, round), of.replicas, replica);
        let mut is_due = false;
        self.change(worker, stage, |holding| {
            is_due = of.buckets > 1 && holding.summed < items;
            holding.due.extend(is_due.then_some((meeting, token)));
            holding.posted += 1;
            holding.close_if(!is_due && holding.posted == of.buckets);
        });
        match is_due {
            true => _ = self.hands[worker.index()].tokens.insert(token.0, false),
            false => self.meet(worker, instruction),
        }
    }

    /// The planned bucket, or an even split if the program has other buckets than the plan.
    fn bucket(&self, stage: StageId, number: u32) -> Bucket {
        let planned = self.pipeline.stages.get(stage.index()).map_or(&[][..], |shape| &shape.buckets);
        let count = self.program.stages.get(stage.index()).map_or(1, |stage| stage.buckets.max(1));
        match planned.get(number as usize) {
            Some(&bucket) if planned.len() == count as usize => bucket,
            _ => Bucket { ready: f64::from(number + 1) / f64::from(count), share: 1.0 / f64::from(count) },
        }
    }

    fn meet(&mut self, worker: WorkerId, instruction: Instruction) {
        let Some((meeting, token)) = instruction.meeting() else { return };
        self.hands[worker.index()].tokens.insert(token.0, false);
        self.join(meeting, Name { worker, token });
    }

    /// Joins a collective, which starts when the last replica has joined.
    fn join(&mut self, meeting: CollectiveId, name: Name) {
        let stage = meeting.stage;
        let members = self.program.stages.get(stage.index()).map_or(0, |stage| stage.replicas as usize);
        let joined = self.joined.entry(meeting).or_default();
        joined.push(name);
        if joined.len() == members {
            let (ports, flows) = (&self.machine.network.ports, &mut self.flows);
            let reducing = self.reductions.entry(stage).or_insert_with(|| {
                let parts = ports.reduction(stage.index()).iter();
                let mut parts: Vec<_> = parts.map(|part| (part.share, flows.way(part.ports.clone()))).collect();
                if parts.is_empty() {
                    parts.push((1.0, flows.way(Vec::new())));
                }
                Reducing { parts, ..Reducing::default() }
            });
            reducing.met.push_back(meeting);
            if reducing.met.len() == 1 {
                reducing.began = self.now;
                self.reduce(meeting, 0);
            }
        }
    }

    /// Starts one level of a collective. Reduce-scatter and all-gather carry an all-reduce together.
    fn reduce(&mut self, meeting: CollectiveId, part: usize) {
        let Some(&(share, way)) = self.reductions.get(&meeting.stage).and_then(|of| of.parts.get(part)) else { return };
        // Under ZeRO 3 the all-gather only synchronizes: the ops gather their weights themselves.
        let only_synchronizes = self.program.stages.get(meeting.stage.index()).is_some_and(|stage| stage.zero >= 3);
        let scattered = self.pipeline.stages.get(meeting.stage.index()).map_or(0.5, |shape| shape.scattered);
        let carried = match meeting.kind {
            Collective::AllReduce => 1.0,
            Collective::AllGather if only_synchronizes => 0.0,
            Collective::ReduceScatter => scattered,
            Collective::AllGather => 1.0 - scattered,
        };
        let carried = carried * self.bucket(meeting.stage, meeting.bucket).share;
        let time = self.machine.network.all_reduce(meeting.stage.index()) * carried * share;
        self.flows.begin(self.now, time, way, Arrival::Part(meeting, part));
    }

    fn arrive(&mut self, arrival: Arrival) {
        match arrival {
            Arrival::Transfer(number, sender, receiver) => {
                let line = &mut self.lines[number as usize];
                let carried = line.carries.take().filter(|(_, start)| self.is_recorded && self.now > *start);
                if let Some((activity, start)) = carried {
                    line.spans.push(Span { activity, start, end: self.now });
                }
                self.begin(number);
                let Channel { from, to, .. } = self.channels.channel(number);
                self.complete(Name { worker: from, token: sender });
                self.complete(Name { worker: to, token: receiver });
            }
            Arrival::Part(meeting, part) => {
                let Some(reducing) = self.reductions.get_mut(&meeting.stage) else { return };
                if part + 1 < reducing.parts.len() {
                    return self.reduce(meeting, part + 1);
                }
                if self.is_recorded && self.now > reducing.began {
                    let span = Span { activity: Activity::of_meeting(meeting), start: reducing.began, end: self.now };
                    reducing.spans.push(span);
                }
                reducing.met.pop_front();
                reducing.began = self.now;
                if let Some(&next) = reducing.met.front() {
                    self.reduce(next, 0);
                }
                for name in self.joined.remove(&meeting).unwrap_or_default() {
                    self.complete(name);
                }
            }
        }
    }

    fn complete(&mut self, Name { worker, token }: Name) {
        let hands = &mut self.hands[worker.index()];
        hands.tokens.insert(token.0, true);
        if hands.blocked == Some(token) {
            hands.blocked = None;
            self.advance(worker);
        }
    }

    /// Changes the memory state of a stage and records the worker's bytes.
    fn change(&mut self, worker: WorkerId, stage: StageId, change: impl FnOnce(&mut StageMemoryState)) {
        let hands = &mut self.hands[worker.index()];
        // The stage may also belong to another worker.
        let Some(holding) = hands.holds.iter_mut().find(|of| of.stage == stage) else { return };
        change(holding);
        if hands.memory.is_empty() {
            return;
        }
        let bytes = hands.holds.iter().fold(0u64, |sum, of| {
            let shape = &self.pipeline.stages[of.stage.index()];
            let weights = (of.versions + of.gradients).saturating_mul(shape.param_bytes);
            sum.saturating_add(weights).saturating_add(of.in_flight.saturating_mul(shape.saved_bytes))
        });
        match hands.memory.last_mut() {
            Some(last) if last.0 == self.now => last.1 = last.1.max(bytes),
            Some(last) if last.1 == bytes => {}
            _ => hands.memory.push((self.now, bytes)),
        }
    }

    fn timeline(self) -> Timeline {
        let program = self.program;
        let name = |worker| program.worker_name(worker);
        let mut links = Vec::new();
        let mut lines = self.lines;
        for (Channel { from, to, .. }, number) in self.channels.all() {
            let spans = std::mem::take(&mut lines[number as usize].spans);
            if !spans.is_empty() {
                links.push(Track { name: format!("{} > {}", name(from), name(to)), spans });
            }
        }
        for (stage, Reducing { spans, .. }) in self.reductions.into_iter().filter(|(_, of)| !of.spans.is_empty()) {
            links.push(Track { name: format!("all-reduce {}", stage.0), spans });
        }
        let (mut workers, mut peak_in_flight, mut memory) = (Vec::new(), Vec::new(), Vec::new());
        let hands = if self.is_recorded { self.hands } else { Vec::new() };
        for (index, hands) in hands.into_iter().enumerate() {
            workers.push(Track { name: name(WorkerId(index as u32)), spans: hands.spans });
            peak_in_flight.push(hands.peak);
            memory.push(hands.memory);
        }
        let finished = self.finished.into_iter().filter(|at| !at.is_nan()).chain(self.foreign.into_values()).collect();
        Timeline { workers, links, makespan: self.now, finished, peak_in_flight, memory }
    }
}
