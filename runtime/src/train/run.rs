//! Trains compiled stages under a program: one thread per worker, until all instructions have run.

use crate::checkpoint::resume_point::ResumePoint;
use crate::comm::tensor_group::{GroupRank, Layouts, TensorRank};
use crate::device::api::Device;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::layout::{accumulation_type, is_half};
use crate::exec::evaluate::buffers;
use crate::exec::stage_code::{NamedTensor, StageCode};
use crate::optim::grad_norm::shard_number;
use crate::optim::optimizer::is_trainable;
use crate::process::exchange::Exchange;
use crate::process::placement::rank_name;
use crate::process::process_group::Group;
use crate::process::tensor_links::transport;
use crate::stage::stage_worker::{StageConfig, StageSetup};
use crate::stage::worker;
use crate::stage::worker::{CheckpointPlan, Event, WorkerContext};
use crate::train::channels::{
    RankChannels, RankContext, device_of, max_shards, shard_range, tensor_groups, tied_parameters,
};
use crate::train::error::TrainError;
use crate::train::job::{RunOptions, StepDone, TrainJob, Trained};
use crate::train::losses::LossTracker;
use crate::train::results::{collect, finish, join};
use crate::train::resume::check_states as check_read_states;
use crate::train::validate::{check_instructions, check_parts, check_policy, check_states};
use compiler::graph::{Graph, order};
use compiler::op::NodeId;
use compiler::pass::loss::{LOSS, LOSS_SCALE};
use compiler::plan::StageId;
use compiler::schedule::resume::rest;
use compiler::schedule::semantics::Rule;
use compiler::schedule::{Edge, MicrobatchId, Pipeline, Program, WorkerId};
use compiler::tensor::Tensor;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

/// Maps every op that depends on a source to its stage. Op `i` of `graph` (without loss) is in stage `stages[i]`; loss
/// ops are in the stage of the loss's input.
pub fn placement(graph: &Graph, with_loss: &Graph, stages: &[usize]) -> HashMap<NodeId, usize> {
    let mut stage_of: HashMap<NodeId, usize> = order::numbered(graph).into_iter().zip(stages.iter().copied()).collect();
    for node in order::executed(graph) {
        if let Some(stage) = stage_of.get(&graph.op_of(node)).copied() {
            stage_of.insert(node, stage);
        }
    }
    let loss = with_loss.outputs.iter().rev().find(|output| output.name == LOSS);
    let mut loss_node = loss.or(with_loss.outputs.first()).map(|output| output.value.node);
    while let Some(node) = loss_node.filter(|node| !stage_of.contains_key(node)) {
        loss_node = with_loss.inputs(node).first().map(|input| input.node);
    }
    let last = loss_node.and_then(|node| stage_of.get(&node)).copied().unwrap_or(0);
    for id in order::executed(with_loss) {
        let stage = stage_of.get(&with_loss.op_of(id)).copied().unwrap_or(last);
        stage_of.entry(id).or_insert(stage);
    }
    stage_of
}

/// Replaces the pipeline's edges by those over which the compiled stages send, keeping known transfer times.
pub fn with_edges(mut pipeline: Pipeline, codes: &[StageCode]) -> Pipeline {
    let mut edges = Vec::new();
    for (from, code) in codes.iter().enumerate() {
        let mut bytes: BTreeMap<usize, u64> = BTreeMap::new();
        for t in &code.sent {
            *bytes.entry(t.stage).or_default() += t.address.bytes as u64;
        }
        for (to, forward_bytes) in bytes {
            let existing = pipeline.edges.iter().find(|e| (e.from.index(), e.to.index()) == (from, to)).cloned();
            let mut edge = existing.unwrap_or_else(|| Edge::new(from as u32, to as u32));
            edge.forward_bytes = forward_bytes;
            let gradients = codes[to].gradients_out.iter().filter(|t| t.stage == from);
            edge.backward_bytes = gradients.map(|t| t.address.bytes as u64).sum();
            edges.push(edge);
        }
    }
    pipeline.edges = edges;
    pipeline
}

/// The graph inputs of all stages, each once.
pub fn feeds(codes: &[StageCode]) -> Vec<NamedTensor> {
    let mut feeds: Vec<NamedTensor> = Vec::new();
    for feed in codes.iter().flat_map(|c| &c.feeds) {
        if feeds.iter().all(|f| f.name != feed.name) {
            feeds.push(feed.clone());
        }
    }
    feeds
}

/// Rejects weights that cannot be trained: wrong element types, and non-finite values, which would spread to all
/// results.
pub fn check_weights(codes: &[StageCode], weights: &BTreeMap<String, Tensor>) -> Result<(), TrainError> {
    for named in codes.iter().flat_map(|c| &c.parameters) {
        if !is_trainable(named.fact.dtype) {
            return Err(TrainError::ElementType { name: named.name.clone(), dtype: named.fact.dtype });
        }
        if let Some(tensor) = weights.get(&named.name).filter(|t| t.dtype().is_float()) {
            let view = tensor.view();
            if let Some(value) = (0..view.len()).map(|i| view.f64(i)).find(|v| !v.is_finite()) {
                return Err(TrainError::NotFinite { name: named.name.clone(), value });
            }
        }
    }
    Ok(())
}

/// Runs the whole program. `on_step` is called for every minibatch, in order. Programs with `Checkpoint` instructions
/// are rejected. A non-finite loss ends the run with [`TrainError::Diverged`].
pub fn train(training: &TrainJob<'_>, on_step: &mut dyn FnMut(StepDone)) -> Result<Trained, TrainError> {
    run(training, RunOptions::default(), on_step)
}

/// True if all workers share a gradient norm before they step.
pub fn shares_norm(training: &TrainJob<'_>) -> bool {
    training.program.schedule.flushes() && (scales_loss(training) || training.policy.clip_norm.is_some())
}

/// True if the micro-batches of each round see the previous round's version, so none needs an older one.
fn has_no_staleness(program: &Program, stage: StageId) -> bool {
    let rule = Rule::of(program);
    let items =
        if program.schedule.is_round_robin() { program.stages[stage.index()].replicas } else { program.microbatches };
    let second = MicrobatchId(items);
    rule.version(stage, second).0 == rule.round(stage, second)
}

fn scales_loss(training: &TrainJob<'_>) -> bool {
    training.codes.iter().flat_map(|code| &code.feeds).any(|feed| feed.name == LOSS_SCALE)
}

/// Runs the rest of the program from the start of `options`. Returned losses cover only these minibatches.
pub fn run(
    training: &TrainJob<'_>,
    options: RunOptions<'_>,
    on_step: &mut dyn FnMut(StepDone),
) -> Result<Trained, TrainError> {
    Ok(run_in_group(training, options, on_step, None)?.expect("a process that runs all workers reports all"))
}

/// Like [`run`] for the workers of this process in a process group. Process 0 receives step reports, snapshots and all
/// results; others receive nothing. The weights of a `Checkpoint` instruction go to the process that runs it.
pub fn run_in_group(
    training: &TrainJob<'_>,
    options: RunOptions<'_>,
    on_step: &mut dyn FnMut(StepDone),
    group: Option<Group>,
) -> Result<Option<Trained>, TrainError> {
    let inputs = RankInputs { weights: training.weights, start: options.start };
    let ranks = TensorRanks { inputs: vec![Some(inputs)], layouts: Arc::default() };
    run_ranks(training, options, on_step, group, ranks)
}

/// What one rank of the tensor-parallel groups starts from.
#[derive(Clone, Copy)]
pub struct RankInputs<'a> {
    pub weights: &'a BTreeMap<String, Tensor>,
    pub start: Option<&'a ResumePoint>,
}

/// The ranks of the tensor-parallel groups, which have equal degrees. One rank is no tensor parallelism.
pub struct TensorRanks<'a> {
    /// By rank; `None` for one that no worker of this process has.
    pub inputs: Vec<Option<RankInputs<'a>>>,
    pub layouts: Arc<Layouts>,
}

/// Like [`run_in_group`] for tensor-parallel groups, whose shards it joins. `on_snapshot` receives the snapshots of all
/// ranks.
pub fn run_ranks(
    training: &TrainJob<'_>,
    options: RunOptions<'_>,
    on_step: &mut dyn FnMut(StepDone),
    group: Option<Group>,
    ranks: TensorRanks<'_>,
) -> Result<Option<Trained>, TrainError> {
    let RunOptions { start, cuts, barrier, devices, on_snapshot, mut on_checkpoint } = options;
    let degree = ranks.inputs.len();
    let minibatches_done = start.map_or(0, |start| start.minibatches);
    let remaining_program = start.map(|_| rest(training.program, minibatches_done));
    let program = remaining_program.as_ref().unwrap_or(training.program);
    check_instructions(program, on_checkpoint.is_some())?;
    check_parts(program, training.codes)?;
    check_weights(training.codes, training.weights)?;
    if start.is_some() || on_snapshot.is_some() {
        check_read_states(program, training.codes)?;
    }
    let scales_loss = scales_loss(training);
    check_policy(training, scales_loss)?;
    check_states(training.codes)?;
    let names: BTreeSet<&str> = training.codes.iter().flat_map(|c| &c.parameters).map(|n| n.name.as_str()).collect();
    let max_shards = max_shards(program);
    let (events, event_receiver) = crossbeam_channel::unbounded();
    // All ranks of a group have equal losses, and the first one reports them.
    let (discarded, _) = crossbeam_channel::unbounded();
    // One checkpoint may be queued while another is written. The writing process queues parts of all workers, others
    // only of theirs.
    let sends_here =
        |rank: &usize| group.as_ref().is_none_or(|group| group.config.process == 0 || group.is_here(*rank));
    let senders = (0..program.workers.len() * degree).filter(sends_here);
    let capacity = senders.map(|rank| program.stages_of(program.workers[rank / degree].rank).count()).sum();
    let (snapshot_sender, snapshot_receiver) = crossbeam_channel::bounded(capacity);
    let process_sender = on_snapshot.is_some().then(|| snapshot_sender.clone());
    let open = |group: Group| {
        let ranks = group.config.placement.ranks(group.config.process);
        let transport = group.config.nccl.then(|| transport(&devices, ranks));
        Exchange::new(group, transport, program, training.codes, &events, process_sender, barrier)
    };
    let mut exchange = group.map(open).transpose()?;
    let numbers: HashMap<&str, usize> = names.into_iter().zip(0..).collect();
    let all_ranks = (0..degree).map(|rank| GroupRank { degree, rank });
    let rank_channels = all_ranks.clone().map(|rank| {
        let context = RankContext { exchange: &mut exchange, rank, devices: &devices };
        RankChannels::open(training, shares_norm(training), context)
    });
    let rank_channels: Vec<RankChannels> = rank_channels.collect::<Result<_, _>>()?;
    let tensor_groups = tensor_groups(training, (degree, &ranks.layouts), &mut exchange)?;
    let progress = match &exchange {
        Some(exchange) => exchange.progress(),
        None => Arc::new((0..program.workers.len() * degree).map(|_| AtomicU32::new(0)).collect()),
    };
    // If another process writes checkpoints, it receives this process's snapshots.
    let send_snapshot =
        exchange.as_ref().filter(|exchange| !exchange.is_reporter() && cuts.is_some()).map(Exchange::snapshot_sender);
    let takes_snapshots = on_snapshot.is_some() || send_snapshot.is_some();
    let checkpoints = takes_snapshots.then_some(CheckpointPlan { cuts, barrier, snapshots: snapshot_sender });
    let is_stopped = AtomicBool::new(false);
    let epoch = Instant::now();
    let mut contexts = Vec::new();
    for (rank, mut channels) in all_ranks.zip(rank_channels) {
        let Some(RankInputs { weights, start: rank_start }) = ranks.inputs[rank.rank] else { continue };
        let training = &TrainJob { weights, ..*training };
        for (w, worker) in program.workers.iter().enumerate() {
            let global_rank = rank.global(w);
            if exchange.as_ref().is_some_and(|exchange| !exchange.is_here(global_rank)) {
                continue;
            }
            let device = device_of(&devices, global_rank);
            let (outgoing, incoming) = channels.ends.remove(&WorkerId(w as u32)).unwrap_or_default();
            let tensor_rank = tensor_groups
                .get(w)
                .map(|group| Arc::new(TensorRank::new(group.clone(), rank.rank, degree, ranks.layouts.clone())));
            let setup = |stage: StageId| -> Result<StageSetup<'_>, TrainError> {
                let code = &training.codes[stage.index()];
                let tied = tied_parameters(&channels.ties, code, (w, stage.index()));
                let shard = shard_range(program, stage.index(), worker.replica, code, &tied);
                let number = |(p, named): (usize, &NamedTensor)| {
                    let rank = if shard.is_sharded(p) { shard.rank() } else { 0 };
                    shard_number(numbers[named.name.as_str()], rank, max_shards)
                };
                Ok(StageSetup {
                    stage,
                    device: device.clone(),
                    code,
                    weights: buffers("parameter", &code.parameters, training.weights, &*device)?
                        .into_iter()
                        .map(Arc::new)
                        .collect(),
                    masters: code
                        .parameters
                        .iter()
                        .map(|named| master(named, training.weights, &*device))
                        .collect::<Result<_, _>>()?,
                    numbers: code.parameters.iter().enumerate().map(number).collect(),
                    delay: program.stages[stage.index()].cap.saturating_sub(1),
                    ends_with_round: has_no_staleness(program, stage),
                    states: buffers("state", &code.states, training.weights, &*device)?,
                    buckets: program.stages[stage.index()].buckets,
                    comms: channels.stages[stage.index()][worker.replica as usize].clone(),
                    shard,
                    tied,
                    replica: worker.replica as usize,
                    resume: rank_start
                        .map(|start| start.resume_state(stage, worker.replica, code, training, &*device))
                        .transpose()?,
                    tensor_rank: tensor_rank.clone(),
                })
            };
            let context = WorkerContext {
                id: WorkerId(w as u32),
                name: rank_name(program, WorkerId(w as u32), rank),
                program,
                stages: program.stages_of(worker.rank).map(setup).collect::<Result<_, _>>()?,
                outgoing,
                incoming,
                batches: training.batches,
                config: StageConfig {
                    optimizer: training.optimizer,
                    policy: training.policy,
                    microbatches: program.microbatches,
                    flushes: program.schedule.flushes(),
                    keeps_gradients: training.keep_gradients,
                    window: match checkpoints {
                        Some(_) => program.stages.iter().map(|stage| stage.cap).max().unwrap_or(0) + 1,
                        None => 0,
                    },
                },
                norms: channels.norms.clone(),
                scales_loss,
                events: if rank.rank == 0 { events.clone() } else { discarded.clone() },
                epoch,
                progress: progress.clone(),
                global_rank,
                checkpoints: checkpoints.clone(),
                scale: start.and_then(|start| start.scale),
                is_stopped: &is_stopped,
            };
            contexts.push(context);
        }
    }
    drop((events, discarded, checkpoints));
    let mut losses = LossTracker::new(program, minibatches_done, scales_loss);
    let results = std::thread::scope(|scope| {
        if let Some(exchange) = &mut exchange {
            exchange.start(scope);
        }
        // This thread ends after the last worker.
        let snapshot_thread = match (on_snapshot, send_snapshot) {
            (Some(on_snapshot), _) => Some(scope.spawn(move || snapshot_receiver.into_iter().for_each(on_snapshot))),
            (None, Some(send_snapshot)) => {
                Some(scope.spawn(move || snapshot_receiver.iter().for_each(|snapshot| send_snapshot(&snapshot))))
            }
            (None, None) => None,
        };
        let threads: Vec<_> = contexts
            .into_iter()
            .map(|context| {
                let (global_rank, name) = (context.global_rank, context.name.clone());
                // If a worker ends early, no peer may wait for it in a communicator.
                let mut abandon: Vec<Abandon> = context.stages.iter().map(abandon_stage).collect();
                abandon.extend(context.norms.clone().map(|norms| Box::new(move || norms.abandon()) as Abandon));
                let guard = AbandonGuard { abandon, blame: exchange.as_ref().map(Exchange::blame) };
                let body = move || {
                    let outcome = worker::run(context);
                    match (&outcome, &guard.blame) {
                        (Ok(_), _) => std::mem::forget(guard),
                        // A worker that lost its peer is not the cause.
                        (Err(error), Some(blame)) if !error.lost_another() => blame(&error.to_string()),
                        (Err(_), _) => {}
                    }
                    outcome
                };
                let builder = std::thread::Builder::new().name(format!("worker {name}"));
                (global_rank, name, builder.spawn_scoped(scope, body))
            })
            .collect();
        for event in event_receiver {
            match (event, &mut on_checkpoint) {
                (Event::Loss { item, value }, _) => match &exchange {
                    Some(exchange) if !exchange.is_reporter() => exchange.send_loss(item, value),
                    _ => {
                        losses.add(item, value, epoch.elapsed().as_secs_f64(), on_step);
                        let Some(diverged) = losses.diverged() else { continue };
                        // Everything after this would be non-finite too.
                        is_stopped.store(true, Ordering::Relaxed);
                        let reason = TrainError::Diverged(diverged).to_string();
                        exchange.iter().for_each(|exchange| exchange.end(&reason));
                    }
                },
                (Event::Checkpoint(checkpoint), Some(on_checkpoint)) => on_checkpoint(checkpoint),
                (Event::Stepped { .. } | Event::Checkpoint(_), _) => {}
            }
        }
        let results: Vec<_> = threads.into_iter().map(|(rank, name, thread)| (rank, join(name, thread))).collect();
        // Send remaining snapshots before the workers' results.
        if exchange.as_ref().is_some_and(|exchange| !exchange.is_reporter()) {
            snapshot_thread.into_iter().for_each(|snapshot_thread| _ = snapshot_thread.join());
        }
        finish(exchange, results)
    });
    let seconds = epoch.elapsed().as_secs_f64();
    if let Some(diverged) = losses.diverged() {
        return Err(TrainError::Diverged(diverged));
    }
    let Some(outcomes) = results? else { return Ok(None) };
    collect(training, (&ranks.layouts, degree), outcomes, losses.done(), seconds).map(Some)
}

/// Fails all waits for this worker in collectives.
type Abandon = Box<dyn Fn() + Send>;

/// Ends the run because of a failure in this process.
type Blame = Box<dyn Fn(&str) + Send>;

/// Fails all waits of peers for this worker, unless it finished.
struct AbandonGuard {
    abandon: Vec<Abandon>,
    blame: Option<Blame>,
}

impl Drop for AbandonGuard {
    fn drop(&mut self) {
        if let Some(blame) = self.blame.as_ref().filter(|_| std::thread::panicking()) {
            blame("it panicked");
        }
        self.abandon.iter().for_each(|abandon| abandon());
    }
}

/// What fails all waits for a worker's part in the collectives of a stage.
fn abandon_stage(setup: &StageSetup<'_>) -> Abandon {
    let (comms, tensor_rank) = (setup.comms.clone(), setup.tensor_rank.clone());
    let tied: Vec<_> = setup.tied.iter().map(|tied| tied.communicator.clone()).collect();
    Box::new(move || {
        comms.abandon();
        tied.iter().for_each(|tied| tied.abandon());
        tensor_rank.iter().for_each(|tensor_rank| tensor_rank.abandon());
    })
}

/// The `f32` master weights of a 16-bit parameter.
fn master(
    named: &NamedTensor,
    weights: &BTreeMap<String, Tensor>,
    device: &dyn Device,
) -> Result<Option<Buffer>, DeviceError> {
    let tensor = weights.get(&named.name).filter(|_| is_half(named.fact.dtype));
    tensor.map(|tensor| device.upload(tensor.cast(accumulation_type(named.fact.dtype)).bytes())).transpose()
}
