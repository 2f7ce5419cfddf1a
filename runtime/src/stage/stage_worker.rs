//! The state of one pipeline stage on one worker: executor, micro-batches in flight, weight versions, gradient sums.
//!
//! A worker owns one `StageWorker` per stage and carries messages between them and the other workers. Only tied weights make it
//! block: the optimizer step, or the forward pass that needs it, waits for the gradients of every stage that shares the parameter.

use crate::checkpoint::ResumeState;
use crate::comm::channel::Parcel;
use crate::comm::communicator::{Communicator, PeerLost};
use crate::comm::tensor_group::TensorRank;
use crate::data::Batches;
use crate::device::buffer::{Buffer, MemoryCounter};
use crate::exec::compile::{NamedTensor, StageCode};
use crate::exec::executor::{ExecuteError, Executor, Item, Weights};
use crate::exec::moving_average::{Samples, follow};
use crate::optim::grad_norm::{Norms, Squares};
use crate::optim::optimizer::{Ahead, Optimizer, Update};
use crate::optim::policy::{Policy, Staleness};
use crate::optim::update::{ParameterUpdater, wide};
use crate::stage::gradient_round::{ReplicaGradients, RoundGradients};
use crate::stage::gradients::{GradientTerms, begun, scaled, square, total};
use crate::stage::recompute::Lag;
use crate::stage::shard_exchange::{ShardComm, Stepped};
use crate::stage::snapshot::PendingSnapshots;
use crate::stage::tied_weights::LateTiedWeight;
use crate::zero::gradient_shards::GradientShards;
use crate::zero::shard::ShardRange;
use crate::zero::streaming::{RoundPosition, ShardStream};
use compiler::op::KernelError;
use compiler::pass::loss::{LOSS, LOSS_SCALE};
use compiler::plan::StageId;
use compiler::schedule::Payload;
use compiler::schedule::action::Phase;
use compiler::tensor::view::{View, ViewMut};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

/// Where the holders of a tied parameter meet, each with its terms by rank.
pub type TiedGradientComm = Communicator<GradientTerms>;

/// A parameter that several stages hold.
pub struct Tied {
    /// Its place in this stage's parameters.
    pub parameter: usize,
    /// Which of the members this worker is.
    pub member: usize,
    /// Where all workers of those stages meet before they step. Where they step together each stage's first replica brings the sums
    /// over replicas, else every worker its own.
    pub place: Arc<TiedGradientComm>,
    /// The stages that hold it, where they step at different times: then it has versions of its own, of which an item sees the
    /// newest that no holder has to wait for. Empty where all step together.
    pub holders: Vec<StageId>,
}

/// One step of the optimizer.
#[derive(Clone, Copy)]
pub struct OptimizerStep {
    /// The round.
    pub round: u32,
    /// Items that are averaged.
    pub count: u32,
    /// The share of the learning rate.
    pub rate: f64,
    /// The newest version before.
    pub from: u32,
    /// Nobody uses that version after this.
    pub in_place: bool,
    /// What the averaged gradients are multiplied by; nothing where the step is left out.
    pub factor: Option<f64>,
}

/// The inputs of a new [`StageWorker`].
pub struct StageSetup<'a> {
    /// Which stage.
    pub stage: StageId,
    /// What it runs.
    pub code: &'a StageCode,
    /// Version 0 of its parameters.
    pub weights: Weights,
    /// The same in `f32` for those that are narrow.
    pub masters: Vec<Option<Buffer>>,
    /// Each parameter's number among all names.
    pub numbers: Vec<usize>,
    /// Updates between a forward of the stage and its own update, at most.
    pub delay: u32,
    /// Whether no item sees a version after the last backward of the first round that does.
    pub ends_with_round: bool,
    /// Its states.
    pub states: Vec<Buffer>,
    /// Parts in which they do so.
    pub buckets: u32,
    /// Where the replicas of the stage add up their gradients.
    pub replicas: Arc<Communicator<ReplicaGradients>>,
    /// What of the parameters the replica owns, and where it gathers what others do.
    pub share: ShardRange,
    /// Where replicas gather what each has a share of, if they have shares.
    pub shard_comm: Option<Arc<ShardComm>>,
    /// Where they agree on the norm of the stage's gradients, if each knows a part of it only.
    pub norms: Option<Norms>,
    /// Where they add to each other's shares of gradients as they make them, if they do.
    pub gradient_shards: Option<Arc<GradientShards>>,
    /// The parameters that other stages hold too.
    pub tied: Vec<Tied>,
    /// Whether this worker is the first of the stage's replicas.
    pub is_first: bool,
    /// Where it begins, if not at the beginning.
    pub begin: Option<ResumeState>,
    /// Where the worker meets those of the other devices, if they share the stage.
    pub tensor_rank: Option<Arc<TensorRank>>,
}

/// Gradients of a round that is about to be applied: terms by parameter and rank, and their sums when they are made.
struct Ready {
    by_parameter: Vec<GradientTerms>,
    totals: Option<Vec<Option<Arc<Buffer>>>>,
    samples: Vec<Samples>,
}

/// One stage on one worker.
pub struct StageWorker<'a> {
    /// Which stage.
    pub stage: StageId,
    pub(super) code: &'a StageCode,
    pub(super) replicas: Arc<Communicator<ReplicaGradients>>,
    pub(super) share: ShardRange,
    pub(super) shard_comm: Option<Arc<ShardComm>>,
    norms: Option<Norms>,
    /// Versions that are in shares.
    pub(super) stepped: BTreeMap<u32, Stepped>,
    pub(super) tied: Vec<Tied>,
    pub(super) late: Vec<LateTiedWeight>,
    pub(super) is_first: bool,
    numbers: Vec<usize>,
    pub(super) policy: Policy,
    microbatches: u32,
    pub(super) keeps_gradients: bool,
    pub(super) executor: Executor<'a>,
    pub(super) items: HashMap<u32, Item>,
    pub(super) versions: BTreeMap<u32, Weights>,
    /// The gradients of the round at hand, and rounds that are summed over replicas.
    pub(super) gathered: RoundGradients,
    pub(super) reduced: HashMap<u32, ReplicaGradients>,
    /// Rounds whose gradients have been brought to the other holders of shared parameters.
    ready: HashMap<u32, Ready>,
    pub(super) stepper: ParameterUpdater<'a>,
    /// By parameter, how many more versions there were than updates.
    pub(super) uncounted: Vec<i64>,
    pub(super) gradients: Vec<(usize, Buffer)>,
    /// Samples for the states of items whose backward is to come.
    samples: HashMap<u32, Vec<Vec<u8>>>,
    pub(super) cutting: PendingSnapshots,
}

/// The configuration of a [`StageWorker`].
#[derive(Clone, Copy)]
pub struct StageConfig<'a> {
    /// How parameters move.
    pub optimizer: &'a Optimizer,
    /// What is done beside.
    pub policy: Policy,
    /// Items of a minibatch.
    pub microbatches: u32,
    /// Whether every item of a minibatch sees what all minibatches before it have made.
    pub flushes: bool,
    /// Whether the averaged gradients of the last step are kept.
    pub keeps_gradients: bool,
    /// The last versions that a checkpoint may ask for; 0 where there are no checkpoints.
    pub window: u32,
}

/// The result of a [`StageWorker`].
pub struct StageResult {
    /// The newest weights.
    pub weights: Weights,
    /// The states.
    pub states: Vec<Buffer>,
    /// The averaged gradients of the last step by parameter, when they were asked for.
    pub gradients: Vec<(usize, Buffer)>,
}

impl<'a> StageWorker<'a> {
    /// A worker's stage at the start of a run. What it holds is counted in the first ledger, what it gives to
    /// checkpoints in the second.
    pub fn new(
        place: StageSetup<'a>,
        manner: StageConfig<'a>,
        (ledger, given): (&Arc<MemoryCounter>, &Arc<MemoryCounter>),
    ) -> StageWorker<'a> {
        let StageSetup {
            stage,
            code,
            weights: mut first,
            masters,
            numbers,
            delay,
            ends_with_round,
            states,
            replicas,
            share,
            shard_comm,
            norms,
            gradient_shards,
            tied,
            is_first,
            buckets,
            mut begin,
            tensor_rank,
        } = place;
        let StageConfig { optimizer, policy, microbatches, flushes, keeps_gradients, window } = manner;
        let kept: usize = states.iter().map(Buffer::len).sum();
        let mut executor = Executor::new(code, states);
        executor.pool.ledger = ledger.clone();
        executor.tensor_rank = tensor_rank;
        if let Some(gradient_shards) = gradient_shards {
            let version = begin.as_ref().map_or(0, |begin| begin.version);
            gradient_shards.enter(share.replica(), ledger, if flushes { version } else { u32::MAX });
            executor.pieces = Some(ShardStream::new(code, share.clone(), gradient_shards, ends_with_round));
        }
        let stepper = ParameterUpdater::new(code, optimizer, masters, policy.staleness, delay, share.clone());
        ledger.add(stepper.bytes() + kept + code.arena_bytes);
        if share.keeps() {
            first = crate::stage::shard_exchange::begin(&share, code, first, begin.as_mut());
        }
        first.iter_mut().filter_map(Arc::get_mut).for_each(|weight| weight.count_in(ledger));
        let mut late = Vec::new();
        for (at, shared) in tied.iter().enumerate().filter(|(_, shared)| !shared.holders.is_empty()) {
            // Versions of the stage have nothing in its place.
            let weight = std::mem::replace(&mut first[shared.parameter], Arc::new(Buffer::new(0)));
            let parameter = shared.parameter;
            let kept = BTreeMap::from_iter((window > 0).then(|| (0, weight.clone())));
            let (waiting, given) = (VecDeque::new(), BTreeMap::new());
            late.push(LateTiedWeight { tied: at, parameter, weight, version: 0, waiting, given, kept });
        }
        let mut stage_worker = StageWorker {
            stage,
            code,
            replicas,
            share,
            shard_comm,
            norms,
            stepped: BTreeMap::new(),
            tied,
            late,
            is_first,
            numbers,
            policy,
            microbatches,
            keeps_gradients,
            executor,
            items: HashMap::new(),
            versions: BTreeMap::from([(0, first)]),
            gathered: RoundGradients::new(code, buckets),
            reduced: HashMap::new(),
            ready: HashMap::new(),
            stepper,
            uncounted: vec![0; code.parameters.len()],
            gradients: Vec::new(),
            samples: HashMap::new(),
            cutting: PendingSnapshots::new(window, given),
        };
        if let Some(begin) = begin {
            stage_worker.begin(begin);
        }
        stage_worker.put(stage_worker.newest_version());
        stage_worker
    }

    /// What is left at the end.
    pub fn leave(mut self) -> Result<StageResult, PeerLost> {
        self.finish()?;
        let weights = self.newest();
        let (mut weights, mut gradients) = (self.stepper.leave(weights), std::mem::take(&mut self.gradients));
        self.join_left(&mut weights, &mut gradients)?;
        Ok(StageResult { weights, states: self.executor.states, gradients })
    }

    fn newest(&mut self) -> Weights {
        let mut weights = self.versions.pop_last().map(|(_, weights)| weights).unwrap_or_default();
        for late in self.late.drain(..) {
            weights[late.parameter] = late.weight;
        }
        weights
    }

    /// Whether this version of the weights is there.
    pub fn has(&self, version: u32) -> bool {
        self.versions.contains_key(&version)
    }

    /// Whether the item's forward has its weights.
    pub fn can_run(&self, item: u32, version: u32) -> bool {
        self.has(version) || self.cutting.forwards.contains_key(&item)
    }

    /// Forgets a version.
    pub fn drop_version(&mut self, version: u32) {
        self.let_go(version);
        for buffer in self.versions.remove(&version).unwrap_or_default() {
            if !self.give_up(&buffer) {
                self.executor.pool.give(buffer);
            }
        }
    }

    fn item(&mut self, item: u32) -> &mut Item {
        let executor = &mut self.executor;
        self.items.entry(item).or_insert_with(|| executor.begin())
    }

    /// Fetches the item's data. The loss is multiplied by `scale` where it is multiplied at all.
    pub fn load(&mut self, batches: &Batches, item: u32, scale: f64) {
        let mut feeds = Vec::new();
        for feed in &self.code.feeds {
            let mut buffer = self.executor.pool.take(feed.bytes);
            let bytes = Arc::get_mut(&mut buffer).expect("the pool hands out buffers that nobody else holds");
            match feed.name == LOSS_SCALE {
                true => ViewMut::new(feed.fact.dtype, &[1], bytes.bytes_mut()).set_f64(0, scale),
                false => batches.fill(&feed.name, item, bytes.bytes_mut()),
            }
            feeds.push(buffer);
        }
        self.item(item).feeds = feeds;
    }

    /// What the item's forward computes with, and whether that was predicted.
    pub(super) fn weights_of(&mut self, item: u32, version: u32, lag: Lag) -> (Weights, bool) {
        if let Some(weights) = self.cutting.forwards.remove(&item) {
            return (weights, true);
        }
        let mut weights = self.versions.get(&version).cloned().unwrap_or_default();
        for late in &self.late {
            weights[late.parameter] = late.weight.clone();
        }
        let predicts = self.policy.staleness == Staleness::Predict && lag.updates > 0;
        if predicts {
            let made = |p: usize| u32::try_from(i64::from(version) - self.uncounted[p]).unwrap_or(0);
            let ahead = |p: usize| Ahead { steps: lag.updates, made: made(p), rate: lag.rate };
            weights = self.stepper.ahead(&weights, ahead, &mut self.executor.pool);
        }
        (weights, predicts)
    }

    /// Runs the item's forward with this version, `lag` updates before the one that its gradients go into; gives its loss where the
    /// stage makes it. What it computes with is kept for a checkpoint where the item comes behind one (`is_behind`).
    pub fn forward(&mut self, item: u32, version: u32, lag: Lag, is_behind: bool) -> Result<Option<f64>, ExecuteError> {
        let (weights, predicts) = self.weights_of(item, version, lag);
        if is_behind {
            self.keep(item, version, &weights, predicts);
        }
        self.item(item);
        let Some(state) = self.items.get_mut(&item) else { return Ok(None) };
        (state.weights, state.version) = (weights, version);
        self.executor.forward(state)?;
        if !self.code.follows.is_empty() {
            let samples = self.code.follows.iter().map(|f| self.executor.result(state, f.sample).to_vec()).collect();
            self.samples.insert(item, samples);
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
        if lag.is_stashed {
            return Ok(loss);
        }
        // Nobody keeps these for the backward.
        let weights = self.items.get_mut(&item).map(|state| std::mem::take(&mut state.weights)).unwrap_or_default();
        if predicts {
            weights.into_iter().for_each(|weight| self.executor.pool.give(weight));
        }
        Ok(loss)
    }

    /// Runs the item's backward, or a part of it, with the weights of its forward, or with this version where none are stashed.
    pub fn backward(&mut self, item: u32, part: Phase, version: u32, lag: Lag) -> Result<(), ExecuteError> {
        let Some(mut state) = self.items.remove(&item) else { return Ok(()) };
        self.take_weights(&mut state, version, lag);
        state.turn = RoundPosition { own: self.gathered.items(), ..lag.turn };
        if part.ends() {
            state.sums = begun(&mut self.gathered.terms, &mut self.executor);
        }
        if part.makes_gradients() {
            // A program may leave to the backward what it does not say.
            self.again(&mut state)?;
            self.executor.backward_input(&mut state)?;
        }
        if part.ends() {
            self.executor.backward_weight(&mut state)?;
            // They go into the states with the update that the item's gradients go into.
            self.gathered.samples.extend(self.samples.remove(&item).map(|samples| (item, samples)));
            let gone = |_| ExecuteError { node: "the gradients of parameters".to_string(), fault: KernelError::Gone };
            self.gathered.add(&mut self.executor, &mut state).map_err(gone)?;
            self.bring_due();
        }
        self.give_weights(&mut state, lag);
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
        let ledger = self.executor.pool.ledger.clone();
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
                // Between devices each holds a copy of its own; here both count one. An activation is read again where it was made.
                ledger.take_place(parcel.buffer.len());
                if kind == Payload::Gradient {
                    parcel.buffer.lend();
                }
                slots[at] = Some(parcel.buffer);
            }
        }
    }

    /// Makes the gradients of a round ready for its step, and brings those of shared parameters to their other holders. A worker
    /// does so for all its stages before it steps with any: two of them may share a parameter.
    pub fn prepare(&mut self, round: u32) {
        if self.ready.contains_key(&round) {
            return;
        }
        let ReplicaGradients { terms, mut samples } = match self.reduced.remove(&round) {
            Some(reduced) => reduced,
            None => self.contribution(round),
        };
        samples.sort_by_key(|(item, _)| *item);
        let mut by_parameter: Vec<GradientTerms> = vec![Vec::new(); self.code.parameters.len()];
        for (term, sum) in self.code.gradient_terms.iter().zip(terms) {
            if let Some(sum) = sum {
                by_parameter[term.parameter].push((term.rank, sum));
            }
        }
        for tied in self.tied.iter().filter(|tied| tied.holders.is_empty()) {
            let own = std::mem::take(&mut by_parameter[tied.parameter]);
            tied.place.bring(u64::from(round) + 1, tied.member, if self.is_first { own } else { Vec::new() });
        }
        self.ready.insert(round, Ready { by_parameter, totals: None, samples });
    }

    /// Adds up the gradients of a round that was prepared, those of other holders of shared parameters included where all step
    /// together. A worker does so for all its stages after it has prepared them.
    pub fn gather(&mut self, round: u32) -> Result<(), PeerLost> {
        if self.ready.get(&round).is_none_or(|ready| ready.totals.is_some()) {
            return Ok(());
        }
        let Some(Ready { by_parameter: mut terms, samples, .. }) = self.ready.remove(&round) else { return Ok(()) };
        for tied in self.tied.iter().filter(|tied| tied.holders.is_empty()) {
            terms[tied.parameter] = tied.place.meet(u64::from(round) + 1)?.iter().flatten().cloned().collect();
        }
        // Where gradients leave as they are made, all but a share of them does.
        let (stays, pool) = (self.executor.pieces.is_none(), &mut self.executor.pool);
        let parameters = self.code.parameters.iter();
        let totals =
            terms.into_iter().zip(parameters).map(|(terms, named)| total(pool, named.fact.dtype, terms, stays));
        let totals = totals.collect();
        self.ready.insert(round, Ready { by_parameter: Vec::new(), totals: Some(totals), samples });
        Ok(())
    }

    /// The sums of squares of a round's gradients that were gathered. Waits for the other devices that share the stage.
    pub fn squares(&self, round: u32) -> Result<Squares, PeerLost> {
        let totals = self.ready.get(&round).and_then(|ready| ready.totals.as_ref());
        let each = totals.into_iter().flatten().zip(&self.numbers).zip(&self.code.parameters);
        let made = each.filter_map(|((total, &number), named)| Some((total.as_ref()?, number, named)));
        let squared = |(total, number, named): (&Arc<Buffer>, usize, &'a NamedTensor)| {
            ((number, square(named.fact.dtype, total.bytes())), named.name.as_str())
        };
        let (mut own, names): (Squares, Vec<&str>) = made.map(squared).unzip();
        if let Some(tensor_rank) = self.executor.tensor_rank.as_ref().filter(|_| !own.is_empty()) {
            let parts: Vec<f64> = own.iter().map(|(_, square)| *square).collect();
            let whole = tensor_rank.whole_squares(&names, &parts)?;
            own.iter_mut().zip(whole).for_each(|((_, own), whole)| *own = whole);
        }
        Ok(own)
    }

    /// The sum of squares of all of a round's gradients that were gathered. Waits for the other replicas where each has a share of them.
    pub fn sum_of_squares(&self, round: u32) -> Result<f64, PeerLost> {
        let own = self.squares(round)?;
        match &self.norms {
            Some(norms) => norms.sum(round, own),
            None => Ok(own.iter().fold(0.0, |sum, (_, square)| sum + square)),
        }
    }

    /// One step of the optimizer, and of the states. The round's gradients were gathered.
    pub fn update(&mut self, step: OptimizerStep) {
        let to = step.round + 1;
        let mut old = self.versions.get(&step.from).cloned().unwrap_or_default();
        if step.in_place {
            self.let_go(step.from);
            self.versions.remove(&step.from);
        }
        let ready = self.ready.remove(&step.round);
        let Some(Ready { totals: Some(mut totals), samples, .. }) = ready else { return };
        let mut new: Weights = Vec::with_capacity(old.len());
        if self.shard_comm.is_some() {
            let is_stepped = |p: &usize| step.factor.is_some() && self.share.deals(*p) && totals[*p].is_some();
            let parameters = (0..old.len()).filter(is_stepped).collect();
            self.stepped.insert(to, Stepped { parameters, buckets: self.gathered.buckets() });
        }
        self.gradients.clear();
        for late in &mut self.late {
            late.waiting.push_back(step);
        }
        for (p, weight) in old.drain(..).enumerate() {
            new.push(match totals[p].take() {
                // No gradient reaches it: it stays as it is.
                None => weight,
                Some(gradient) => self.apply(p, weight, gradient, step),
            });
        }
        self.versions.insert(to, new);
        self.put(to);
        if step.factor.is_none() {
            // It leaves no trace.
            self.uncounted.iter_mut().for_each(|more| *more += 1);
            return;
        }
        let states = (&mut self.executor.states[..], &self.code.states[..]);
        follow(self.policy.statistics, &self.code.follows, states, &samples, self.microbatches);
    }

    /// The next version of a parameter.
    pub(super) fn apply(
        &mut self,
        p: usize,
        weight: Arc<Buffer>,
        gradient: Arc<Buffer>,
        step: OptimizerStep,
    ) -> Arc<Buffer> {
        let dtype = self.code.parameters[p].fact.dtype;
        let Some(factor) = step.factor else {
            self.executor.pool.give(gradient);
            return weight;
        };
        let scale = factor / f64::from(step.count.max(1));
        // At the first step after a cut the count is that of the checkpoint.
        let counted = u32::try_from(i64::from(step.round) + 1 - self.uncounted[p]).unwrap_or(1);
        let update = Update { dtype: wide(dtype), gradient: gradient.bytes(), scale, step: counted, rate: step.rate };
        if step.in_place {
            self.give_up(&weight);
        }
        let next = self.stepper.step(p, weight, update, &mut self.executor.pool);
        if self.keeps_gradients {
            self.gradients.push((p, scaled(dtype, gradient.bytes(), scale)));
        }
        self.executor.pool.give(gradient);
        next
    }
}
