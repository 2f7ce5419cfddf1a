//! The channels and communicators of a run.
//!
//! In one process all endpoints are local. In several, only this process's workers have local endpoints; the rest use
//! connections. All processes traverse the program in the same order, so they assign the same numbers to channels and
//! communicators.
//!
//! With tensor parallelism, each rank of the groups has its own channels and communicators. Only the communicator of a
//! group connects ranks.

use crate::comm::all_reduce::{AllReduce, in_one_process, range};
use crate::comm::channel::{Incoming, Outgoing, channel};
use crate::comm::communicator::Communicator;
use crate::comm::members::Members;
use crate::comm::tensor_group::{GroupRank, Layouts, TensorComm};
use crate::device::api::Device;
use crate::device::cpu::device::cpu;
use crate::exec::sequence::{Sequence, Slot};
use crate::exec::stage_code::{NamedTensor, StageCode, Transfer};
use crate::optim::grad_norm::Squares;
use crate::process::chain_messages::ChainMessages;
use crate::process::exchange::Exchange;
use crate::process::router::GroupReceiver;
use crate::process::run_status::LinkError;
use crate::process::shard_messages::ShardMessages;
use crate::process::wire::{Contribution, ContributionForm, RemoteCommunicator, TensorsForm};
use crate::stage::gradient_buckets::BucketContribution;
use crate::stage::gradients::GradientTerms;
use crate::stage::stage_comms::StageComms;
use crate::stage::tied_parameter::TiedParameter;
use crate::stage::worker::Key;
use crate::train::error::TrainError;
use crate::train::job::TrainJob;
use crate::train::tensor_shards::split_of;
use crate::zero::gradient_shards::GradientShards;
use crate::zero::shard::ShardRange;
use compiler::op::Value;
use compiler::plan::StageId;
use compiler::schedule::{EdgeId, Instruction, Payload, Program, WorkerId, WorkerProgram};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Collectives in which a rank of a tensor-parallel group may take part at once: it may contribute to the next while
/// another reads the last.
const MOST_UNFINISHED: usize = 2;

/// The channel endpoints of a worker.
pub type Ends = (HashMap<Key, Outgoing>, HashMap<Key, Incoming>);

/// What the channels and communicators of one rank of the tensor-parallel groups are opened with.
pub struct RankContext<'e, 'a> {
    /// The other processes, if there are any.
    pub exchange: &'e mut Option<Exchange<'a>>,
    pub rank: GroupRank,
    /// The devices of all ranks, in turn; the CPU if there are none.
    pub devices: &'e [Arc<dyn Device>],
}

/// The channels and communicators of one rank of the tensor-parallel groups.
pub struct RankChannels {
    pub ties: Vec<Tie>,
    /// For the gradient norm, if all workers share one.
    pub norms: Option<Arc<Communicator<Squares>>>,
    pub ends: HashMap<WorkerId, Ends>,
    /// By stage and replica.
    pub stages: Vec<Vec<StageComms>>,
}

impl RankChannels {
    /// `shares_norm` is true if all workers share a gradient norm.
    pub fn open(
        training: &TrainJob<'_>,
        shares_norm: bool,
        mut context: RankContext<'_, '_>,
    ) -> Result<RankChannels, TrainError> {
        let (program, context) = (training.program, &mut context);
        let ties = ties(training, context)?;
        let norms = shares_norm.then(|| {
            let workers: Vec<usize> = (0..program.workers.len()).collect();
            let rounds = u64::from(program.items) + 1;
            open_communicator(context, &workers, norm_count(training), rounds)
        });
        let norms = norms.transpose()?;
        let ends = channels(training, context)?;
        let stages = (0..program.stages.len()).map(|stage| stage_comms(training, stage, &ties, context));
        let stages = stages.collect::<Result<_, _>>()?;
        Ok(RankChannels { ties, norms, ends, stages })
    }
}

/// The communicator of each worker's tensor-parallel group; empty without tensor parallelism. `layouts` gives the
/// sharding of the parameters.
pub fn tensor_groups(
    training: &TrainJob<'_>,
    (degree, layouts): (usize, &Layouts),
    exchange: &mut Option<Exchange<'_>>,
) -> Result<Vec<Arc<TensorComm>>, LinkError> {
    let workers = training.program.workers.iter().enumerate().filter(|_| degree > 1);
    let group = |(worker, worker_program): (usize, &WorkerProgram)| {
        let ranks: Vec<usize> = (worker * degree..(worker + 1) * degree).collect();
        let stages = training.program.stages_of(worker_program.rank).map(|stage| &training.codes[stage.index()]);
        communicator(exchange, &ranks, operands_form(stages, layouts), (u64::MAX, MOST_UNFINISHED))
    };
    workers.map(group).collect()
}

/// The operands of a worker's collectives: those of its code, the shards of parameters that a program saves, also in
/// `f32`, and the squared norms of gradients.
fn operands_form<'a>(stages: impl Iterator<Item = &'a StageCode>, layouts: &Layouts) -> TensorsForm {
    let mut sizes = BTreeSet::new();
    for code in stages {
        let steps = [&code.forward, &code.backward, &code.weight].into_iter().flat_map(|pass: &Sequence| &pass.steps);
        let collectives = steps.filter_map(|step| step.collective.as_ref());
        sizes.extend(collectives.map(|collective| collective.operand.bytes()));
        let split = code.parameters.iter().filter(|named| split_of(layouts, &named.name).is_some());
        sizes.extend(split.flat_map(|named| [named.bytes, named.gradient().1]));
        sizes.extend((0..=code.parameters.len()).map(|squares| squares * size_of::<f64>()));
    }
    TensorsForm::from([(0, sizes)])
}

/// Creates a channel for every pair of communicating workers. Returns the endpoints of this process.
fn channels(training: &TrainJob<'_>, context: &mut RankContext<'_, '_>) -> Result<HashMap<WorkerId, Ends>, LinkError> {
    let program = training.program;
    let mut channel_keys = BTreeSet::new();
    let mut ends: HashMap<WorkerId, Ends> = HashMap::new();
    for (w, worker_program) in program.workers.iter().enumerate() {
        let from = WorkerId(w as u32);
        for instruction in &worker_program.instructions {
            if let Instruction::Send { edge, kind, peer, .. } = *instruction
                && channel_keys.insert((edge, kind == Payload::Activation, from, peer))
            {
                let (sender, receiver) = match context.exchange {
                    Some(exchange) => {
                        let [from, to] = [w, peer.index()].map(|worker| context.rank.global(worker));
                        exchange.channel(from, to, tensors(training, edge, kind))?
                    }
                    None => {
                        let (sender, receiver) = channel();
                        (Some(sender), Some(receiver))
                    }
                };
                if let Some(sender) = sender {
                    ends.entry(from).or_default().0.insert((edge, kind, peer), sender);
                }
                if let Some(receiver) = receiver {
                    ends.entry(peer).or_default().1.insert((edge, kind, from), receiver);
                }
            }
        }
    }
    Ok(ends)
}

/// The tensors of each message over an edge, in sending order: value, reader group, bytes.
fn tensors(training: &TrainJob<'_>, edge: EdgeId, kind: Payload) -> Vec<(Value, usize, usize)> {
    let (from, to) = training.program.edges[edge.index()];
    let (sent, peer_stage) = match kind {
        Payload::Activation => (&training.codes[from.index()].sent, to),
        Payload::Gradient => (&training.codes[to.index()].gradients_out, from),
    };
    let entry = |transfer: &Transfer| (transfer.value, transfer.group, transfer.address.bytes);
    sent.iter().filter(|transfer| transfer.stage == peer_stage.index()).map(entry).collect()
}

/// Creates a communicator of these global ranks. Sequence numbers, and the number of unfinished collectives, have upper
/// bounds.
fn communicator<T: Contribution>(
    exchange: &mut Option<Exchange<'_>>,
    ranks: &[usize],
    form: T::Form,
    bounds: (u64, usize),
) -> Result<Arc<Communicator<T>>, LinkError> {
    let communicator = open(exchange, ranks, |members| RemoteCommunicator::open(members, form, bounds))?;
    Ok(communicator.unwrap_or_else(|| Arc::new(Communicator::new(ranks.len()))))
}

/// Opens a group of these global ranks over connections. `None` if all or none of them are in this process.
fn open<G, R: GroupReceiver + 'static>(
    exchange: &mut Option<Exchange<'_>>,
    ranks: &[usize],
    make: impl FnOnce(Members) -> (Arc<G>, R),
) -> Result<Option<Arc<G>>, LinkError> {
    exchange.as_mut().map_or(Ok(None), |exchange| exchange.open(ranks, make))
}

/// Creates a communicator of this rank of some workers, in rank order, for fewer than `collectives` collectives.
fn open_communicator<T: Contribution>(
    context: &mut RankContext<'_, '_>,
    workers: &[usize],
    form: T::Form,
    collectives: u64,
) -> Result<Arc<Communicator<T>>, LinkError> {
    communicator(context.exchange, &global(context.rank, workers), form, (collectives, usize::MAX))
}

fn global(rank: GroupRank, workers: &[usize]) -> Vec<usize> {
    workers.iter().map(|worker| rank.global(*worker)).collect()
}

/// The communicators of a stage, by replica.
fn stage_comms(
    training: &TrainJob<'_>,
    stage: usize,
    ties: &[Tie],
    context: &mut RankContext<'_, '_>,
) -> Result<Vec<StageComms>, TrainError> {
    let program = training.program;
    let (program_stage, members) = (&program.stages[stage], members(program, stage));
    // Forward passes, which produce samples, run ahead of the round that uses the samples.
    let most_items = program_stage.cap.saturating_add(program.microbatches).saturating_mul(2).min(program.items);
    let code = &training.codes[stage];
    let form = ContributionForm {
        terms: code.gradient_terms.len(),
        samples: code.state_updates.iter().map(|update| update.sample.bytes).collect(),
        items: program.items,
        most_items: most_items as usize,
    };
    let rounds = collectives(program, stage, program.items.saturating_add(1));
    let replicas: Arc<Communicator<BucketContribution>> = open_communicator(context, &members, form, rounds)?;
    let degree = program_stage.shards().max(1) as usize;
    let mut stage_comms = Vec::new();
    for group in members.chunks(degree) {
        let all_reduce = replica_all_reduce(program, stage, group, context)?;
        let (across_groups, shard_comm, norms, gradient_shards) = (None, None, None, None);
        let mut comms =
            StageComms { replicas: replicas.clone(), all_reduce, across_groups, shard_comm, norms, gradient_shards };
        if program_stage.zero > 0 {
            open_zero(training, stage, group, ties, context, &mut comms)?;
        }
        stage_comms.extend(group.iter().map(|_| comms.clone()));
    }
    for rank in 0..degree {
        let owners: Vec<usize> = members.iter().copied().skip(rank).step_by(degree).collect();
        let across_groups = replica_all_reduce(program, stage, &owners, context)?;
        stage_comms.iter_mut().skip(rank).step_by(degree).for_each(|comms| comms.across_groups = across_groups.clone());
    }
    Ok(stage_comms)
}

/// The all-reduce in place of these replicas of a stage; `None` for one alone, and if all are in other processes.
fn replica_all_reduce(
    program: &Program,
    stage: usize,
    replicas: &[usize],
    context: &mut RankContext<'_, '_>,
) -> Result<Option<Arc<dyn AllReduce>>, TrainError> {
    let ranks = global(context.rank, replicas);
    let collectives = collectives(program, stage, versions(program));
    if let Some(all_reduce) = open(context.exchange, &ranks, |members| ChainMessages::open(members, collectives))? {
        return Ok(Some(all_reduce));
    }
    let is_here = |rank: &usize| context.exchange.as_ref().is_none_or(|exchange| exchange.is_here(*rank));
    if !ranks.iter().all(is_here) {
        return Ok(None);
    }
    let devices: Vec<_> = ranks.iter().map(|rank| device_of(context.devices, *rank)).collect();
    Ok(in_one_process(&devices)?)
}

/// Sequence numbers of a stage's collectives are below this, with `rounds` rounds or versions of all buckets.
fn collectives(program: &Program, stage: usize, rounds: u32) -> u64 {
    u64::from(rounds) * u64::from(program.stages[stage].buckets.max(1))
}

/// Upper bound of weight versions, rounds and micro-batches.
fn versions(program: &Program) -> u32 {
    program.items.saturating_add(2)
}

/// The device of a rank: ranks take the devices in turn. Without devices, the CPU.
pub fn device_of(devices: &[Arc<dyn Device>], rank: usize) -> Arc<dyn Device> {
    if devices.is_empty() { cpu() } else { devices[rank % devices.len()].clone() }
}

/// Opens the ZeRO communicators of the replicas of a stage that shard together.
fn open_zero(
    training: &TrainJob<'_>,
    stage: usize,
    members: &[usize],
    ties: &[Tie],
    context: &mut RankContext<'_, '_>,
    comms: &mut StageComms,
) -> Result<(), LinkError> {
    let (program, code) = (training.program, &training.codes[stage]);
    let form = shards_form(code, members.len());
    comms.shard_comm = Some(open_communicator(context, members, form, collectives(program, stage, versions(program)))?);
    if training.policy.clip_norm.is_some() && !program.schedule.flushes() {
        comms.norms = Some(open_communicator(context, members, norm_count(training), versions(program).into())?);
    }
    if program.stages[stage].zero >= 2 {
        let tied = members.first().map(|first| tied_parameters(ties, code, (*first, stage))).unwrap_or_default();
        let shard = shard_range(program, stage, 0, code, &tied);
        let make = |members: Members| ShardMessages::open(members, shard, code, versions(program));
        let shards = open(context.exchange, &global(context.rank, members), make)?;
        let local = || Arc::new(GradientShards::new(Members::here(members.len())));
        comms.gradient_shards = Some(shards.unwrap_or_else(local));
    }
    Ok(())
}

/// What the final gather of one of `replicas` replicas may hold: shards of parameters, then of their gradients, also in
/// `f32`.
fn shards_form(code: &StageCode, replicas: usize) -> TensorsForm {
    let sizes = |named: &NamedTensor| -> BTreeSet<usize> {
        let (wide, wide_bytes) = named.gradient();
        let whole = [(named.fact.dtype, named.bytes), (wide, wide_bytes)].into_iter();
        whole
            .flat_map(|(dtype, bytes)| (0..replicas).map(move |of| range(bytes, dtype.size(), of, replicas).len()))
            .collect()
    };
    (0..).zip(code.parameters.iter().chain(&code.parameters).map(sizes)).collect()
}

/// The parameter shards of one replica. Tied parameters are not sharded.
pub fn shard_range(
    program: &Program,
    stage: usize,
    replica: u32,
    code: &StageCode,
    tied: &[TiedParameter],
) -> ShardRange {
    let program_stage = &program.stages[stage];
    // ZeRO 3 does not gather a parameter that is read after a pass, so it is not sharded.
    let is_read_whole =
        |p: usize| program_stage.zero >= 3 && code.read_apart().any(|address| address.slot == Slot::Parameter(p));
    let is_sharded =
        |p: usize| program_stage.zero > 0 && tied.iter().all(|tied| tied.parameter != p) && !is_read_whole(p);
    ShardRange {
        replica: replica as usize,
        replicas: program_stage.replicas as usize,
        degree: program_stage.shards() as usize,
        sharded: (0..code.parameters.len()).map(is_sharded).collect(),
        shards_weights: program_stage.zero >= 3,
    }
}

/// Maximum number of shards per parameter.
pub fn max_shards(program: &Program) -> usize {
    program.stages.iter().filter(|stage| stage.zero > 0).map(|stage| stage.shards() as usize).max().unwrap_or(1)
}

/// Number of parameters times the maximum number of shards.
fn norm_count(training: &TrainJob<'_>) -> usize {
    let names: BTreeSet<&str> = training.codes.iter().flat_map(|c| &c.parameters).map(|n| n.name.as_str()).collect();
    names.len() * max_shards(training.program)
}

fn members(program: &Program, stage: usize) -> Vec<usize> {
    let rank = program.stages[stage].rank;
    let workers = program.workers.iter().enumerate().filter(|(_, worker)| worker.rank == rank);
    let mut members: Vec<(u32, usize)> = workers.map(|(w, worker)| (worker.replica, w)).collect();
    members.sort_unstable();
    members.into_iter().map(|(_, w)| w).collect()
}

/// A tied parameter: its members as (worker, stage) pairs, and their communicator.
pub struct Tie {
    name: String,
    members: Vec<(usize, usize)>,
    communicator: Arc<Communicator<GradientTerms>>,
    holders: Vec<StageId>,
}

/// Finds the tied parameters. Rejects those whose copies could not be kept equal.
fn ties(training: &TrainJob<'_>, context: &mut RankContext<'_, '_>) -> Result<Vec<Tie>, TrainError> {
    let mut holders: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for (stage, code) in training.codes.iter().enumerate() {
        for named in &code.parameters {
            holders.entry(&named.name).or_default().insert(stage);
        }
    }
    let program = training.program;
    let mut ties = Vec::new();
    for (name, stages) in holders.into_iter().filter(|(_, s)| s.len() > 1) {
        let stages: Vec<usize> = stages.into_iter().collect();
        // Copies stay equal only if every stage steps for the same minibatches, and a backward sees the weights of its
        // forward.
        let replicas = program.stages[stages[0]].replicas;
        let is_even = stages.iter().all(|s| program.stages[*s].replicas == replicas);
        let schedule = program.schedule;
        if !(schedule.stashes() && (is_even || schedule.is_by_minibatch())) {
            return Err(TrainError::TiedParameter {
                name: name.to_string(),
                first: stages[0],
                second: stages[1],
                schedule: program.schedule,
            });
        }
        let holders = program.workers.iter().enumerate().flat_map(|(w, worker)| {
            program
                .stages_of(worker.rank)
                .map(move |stage| (w, stage.index()))
                .filter(|(_, stage)| stages.contains(stage))
        });
        let members: Vec<(usize, usize)> = holders.collect();
        let workers: Vec<usize> = members.iter().map(|(worker, _)| *worker).collect();
        let communicator =
            open_communicator(context, &workers, terms_form(training, name), u64::from(program.items) + 2)?;
        let holders = if schedule.flushes() { Vec::new() } else { stages.iter().map(|s| StageId(*s as u32)).collect() };
        ties.push(Tie { name: name.to_string(), members, communicator, holders });
    }
    Ok(ties)
}

/// Ranks and size of a parameter's gradient terms.
fn terms_form(training: &TrainJob<'_>, name: &str) -> TensorsForm {
    let mut form = TensorsForm::new();
    for code in training.codes {
        for term in code.gradient_terms.iter().filter(|term| code.parameters[term.parameter].name == name) {
            form.entry(term.rank).or_default().insert(code.parameters[term.parameter].gradient().1);
        }
    }
    form
}

/// The tied parameters of a worker's stage.
pub fn tied_parameters(ties: &[Tie], code: &StageCode, holder: (usize, usize)) -> Vec<TiedParameter> {
    let tied_parameter = |tie: &Tie| {
        let member = tie.members.iter().position(|member| *member == holder)?;
        let parameter = code.parameters.iter().position(|p| p.name == tie.name)?;
        Some(TiedParameter { parameter, member, communicator: tie.communicator.clone(), holders: tie.holders.clone() })
    };
    ties.iter().filter_map(tied_parameter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::op::Sharding;
    use compiler::tensor::DType;
    use compiler::tensor::dim::Dim;
    use compiler::tensor::fact::Fact;

    #[test]
    fn operands_are_shards_of_parameters_or_norms() {
        let named = |name: &str, elements: usize, dtype: DType| NamedTensor {
            name: name.to_string(),
            fact: Fact::new(dtype, vec![Dim::from(elements)]),
            bytes: elements * dtype.size(),
        };
        let parameters = vec![named("split", 50, DType::Bf16), named("both", 70, DType::F32)];
        let code = StageCode { parameters, states: vec![named("mean", 90, DType::F32)], ..StageCode::default() };
        let layouts = Layouts::from([("split".to_string(), Sharding::split(0))]);
        let form = operands_form([&code].into_iter(), &layouts);
        assert_eq!(form, TensorsForm::from([(0, BTreeSet::from([0, 8, 16, 100, 200]))]));
    }
}
