//! The worker: a loop over the instructions of its program. It makes no decisions.
//!
//! It owns a [`StageWorker`] per stage and carries messages between them and the other workers. It waits for messages and for the
//! other members of a communicator; both waits end when the peer delivers or fails.

use crate::checkpoint::StageSnapshot as CheckpointPart;
use crate::checkpoint::barrier::MinibatchBarrier;
use crate::checkpoint::points::Cuts;
use crate::comm::channel::{Incoming, Message, Outgoing};
use crate::comm::communicator::{Communicator, PEER_LOST};
use crate::data::Batches;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use crate::exec::phase::RoundPosition;
use crate::exec::stage_tensor::StageTensors;
use crate::optim::grad_norm::{LossScale, Squares, clip_factor, sum_of_squares};
use crate::stage::gradient_buckets::PostedBucket;
use crate::stage::lag::Lag;
use crate::stage::optimizer_step::OptimizerStep;
use crate::stage::saved_weights::Checkpoint;
use crate::stage::snapshot::CheckpointPoint;
use crate::stage::stage_worker::{StageConfig, StageSetup, StageWorker};
use crate::stage::worker_error::WorkerError;
use compiler::plan::StageId;
use compiler::schedule::action::Phase;
use compiler::schedule::resume::{minibatch, version_at, versions_before};
use compiler::schedule::semantics::{Rule, dealt};
use compiler::schedule::{EdgeId, Instruction, MicrobatchId, Payload, Program, Token, Version, WorkerId};
use crossbeam_channel::Sender;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

/// Channel endpoint: edge, direction and peer.
pub type Key = (EdgeId, Payload, WorkerId);

pub struct WorkerContext<'a> {
    pub id: WorkerId,
    /// Display name of the worker, with its tensor-parallel rank if it has one.
    pub name: String,
    pub program: &'a Program,
    pub stages: Vec<StageSetup<'a>>,
    pub outgoing: HashMap<Key, Outgoing>,
    pub incoming: HashMap<Key, Incoming>,
    pub batches: &'a Batches,
    pub config: StageConfig<'a>,
    /// Norm all-reduce of all workers before a step, for clipping or loss scaling.
    pub norms: Option<Arc<Communicator<Squares>>>,
    pub scales_loss: bool,
    /// Receiver of losses, steps and checkpoints.
    pub events: Sender<Event>,
    /// Start of the run; spans are relative to it.
    pub epoch: Instant,
    /// Current instruction of every worker's ranks.
    pub progress: Arc<Vec<AtomicU32>>,
    /// This worker's place in `progress`.
    pub global_rank: usize,
    /// Checkpoint positions, if checkpoints are made.
    pub checkpoints: Option<CheckpointPlan<'a>>,
    /// Loss-scaling state of a resumed run: scale and number of good steps.
    pub scale: Option<(f64, u32)>,
    /// Set to stop all workers early.
    pub is_stopped: &'a AtomicBool,
}

/// Checkpoint positions and the channel for snapshots. Sending blocks while an earlier checkpoint is still being
/// written, so slow disks do not fill memory.
#[derive(Clone)]
pub struct CheckpointPlan<'a> {
    /// Minibatches after which checkpoints are made; `None` only checkpoints at a stop.
    pub cuts: Option<Cuts>,
    pub barrier: Option<&'a MinibatchBarrier<'a>>,
    pub snapshots: Sender<CheckpointPart>,
}

/// Progress events of a worker.
#[derive(Debug)]
pub enum Event {
    Loss {
        item: u32,
        value: f64,
    },
    Stepped {
        worker: WorkerId,
        version: u32,
    },
    /// Weights to write, from a `Checkpoint` instruction.
    Checkpoint(Checkpoint),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    Compute(compiler::schedule::action::Work),
    Recompute(StageId, MicrobatchId),
    /// Waiting for a message or a collective.
    Wait,
    /// Optimizer step of a stage to this version.
    Step(StageId, u32),
}

/// A period of a worker's time, in seconds since the start of the run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    pub work: Work,
    pub start: f64,
    pub end: f64,
}

/// Minibatches by which the host may be ahead of a device, for which it waits then.
const LATE_MINIBATCHES: usize = 2;

/// Maximum spans recorded per worker; a long run must not fill memory with them.
pub const MOST_SPANS: usize = 1 << 20;

pub struct WorkerResult {
    /// Results of its stages, in order.
    pub stages: Vec<StageTensors>,
    pub spans: Vec<Span>,
    /// Peak bytes: weight versions, gradients, optimizer state, in-flight micro-batches, messages, arenas.
    pub peak_memory_bytes: u64,
    /// Peak bytes of snapshots that were not yet written.
    pub checkpoint_bytes: u64,
}

enum Pending {
    /// Message `number` of its channel.
    Sent {
        key: Key,
        number: u64,
        /// Sent gradients, which are charged to the receiver once received.
        gradients: Vec<Arc<Buffer>>,
    },
    Message {
        edge: EdgeId,
        item: u32,
        kind: Payload,
        peer: WorkerId,
    },
    Reduce {
        stage: StageId,
        round: u32,
        bucket: u32,
    },
    Gather {
        stage: StageId,
        version: u32,
        bucket: u32,
    },
}

struct Worker<'a> {
    context: WorkerContext<'a>,
    name: String,
    stage_workers: Vec<StageWorker<'a>>,
    pending: HashMap<Token, Pending>,
    spans: Vec<Span>,
    rule: Rule,
    scale: Option<LossScale>,
    /// Last round whose gradient factor was agreed on, with the factor.
    agreed: Option<(u32, Option<f64>)>,
    /// Number of minibatches that the stop control has admitted.
    entered: u32,
}

pub fn run(mut context: WorkerContext<'_>) -> Result<WorkerResult, WorkerError> {
    let name = context.name.clone();
    let instructions = &context.program.workers[context.id.index()].instructions;
    let (counter, snapshot_counter) = (Arc::<MemoryCounter>::default(), Arc::<MemoryCounter>::default());
    let setups = std::mem::take(&mut context.stages);
    let (config, counters) = (context.config, (&counter, &snapshot_counter));
    let stage_workers = setups.into_iter().map(|setup| StageWorker::new(setup, config, counters));
    let stage_workers = stage_workers.collect::<Result<_, _>>();
    let stage_workers = stage_workers.map_err(|fault| WorkerError::Device { worker: name.clone(), fault })?;
    let scaling = context.config.policy.loss_scaling;
    let scale = context.scale.map_or(LossScale::new(scaling), |saved| LossScale::resumed(scaling, saved));
    let (rule, scale) = (Rule::of(context.program), context.scales_loss.then_some(scale));
    let mut worker = Worker {
        name,
        stage_workers,
        pending: HashMap::new(),
        spans: Vec::new(),
        rule,
        scale,
        agreed: None,
        entered: 0,
        context,
    };
    for (index, instruction) in instructions.iter().enumerate() {
        worker.context.progress[worker.context.global_rank].store(index as u32, Ordering::Relaxed);
        if worker.context.is_stopped.load(Ordering::Relaxed) {
            return Err(worker.gone());
        }
        match worker.should_run(instruction) {
            true => worker.execute(index, *instruction)?,
            false => worker.skip(*instruction)?,
        }
    }
    worker.send_losses(0)?;
    for stage_worker in &mut worker.stage_workers {
        stage_worker.finish().map_err(|fault| failed(&worker.name, fault))?;
    }
    worker.send_snapshots();
    let stages = worker.stage_workers.into_iter().map(StageWorker::into_result).collect::<Result<_, _>>();
    let stages = stages.map_err(|fault| failed(&worker.name, fault))?;
    let (peak_memory_bytes, checkpoint_bytes) = (counter.peak(), snapshot_counter.peak());
    Ok(WorkerResult { stages, spans: worker.spans, peak_memory_bytes, checkpoint_bytes })
}

/// The error of a worker whose part in a collective, or whose device, failed.
fn failed(worker: &str, fault: DeviceError) -> WorkerError {
    let worker = worker.to_string();
    match fault {
        PEER_LOST => WorkerError::PeerGone { worker },
        fault => WorkerError::Device { worker, fault },
    }
}

impl<'a> Worker<'a> {
    fn execute(&mut self, index: usize, instruction: Instruction) -> Result<(), WorkerError> {
        let start = self.now();
        match instruction {
            Instruction::Load { stage, item } => {
                let (batches, scale) = (self.context.batches, self.scale.map_or(1.0, |scale| scale.value));
                self.on_stage(index, stage, |stage_worker| stage_worker.load(batches, item.0, scale))?;
            }
            Instruction::Forward { .. }
            | Instruction::Backward { .. }
            | Instruction::BackwardInput { .. }
            | Instruction::BackwardWeight { .. } => self.compute(index, instruction)?,
            Instruction::Send { edge, item, kind, peer, token } => {
                let sent = self.send(index, edge, item.0, kind, peer)?;
                self.pending.insert(token, sent);
            }
            Instruction::Recv { edge, item, kind, peer, token } => {
                self.context.incoming.get(&(edge, kind, peer)).ok_or_else(|| self.gone())?.post();
                self.pending.insert(token, Pending::Message { edge, item: item.0, kind, peer });
            }
            Instruction::Wait { token } => {
                let pending = self.pending.remove(&token);
                let pending = pending.ok_or_else(|| self.bug(index, "nothing was posted with this token"))?;
                self.wait(index, pending)?;
            }
            Instruction::AllReduce { stage, round, bucket, token }
            | Instruction::ReduceScatter { stage, round, bucket, token } => {
                let replica = self.context.program.workers[self.context.id.index()].replica;
                let replicas = self.context.program.stages[stage.index()].replicas;
                let items = dealt(self.rule.count(stage, round), replicas, replica);
                let posting = PostedBucket { round, bucket, replica: replica as usize, items };
                self.on_stage(index, stage, |stage_worker| stage_worker.reduce(posting))?;
                self.pending.insert(token, Pending::Reduce { stage, round, bucket });
            }
            Instruction::Step { stage, round, from, to, count, in_place } => {
                if !self.stage_worker(index, stage)?.has_version(from.0) {
                    return Err(self.bug(index, "version is gone"));
                }
                // All steps of a round are adjacent: see `schedule::lower`.
                let (name, stage_workers) = (&self.name, self.stage_workers.iter_mut());
                let mut stage_workers: Vec<&mut StageWorker<'a>> =
                    stage_workers.filter(|stage_worker| stage_worker.has_version(from.0)).collect();
                for stage_worker in &mut stage_workers {
                    stage_worker.prepare(round).map_err(|fault| failed(name, fault))?;
                }
                for stage_worker in stage_workers {
                    stage_worker.gather(round).map_err(|fault| failed(name, fault))?;
                }
                let factor = self.factor(index, stage, round, count)?;
                let rate = self.lr_scale(stage, round);
                let step = OptimizerStep { round, count, rate, from: from.0, in_place, factor };
                self.on_stage(index, stage, |stage_worker| stage_worker.update(step))?;
                if !self.stage_worker(index, stage)?.is_incomplete(to.0) {
                    self.take_snapshot(stage, to.0)?;
                }
                let _ = self.context.events.send(Event::Stepped { worker: self.context.id, version: to.0 });
                self.record_span(Work::Step(stage, to.0), start);
            }
            Instruction::Drop { stage, version } => self.stage_worker(index, stage)?.drop_version(version.0),
            Instruction::Recompute { stage, item, version, .. } => {
                let lag = self.lag(stage, item);
                if !lag.is_stashed && !self.stage_worker(index, stage)?.has_version(version.0) {
                    return Err(self.bug(index, "version is gone"));
                }
                let result = self.stage_worker(index, stage)?.recompute(item.0, version.0, lag);
                result.map_err(|fault| WorkerError::Execute { worker: self.name.clone(), fault })?;
                self.record_span(Work::Recompute(stage, item), start);
            }
            Instruction::Checkpoint { stage, version: Version(version) } => {
                if !self.stage_worker(index, stage)?.has_version(version) {
                    return Err(self.bug(index, "version is gone"));
                }
                if let Some(weights) = self.on_stage(index, stage, |stage_worker| stage_worker.checkpoint(version))? {
                    let _ = self.context.events.send(Event::Checkpoint(Checkpoint { stage, version, weights }));
                }
            }
            Instruction::AllGather { stage, version: Version(version), bucket, token } => {
                self.on_stage(index, stage, |stage_worker| stage_worker.contribute_shards(version, bucket))?;
                self.pending.insert(token, Pending::Gather { stage, version, bucket });
            }
        }
        Ok(())
    }

    fn bug(&self, index: usize, what: &str) -> WorkerError {
        WorkerError::Program { worker: self.name.clone(), at: index, what: what.to_string() }
    }

    fn gone(&self) -> WorkerError {
        WorkerError::PeerGone { worker: self.name.clone() }
    }

    fn stage_worker(&mut self, index: usize, stage: StageId) -> Result<&mut StageWorker<'a>, WorkerError> {
        match self.stage_workers.iter().position(|stage_worker| stage_worker.stage == stage) {
            Some(place) => Ok(&mut self.stage_workers[place]),
            None => Err(self.bug(index, "the stage belongs to another worker")),
        }
    }

    /// Does something with a stage that may fail.
    fn on_stage<T>(
        &mut self,
        index: usize,
        stage: StageId,
        run: impl FnOnce(&mut StageWorker<'a>) -> Result<T, DeviceError>,
    ) -> Result<T, WorkerError> {
        let result = run(self.stage_worker(index, stage)?);
        result.map_err(|fault| failed(&self.name, fault))
    }

    fn compute(&mut self, index: usize, instruction: Instruction) -> Result<(), WorkerError> {
        let start = self.now();
        let Some((work, version, _)) = instruction.work() else { return Ok(()) };
        let (item, phase) = (work.item.0, work.part);
        let lag = self.lag(work.stage, work.item);
        let stage_worker = self.stage_worker(index, work.stage)?;
        let has_weights = match phase {
            Phase::Forward => stage_worker.can_run(item, version.0),
            _ => lag.is_stashed || stage_worker.has_version(version.0),
        };
        if !has_weights {
            return Err(self.bug(index, "version is gone"));
        }
        let is_after_checkpoint = phase == Phase::Forward && self.is_after_checkpoint(work.stage, work.item);
        let result = match phase {
            Phase::Forward => {
                let position =
                    self.stage_workers.iter().position(|stage_worker| stage_worker.stage == work.stage).unwrap_or(0);
                let (rule, stage_worker) = (&self.rule, &mut self.stage_workers[position]);
                let caught_up = stage_worker.catch_up(&|stage| rule.version(stage, work.item).0);
                caught_up.map_err(|fault| failed(&self.name, fault))?;
                stage_worker.forward(item, version.0, lag, is_after_checkpoint)
            }
            _ => self.stage_worker(index, work.stage)?.backward(item, phase, version.0, lag),
        };
        self.send_snapshots();
        result.map_err(|fault| WorkerError::Execute { worker: self.name.clone(), fault })?;
        self.send_losses(LATE_MINIBATCHES * self.context.program.microbatches as usize)?;
        self.record_span(Work::Compute(work), start);
        Ok(())
    }

    fn barrier(&self) -> Option<&'a MinibatchBarrier<'a>> {
        self.context.checkpoints.as_ref()?.barrier
    }

    /// True if an instruction runs; false if the run stops before its minibatch.
    fn should_run(&mut self, instruction: &Instruction) -> bool {
        let Some(barrier) = self.barrier() else { return true };
        match (minibatch(&self.rule, instruction), instruction) {
            (Some(minibatch), _) if minibatch < self.entered => true,
            (Some(minibatch), _) => {
                let is_admitted = barrier.enter(minibatch);
                self.entered = self.entered.max(if is_admitted { minibatch.saturating_add(1) } else { 0 });
                is_admitted
            }
            (None, Instruction::Wait { token }) => self.pending.contains_key(token) || barrier.end().is_none(),
            // The run returns the version of its last minibatch.
            (None, Instruction::Drop { stage, version }) => {
                barrier.end().is_none_or(|end| *version < version_at(&self.rule, *stage, end))
            }
            (None, Instruction::Checkpoint { stage, version }) => {
                barrier.end().is_none_or(|end| *version <= version_at(&self.rule, *stage, end))
            }
            _ => true,
        }
    }

    /// Keeps weights for a skipped forward: a checkpoint at the end of the run needs them after they would be dropped.
    fn skip(&mut self, instruction: Instruction) -> Result<(), WorkerError> {
        let Instruction::Forward { stage, item, version, .. } = instruction else { return Ok(()) };
        let end = self.barrier().and_then(MinibatchBarrier::end);
        let newest = end.map_or(0, |end| version_at(&self.rule, stage, end).0);
        let lag = self.lag(stage, item);
        let name = &self.name;
        let Some(stage_worker) = self.stage_workers.iter_mut().find(|stage_worker| stage_worker.stage == stage) else {
            return Ok(());
        };
        if stage_worker.newest_version() < newest && stage_worker.can_run(item.0, version.0) {
            let rule = &self.rule;
            let caught_up = stage_worker.catch_up(&|stage| rule.version(stage, item).0);
            caught_up.map_err(|fault| failed(name, fault))?;
            stage_worker.keep_forward_weights(item.0, version.0, lag).map_err(|fault| failed(name, fault))?;
        }
        self.send_snapshots();
        Ok(())
    }

    /// Number of minibatches in `rounds` rounds of a stage.
    fn minibatches(&self, stage: StageId, rounds: u32) -> u32 {
        match self.rule.schedule.is_round_robin() {
            true => rounds.saturating_mul(self.rule.stages[stage.index()].replicas),
            false => rounds,
        }
    }

    /// True if the micro-batch follows a checkpoint that the stage has not reached.
    fn is_after_checkpoint(&self, stage: StageId, item: MicrobatchId) -> bool {
        let Some(cuts) = self.context.checkpoints.as_ref().and_then(|plan| plan.cuts) else { return false };
        let Some(stage_worker) = self.stage_workers.iter().find(|stage_worker| stage_worker.stage == stage) else {
            return false;
        };
        let newest = stage_worker.newest_version();
        let minibatch = item.0 / self.rule.microbatches.max(1);
        newest < self.rule.round(stage, item)
            && cuts.after(self.minibatches(stage, newest)).is_some_and(|cut| cut <= minibatch)
    }

    /// Takes a snapshot if there is a checkpoint at this version, which is complete.
    fn take_snapshot(&mut self, stage: StageId, version: u32) -> Result<(), WorkerError> {
        let Some((cuts, barrier)) = self.context.checkpoints.as_ref().map(|plan| (plan.cuts, plan.barrier)) else {
            return Ok(());
        };
        let minibatches = self.minibatches(stage, version);
        let is_end = || barrier.is_some_and(|barrier| barrier.end() == Some(minibatches));
        if !(cuts.is_some_and(|cuts| cuts.is_at(minibatches)) || is_end()) {
            return Ok(());
        }
        // A run whose loss is not finite, or whose kernels failed, ends before this checkpoint is complete.
        self.send_losses(0)?;
        for stage_worker in &self.stage_workers {
            stage_worker.finish_work().map_err(|fault| failed(&self.name, fault))?;
        }
        let next = cuts.and_then(|cuts| cuts.after(minibatches)).unwrap_or(u32::MAX);
        let replica = self.context.program.workers[self.context.id.index()].replica;
        let older = |replica| versions_before(&self.rule, stage, replica, minibatches).map(|(i, v)| (i.0, v.0));
        let point = CheckpointPoint {
            minibatches,
            version,
            replica,
            older: older(replica).collect(),
            first_replica_versions: if replica > 0 {
                older(0).map(|(_, version)| version).collect()
            } else {
                Vec::new()
            },
            next_item: next.saturating_mul(self.rule.microbatches),
            scale: self.scale.map(|scale| scale.saved_state()),
        };
        if let Some(stage_worker) = self.stage_workers.iter_mut().find(|stage_worker| stage_worker.stage == stage) {
            stage_worker.take_snapshot(point).map_err(|fault| failed(&self.name, fault))?;
        }
        self.send_snapshots();
        Ok(())
    }

    /// Sends losses that have arrived. Waits if more than `limit` of a stage are under way.
    fn send_losses(&mut self, limit: usize) -> Result<(), WorkerError> {
        for stage_worker in &mut self.stage_workers {
            for (item, value) in stage_worker.losses(limit).map_err(|fault| failed(&self.name, fault))? {
                let _ = self.context.events.send(Event::Loss { item, value });
            }
        }
        Ok(())
    }

    /// Sends complete snapshots to the writer.
    fn send_snapshots(&mut self) {
        let Some(checkpoints) = &self.context.checkpoints else { return };
        for part in self.stage_workers.iter_mut().flat_map(StageWorker::take_ready_snapshots) {
            // The writer may have failed; training continues.
            let _ = checkpoints.snapshots.send(part);
        }
    }

    /// Staleness of a micro-batch at a stage.
    fn lag(&self, stage: StageId, item: MicrobatchId) -> Lag {
        let round = self.rule.round(stage, item);
        let updates = round.saturating_sub(self.rule.version(stage, item).0);
        let is_stashed = self.context.program.schedule.stashes();
        let replica = self.context.program.workers[self.context.id.index()].replica;
        let count = dealt(self.rule.count(stage, round), self.rule.stages[stage.index()].replicas, replica);
        let position = RoundPosition { round, before: self.rule.place(stage, item), done: 0, count };
        Lag { updates, rate: self.lr_scale(stage, round), is_stashed, position }
    }

    /// The factor on the averaged gradients of this step; `None` skips it. The first step of a round blocks for all
    /// workers if they share a norm.
    fn factor(&mut self, index: usize, stage: StageId, round: u32, count: u32) -> Result<Option<f64>, WorkerError> {
        let clip = self.context.config.policy.clip_norm;
        let count = f64::from(count.max(1));
        let Some(norms) = &self.context.norms else {
            let Some(clip) = clip else { return Ok(Some(1.0)) };
            let sum = self.on_stage(index, stage, |stage_worker| stage_worker.sum_of_squares(round))?;
            return Ok(Some(clip_factor(clip, sum.sqrt() / count)));
        };
        if let Some((_, factor)) = self.agreed.filter(|(of, _)| *of == round) {
            return Ok(factor);
        }
        let squares = self.stage_workers.iter().map(|stage_worker| stage_worker.squares(round));
        let squares = squares.collect::<Result<Vec<_>, _>>().map_err(|fault| failed(&self.name, fault))?;
        let sum = sum_of_squares(norms, self.context.id.index(), round, squares.concat())
            .map_err(|fault| failed(&self.name, fault))?;
        let scale = self.scale.map_or(1.0, |scale| scale.value);
        let is_finite = sum.is_finite() || self.scale.is_none();
        let clip_factor = clip.map_or(1.0, |clip| clip_factor(clip, sum.sqrt() / (count * scale)));
        let agreed = is_finite.then_some(clip_factor / scale);
        if let Some(scale) = &mut self.scale {
            scale.update(is_finite);
        }
        self.agreed = Some((round, agreed));
        Ok(agreed)
    }

    /// This stage and the peer stage of a transfer.
    fn end_stages(&self, edge: EdgeId, kind: Payload, sends: bool) -> (StageId, StageId) {
        let (from, to) = self.context.program.edges[edge.index()];
        if sends == (kind == Payload::Activation) { (from, to) } else { (to, from) }
    }

    fn send(
        &mut self,
        index: usize,
        edge: EdgeId,
        item: u32,
        kind: Payload,
        peer: WorkerId,
    ) -> Result<Pending, WorkerError> {
        let (own_stage, peer_stage) = self.end_stages(edge, kind, true);
        let tensors = self.on_stage(index, own_stage, |stage| stage.tensors_to_send(item, kind, peer_stage))?;
        let message = Message { item, tensors };
        // The sender keeps an activation for its backward.
        let gradients = message.tensors.iter().filter(|_| kind == Payload::Gradient);
        let gradients = gradients.map(|parcel| parcel.buffer.clone()).collect();
        let (gone, key) = (self.gone(), (edge, kind, peer));
        let channel = self.context.outgoing.get_mut(&key).ok_or_else(|| gone.clone())?;
        let number = channel.send(message).map_err(|_| gone)?;
        if kind == Payload::Gradient {
            self.on_stage(index, own_stage, |stage_worker| stage_worker.mark_gradients_sent(item, peer_stage))?;
        }
        Ok(Pending::Sent { key, number, gradients })
    }

    fn wait(&mut self, index: usize, pending: Pending) -> Result<(), WorkerError> {
        let start = self.now();
        match pending {
            Pending::Sent { key, number, gradients } => {
                let gone = self.gone();
                let channel = self.context.outgoing.get_mut(&key).ok_or_else(|| gone.clone())?;
                channel.wait(number).map_err(|_| gone)?;
                gradients.iter().for_each(|buffer| buffer.release_slot());
            }
            Pending::Message { edge, item, kind, peer } => {
                let gone = self.gone();
                let channel = self.context.incoming.get_mut(&(edge, kind, peer)).ok_or_else(|| gone.clone())?;
                let message = channel.take(item).map_err(|_| gone)?;
                let (own_stage, peer_stage) = self.end_stages(edge, kind, false);
                self.on_stage(index, own_stage, |stage_worker| {
                    stage_worker.receive_tensors(peer_stage, kind, item, message.tensors)
                })?;
            }
            Pending::Reduce { stage, round, bucket } => {
                self.on_stage(index, stage, |stage_worker| stage_worker.finish_reduce(round, bucket))?;
            }
            Pending::Gather { stage, version, bucket } => {
                if self.on_stage(index, stage, |stage_worker| stage_worker.receive_shards(version, bucket))? {
                    self.take_snapshot(stage, version)?;
                }
            }
        }
        self.record_span(Work::Wait, start);
        Ok(())
    }

    /// Learning-rate scale at the first minibatch of a round.
    fn lr_scale(&self, stage: StageId, round: u32) -> f64 {
        let program = self.context.program;
        let minibatches = if program.schedule.is_round_robin() { program.stages[stage.index()].replicas } else { 1 };
        let total = program.items / program.microbatches.max(1);
        let minibatch = round.saturating_mul(minibatches);
        let staleness_rate = match program.schedule.stashes() {
            true => 1.0,
            false => self.context.config.policy.staleness.rate(program.stages[stage.index()].cap - 1, minibatch),
        };
        self.context.config.optimizer.rate.factor(minibatch, total) * staleness_rate
    }

    fn now(&self) -> f64 {
        self.context.epoch.elapsed().as_secs_f64()
    }

    fn record_span(&mut self, work: Work, start: f64) {
        let end = self.now();
        if self.spans.len() < MOST_SPANS {
            self.spans.push(Span { work, start, end });
        }
    }
}
