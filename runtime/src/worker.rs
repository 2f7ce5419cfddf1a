//! The worker: a loop over the instructions of its program, with one `match`. It holds no policy.
//!
//! It owns the executor of its stage, the items in flight, the weight versions that are still used, and the gradients
//! of the round at hand. It waits in two places only: for a message, and for the other members of a rendezvous. Both end
//! when the peer delivers or is gone.

use crate::buffer::Buffer;
use crate::compile::{GradientTerm, StageCode};
use crate::data::Batches;
use crate::execute::{ExecuteError, Executor, Item, Weights};
use crate::link::channel::{Message, Parcel};
use crate::link::rendezvous::Rendezvous;
use crate::optimizer::{Optimizer, Update, accumulate};
use compiler::plan::StageId;
use compiler::schedule::{EdgeId, Instruction, Payload, Program, Token, WorkerId};
use compiler::tensor::DType;
use compiler::tensor::view::{View, ViewMut};
use crossbeam_channel::{Receiver, Sender};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;
use thiserror::Error;

/// Why a worker stopped before its end.
#[derive(Debug, Error, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum WorkerError {
    #[error("worker {worker}: {fault}")]
    Execute { worker: String, fault: ExecuteError },
    #[error("worker {worker}: another worker stopped")]
    PeerGone { worker: String },
    #[error("bug in pipec: worker {worker}, instruction {at}: {what}")]
    Program { worker: String, at: usize, what: String },
}

/// A channel's end, by edge, direction and peer.
pub type Key = (EdgeId, Payload, WorkerId);

/// What replicas bring to an all-reduce.
pub struct Contribution {
    /// The sum of each gradient term over this replica's items; nothing when it had none.
    pub terms: Vec<Option<Arc<Buffer>>>,
    /// Samples for the states, by item.
    pub samples: Vec<(u32, Vec<Vec<u8>>)>,
}

/// Where the holders of a tied parameter meet, each with its terms by rank.
pub type Meeting = Rendezvous<Vec<(usize, Arc<Buffer>)>>;

/// A parameter that several stages hold.
pub struct Tied {
    /// Its place in this stage's parameters.
    pub parameter: usize,
    /// Which of the members this worker is.
    pub member: usize,
    /// Where all workers of those stages meet before they step; each stage's first replica brings its terms by rank.
    pub place: Arc<Meeting>,
}

/// What a worker is given.
pub struct Equipment<'a> {
    /// Who it is.
    pub id: WorkerId,
    /// What all workers run.
    pub program: &'a Program,
    /// What its stage runs.
    pub code: &'a StageCode,
    /// Version 0 of its parameters.
    pub weights: Weights,
    /// Its states.
    pub states: Vec<Buffer>,
    /// Where its messages go.
    pub outgoing: HashMap<Key, Sender<Message>>,
    /// Where its messages come from.
    pub incoming: HashMap<Key, Receiver<Message>>,
    /// Where the replicas of its stage add up their gradients.
    pub replicas: Arc<Rendezvous<Contribution>>,
    /// The parameters that other stages hold too.
    pub tied: Vec<Tied>,
    /// The data.
    pub batches: &'a Batches,
    /// How parameters move.
    pub optimizer: &'a Optimizer,
    /// Who wants to know.
    pub events: Sender<Event>,
    /// When the run began.
    pub epoch: Instant,
    /// Whether the averaged gradients of the last step are kept.
    pub keep_gradients: bool,
}

/// What a worker tells while it runs.
#[derive(Debug)]
pub enum Event {
    /// The loss of an item.
    Loss {
        /// The item.
        item: u32,
        /// Its loss.
        value: f64,
    },
    /// A stage stepped: worker, and the updates it has seen.
    Stepped {
        /// The worker.
        worker: WorkerId,
        /// Its newest version.
        version: u32,
    },
}

/// What took a worker's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// The forward run of an item.
    Forward(u32),
    /// The backward run of an item.
    Backward(u32),
    /// Waiting for a message or a rendezvous.
    Wait,
    /// A step to this version.
    Step(u32),
}

/// One piece of a worker's time, in seconds since the run began.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// What it did.
    pub work: Work,
    /// When it began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// A worker remembers how it spent its time up to so many pieces: a long run must not fill the memory with them.
pub const MOST_SPANS: usize = 1 << 20;

/// What a worker leaves behind.
pub struct Outcome {
    /// The newest weights.
    pub weights: Weights,
    /// The states.
    pub states: Vec<Buffer>,
    /// The averaged gradients of the last step by parameter, when they were asked for.
    pub gradients: Vec<(usize, Buffer)>,
    /// How its time was spent.
    pub spans: Vec<Span>,
    /// The most bytes it held at once: weights in all versions, gradients, optimizer state, items in flight, messages, arena.
    pub held_bytes: u64,
}

enum Pending {
    Sent,
    Message { edge: EdgeId, item: u32, kind: Payload, peer: WorkerId },
    Reduce { round: u32 },
}

struct Worker<'a> {
    gear: Equipment<'a>,
    name: String,
    executor: Executor<'a>,
    items: HashMap<u32, Item>,
    versions: BTreeMap<u32, Weights>,
    pending: HashMap<Token, Pending>,
    /// Sums of the gradient terms since the last all-reduce or step.
    terms: Vec<Option<Arc<Buffer>>>,
    samples: Vec<(u32, Vec<Vec<u8>>)>,
    reduced: HashMap<u32, Contribution>,
    optimizer_state: Vec<Vec<Buffer>>,
    gradients: Vec<(usize, Buffer)>,
    spans: Vec<Span>,
}

/// Runs a worker's whole program.
pub fn run(mut gear: Equipment<'_>) -> Result<Outcome, WorkerError> {
    let name = gear.program.worker_name(gear.id);
    let instructions = &gear.program.workers[gear.id.index()].instructions;
    let states = std::mem::take(&mut gear.states);
    let mut first = std::mem::take(&mut gear.weights);
    let weights: usize = first.iter().map(|weight| weight.len()).sum();
    let kept: usize = states.iter().map(Buffer::len).sum();
    let lasting = weights * gear.optimizer.buffers() + kept + gear.code.arena_bytes;
    let executor = Executor::new(gear.code, states);
    executor.pool.ledger.add(lasting);
    first.iter_mut().filter_map(Arc::get_mut).for_each(|weight| weight.count_in(&executor.pool.ledger));
    let optimizer_state = first.iter().map(|w| gear.optimizer.new_state(w.len())).collect();
    let mut worker = Worker {
        name,
        executor,
        items: HashMap::new(),
        versions: BTreeMap::from([(0, first)]),
        pending: HashMap::new(),
        terms: vec![None; gear.code.gradient_terms.len()],
        samples: Vec::new(),
        reduced: HashMap::new(),
        optimizer_state,
        gradients: Vec::new(),
        spans: Vec::new(),
        gear,
    };
    for (at, instruction) in instructions.iter().enumerate() {
        worker.step(at, *instruction)?;
    }
    let newest = worker.versions.pop_last().map(|(_, weights)| weights).unwrap_or_default();
    Ok(Outcome {
        weights: newest,
        held_bytes: worker.executor.pool.ledger.peak(),
        states: worker.executor.states,
        gradients: worker.gradients,
        spans: worker.spans,
    })
}

impl Worker<'_> {
    fn step(&mut self, at: usize, instruction: Instruction) -> Result<(), WorkerError> {
        let bug = |worker: &Self, what: &str| WorkerError::Program {
            worker: worker.name.clone(),
            at,
            what: what.to_string(),
        };
        match instruction {
            Instruction::Load { item, .. } => self.load(item.0),
            Instruction::Forward { item, version, .. } => {
                let weights = self.versions.get(&version.0).cloned().ok_or_else(|| bug(self, "version is gone"))?;
                self.forward(item.0, weights)?;
            }
            Instruction::Backward { item, .. } => self.backward(item.0)?,
            Instruction::BackwardInput { .. } | Instruction::BackwardWeight { .. } => {
                return Err(bug(self, "the backward comes in two parts"));
            }
            Instruction::Send { edge, item, kind, peer, token } => {
                self.send(edge, item.0, kind, peer)?;
                self.pending.insert(token, Pending::Sent);
            }
            Instruction::Recv { edge, item, kind, peer, token } => {
                self.pending.insert(token, Pending::Message { edge, item: item.0, kind, peer });
            }
            Instruction::Wait { token } => {
                let pending =
                    self.pending.remove(&token).ok_or_else(|| bug(self, "nothing is posted under this token"))?;
                self.wait(pending)?;
            }
            Instruction::AllReduce { round, token, .. } => {
                let part = self.contribution();
                let replica = self.gear.program.workers[self.gear.id.index()].replica as usize;
                self.gear.replicas.bring(round, replica, part);
                self.pending.insert(token, Pending::Reduce { round });
            }
            Instruction::Step { stage, round, from, to, count, in_place } => {
                let old = self.versions.get(&from.0).cloned().ok_or_else(|| bug(self, "version is gone"))?;
                if in_place {
                    self.versions.remove(&from.0);
                }
                let part = self.reduced.remove(&round).unwrap_or_else(|| self.contribution());
                let rate = self.rate(stage, round);
                self.update(old, to.0, count, rate, part)?;
            }
            Instruction::Drop { version, .. } => {
                for buffer in self.versions.remove(&version.0).unwrap_or_default() {
                    self.executor.pool.give(buffer);
                }
            }
        }
        Ok(())
    }

    fn item(&mut self, item: u32) -> &mut Item {
        let executor = &mut self.executor;
        self.items.entry(item).or_insert_with(|| executor.begin())
    }

    fn load(&mut self, item: u32) {
        let mut feeds = Vec::new();
        for feed in &self.gear.code.feeds {
            let mut buffer = self.executor.pool.take(feed.bytes);
            let bytes = Arc::get_mut(&mut buffer).expect("the pool hands out buffers that nobody else holds");
            self.gear.batches.fill(&feed.name, item, bytes.bytes_mut());
            feeds.push(buffer);
        }
        self.item(item).feeds = feeds;
    }

    fn forward(&mut self, item: u32, weights: Weights) -> Result<(), WorkerError> {
        self.item(item).weights = weights;
        let start = self.now();
        let state = &self.items[&item];
        self.executor.forward(state).map_err(|fault| WorkerError::Execute { worker: self.name.clone(), fault })?;
        if !self.gear.code.follows.is_empty() {
            let samples =
                self.gear.code.follows.iter().map(|f| self.executor.result(state, f.sample).to_vec()).collect();
            self.samples.push((item, samples));
        }
        let is_again = self.gear.code.recompute;
        for (named, place) in self.gear.code.results.iter().filter(|(n, _)| n.name == compiler::pass::loss::LOSS) {
            let shape = named.fact.concrete().unwrap_or_default();
            let value = View::new(named.fact.dtype, &shape, self.executor.result(state, *place)).f64(0);
            let _ = self.gear.events.send(Event::Loss { item, value });
        }
        // What backward reads is made again before it.
        if let (true, Some(state)) = (is_again, self.items.get_mut(&item)) {
            self.executor.let_go(state);
        }
        self.spend(Work::Forward(item), start);
        Ok(())
    }

    fn backward(&mut self, item: u32) -> Result<(), WorkerError> {
        let start = self.now();
        let Some(mut state) = self.items.remove(&item) else { return Ok(()) };
        let again = if self.gear.code.recompute { self.executor.again(&mut state) } else { Ok(()) };
        again
            .and_then(|()| self.executor.backward(&mut state))
            .map_err(|fault| WorkerError::Execute { worker: self.name.clone(), fault })?;
        for (i, term) in self.gear.code.gradient_terms.iter().enumerate() {
            let dtype = self.gear.code.parameters[term.parameter].fact.dtype;
            add_term(&mut self.terms[i], &mut self.executor, &state, term, dtype);
        }
        self.items.insert(item, state);
        self.spend(Work::Backward(item), start);
        self.release(item);
        Ok(())
    }

    /// An item whose last message has been posted gives its buffers back.
    fn release(&mut self, item: u32) {
        if self.gear.code.gradients_out.is_empty()
            && let Some(state) = self.items.remove(&item)
        {
            self.executor.finish(state);
        }
    }

    fn send(&mut self, edge: EdgeId, item: u32, kind: Payload, peer: WorkerId) -> Result<(), WorkerError> {
        let (from, to) = self.gear.program.edges[edge.index()];
        let code = self.gear.code;
        let (other, transfers, sequence) = match kind {
            Payload::Activation => (to.index(), &code.sent, &code.forward),
            Payload::Gradient => (from.index(), &code.gradients_out, &code.backward),
        };
        let mut parcels = Vec::new();
        for (i, t) in transfers.iter().enumerate().filter(|(_, t)| t.stage == other) {
            let Some(state) = self.items.get(&item) else { break };
            let buffer = match (kind, state.gradients_out.get(i)) {
                (Payload::Gradient, Some(Some(buffer))) => buffer.clone(),
                _ => self.executor.shared(sequence, state, t.place),
            };
            parcels.push(Parcel { value: t.value, group: t.group, buffer });
        }
        let message = Message { item, parcels };
        let gone = || WorkerError::PeerGone { worker: self.name.clone() };
        self.gear.outgoing.get(&(edge, kind, peer)).ok_or_else(gone)?.send(message).map_err(|_| gone())?;
        if kind == Payload::Gradient && self.sent_all_gradients(edge, item) {
            let state = self.items.remove(&item).expect("it was just read");
            self.executor.finish(state);
        }
        Ok(())
    }

    /// Gradients go out over the edges in any order; the item is done after the last of them.
    fn sent_all_gradients(&mut self, edge: EdgeId, item: u32) -> bool {
        let Some(state) = self.items.get_mut(&item) else { return false };
        let from = self.gear.program.edges[edge.index()].0.index();
        for (slot, t) in state.gradients_out.iter_mut().zip(&self.gear.code.gradients_out) {
            if t.stage == from {
                // The receiver holds its own reference.
                if let Some(buffer) = slot.take() {
                    self.executor.pool.give(buffer);
                }
            }
        }
        state.gradients_out.iter().all(Option::is_none)
    }

    fn wait(&mut self, pending: Pending) -> Result<(), WorkerError> {
        let start = self.now();
        let gone = WorkerError::PeerGone { worker: self.name.clone() };
        match pending {
            // A message is a reference: it is delivered when it is posted.
            Pending::Sent => return Ok(()),
            Pending::Message { edge, item, kind, peer } => {
                let channel = self.gear.incoming.get(&(edge, kind, peer)).ok_or_else(|| gone.clone())?;
                let message = channel.recv().map_err(|_| gone)?;
                if message.item != item {
                    let what = format!("item {} came where item {item} was expected", message.item);
                    return Err(WorkerError::Program { worker: self.name.clone(), at: 0, what });
                }
                self.unpack(edge, kind, message);
            }
            Pending::Reduce { round } => {
                let all = self.gear.replicas.meet(round).map_err(|_| gone)?;
                let sum = self.sum(&all);
                self.reduced.insert(round, sum);
            }
        }
        self.spend(Work::Wait, start);
        Ok(())
    }

    fn unpack(&mut self, edge: EdgeId, kind: Payload, message: Message) {
        let (from, to) = self.gear.program.edges[edge.index()];
        let code = self.gear.code;
        let (stage, transfers) = match kind {
            Payload::Activation => (from.index(), &code.received),
            Payload::Gradient => (to.index(), &code.gradients_in),
        };
        let mut held = 0;
        let state = self.item(message.item);
        let slots = match kind {
            Payload::Activation => &mut state.received,
            Payload::Gradient => &mut state.gradients_in,
        };
        for parcel in message.parcels {
            let at = transfers.iter().position(|t| (t.stage, t.value, t.group) == (stage, parcel.value, parcel.group));
            if let Some(at) = at {
                held += parcel.buffer.len();
                slots[at] = Some(parcel.buffer);
            }
        }
        // Between devices each holds a copy of its own; here the two count one buffer each for itself.
        self.executor.pool.ledger.add(held);
    }

    /// What was gathered since the last all-reduce or step.
    fn contribution(&mut self) -> Contribution {
        let empty = vec![None; self.terms.len()];
        Contribution { terms: std::mem::replace(&mut self.terms, empty), samples: std::mem::take(&mut self.samples) }
    }

    /// The sum over replicas, in replica order; samples in item order.
    fn sum(&mut self, all: &[Contribution]) -> Contribution {
        let code = self.gear.code;
        let mut terms = Vec::new();
        for (i, term) in code.gradient_terms.iter().enumerate() {
            let dtype = code.parameters[term.parameter].fact.dtype;
            let mut sum: Option<Arc<Buffer>> = None;
            for part in all.iter().filter_map(|c| c.terms[i].as_ref()) {
                match &mut sum {
                    None => sum = Some(self.copy(part.bytes())),
                    Some(sum) => accumulate(dtype, exclusive(sum), part.bytes()),
                }
            }
            terms.push(sum);
        }
        let mut samples: Vec<(u32, Vec<Vec<u8>>)> = all.iter().flat_map(|c| c.samples.iter().cloned()).collect();
        samples.sort_by_key(|(item, _)| *item);
        Contribution { terms, samples }
    }

    fn copy(&mut self, bytes: &[u8]) -> Arc<Buffer> {
        let mut copy = self.executor.pool.take(bytes.len());
        exclusive(&mut copy).copy_from_slice(bytes);
        copy
    }

    /// One step of the optimizer, and of the states.
    fn update(
        &mut self,
        mut old: Weights,
        to: u32,
        count: u32,
        rate: f64,
        part: Contribution,
    ) -> Result<(), WorkerError> {
        let start = self.now();
        let code = self.gear.code;
        let mut totals = self.totals(part.terms, to)?;
        let scale = 1.0 / f64::from(count.max(1));
        let mut new: Weights = Vec::with_capacity(old.len());
        self.gradients.clear();
        for (p, weight) in old.drain(..).enumerate() {
            let dtype = code.parameters[p].fact.dtype;
            let Some(gradient) = totals[p].take() else {
                // No gradient reaches it: it stays as it is.
                new.push(weight);
                continue;
            };
            let update = Update { dtype, gradient: gradient.bytes(), scale, step: to, rate };
            let next = self.apply(p, weight, update);
            new.push(next);
            if self.gear.keep_gradients {
                let mut kept = Buffer::copy_of(gradient.bytes());
                scaled(dtype, kept.bytes_mut(), scale);
                self.gradients.push((p, kept));
            }
            self.executor.pool.give(gradient);
        }
        self.versions.insert(to, new);
        for (_, samples) in part.samples {
            for (follow, sample) in code.follows.iter().zip(samples) {
                let state = &code.states[follow.state];
                follow_sample(state.fact.dtype, self.executor.states[follow.state].bytes_mut(), &sample, follow.keep);
            }
        }
        let _ = self.gear.events.send(Event::Stepped { worker: self.gear.id, version: to });
        self.spend(Work::Step(to), start);
        Ok(())
    }

    /// The share of the learning rate at the first minibatch of a round.
    fn rate(&self, stage: StageId, round: u32) -> f64 {
        let program = self.gear.program;
        let minibatches = if program.schedule.is_round_robin() { program.stages[stage.index()].replicas } else { 1 };
        let total = program.items / program.microbatches.max(1);
        self.gear.optimizer.rate.factor(round.saturating_mul(minibatches), total)
    }

    fn apply(&mut self, p: usize, mut weight: Arc<Buffer>, update: Update<'_>) -> Arc<Buffer> {
        let state = &mut self.optimizer_state[p];
        // Nobody else holds the old version: write over it.
        if let Some(only) = Arc::get_mut(&mut weight) {
            self.gear.optimizer.in_place(update, only.bytes_mut(), state);
            return weight;
        }
        let mut next = self.executor.pool.take(weight.len());
        self.gear.optimizer.out_of_place(update, weight.bytes(), exclusive(&mut next), state);
        next
    }

    /// The gradient of each parameter: its terms by rank, those of other stages that hold it included.
    fn totals(&mut self, terms: Vec<Option<Arc<Buffer>>>, to: u32) -> Result<Vec<Option<Arc<Buffer>>>, WorkerError> {
        let code = self.gear.code;
        let mut by_parameter: Vec<Vec<(usize, Arc<Buffer>)>> = vec![Vec::new(); code.parameters.len()];
        for (term, sum) in code.gradient_terms.iter().zip(terms) {
            if let Some(sum) = sum {
                by_parameter[term.parameter].push((term.rank, sum));
            }
        }
        let first_replica = self.gear.program.workers[self.gear.id.index()].replica == 0;
        for tied in &self.gear.tied {
            let own = &mut by_parameter[tied.parameter];
            tied.place.bring(to, tied.member, if first_replica { std::mem::take(own) } else { Vec::new() });
        }
        for tied in &self.gear.tied {
            let gone = WorkerError::PeerGone { worker: self.name.clone() };
            let all = tied.place.meet(to).map_err(|_| gone)?;
            by_parameter[tied.parameter] = all.iter().flatten().cloned().collect();
        }
        let mut totals = Vec::new();
        for (p, mut terms) in by_parameter.into_iter().enumerate() {
            terms.sort_by_key(|(rank, _)| *rank);
            let dtype = code.parameters[p].fact.dtype;
            let mut terms = terms.into_iter().map(|(_, sum)| sum);
            let Some(mut total) = terms.next() else {
                totals.push(None);
                continue;
            };
            for term in terms {
                if Arc::get_mut(&mut total).is_none() {
                    total = self.copy(total.bytes());
                }
                accumulate(dtype, exclusive(&mut total), term.bytes());
            }
            totals.push(Some(total));
        }
        Ok(totals)
    }

    fn now(&self) -> f64 {
        self.gear.epoch.elapsed().as_secs_f64()
    }

    fn spend(&mut self, work: Work, start: f64) {
        let end = self.now();
        if self.spans.len() < MOST_SPANS {
            self.spans.push(Span { work, start, end });
        }
    }
}

fn exclusive(buffer: &mut Arc<Buffer>) -> &mut [u8] {
    Arc::get_mut(buffer).expect("a buffer from the pool is held by its taker alone").bytes_mut()
}

fn add_term(
    sum: &mut Option<Arc<Buffer>>,
    executor: &mut Executor<'_>,
    item: &Item,
    term: &GradientTerm,
    dtype: DType,
) {
    match sum {
        Some(sum) => accumulate(dtype, exclusive(sum), executor.gradient(item, term.place)),
        None => {
            let mut first = executor.pool.take(term.place.bytes);
            exclusive(&mut first).copy_from_slice(executor.gradient(item, term.place));
            *sum = Some(first);
        }
    }
}

fn scaled(dtype: DType, bytes: &mut [u8], scale: f64) {
    if scale == 1.0 {
        return;
    }
    let shape = [bytes.len() / dtype.size()];
    let mut view = ViewMut::new(dtype, &shape, bytes);
    for i in 0..shape[0] {
        let value = view.as_view().f64(i);
        view.set_f64(i, value * scale);
    }
}

/// `state ← keep · state + (1 − keep) · sample`, computed in `f64`.
fn follow_sample(dtype: DType, state: &mut [u8], sample: &[u8], keep: f64) {
    let shape = [state.len() / dtype.size()];
    let sample = View::new(dtype, &shape, sample);
    let mut state = ViewMut::new(dtype, &shape, state);
    for i in 0..shape[0] {
        let old = state.as_view().f64(i);
        state.set_f64(i, keep * old + (1.0 - keep) * sample.f64(i));
    }
}
