//! The state of one pipeline stage on one worker: executor, micro-batches in flight, weight versions, gradient sums.
//!
//! A worker owns one `StageWorker` per stage and carries messages between them and the other workers. Only tied weights
//! make it block: the optimizer step, or the forward pass that needs it, waits for the gradients of every stage that
//! shares the parameter.

use crate::checkpoint::ResumeState;
use crate::comm::tensor_group::TensorRank;
use crate::data::Batches;
use crate::device::api::Device;
use crate::device::buffer::Buffer;
use crate::device::download::Download;
use crate::device::error::DeviceError;
use crate::device::layout::accumulation_type;
use crate::device::memory_counter::MemoryCounter;
use crate::device::optimizer::{Prediction, StepArgs};
use crate::device::region::Region;
use crate::exec::executor::{ExecuteError, Executor, Item, Weights};
use crate::exec::moving_average::{Samples, update_states};
use crate::exec::phase::RoundPosition;
use crate::exec::stage_code::StageCode;
use crate::exec::stage_tensor::{StageTensor, StageTensors};
use crate::optim::grad_norm::{Squares, sum_of_squares};
use crate::optim::optimizer::Optimizer;
use crate::optim::policy::{Policy, Staleness};
use crate::optim::update::{ParameterStep, ParameterUpdater};
use crate::stage::gradient_buckets::{ReplicaGradients, RoundGradients};
use crate::stage::gradients::{GradientTerms, lend_sums, scaled_copy, sum_terms};
use crate::stage::lag::Lag;
use crate::stage::optimizer_step::OptimizerStep;
use crate::stage::pending_snapshots::PendingSnapshots;
use crate::stage::shard_versions::Stepped;
use crate::stage::stage_comms::StageComms;
use crate::stage::tied_parameter::{LateTiedWeight, TiedParameter};
use crate::zero::shard::ShardRange;
use crate::zero::streaming::ShardStream;
use compiler::pass::loss::{LOSS, LOSS_SCALE};
use compiler::plan::StageId;
use compiler::schedule::action::Phase;
use compiler::tensor::DType;
use compiler::tensor::fact::Fact;
use compiler::tensor::view::{View, ViewMut};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

pub struct StageSetup<'a> {
    pub stage: StageId,
    /// The worker's device, which holds all tensors below.
    pub device: Arc<dyn Device>,
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
    pub comms: StageComms,
    /// The replica's parameter shards.
    pub shard: ShardRange,
    pub tied: Vec<TiedParameter>,
    /// Number among the replicas of the stage.
    pub replica: usize,
    /// Restored state of a resumed run.
    pub resume: Option<ResumeState>,
    /// The worker's tensor-parallel rank, if the stage is tensor-parallel.
    pub tensor_rank: Option<Arc<TensorRank>>,
}

/// Gradients of a round about to be applied: terms by parameter, and their totals once gathered.
struct Ready {
    by_parameter: Vec<GradientTerms>,
    totals: Option<Vec<Option<Arc<Buffer>>>>,
    samples: Vec<Samples>,
}

/// The loss of a micro-batch.
struct PendingLoss {
    item: u32,
    fact: Fact,
    copy: Download,
}

pub struct StageWorker<'a> {
    pub stage: StageId,
    pub(super) code: &'a StageCode,
    pub(super) comms: StageComms,
    pub(super) shard: ShardRange,
    pub(super) shard_stream: Option<Arc<ShardStream>>,
    /// Versions that are not gathered completely.
    pub(super) stepped: BTreeMap<u32, Stepped>,
    pub(super) tied: Vec<TiedParameter>,
    pub(super) late_weights: Vec<LateTiedWeight>,
    pub(super) is_first: bool,
    numbers: Vec<usize>,
    pub(super) config: StageConfig<'a>,
    pub(super) executor: Executor<'a>,
    pub(super) items: HashMap<u32, Item>,
    pub(super) versions: BTreeMap<u32, Weights>,
    /// Gradients of the current round, and rounds reduced over replicas.
    pub(super) round_gradients: RoundGradients,
    pub(super) reduced: HashMap<u32, ReplicaGradients>,
    /// Rounds prepared for their step.
    ready: HashMap<u32, Ready>,
    pub(super) updater: ParameterUpdater<'a>,
    /// By parameter: version number minus number of updates.
    pub(super) skipped_updates: Vec<i64>,
    pub(super) gradients: Vec<(usize, Buffer)>,
    /// Moving-average samples of micro-batches whose backward has not run.
    samples: HashMap<u32, Download>,
    /// Losses on their way to the host, oldest first.
    losses: VecDeque<PendingLoss>,
    pub(super) snapshots: PendingSnapshots,
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

impl<'a> StageWorker<'a> {
    /// Creates a stage at the start of a run. `counter` counts its memory, `snapshot_counter` the memory of its snapshots.
    pub fn new(
        setup: StageSetup<'a>,
        config: StageConfig<'a>,
        (counter, snapshot_counter): (&Arc<MemoryCounter>, &Arc<MemoryCounter>),
    ) -> Result<StageWorker<'a>, DeviceError> {
        let (code, shard, comms, replica) = (setup.code, setup.shard, setup.comms, setup.replica);
        let (mut first, mut resume) = (setup.weights, setup.resume);
        let state_bytes: usize = setup.states.iter().map(Buffer::len).sum();
        let mut executor = Executor::new(code, setup.states, &setup.device, counter.clone())?;
        executor.tensor_rank = setup.tensor_rank;
        let mut shard_stream = None;
        if let Some(gradient_shards) = &comms.gradient_shards {
            let version = resume.as_ref().map_or(0, |resume| resume.version);
            let last = if config.flushes { version } else { u32::MAX };
            gradient_shards.enter(shard.rank(), &setup.device, counter, last);
            let stream =
                Arc::new(ShardStream::new(code, shard.clone(), gradient_shards.clone(), setup.ends_with_round));
            executor.step_hook = Some(stream.clone());
            shard_stream = Some(stream);
        }
        let (staleness, masters) = ((config.policy.staleness, setup.delay), setup.masters);
        let updater =
            ParameterUpdater::new(code, config.optimizer, masters, staleness, shard.clone(), &executor.device)?;
        counter.add(updater.bytes() + state_bytes + code.arena_bytes);
        if shard.shards_weights {
            let shards = shard.shard_weights(&code.parameters, &first, &executor.device)?;
            // Older versions of a resumed run stay unsharded.
            if let Some(resume) = &mut resume {
                let versions = std::mem::take(&mut resume.unknown_versions);
                resume.versions.extend(versions.into_iter().map(|version| (version, first.clone())));
            }
            first = shards;
        }
        first.iter_mut().filter_map(Arc::get_mut).for_each(|weight| weight.count_in(counter));
        let gradient_bytes: usize =
            code.gradient_terms.iter().map(|term| code.parameters[term.parameter].gradient().1).sum();
        if let Some(all_reduce) = &comms.all_reduce {
            all_reduce.enter(shard.rank(), &setup.device, gradient_bytes, counter)?;
        }
        if let Some(across) = &comms.across_groups {
            let bytes = gradient_bytes / shard.degree.max(1);
            across.enter(shard.group(), &setup.device, bytes, counter)?;
        }
        let mut late_weights = Vec::new();
        for (index, shared) in setup.tied.iter().enumerate().filter(|(_, shared)| !shared.holders.is_empty()) {
            // The stage's weight versions hold an empty buffer for it.
            let weight = std::mem::replace(&mut first[shared.parameter], Arc::new(Buffer::empty()));
            let parameter = shared.parameter;
            let recent = BTreeMap::from_iter((config.window > 0).then(|| (0, weight.clone())));
            let (steps, restored) = (VecDeque::new(), BTreeMap::new());
            late_weights.push(LateTiedWeight { tied: index, parameter, weight, version: 0, steps, restored, recent });
        }
        let mut stage_worker = StageWorker {
            stage: setup.stage,
            code,
            comms,
            shard,
            shard_stream,
            stepped: BTreeMap::new(),
            tied: setup.tied,
            late_weights,
            is_first: replica == 0,
            numbers: setup.numbers,
            config,
            executor,
            items: HashMap::new(),
            versions: BTreeMap::from([(0, first)]),
            round_gradients: RoundGradients::new(code, setup.buckets),
            reduced: HashMap::new(),
            ready: HashMap::new(),
            updater,
            skipped_updates: vec![0; code.parameters.len()],
            gradients: Vec::new(),
            samples: HashMap::new(),
            losses: VecDeque::new(),
            snapshots: PendingSnapshots::new(config.window, snapshot_counter),
        };
        if let Some(resume) = resume {
            stage_worker.restore(resume)?;
        }
        stage_worker.publish_shards(stage_worker.newest_version())?;
        Ok(stage_worker)
    }

    /// Runs pending steps of tied weights and returns the final weights, states and gradients.
    pub fn into_result(mut self) -> Result<StageTensors, DeviceError> {
        self.finish()?;
        let weights = self.take_newest();
        let (mut weights, mut gradients) = (self.updater.final_weights(weights), std::mem::take(&mut self.gradients));
        self.gather_final_shards(&mut weights, &mut gradients)?;
        self.executor.device.stream.finish()?;
        let weights = weights.into_iter().enumerate().map(|(p, weight)| (StageTensor::Weight(p), weight));
        let states = self.executor.states.into_iter().map(Arc::new).enumerate();
        let states = states.map(|(index, state)| (StageTensor::State(index), state));
        let gradients = gradients.into_iter().map(|(p, gradient)| (StageTensor::Gradient(p), Arc::new(gradient)));
        Ok(weights.chain(states).chain(gradients).collect())
    }

    /// Waits for the work of the stage, and returns the first failure of its kernels.
    pub fn finish_work(&self) -> Result<(), DeviceError> {
        self.executor.device.stream.finish()
    }

    fn take_newest(&mut self) -> Weights {
        let mut weights = self.versions.pop_last().map(|(_, weights)| weights).unwrap_or_default();
        for late in self.late_weights.drain(..) {
            weights[late.parameter] = late.weight;
        }
        weights
    }

    pub fn has_version(&self, version: u32) -> bool {
        self.versions.contains_key(&version)
    }

    /// True if the weights for the micro-batch's forward exist.
    pub fn can_run(&self, item: u32, version: u32) -> bool {
        self.has_version(version) || self.snapshots.forwards.contains_key(&item)
    }

    /// Frees a weight version.
    pub fn drop_version(&mut self, version: u32) {
        self.release_version(version);
        for buffer in self.versions.remove(&version).unwrap_or_default() {
            if !self.drop_weight(&buffer) {
                self.executor.device.give(buffer);
            }
        }
    }

    pub(super) fn item(&mut self, item: u32) -> Result<&mut Item, DeviceError> {
        Ok(match self.items.entry(item) {
            Entry::Occupied(occupied) => occupied.into_mut(),
            Entry::Vacant(vacant) => vacant.insert(self.executor.begin()?),
        })
    }

    /// Loads the data of a micro-batch. `scale` is the loss scale, if the graph has that input.
    pub fn load(&mut self, batches: &Batches, item: u32, scale: f64) -> Result<(), DeviceError> {
        let mut feeds = Vec::new();
        for feed in &self.code.feeds {
            let mut buffer = self.executor.device.take(feed.bytes)?;
            self.executor.device.stream.upload_with(Buffer::exclusive(&mut buffer), &mut |bytes| match feed.name
                == LOSS_SCALE
            {
                true => ViewMut::new(feed.fact.dtype, &[1], bytes).set_f64(0, scale),
                false => batches.fill(&feed.name, item, bytes),
            })?;
            feeds.push(buffer);
        }
        self.item(item)?.feeds = feeds;
        Ok(())
    }

    /// The weights for a micro-batch's forward, and true if they are predicted or restored.
    pub(super) fn weights_of(&mut self, item: u32, version: u32, lag: Lag) -> Result<(Weights, bool), DeviceError> {
        if let Some(weights) = self.snapshots.forwards.remove(&item) {
            return Ok((weights, true));
        }
        let mut weights = self.versions.get(&version).cloned().unwrap_or_default();
        for late in &self.late_weights {
            weights[late.parameter] = late.weight.clone();
        }
        let predicts = self.config.policy.staleness == Staleness::Predict && lag.updates > 0;
        if predicts {
            let updates_done = |p: usize| u32::try_from(i64::from(version) - self.skipped_updates[p]).unwrap_or(0);
            let prediction = |p: usize| {
                let dtype = self.code.parameters[p].fact.dtype;
                Prediction { dtype, steps: lag.updates, made: updates_done(p), rate: lag.rate }
            };
            weights = self.updater.predict(&weights, prediction, &self.executor.device)?;
        }
        Ok((weights, predicts))
    }

    /// Runs the forward of a micro-batch with `version`. If this stage computes the loss, [`StageWorker::losses`] gives
    /// it later. If `is_after_checkpoint` is set, the micro-batch follows a checkpoint, which keeps the forward's weights.
    pub fn forward(
        &mut self,
        item: u32,
        version: u32,
        lag: Lag,
        is_after_checkpoint: bool,
    ) -> Result<(), ExecuteError> {
        let (weights, predicts) = self.weights_of(item, version, lag)?;
        if is_after_checkpoint {
            self.keep_weights(item, version, &weights, predicts)?;
        }
        self.item(item)?;
        let Some(state) = self.items.get_mut(&item) else { return Ok(()) };
        (state.weights, state.version) = (weights, version);
        self.executor.forward(state)?;
        if !self.code.state_updates.is_empty() {
            let samples = self.code.state_updates.iter().map(|follow| self.executor.result(state, follow.sample));
            let samples = self.executor.device.stream.begin_download_all(&samples.collect::<Vec<_>>())?;
            self.samples.insert(item, samples);
        }
        for (named, address) in self.code.results.iter().filter(|(n, _)| n.name == LOSS) {
            let copy = self.executor.download_result(state, *address)?;
            self.losses.push_back(PendingLoss { item, fact: named.fact.clone(), copy });
        }
        // The activations are recomputed before the backward.
        if let (true, Some(state)) = (self.code.recompute, self.items.get_mut(&item)) {
            self.executor.free_recomputed(state);
        }
        if lag.is_stashed {
            return Ok(());
        }
        // Without stashing, the backward does not use these.
        let weights = self.items.get_mut(&item).map(|state| std::mem::take(&mut state.weights)).unwrap_or_default();
        if predicts {
            weights.into_iter().for_each(|weight| self.executor.device.give(weight));
        }
        Ok(())
    }

    /// Losses that have arrived since the last call, with their micro-batches, oldest first. If more than `limit` are under
    /// way, it waits until half as many are, so that the host waits rarely.
    pub fn losses(&mut self, limit: usize) -> Result<Vec<(u32, f64)>, DeviceError> {
        if self.losses.len() > limit {
            self.losses[self.losses.len() - limit / 2 - 1].copy.wait()?;
        }
        let mut arrived = Vec::new();
        while let Some(first) = self.losses.front() {
            if !first.copy.is_done()? {
                break;
            }
            let Some(PendingLoss { item, fact, copy }) = self.losses.pop_front() else { break };
            let shape = fact.concrete().unwrap_or_default();
            arrived.push((item, View::new(fact.dtype, &shape, &copy.bytes()?).f64(0)));
        }
        Ok(arrived)
    }

    /// Runs the backward or one phase of it, with the stashed weights of the forward, or with `version` if none are
    /// stashed.
    pub fn backward(&mut self, item: u32, phase: Phase, version: u32, lag: Lag) -> Result<(), ExecuteError> {
        let Some(mut state) = self.items.remove(&item) else { return Ok(()) };
        self.take_weights(&mut state, version, lag)?;
        state.position = RoundPosition { done: self.round_gradients.items, ..lag.position };
        if phase.ends() {
            state.sums = lend_sums(&mut self.round_gradients.terms, &self.executor, self.shard_stream.as_deref())?;
        }
        if phase.makes_gradients() {
            // A program need not contain a recompute instruction.
            self.recompute_activations(&mut state)?;
            self.executor.backward_input(&mut state)?;
        }
        if phase.ends() {
            self.executor.backward_weight(&mut state)?;
            // The states use the samples in the same update as the gradients.
            self.round_gradients.samples.extend(self.samples.remove(&item).map(|samples| (item, samples)));
            let failed = |fault| ExecuteError { node: "the gradients of parameters".to_string(), fault };
            self.round_gradients.add(&self.executor, self.shard_stream.as_deref(), &mut state).map_err(failed)?;
            self.contribute_due()?;
        }
        self.give_weights(&mut state, lag);
        self.items.insert(item, state);
        self.release(item)?;
        Ok(())
    }

    /// Frees a micro-batch once its backward is done and its last message is posted.
    pub(super) fn release(&mut self, item: u32) -> Result<(), DeviceError> {
        let is_sent = |state: &mut Item| state.is_done && state.gradients_out.iter().all(Option::is_none);
        let sends_gradients = !self.code.gradients_out.is_empty();
        let is_finished =
            self.items.get_mut(&item).is_some_and(|state| if sends_gradients { is_sent(state) } else { state.is_done });
        if is_finished && let Some(state) = self.items.remove(&item) {
            self.executor.finish(state)?;
        }
        Ok(())
    }

    /// Prepares a round's gradients for the step and contributes those of tied parameters. A worker prepares all its
    /// stages before any steps, since two of them may share a parameter.
    pub fn prepare(&mut self, round: u32) -> Result<(), DeviceError> {
        if self.ready.contains_key(&round) {
            return Ok(());
        }
        let ReplicaGradients { terms, mut samples } = match self.reduced.remove(&round) {
            Some(reduced) => reduced,
            None => self.contribution(round)?,
        };
        samples.sort_by_key(|(item, _)| *item);
        let mut by_parameter: Vec<GradientTerms> = vec![Vec::new(); self.code.parameters.len()];
        for (term, sum) in self.code.gradient_terms.iter().zip(terms) {
            if let Some(sum) = sum {
                by_parameter[term.parameter].push((term.rank, sum));
            }
        }
        for tied in self.tied.iter().filter(|tied| tied.holders.is_empty()) {
            let terms = std::mem::take(&mut by_parameter[tied.parameter]);
            tied.contribute(u64::from(round) + 1, terms, self.is_first, &self.executor.device)?;
        }
        self.ready.insert(round, Ready { by_parameter, totals: None, samples });
        Ok(())
    }

    /// Sums a prepared round's gradients, including other stages' terms of tied parameters if all step together. A
    /// worker gathers all its stages after preparing them.
    pub fn gather(&mut self, round: u32) -> Result<(), DeviceError> {
        if self.ready.get(&round).is_none_or(|ready| ready.totals.is_some()) {
            return Ok(());
        }
        let Some(Ready { by_parameter: mut terms, samples, .. }) = self.ready.remove(&round) else { return Ok(()) };
        let mut contributed = Vec::new();
        for tied in self.tied.iter().filter(|tied| tied.holders.is_empty()) {
            let (summands, own) = tied.wait(u64::from(round) + 1)?;
            terms[tied.parameter] = summands;
            contributed.extend(own.into_iter().map(|(_, own)| own));
        }
        // With streaming, all but a shard of each gradient is freed.
        let (is_pooled, device) = (self.shard_stream.is_none(), &self.executor.device);
        let parameters = self.code.parameters.iter();
        let totals = terms
            .into_iter()
            .zip(parameters)
            .map(|(terms, named)| sum_terms(device, named.fact.dtype, terms, is_pooled));
        let totals: Vec<Option<Arc<Buffer>>> = totals.collect::<Result<_, _>>()?;
        for own in contributed {
            // Others may still read it. On separate devices they would have copies.
            if !totals.iter().flatten().any(|total| Arc::ptr_eq(total, &own)) {
                own.release_slot();
            }
            device.give(own);
        }
        self.ready.insert(round, Ready { by_parameter: Vec::new(), totals: Some(totals), samples });
        Ok(())
    }

    /// Sums of squares of a round's gathered gradients. Blocks for the other tensor-parallel ranks.
    pub fn squares(&self, round: u32) -> Result<Squares, DeviceError> {
        let totals = self.ready.get(&round).and_then(|ready| ready.totals.as_ref());
        let (mut numbers, mut names, mut gradients) = (Vec::new(), Vec::new(), Vec::<(DType, Region<'_>)>::new());
        for ((total, number), named) in totals.into_iter().flatten().zip(&self.numbers).zip(&self.code.parameters) {
            if let Some(total) = total {
                numbers.push(*number);
                names.push(named.name.as_str());
                gradients.push((accumulation_type(named.fact.dtype), total.region()));
            }
        }
        let squares = self.executor.device.stream.squared_norms(&gradients)?;
        let mut numbered_squares: Squares = numbers.into_iter().zip(squares).collect();
        if let Some(tensor_rank) = self.executor.tensor_rank.as_ref().filter(|_| !numbered_squares.is_empty()) {
            let parts: Vec<f64> = numbered_squares.iter().map(|(_, square)| *square).collect();
            let group_squares = tensor_rank.whole_squares(&names, &parts)?;
            numbered_squares.iter_mut().zip(group_squares).for_each(|((_, square), whole)| *square = whole);
        }
        Ok(numbered_squares)
    }

    /// Total sum of squares of a round's gathered gradients. Blocks for the other replicas if gradients are sharded.
    pub fn sum_of_squares(&self, round: u32) -> Result<f64, DeviceError> {
        let squares = self.squares(round)?;
        match &self.comms.norms {
            Some(norms) => Ok(sum_of_squares(norms, self.shard.rank(), round, squares)?),
            None => Ok(squares.iter().fold(0.0, |sum, (_, square)| sum + square)),
        }
    }

    /// Runs the optimizer step and updates the states. The round must have been gathered.
    pub fn update(&mut self, step: OptimizerStep) -> Result<(), DeviceError> {
        let to = step.round + 1;
        let mut old = self.versions.get(&step.from).cloned().unwrap_or_default();
        if step.in_place {
            self.release_version(step.from);
            self.versions.remove(&step.from);
        }
        let ready = self.ready.remove(&step.round);
        let Some(Ready { totals: Some(mut totals), samples, .. }) = ready else { return Ok(()) };
        if self.comms.shard_comm.is_some() {
            let is_stepped = |p: &usize| step.factor.is_some() && self.shard.is_sharded(*p) && totals[*p].is_some();
            let parameters = (0..old.len()).filter(is_stepped).collect();
            self.stepped.insert(to, Stepped { parameters, buckets: self.round_gradients.buckets });
        }
        self.gradients.clear();
        for late in &mut self.late_weights {
            late.steps.push_back(step);
        }
        // A parameter without a gradient stays unchanged.
        let changes: Vec<usize> = (0..old.len()).filter(|p| totals[*p].is_some()).collect();
        let take_parameter =
            |p: &usize| Some((*p, std::mem::replace(&mut old[*p], Arc::new(Buffer::empty())), totals[*p].take()?));
        let gradients = changes.iter().filter_map(take_parameter).collect();
        let new = self.apply(gradients, step)?;
        changes.into_iter().zip(new).for_each(|(p, weight)| old[p] = weight);
        self.versions.insert(to, old);
        self.publish_shards(to)?;
        if step.factor.is_none() {
            // A skipped step does not count as an update.
            self.skipped_updates.iter_mut().for_each(|skipped| *skipped += 1);
            return Ok(());
        }
        let states = (&mut self.executor.states[..], &self.code.states[..]);
        let (stream, config) = (&*self.executor.device.stream, self.config);
        update_states(stream, config.policy.statistics, &self.code.state_updates, states, &samples, config.microbatches)
    }

    /// Updates parameters, given with their weights and gradients. Returns the new weights.
    pub(super) fn apply(
        &mut self,
        parameters: Vec<(usize, Arc<Buffer>, Arc<Buffer>)>,
        step: OptimizerStep,
    ) -> Result<Weights, DeviceError> {
        let device = &self.executor.device;
        let Some(factor) = step.factor else {
            let unchanged = |(_, weight, gradient)| device.give_shared(gradient).map(|()| weight);
            return parameters.into_iter().map(unchanged).collect();
        };
        let scale = factor / f64::from(step.count.max(1));
        let mut steps = Vec::with_capacity(parameters.len());
        for (parameter, weight, gradient) in parameters {
            let dtype = self.code.parameters[parameter].fact.dtype;
            // After a resume, the update count continues from the checkpoint.
            let update_count = u32::try_from(i64::from(step.round) + 1 - self.skipped_updates[parameter]).unwrap_or(1);
            let args = StepArgs { dtype: accumulation_type(dtype), scale, step: update_count, rate: step.rate };
            if step.in_place {
                self.drop_weight(&weight);
            }
            if self.config.keeps_gradients {
                self.gradients.push((parameter, scaled_copy(device, dtype, &gradient, scale)?));
            }
            steps.push(ParameterStep { parameter, weight, gradient, args });
        }
        self.updater.step(steps, device)
    }
}
