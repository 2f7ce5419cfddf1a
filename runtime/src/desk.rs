//! One stage on one worker: its executor, its items in flight, the weight versions that are still used, and the gradients of the
//! round at hand.
//!
//! A worker has a desk for each of its stages and moves messages between them and the other workers. A desk waits in one
//! place only: for the other holders of a shared parameter, when it steps.

use crate::buffer::{Buffer, Ledger};
use crate::compile::{GradientTerm, StageCode};
use crate::data::Batches;
use crate::execute::{ExecuteError, Executor, Item, Weights};
use crate::link::channel::Parcel;
use crate::link::rendezvous::{Abandoned, Rendezvous};
use crate::optimizer::{Optimizer, Update, accumulate};
use compiler::pass::loss::LOSS;
use compiler::plan::StageId;
use compiler::schedule::Payload;
use compiler::schedule::work::Part;
use compiler::tensor::DType;
use compiler::tensor::view::{View, ViewMut};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

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

/// What a desk is given.
pub struct Place<'a> {
    /// Which stage.
    pub stage: StageId,
    /// What it runs.
    pub code: &'a StageCode,
    /// Version 0 of its parameters.
    pub weights: Weights,
    /// Its states.
    pub states: Vec<Buffer>,
    /// Where the replicas of the stage add up their gradients.
    pub replicas: Arc<Rendezvous<Contribution>>,
    /// The parameters that other stages hold too.
    pub tied: Vec<Tied>,
    /// Whether this worker is the first of the stage's replicas.
    pub is_first: bool,
}

/// Gradients of a round that is about to be applied.
struct Ready {
    by_parameter: Vec<Vec<(usize, Arc<Buffer>)>>,
    samples: Vec<(u32, Vec<Vec<u8>>)>,
}

/// One stage on one worker.
pub struct Desk<'a> {
    /// Which stage.
    pub stage: StageId,
    code: &'a StageCode,
    replicas: Arc<Rendezvous<Contribution>>,
    tied: Vec<Tied>,
    is_first: bool,
    optimizer: &'a Optimizer,
    keeps_gradients: bool,
    executor: Executor<'a>,
    items: HashMap<u32, Item>,
    versions: BTreeMap<u32, Weights>,
    /// Sums of the gradient terms since the last all-reduce or step.
    terms: Vec<Option<Arc<Buffer>>>,
    samples: Vec<(u32, Vec<Vec<u8>>)>,
    reduced: HashMap<u32, Contribution>,
    /// Rounds whose gradients have been brought to the other holders of shared parameters.
    ready: HashMap<u32, Ready>,
    optimizer_state: Vec<Vec<Buffer>>,
    gradients: Vec<(usize, Buffer)>,
}

/// What a desk leaves behind.
pub struct Left {
    /// The newest weights.
    pub weights: Weights,
    /// The states.
    pub states: Vec<Buffer>,
    /// The averaged gradients of the last step by parameter, when they were asked for.
    pub gradients: Vec<(usize, Buffer)>,
}

impl<'a> Desk<'a> {
    /// A desk at which nothing has been done. What it holds is counted in the ledger.
    pub fn new(place: Place<'a>, optimizer: &'a Optimizer, keeps_gradients: bool, ledger: &Arc<Ledger>) -> Desk<'a> {
        let Place { stage, code, weights: mut first, states, replicas, tied, is_first } = place;
        let weights: usize = first.iter().map(|weight| weight.len()).sum();
        let kept: usize = states.iter().map(Buffer::len).sum();
        let mut executor = Executor::new(code, states);
        executor.pool.ledger = ledger.clone();
        ledger.add(weights * optimizer.buffers() + kept + code.arena_bytes);
        first.iter_mut().filter_map(Arc::get_mut).for_each(|weight| weight.count_in(ledger));
        let optimizer_state = first.iter().map(|w| optimizer.new_state(w.len())).collect();
        Desk {
            stage,
            code,
            replicas,
            tied,
            is_first,
            optimizer,
            keeps_gradients,
            executor,
            items: HashMap::new(),
            versions: BTreeMap::from([(0, first)]),
            terms: vec![None; code.gradient_terms.len()],
            samples: Vec::new(),
            reduced: HashMap::new(),
            ready: HashMap::new(),
            optimizer_state,
            gradients: Vec::new(),
        }
    }

    /// What is left at the end.
    pub fn leave(mut self) -> Left {
        let weights = self.versions.pop_last().map(|(_, weights)| weights).unwrap_or_default();
        Left { weights, states: self.executor.states, gradients: self.gradients }
    }

    /// Whether this version of the weights is there.
    pub fn has(&self, version: u32) -> bool {
        self.versions.contains_key(&version)
    }

    /// Forgets a version.
    pub fn drop_version(&mut self, version: u32) {
        for buffer in self.versions.remove(&version).unwrap_or_default() {
            self.executor.pool.give(buffer);
        }
    }

    fn item(&mut self, item: u32) -> &mut Item {
        let executor = &mut self.executor;
        self.items.entry(item).or_insert_with(|| executor.begin())
    }

    /// Fetches the item's data.
    pub fn load(&mut self, batches: &Batches, item: u32) {
        let mut feeds = Vec::new();
        for feed in &self.code.feeds {
            let mut buffer = self.executor.pool.take(feed.bytes);
            let bytes = Arc::get_mut(&mut buffer).expect("the pool hands out buffers that nobody else holds");
            batches.fill(&feed.name, item, bytes.bytes_mut());
            feeds.push(buffer);
        }
        self.item(item).feeds = feeds;
    }

    /// Runs the item's forward with this version; gives its loss where the stage makes it.
    pub fn forward(&mut self, item: u32, version: u32) -> Result<Option<f64>, ExecuteError> {
        let weights = self.versions.get(&version).cloned().unwrap_or_default();
        self.item(item).weights = weights;
        let state = &self.items[&item];
        self.executor.forward(state)?;
        if !self.code.follows.is_empty() {
            let samples = self.code.follows.iter().map(|f| self.executor.result(state, f.sample).to_vec()).collect();
            self.samples.push((item, samples));
        }
        let mut loss = None;
        for (named, place) in self.code.results.iter().filter(|(n, _)| n.name == LOSS) {
            let shape = named.fact.concrete().unwrap_or_default();
            loss = Some(View::new(named.fact.dtype, &shape, self.executor.result(state, *place)).f64(0));
        }
        // What backward reads is made again before it.
        if let (true, Some(state)) = (self.code.recompute, self.items.get_mut(&item)) {
            self.executor.let_go(state);
        }
        Ok(loss)
    }

    /// Runs the item's backward, or a part of it.
    pub fn backward(&mut self, item: u32, part: Part) -> Result<(), ExecuteError> {
        let Some(mut state) = self.items.remove(&item) else { return Ok(()) };
        if part.makes_gradients() {
            if self.code.recompute {
                self.executor.again(&mut state)?;
            }
            self.executor.backward_input(&mut state)?;
        }
        if part.ends() {
            self.executor.backward_weight(&mut state)?;
            for (i, term) in self.code.gradient_terms.iter().enumerate() {
                let dtype = self.code.parameters[term.parameter].fact.dtype;
                add_term(&mut self.terms[i], &mut self.executor, &state, term, dtype);
            }
        }
        self.items.insert(item, state);
        self.release(item);
        Ok(())
    }

    /// An item whose backward is over and whose last message has been posted gives its buffers back.
    fn release(&mut self, item: u32) {
        let is_over = |state: &mut Item| state.is_done && state.gradients_out.iter().all(Option::is_none);
        let waits = !self.code.gradients_out.is_empty();
        let over = self.items.get_mut(&item).is_some_and(|state| if waits { is_over(state) } else { state.is_done });
        if over && let Some(state) = self.items.remove(&item) {
            self.executor.finish(state);
        }
    }

    /// What of the item goes to another stage.
    pub fn parcels(&mut self, item: u32, kind: Payload, other: StageId) -> Vec<Parcel> {
        let code = self.code;
        let (transfers, sequence) = match kind {
            Payload::Activation => (&code.sent, &code.forward),
            Payload::Gradient => (&code.gradients_out, &code.backward),
        };
        let mut parcels = Vec::new();
        for (i, t) in transfers.iter().enumerate().filter(|(_, t)| t.stage == other.index()) {
            let Some(state) = self.items.get(&item) else { break };
            let buffer = match (kind, state.gradients_out.get(i)) {
                (Payload::Gradient, Some(Some(buffer))) => buffer.clone(),
                _ => self.executor.shared(sequence, state, t.place),
            };
            parcels.push(Parcel { value: t.value, group: t.group, buffer });
        }
        parcels
    }

    /// The item's gradients for a stage have been posted. They go out in any order; the item is over after the last of them.
    pub fn sent_gradients(&mut self, item: u32, other: StageId) {
        let Some(state) = self.items.get_mut(&item) else { return };
        for (slot, t) in state.gradients_out.iter_mut().zip(&self.code.gradients_out) {
            if t.stage == other.index() {
                // The receiver holds its own reference.
                if let Some(buffer) = slot.take() {
                    self.executor.pool.give(buffer);
                }
            }
        }
        self.release(item);
    }

    /// Takes what has come from another stage.
    pub fn unpack(&mut self, other: StageId, kind: Payload, item: u32, parcels: Vec<Parcel>) {
        let code = self.code;
        let transfers = match kind {
            Payload::Activation => &code.received,
            Payload::Gradient => &code.gradients_in,
        };
        let mut held = 0;
        let state = self.item(item);
        let slots = match kind {
            Payload::Activation => &mut state.received,
            Payload::Gradient => &mut state.gradients_in,
        };
        for parcel in parcels {
            let at = transfers
                .iter()
                .position(|t| (t.stage, t.value, t.group) == (other.index(), parcel.value, parcel.group));
            if let Some(at) = at {
                held += parcel.buffer.len();
                // An activation is read again where it was made.
                if kind == Payload::Gradient {
                    parcel.buffer.lend();
                }
                slots[at] = Some(parcel.buffer);
            }
        }
        // Between devices each holds a copy of its own; here the two count one buffer each for itself.
        self.executor.pool.ledger.add(held);
    }

    /// Brings the gradients of a round to the all-reduce.
    pub fn reduce(&mut self, round: u32, replica: usize) {
        let part = self.contribution();
        self.replicas.bring(round, replica, part);
    }

    /// Waits for the all-reduce of a round.
    pub fn reduced(&mut self, round: u32) -> Result<(), Abandoned> {
        let all = self.replicas.meet(round)?;
        let sum = self.sum(&all);
        self.reduced.insert(round, sum);
        Ok(())
    }

    /// What was gathered since the last all-reduce or step.
    fn contribution(&mut self) -> Contribution {
        let empty = vec![None; self.terms.len()];
        Contribution { terms: std::mem::replace(&mut self.terms, empty), samples: std::mem::take(&mut self.samples) }
    }

    /// The sum over replicas, in replica order; samples in item order.
    fn sum(&mut self, all: &[Contribution]) -> Contribution {
        let code = self.code;
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

    /// Makes the gradients of a round ready for its step, and brings those of shared parameters to their other holders. A worker
    /// does so for all its stages before it steps with any: two of them may share a parameter.
    pub fn prepare(&mut self, round: u32) {
        if self.ready.contains_key(&round) {
            return;
        }
        let Contribution { terms, samples } = match self.reduced.remove(&round) {
            Some(reduced) => reduced,
            None => self.contribution(),
        };
        let mut by_parameter: Vec<Vec<(usize, Arc<Buffer>)>> = vec![Vec::new(); self.code.parameters.len()];
        for (term, sum) in self.code.gradient_terms.iter().zip(terms) {
            if let Some(sum) = sum {
                by_parameter[term.parameter].push((term.rank, sum));
            }
        }
        for tied in &self.tied {
            let own = std::mem::take(&mut by_parameter[tied.parameter]);
            tied.place.bring(round + 1, tied.member, if self.is_first { own } else { Vec::new() });
        }
        self.ready.insert(round, Ready { by_parameter, samples });
    }

    /// One step of the optimizer, and of the states. The round was prepared.
    pub fn update(&mut self, round: u32, count: u32, rate: f64, from: u32, in_place: bool) -> Result<(), Abandoned> {
        let to = round + 1;
        let mut old = self.versions.get(&from).cloned().unwrap_or_default();
        if in_place {
            self.versions.remove(&from);
        }
        let Some(Ready { by_parameter, samples }) = self.ready.remove(&round) else { return Ok(()) };
        let mut totals = self.totals(by_parameter, to)?;
        let code = self.code;
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
            if self.keeps_gradients {
                let mut kept = Buffer::copy_of(gradient.bytes());
                scaled(dtype, kept.bytes_mut(), scale);
                self.gradients.push((p, kept));
            }
            self.executor.pool.give(gradient);
        }
        self.versions.insert(to, new);
        for (_, samples) in samples {
            for (follow, sample) in code.follows.iter().zip(samples) {
                let state = &code.states[follow.state];
                follow_sample(state.fact.dtype, self.executor.states[follow.state].bytes_mut(), &sample, follow.keep);
            }
        }
        Ok(())
    }

    fn apply(&mut self, p: usize, mut weight: Arc<Buffer>, update: Update<'_>) -> Arc<Buffer> {
        let state = &mut self.optimizer_state[p];
        // Nobody else holds the old version: write over it.
        if let Some(only) = Arc::get_mut(&mut weight) {
            self.optimizer.in_place(update, only.bytes_mut(), state);
            return weight;
        }
        let mut next = self.executor.pool.take(weight.len());
        self.optimizer.out_of_place(update, weight.bytes(), exclusive(&mut next), state);
        next
    }

    /// The gradient of each parameter: its terms by rank, those of other stages that hold it included.
    fn totals(
        &mut self,
        mut by_parameter: Vec<Vec<(usize, Arc<Buffer>)>>,
        to: u32,
    ) -> Result<Vec<Option<Arc<Buffer>>>, Abandoned> {
        for tied in &self.tied {
            by_parameter[tied.parameter] = tied.place.meet(to)?.iter().flatten().cloned().collect();
        }
        let mut totals = Vec::new();
        for (p, mut terms) in by_parameter.into_iter().enumerate() {
            terms.sort_by_key(|(rank, _)| *rank);
            let dtype = self.code.parameters[p].fact.dtype;
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
