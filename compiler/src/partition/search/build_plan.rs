//! Builds the parts of a plan from a shape: numbers stages and devices, lists edges, and sums the time and memory of
//! stages.

use crate::cluster::class;
use crate::partition::dp::nested_partition::{Shape, StageGroup};
use crate::partition::dp::uneven_levels;
use crate::plan::buckets::buckets;
use crate::plan::cost_estimate::{self, CostEstimate, FlowQuery, PlacedStage};
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::in_flight::{self, First, Position, ScheduleFlow, StageInFlight};
use crate::plan::memory::{self, MemoryMultipliers, MemoryTerms, Touched};
use crate::plan::problem::{CostModel, Objective, Problem, Target};
use crate::plan::schedule::Schedule;
use crate::plan::tied;
use crate::plan::zero::Zero;
use crate::plan::{Edge, GradientBucket, RecomputedOps, Stage, StageId, StageMemory};
use crate::plan::{chunks, fullest_moment};
use crate::profile::arena::Arena;
use crate::profile::cost_graph::{OpCost, OpId, ParamCost, TensorCost};
use crate::profile::recompute_scope::{self, RecomputeCosts, RecomputeTerms};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePosition {
    pub first: u32,
    pub recompute: Recompute,
}

/// The ops of a stage that are recomputed before the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    None,
    /// This many, in ascending order of ids.
    First(u32),
    All,
}

impl From<bool> for Recompute {
    fn from(all: bool) -> Recompute {
        if all { Recompute::All } else { Recompute::None }
    }
}

impl Recompute {
    pub fn is_any(self) -> bool {
        self != Recompute::None
    }

    /// The recomputed ones of a stage's ops.
    pub fn of(self, ops: &[u32]) -> &[u32] {
        match self {
            Recompute::None => &[],
            Recompute::First(count) => &ops[..ops.len().min(count as usize)],
            Recompute::All => ops,
        }
    }
}

/// Places the stages side by side from device 0, with recomputation only if it is full.
pub fn side_by_side(problem: &Problem, shape: &Shape) -> Vec<StagePosition> {
    let recompute = problem.recomputation().is_full().into();
    firsts(&shape.replicas()).into_iter().map(|first| StagePosition { first, recompute }).collect()
}

/// The first device of each stage, if they are side by side from device 0.
pub fn firsts(replicas: &[u32]) -> Vec<u32> {
    let before = |next: &mut u32, replicas: &u32| Some(std::mem::replace(next, next.saturating_add(*replicas)));
    replicas.iter().scan(0, before).collect()
}

pub fn asked(problem: &Problem) -> FlowQuery {
    FlowQuery::of(
        &flow(problem, problem.cluster.devices()),
        problem.objective == Objective::Latency,
        problem.bucket.0 as f64,
    )
}

pub fn placed(problem: &Problem, shape: &Shape, spots: &[StagePosition], caps: &[u32]) -> Vec<PlacedStage> {
    let ops = &problem.graph.ops;
    let placed = |((leaf, spot), &in_flight): ((StageGroup<'_>, &StagePosition), &u32)| {
        let pace = pace(problem, spot, leaf.replicas);
        let sum = |of: &[u32], us: fn(&OpCost) -> f64| of.iter().map(|&op| us(&ops[op as usize])).sum::<f64>() / pace;
        PlacedStage {
            forward_us: sum(leaf.ops, |op| op.fwd_us),
            backward_us: sum(leaf.ops, |op| op.bwd_us) + sum(spot.recompute.of(leaf.ops), OpCost::recompute_us),
            gradient_bytes: parameter_bytes(problem, leaf.ops, |param| param.sum_bytes) as f64,
            first: spot.first,
            replicas: leaf.replicas,
            in_flight,
            tied_us: 0.0,
        }
    };
    let mut stages: Vec<PlacedStage> = shape.leaves().into_iter().zip(spots).zip(caps).map(placed).collect();
    stages.iter_mut().zip(tied_us(problem, shape, spots)).for_each(|(stage, us)| stage.tied_us = us);
    stages
}

pub fn outlook(
    problem: &Problem,
    asked: &FlowQuery,
    shape: &Shape,
    spots: &[StagePosition],
    caps: &[u32],
) -> CostEstimate {
    let stages = placed(problem, shape, spots, caps);
    let (levels, edges) = (&problem.cluster.levels, edges_with(problem, shape, |_| None));
    match problem.chunks > 1 && stages.len() > 1 {
        true => chunks::outlook(asked, levels, &stages, &edges),
        false => cost_estimate::outlook(asked, levels, &stages, &edges),
    }
}

/// Relative speed of the slowest device of a stage.
pub fn pace(problem: &Problem, spot: &StagePosition, replicas: u32) -> f64 {
    class::slowest(&problem.cluster.classes, spot.first..spot.first.saturating_add(replicas))
}

/// Returns whether device memory can matter: false if a stage with all ops and the largest possible multipliers fits
/// everywhere.
pub fn is_limited(problem: &Problem) -> bool {
    let Some(limit) = problem.limit_of(0..problem.cluster.devices()) else { return false };
    let graph = &problem.graph;
    let given = problem.in_flight.given().and_then(|caps| caps.iter().copied().max()).unwrap_or(1);
    let in_flight = given.max(2 * problem.cluster.devices()).max(problem.microbatches).saturating_mul(problem.chunks);
    let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0u64, u64::saturating_add);
    let tensors = sum(&mut graph.tensors.iter().map(|tensor| tensor.bytes));
    let all = MemoryTerms {
        weights: sum(&mut graph.params.iter().map(|param| param.bytes)),
        frozen: sum(&mut graph.frozen.iter().map(|frozen| frozen.bytes)),
        summed: sum(&mut graph.params.iter().map(|param| param.sum_bytes)),
        masters: sum(&mut graph.params.iter().map(ParamCost::master_bytes)),
        terms: sum(&mut graph.summed_bytes().into_iter()),
        shared: sum(&mut graph.params.iter().filter(|param| param.users.len() > 1).map(|param| param.sum_bytes)),
        largest: graph.largest_bytes().into_iter().max().unwrap_or(0),
        needed: graph.needed_bytes().into_iter().max().unwrap_or(0),
        saved: sum(&mut graph.ops.iter().map(OpCost::kept_bytes)),
        inputs: tensors,
        passed: tensors.saturating_mul(2),
        outputs: tensors,
        sent: tensors,
        recompute: RecomputeTerms::default(),
        arena: Arena::always(graph.ops.iter().map(OpCost::most_scratch).max().unwrap_or(0)),
        batched_grads: sum(&mut graph.ops.iter().map(|op| op.batched_grad_bytes)),
        halves: sum(&mut graph.ops.iter().map(OpCost::pending_weight_grad_bytes)),
    };
    let most = MemoryMultipliers {
        in_flight,
        pending_weight_grads: in_flight,
        versions: in_flight.saturating_add(1),
        late: in_flight,
        zero: Zero::default(),
        in_place: false,
        ..multiples_of_one(problem, 2)
    };
    all.held(&most).total > limit
}

pub fn fits(problem: &Problem, shape: &Shape, spots: &[StagePosition], memory: &[StageMemory]) -> bool {
    // Interleaved chunks of one rank share its devices.
    let mut held: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for ((spot, replicas), memory) in spots.iter().zip(shape.replicas()).zip(memory) {
        let sum = held.entry((spot.first, replicas)).or_default();
        *sum = sum.saturating_add(memory.total);
    }
    let fits = |(&(first, replicas), held): (&(u32, u32), &u64)| {
        problem.limit_of(first..first.saturating_add(replicas)).is_none_or(|limit| *held <= limit)
    };
    held.iter().all(fits)
}

/// The objective of a shape under the problem's cost model, in microseconds.
pub fn minibatch_us(problem: &Problem, shape: &Shape, spots: &[StagePosition], caps: &[u32]) -> f64 {
    match problem.cost {
        CostModel::Pipec => outlook(problem, &asked(problem), shape, spots, caps).minibatch_us,
        CostModel::Paper | CostModel::Pipedream => {
            shape.minibatch_us(problem).max(uneven_levels::busiest_us(problem, shape, spots))
        }
        CostModel::Load | CostModel::Hybrid => shape.minibatch_us(problem),
    }
}

/// The schedule settings of a problem for a pipeline with this many workers.
pub fn flow(problem: &Problem, workers: u32) -> ScheduleFlow {
    let &Problem { schedule, microbatches, chunks, room, .. } = problem;
    ScheduleFlow { schedule, microbatches, chunks, workers, room }
}

/// The given in-flight limits of stages with these replicas, or those of the schedule's rule.
pub fn caps(problem: &Problem, replicas: &[u32]) -> Vec<u32> {
    let given = problem.in_flight.given().filter(|caps| caps.len() == replicas.len());
    given.map_or_else(|| published_caps(problem, replicas), <[u32]>::to_vec)
}

pub fn published_caps(problem: &Problem, replicas: &[u32]) -> Vec<u32> {
    in_flight::published(&flow(problem, problem.cluster.devices()), replicas)
}

pub fn versions(problem: &Problem, shape: &Shape, caps: &[u32]) -> Vec<u32> {
    of_lanes(problem, &shape.replicas(), caps, ScheduleFlow::versions)
}

fn of_lanes(
    problem: &Problem,
    replicas: &[u32],
    caps: &[u32],
    says: fn(&ScheduleFlow, StageInFlight, First) -> u32,
) -> Vec<u32> {
    let flow = flow(problem, problem.cluster.devices());
    let lanes = replicas.iter().zip(caps).map(|(&replicas, &in_flight)| StageInFlight { replicas, in_flight });
    let lanes: Vec<StageInFlight> = lanes.collect();
    let first = lanes.first().map_or(First::Unknown, |&first| First::Known(first));
    lanes.into_iter().map(|own| says(&flow, own, first)).collect()
}

/// The memory terms of each stage, before multipliers.
pub fn holdings(problem: &Problem, shape: &Shape) -> Vec<MemoryTerms> {
    let mut inside = vec![false; problem.graph.ops.len()];
    let (flows, passing) = (problem.graph.flows(), GradientBuffers::of(&problem.cluster));
    let recompute = RecomputeCosts::of(&problem.graph);
    let needs = [problem.graph.largest_bytes(), problem.graph.needed_bytes()];
    let leaves = shape.leaves();
    let touched = Touched::by_stage(&problem.graph, &stage_of(problem, shape), leaves.len());
    let mut all = Vec::new();
    for (leaf, touched) in leaves.iter().zip(&touched) {
        leaf.ops.iter().for_each(|&op| inside[op as usize] = true);
        let costs = (&flows, &recompute);
        all.push(MemoryTerms::of_touched(&problem.graph, costs, &inside, &passing, (touched, &needs)));
        leaf.ops.iter().for_each(|&op| inside[op as usize] = false);
    }
    all
}

/// Pending weight gradients of each stage for the given caps; empty if backwards are not split.
pub fn pending_weight_grads(problem: &Problem, replicas: &[u32], caps: &[u32]) -> Vec<u32> {
    in_flight::pending_weight_grads(&flow(problem, problem.cluster.devices()), replicas, caps)
}

/// The memory of each stage; `holdings` are its memory terms, `caps` the in-flight limits, and `pending_weight_grads` the pending weight
/// gradients.
pub fn memory(
    problem: &Problem,
    shape: &Shape,
    spots: &[StagePosition],
    holdings: &[MemoryTerms],
    caps: &[u32],
    pending_weight_grads: &[u32],
) -> Vec<StageMemory> {
    let all = held_terms(problem, shape, spots, holdings, (caps, pending_weight_grads));
    let mut memory = vec![StageMemory::default(); all.len()];
    for own in sharing(problem, spots, all.len()) {
        let terms: Vec<HeldTerms> = own.iter().map(|at| all[*at]).collect();
        let held = of_device(problem, own[0], all.len(), &terms);
        own.into_iter().zip(held).for_each(|(at, held)| memory[at] = held);
    }
    memory
}

/// What a stage holds, and how often.
pub type HeldTerms = (MemoryTerms, MemoryMultipliers);

fn held_terms(
    problem: &Problem,
    shape: &Shape,
    spots: &[StagePosition],
    holdings: &[MemoryTerms],
    (caps, pending_weight_grads): (&[u32], &[u32]),
) -> Vec<HeldTerms> {
    let leaves = shape.leaves();
    let stage = |(at, multiples): (usize, MemoryMultipliers)| {
        let recompute = match spots[at].recompute {
            Recompute::First(_) => recomputed(problem, leaves[at].ops, spots[at].recompute),
            Recompute::None | Recompute::All => holdings[at].recompute,
        };
        let multiples = MemoryMultipliers { recompute: spots[at].recompute.is_any(), ..multiples };
        (MemoryTerms { recompute, ..holdings[at] }, multiples)
    };
    multiples(problem, &shape.replicas(), caps, pending_weight_grads).into_iter().enumerate().map(stage).collect()
}

/// The stages whose memory depends on each other: those of a device in Megatron-LM's interleaved 1F1B. A worker of pipec
/// also holds what other stages sent early. The baselines have one stage per device, whatever the schedule.
pub fn sharing(problem: &Problem, spots: &[StagePosition], stages: usize) -> Vec<Vec<usize>> {
    let ranks = stages / problem.chunks.max(1) as usize;
    let is_loop = has_one_peak(problem, problem.schedule) && stages.is_multiple_of(problem.chunks.max(1) as usize);
    if is_loop && spots.get(ranks).is_some_and(|spot| spot.first == spots[0].first) {
        return (0..ranks).map(|rank| (rank..stages).step_by(ranks).collect()).collect();
    }
    (0..stages).map(|at| vec![at]).collect()
}

/// True if the stages of a device are not fullest at the same time.
pub fn has_one_peak(problem: &Problem, schedule: Schedule) -> bool {
    schedule == Schedule::Interleaved && problem.constraints.target == Some(Target::Megatron)
}

/// The memory of such stages, of which `first` is the first, when their device is fullest.
pub fn of_device(problem: &Problem, first: usize, stages: usize, own: &[HeldTerms]) -> Vec<StageMemory> {
    let in_flight = match own {
        [_, _, ..] => {
            let bytes: Vec<u64> = own.iter().map(|(terms, multiples)| terms.per_microbatch(multiples)).collect();
            let items = problem.microbatches.div_ceil(own[0].1.replicas.max(1));
            fullest_moment::of_rank(((stages / own.len()) as u32, first as u32), items, &bytes)
        }
        _ => own.iter().map(|(_, multiples)| multiples.in_flight).collect(),
    };
    own.iter().zip(in_flight).map(|((terms, multiples), in_flight)| terms.held_with(multiples, in_flight)).collect()
}

/// The multipliers of the memory terms of each stage, without recomputation.
pub fn multiples(
    problem: &Problem,
    replicas: &[u32],
    caps: &[u32],
    pending_weight_grads: &[u32],
) -> Vec<MemoryMultipliers> {
    let versions = of_lanes(problem, replicas, caps, ScheduleFlow::versions);
    let late = of_lanes(problem, replicas, caps, ScheduleFlow::late);
    let one = |(at, &replicas): (usize, &u32)| MemoryMultipliers {
        in_flight: caps[at],
        pending_weight_grads: pending_weight_grads.get(at).copied().unwrap_or(0),
        versions: versions[at],
        late: late[at],
        ..multiples_of_one(problem, replicas)
    };
    replicas.iter().enumerate().map(one).collect()
}

/// The multipliers of a stage at a known position of the pipeline, without recomputation; `first` is what is known of
/// the first stage.
pub fn multiples_at(
    problem: &Problem,
    flow: &ScheduleFlow,
    position: Position,
    in_flight: u32,
    first: First,
) -> MemoryMultipliers {
    let own = StageInFlight { replicas: position.replicas, in_flight };
    MemoryMultipliers {
        in_flight,
        pending_weight_grads: flow.pending_weight_grads(position, in_flight),
        versions: flow.versions(own, first),
        late: flow.late(own, first),
        ..multiples_of_one(problem, position.replicas)
    }
}

/// The multipliers of a stage with one micro-batch in flight and one weight version, without recomputation.
pub fn multiples_of_one(problem: &Problem, replicas: u32) -> MemoryMultipliers {
    MemoryMultipliers {
        in_flight: 1,
        pending_weight_grads: 0,
        versions: 1,
        late: 0,
        replicas,
        recompute: false,
        zero: problem.zero,
        in_place: problem.reduces_in_place(),
        optimizer_state: problem.optimizer_state,
        schedule: problem.schedule,
        microbatches: problem.microbatches,
    }
}

fn recomputed(problem: &Problem, ops: &[u32], recompute: Recompute) -> RecomputeTerms {
    let mut inside = vec![false; problem.graph.ops.len()];
    ops.iter().for_each(|&op| inside[op as usize] = true);
    memory::recomputed(&problem.graph, &RecomputeCosts::of(&problem.graph), &inside, recompute.of(ops))
}

pub fn stages(problem: &Problem, shape: &Shape, spots: &[StagePosition], memory: &[StageMemory]) -> Vec<Stage> {
    let ops = &problem.graph.ops;
    let stage = |(at, ((leaf, memory), spot)): (usize, ((StageGroup<'_>, &StageMemory), &StagePosition))| {
        let mut modules: Vec<String> = Vec::new();
        let mut seen = std::collections::HashSet::new();
        for &op in leaf.ops {
            let module = &ops[op as usize].module;
            if !module.is_empty() && seen.insert(module) {
                modules.push(module.clone());
            }
        }
        let name = |&op: &u32| {
            let name = &ops[op as usize].name;
            if name.is_empty() { op.to_string() } else { name.clone() }
        };
        let placed = Placed { first: spot.first, replicas: leaf.replicas, pace: pace(problem, spot, leaf.replicas) };
        Stage {
            id: StageId(at as u32),
            ops: ranges(leaf.ops),
            op_names: leaf.ops.iter().map(name).collect(),
            modules,
            memory: *memory,
            hierarchy: leaf.hierarchy,
            ..StageCosts::of(problem, leaf.ops, spot.recompute).stage(problem, &placed)
        }
    };
    let mut stages: Vec<Stage> = shape.leaves().into_iter().zip(memory).zip(spots).enumerate().map(stage).collect();
    stages.iter_mut().zip(tied_us(problem, shape, spots)).for_each(|(stage, us)| stage.tied_us = us);
    stages
}

/// The stage of each op.
pub fn stage_of(problem: &Problem, shape: &Shape) -> Vec<u32> {
    let mut stage_of = vec![0u32; problem.graph.ops.len()];
    for (at, leaf) in shape.leaves().iter().enumerate() {
        leaf.ops.iter().for_each(|&op| stage_of[op as usize] = at as u32);
    }
    stage_of
}

/// The time that each stage exchanges gradients of tied parameters; only cost model `pipec` has it.
fn tied_us(problem: &Problem, shape: &Shape, spots: &[StagePosition]) -> Vec<f64> {
    if problem.cost != CostModel::Pipec || !problem.schedule.trains() {
        return vec![0.0; spots.len()];
    }
    let stage_of = stage_of(problem, shape);
    let places: Vec<(u32, u32)> = spots.iter().map(|spot| spot.first).zip(shape.replicas()).collect();
    tied::exchange_us(&problem.cluster.levels, &problem.graph.params, &places, &|op| stage_of[op] as usize)
}

/// The devices of a stage.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    pub first: u32,
    pub replicas: u32,
    /// Relative speed of the slowest device.
    pub pace: f64,
}

/// What a stage costs, whatever its devices.
#[derive(Clone, Debug)]
pub struct StageCosts {
    recompute: bool,
    recomputed: Option<RecomputedOps>,
    forward_us: f64,
    backward_us: f64,
    weight_grad_us: Option<f64>,
    buckets: Vec<GradientBucket>,
    parameter_bytes: u64,
    /// 0 if they are as many as those of the parameters.
    gradient_bytes: u64,
}

impl StageCosts {
    /// The costs of these ops; `ops` must be sorted.
    pub fn of(problem: &Problem, ops: &[u32], recompute: Recompute) -> StageCosts {
        let costs = &problem.graph.ops;
        let sum = |of: &[u32], us: fn(&OpCost) -> f64| of.iter().map(|&op| us(&costs[op as usize])).sum::<f64>();
        let again = recompute.of(ops);
        let again_us = sum(again, OpCost::recompute_us);
        let layers = recompute_scope::layers(again.iter().map(|&op| &costs[op as usize]));
        let recomputed = match recompute {
            Recompute::None => None,
            Recompute::All if layers.is_none() => None,
            Recompute::First(_) | Recompute::All => {
                Some(RecomputedOps { ops: again.len() as u32, layers, fwd_us: again_us })
            }
        }
        .filter(|_| layers != Some(0));
        let bytes = |of: fn(&ParamCost) -> u64| parameter_bytes(problem, ops, of);
        let (weights, sums) = (bytes(|param| param.bytes), bytes(|param| param.sum_bytes));
        let is_known = ops.iter().any(|&op| costs[op as usize].weight_grad_us.is_some());
        StageCosts {
            recompute: recompute.is_any() && layers != Some(0),
            recomputed,
            forward_us: sum(ops, |op| op.fwd_us),
            backward_us: sum(ops, |op| op.bwd_us) + again_us,
            weight_grad_us: is_known.then(|| sum(ops, OpCost::weight_part_us)),
            buckets: if problem.schedule.trains() {
                buckets(&problem.graph, ops, problem.bucket.0)
            } else {
                Vec::new()
            },
            parameter_bytes: weights,
            gradient_bytes: if sums == weights { 0 } else { sums },
        }
    }

    /// The same costs, without the names of parameters in buckets.
    pub fn without_names(mut self) -> StageCosts {
        self.buckets.iter_mut().for_each(|bucket| bucket.parameters = Vec::new());
        self
    }

    /// The stage on these devices, without its ops and names.
    pub fn stage(&self, problem: &Problem, placed: &Placed) -> Stage {
        let &Placed { first, replicas, pace } = placed;
        let reduces = replicas > 1 && problem.schedule.trains();
        let zero = if reduces { problem.zero.of_stage(replicas) } else { Zero::default() };
        let slower = |recomputed: RecomputedOps| RecomputedOps { fwd_us: recomputed.fwd_us / pace, ..recomputed };
        Stage {
            id: StageId(0),
            ops: Vec::new(),
            op_names: Vec::new(),
            modules: Vec::new(),
            replicas,
            tensor_degree: None,
            tensor_parallel: None,
            choices: Vec::new(),
            devices: (first..first + replicas).collect(),
            recompute: self.recompute,
            recomputed: self.recomputed.map(slower),
            fwd_us: self.forward_us / pace,
            bwd_us: self.backward_us / pace,
            weight_grad_us: self.weight_grad_us.map(|us| us / pace),
            buckets: if reduces { self.buckets.clone() } else { Vec::new() },
            zero: zero.level,
            shard_degree: zero.degree,
            parameter_bytes: if zero.level >= 3 { self.parameter_bytes } else { 0 },
            gradient_bytes: self.gradient_bytes,
            tied_us: 0.0,
            memory: StageMemory::default(),
            hierarchy: Vec::new(),
        }
    }

    /// The stage in the cost model.
    pub fn placed(&self, placed: &Placed, gradient_bytes: u64, in_flight: u32) -> PlacedStage {
        PlacedStage {
            forward_us: self.forward_us / placed.pace,
            backward_us: self.backward_us / placed.pace,
            gradient_bytes: gradient_bytes as f64,
            first: placed.first,
            replicas: placed.replicas,
            in_flight,
            tied_us: 0.0,
        }
    }
}

/// Bytes of the parameters used by these ops; `ops` must be sorted.
fn parameter_bytes(problem: &Problem, ops: &[u32], bytes: impl Fn(&ParamCost) -> u64) -> u64 {
    let is_used = |users: &[OpId]| users.iter().any(|user| ops.binary_search(&user.0).is_ok());
    let used = problem.graph.params.iter().filter(|param| is_used(&param.users));
    used.fold(0, |sum: u64, param| sum.saturating_add(bytes(param)))
}

/// The tensors sent between stages, each directly from its producer to every stage that reads it.
pub fn edges(problem: &Problem, shape: &Shape) -> Vec<Edge> {
    edges_with(problem, shape, |tensor| Some(tensor.name.clone()))
}

fn edges_with(problem: &Problem, shape: &Shape, name: impl Fn(&TensorCost) -> Option<String>) -> Vec<Edge> {
    let stage_of = stage_of(problem, shape);
    let mut edges: BTreeMap<(u32, u32), Edge> = BTreeMap::new();
    for tensor in &problem.graph.tensors {
        let from = stage_of[tensor.producer.index()];
        let mut readers: Vec<u32> = tensor.consumers.iter().map(|to| stage_of[to.index()]).collect();
        readers.sort_unstable();
        readers.dedup();
        for to in readers.into_iter().filter(|&to| to != from) {
            let fresh = || Edge { from: StageId(from), to: StageId(to), tensors: Vec::new(), bytes: 0 };
            let edge = edges.entry((from, to)).or_insert_with(fresh);
            edge.tensors.extend(name(tensor));
            edge.bytes += tensor.bytes;
        }
    }
    edges.into_values().collect()
}

/// Ascending ops as half-open ranges of maximum length.
pub fn ranges(ops: &[u32]) -> Vec<(u32, u32)> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &op in ops {
        match ranges.last_mut() {
            Some((_, end)) if *end == op => *end += 1,
            _ => ranges.push((op, op + 1)),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    #[test]
    fn ranges_are_as_long_as_possible() {
        assert_eq!(super::ranges(&[0, 1, 2, 5, 7, 8]), [(0, 3), (5, 6), (7, 9)]);
    }
}
