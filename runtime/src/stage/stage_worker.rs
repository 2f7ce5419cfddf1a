//! The state of one pipeline stage on one worker: executor, micro-batches in flight, weight versions, gradient sums.
//!
//! A worker owns one `StageWorker` per stage and carries messages between them and the other workers. Only tied weights
//! make it block: the optimizer step, or the forward pass that needs it, waits for the gradients of every stage that
//! shares the parameter.

use crate::checkpoint::ResumeState;
use crate::comm::channel::TensorMessage;
use crate::comm::communicator::{Communicator, PeerLost};
use crate::comm::tensor_group::TensorRank;
use crate::data::Batches;
use crate::device::buffer::{Buffer, MemoryCounter};
use crate::exec::compile::{NamedTensor, StageCode};
use crate::exec::executor::{ExecuteError, Executor, Item, Weights};
use crate::exec::moving_average::{Samples, follow};
use crate::optim::grad_norm::{NormAllReduce, Squares};
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

/// Exchanges gradient terms of a tied parameter among its stages.
pub type TiedGradientComm = Communicator<GradientTerms>;

/// A tied parameter of this stage.
pub struct TiedParameter {
    /// Index into this stage's parameters.
    pub parameter: usize,
    /// This worker's rank in `place`.
    pub member: usize,
    /// Communicator of all workers of those stages. If the stages step together, each stage's first replica contributes
    /// the sums over replicas; otherwise every worker contributes its own.
    pub place: Arc<TiedGradientComm>,
    /// The stages holding it, if they step at different times. The parameter then has its own versions, and a
    /// micro-batch sees the newest one that needs no waiting. Empty if all stages step together.
    pub holders: Vec<StageId>,
}

#[derive(Clone, Copy)]
pub struct OptimizerStep {
    pub round: u32,
    /// Number of micro-batches to average over.
    pub count: u32,
    /// Learning-rate scale.
    pub rate: f64,
    /// The version to update.
    pub from: u32,
    /// True if nothing uses version `from` after this step.
    pub in_place: bool,
    /// Factor on the averaged gradients (clipping and loss scale); `None` skips the step.
    pub factor: Option<f64>,
}

pub struct StageSetup<'a> {
    pub stage: StageId,
    pub code: &'a StageCode,
    /// Version 0 of the parameters.
    pub weights: Weights,
    /// `f32` master weights of 16-bit parameters.
    pub masters: Vec<Option<Buffer>>,
    /// Each parameter's number in name order over all stages, for gradient norms.
    pub numbers: Vec<usize>,
    /// Maximum number of updates between a forward of the stage and its own update.
    pub delay: u32,
    /// True if no micro-batch sees a version after the last backward of the first round that uses it.
    pub ends_with_round: bool,
    pub states: Vec<Buffer>,
    pub buckets: u32,
    pub replicas: Arc<Communicator<ReplicaGradients>>,
    /// The replica's parameter shards.
    pub share: ShardRange,
    /// Exchange of weight shards, under ZeRO.
    pub shard_comm: Option<Arc<ShardComm>>,
    /// Norm all-reduce, if each replica has only a shard of the gradients.
    pub norms: Option<NormAllReduce>,
    /// Gradient shards, under ZeRO 2 and 3.
    pub gradient_shards: Option<Arc<GradientShards>>,
    pub tied: Vec<TiedParameter>,
    pub is_first: bool,
    /// Restored state of a resumed run.
    pub begin: Option<ResumeState>,
    /// The worker's tensor-parallel rank, if the stage is tensor-parallel.
    pub tensor_rank: Option<Arc<TensorRank>>,
}

/// Gradients of a round about to be applied: terms by parameter, and their totals once gathered.
struct Ready {
    by_parameter: Vec<GradientTerms>,
    totals: Option<Vec<Option<Arc<Buffer>>>>,
    samples: Vec<Samples>,
}

pub struct StageWorker<'a> {
    pub stage: StageId,
    pub(super) code: &'a StageCode,
    pub(super) replicas: Arc<Communicator<ReplicaGradients>>,
    pub(super) share: ShardRange,
    pub(super) shard_comm: Option<Arc<ShardComm>>,
    norms: Option<NormAllReduce>,
    /// Versions that are not gathered completely.
    pub(super) stepped: BTreeMap<u32, Stepped>,
    pub(super) tied: Vec<TiedParameter>,
    pub(super) late: Vec<LateTiedWeight>,
    pub(super) is_first: bool,
    numbers: Vec<usize>,
    pub(super) policy: Policy,
    microbatches: u32,
    pub(super) keeps_gradients: bool,
    pub(super) executor: Executor<'a>,
    pub(super) items: HashMap<u32, Item>,
    pub(super) versions: BTreeMap<u32, Weights>,
    /// Gradients of the current round, and rounds reduced over replicas.
    pub(super) gathered: RoundGradients,
    pub(super) reduced: HashMap<u32, ReplicaGradients>,
    /// Rounds prepared for their step.
    ready: HashMap<u32, Ready>,
    pub(super) stepper: ParameterUpdater<'a>,
    /// By parameter: version number minus number of updates.
    pub(super) uncounted: Vec<i64>,
    pub(super) gradients: Vec<(usize, Buffer)>,
    /// Moving-average samples of micro-batches whose backward has not run.
    samples: HashMap<u32, Vec<Vec<u8>>>,
    pub(super) cutting: PendingSnapshots,
}

#[derive(Clone, Copy)]
pub struct StageConfig<'a> {
    pub optimizer: &'a Optimizer,
    pub policy: Policy,
    pub microbatches: u32,
    /// True if every micro-batch of a minibatch sees the updates of all earlier minibatches.
    pub flushes: bool,
    /// True if the averaged gradients of the last step are returned.
    pub keeps_gradients: bool,
    /// Number of recent versions that a checkpoint may need; 0 without checkpoints.
    pub window: u32,
}

pub struct StageResult {
    /// The newest weight version.
    pub weights: Weights,
    pub states: Vec<Buffer>,
    /// Averaged gradients of the last step by parameter, if requested.
    pub gradients: Vec<(usize, Buffer)>,
}

impl<'a> StageWorker<'a> {
    /// Creates a stage at the start of a run. `ledger` counts its memory, `given` the memory of its snapshots.
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
            // The stage's weight versions hold an empty buffer for it.
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

    /// Runs pending steps of tied weights and returns the final weights, states and gradients.
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

    pub fn has(&self, version: u32) -> bool {
        self.versions.contains_key(&version)
    }

    /// True if the weights for the micro-batch's forward exist.
    pub fn can_run(&self, item: u32, version: u32) -> bool {
        self.has(version) || self.cutting.forwards.contains_key(&item)
    }

    /// Frees a weight version.
    pub fn drop_version(&mut self, version: u32) {
        self.let_go(version);
        for buffer in self.versions.remove(&version).unwrap_or_default() {
            if !self.drop_weight(&buffer) {
                self.executor.pool.give(buffer);
            }
        }
    }

    fn item(&mut self, item: u32) -> &mut Item {
        let executor = &mut self.executor;
        self.items.entry(item).or_insert_with(|| executor.begin())
    }

    /// Loads the data of a micro-batch. `scale` is the loss scale, if the graph has that input.
    pub fn load(&mut self, batches: &Batches, item: u32, scale: f64) {
        let mut feeds = Vec::new();
        for feed in &self.code.feeds {
            let mut buffer = self.executor.pool.take(feed.bytes);
            let bytes = Arc::get_mut(&mut buffer).expect("the pool hands out buffers with a single owner");
            match feed.name == LOSS_SCALE {
                true => ViewMut::new(feed.fact.dtype, &[1], bytes.bytes_mut()).set_f64(0, scale),
                false => batches.fill(&feed.name, item, bytes.bytes_mut()),
            }
            feeds.push(buffer);
        }
        self.item(item).feeds = feeds;
    }

    /// The weights for a micro-batch's forward, and true if they are predicted or restored.
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

    /// Runs the forward of a micro-batch with `version`. Returns the loss if this stage computes it. If `is_behind` is
    /// set, the micro-batch follows a checkpoint, which keeps the forward's weights.
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
        // The activations are recomputed before the backward.
        if let (true, Some(state)) = (self.code.recompute, self.items.get_mut(&item)) {
            self.executor.let_go(state);
        }
        if lag.is_stashed {
            return Ok(loss);
        }
        // Without stashing, the backward does not use these.
        let weights = self.items.get_mut(&item).map(|state| std::mem::take(&mut state.weights)).unwrap_or_default();
        if predicts {
            weights.into_iter().for_each(|weight| self.executor.pool.give(weight));
        }
        Ok(loss)
    }

    /// Runs the backward or one phase of it, with the stashed weights of the forward, or with `version` if none are
    /// stashed.
    pub fn backward(&mut self, item: u32, part: Phase, version: u32, lag: Lag) -> Result<(), ExecuteError> {
        let Some(mut state) = self.items.remove(&item) else { return Ok(()) };
        self.take_weights(&mut state, version, lag);
        state.turn = RoundPosition { own: self.gathered.items(), ..lag.turn };
        if part.ends() {
            state.sums = begun(&mut self.gathered.terms, &mut self.executor);
        }
        if part.makes_gradients() {
            // A program need not contain a recompute instruction.
            self.again(&mut state)?;
            self.executor.backward_input(&mut state)?;
        }
        if part.ends() {
            self.executor.backward_weight(&mut state)?;
            // The states use the samples in the same update as the gradients.
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

    /// Frees a micro-batch once its backward is done and its last message is posted.
    fn release(&mut self, item: u32) {
        let is_over = |state: &mut Item| state.is_done && state.gradients_out.iter().all(Option::is_none);
        let waits = !self.code.gradients_out.is_empty();
        let over = self.items.get_mut(&item).is_some_and(|state| if waits { is_over(state) } else { state.is_done });
        if over && let Some(state) = self.items.remove(&item) {
            self.executor.finish(state);
        }
    }

    /// The tensors of a micro-batch for another stage.
    pub fn parcels(&mut self, item: u32, kind: Payload, other: StageId) -> Vec<TensorMessage> {
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
            parcels.push(TensorMessage { value: t.value, group: t.group, buffer });
        }
        parcels
    }

    /// Marks gradients for a stage as sent, in any order. After the last send the micro-batch is freed.
    pub fn sent_gradients(&mut self, item: u32, other: StageId) {
        let Some(state) = self.items.get_mut(&item) else { return };
        for (slot, t) in state.gradients_out.iter_mut().zip(&self.code.gradients_out) {
            if t.stage == other.index()
                && let Some(buffer) = slot.take()
            {
                self.executor.pool.give(buffer);
            }
        }
        self.release(item);
    }

    /// Stores the tensors received from another stage.
    pub fn unpack(&mut self, other: StageId, kind: Payload, item: u32, parcels: Vec<TensorMessage>) {
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
                // On separate devices sender and receiver each hold a copy, so both count one here. The sender reads an
                // activation again.
                ledger.take_place(parcel.buffer.len());
                if kind == Payload::Gradient {
                    parcel.buffer.release_slot();
                }
                slots[at] = Some(parcel.buffer);
            }
        }
    }

    /// Prepares a round's gradients for the step and contributes those of tied parameters. A worker prepares all its
    /// stages before any steps, since two of them may share a parameter.
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

    /// Sums a prepared round's gradients, including other stages' terms of tied parameters if all step together. A
    /// worker gathers all its stages after preparing them.
    pub fn gather(&mut self, round: u32) -> Result<(), PeerLost> {
        if self.ready.get(&round).is_none_or(|ready| ready.totals.is_some()) {
            return Ok(());
        }
        let Some(Ready { by_parameter: mut terms, samples, .. }) = self.ready.remove(&round) else { return Ok(()) };
        for tied in self.tied.iter().filter(|tied| tied.holders.is_empty()) {
            terms[tied.parameter] = tied.place.meet(u64::from(round) + 1)?.iter().flatten().cloned().collect();
        }
        // With streaming, all but a shard of each gradient is freed.
        let (stays, pool) = (self.executor.pieces.is_none(), &mut self.executor.pool);
        let parameters = self.code.parameters.iter();
        let totals =
            terms.into_iter().zip(parameters).map(|(terms, named)| total(pool, named.fact.dtype, terms, stays));
        let totals = totals.collect();
        self.ready.insert(round, Ready { by_parameter: Vec::new(), totals: Some(totals), samples });
        Ok(())
    }

    /// Sums of squares of a round's gathered gradients. Blocks for the other tensor-parallel ranks.
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

    /// Total sum of squares of a round's gathered gradients. Blocks for the other replicas if gradients are sharded.
    pub fn sum_of_squares(&self, round: u32) -> Result<f64, PeerLost> {
        let own = self.squares(round)?;
        match &self.norms {
            Some(norms) => norms.sum(round, own),
            None => Ok(own.iter().fold(0.0, |sum, (_, square)| sum + square)),
        }
    }

    /// Runs the optimizer step and updates the states. The round must have been gathered.
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
            let is_stepped = |p: &usize| step.factor.is_some() && self.share.is_sharded(*p) && totals[*p].is_some();
            let parameters = (0..old.len()).filter(is_stepped).collect();
            self.stepped.insert(to, Stepped { parameters, buckets: self.gathered.buckets() });
        }
        self.gradients.clear();
        for late in &mut self.late {
            late.waiting.push_back(step);
        }
        for (p, weight) in old.drain(..).enumerate() {
            new.push(match totals[p].take() {
                // A parameter without a gradient stays unchanged.
                None => weight,
                Some(gradient) => self.apply(p, weight, gradient, step),
            });
        }
        self.versions.insert(to, new);
        self.put(to);
        if step.factor.is_none() {
            // A skipped step does not count as an update.
            self.uncounted.iter_mut().for_each(|more| *more += 1);
            return;
        }
        let states = (&mut self.executor.states[..], &self.code.states[..]);
        follow(self.policy.statistics, &self.code.follows, states, &samples, self.microbatches);
    }

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
        // After a resume, the update count continues from the checkpoint.
        let counted = u32::try_from(i64::from(step.round) + 1 - self.uncounted[p]).unwrap_or(1);
        let update = Update { dtype: wide(dtype), gradient: gradient.bytes(), scale, step: counted, rate: step.rate };
        if step.in_place {
            self.drop_weight(&weight);
        }
        let next = self.stepper.step(p, weight, update, &mut self.executor.pool);
        if self.keeps_gradients {
            self.gradients.push((p, scaled(dtype, gradient.bytes(), scale)));
        }
        self.executor.pool.give(gradient);
        next
    }
}
