//! Entry point of hybrid planning: finds the smallest time per sample and returns the plan.
//!
//! Bisects the time between a lower bound and the best known pipeline; `search` decides each step. Over all down-sets
//! the result is optimal. If there are too many, or the search runs out of steps, some linear orders are cut and the
//! plan has a warning.

use crate::piper::check;
use crate::piper::choose::Chosen;
use crate::piper::layers::{Layers, takes_nothing};
use crate::piper::model::Hybrid;
use crate::piper::search::{Price, Search, Span, picks};
use compiler::cluster::read::{self, ClusterError};
use compiler::cluster::{Bytes, BytesPerSecond};
use compiler::partition::search::build_plan::ranges;
use compiler::partition::search::downset_lattice;
use compiler::partition::search::downset_lattice::Lattice;
use compiler::plan::check::error::PlanFault;
use compiler::plan::problem::{CostModel, Objective};
use compiler::plan::schedule::Schedule;
use compiler::plan::{
    Baselines, Edge, Fits, LevelPlacement, Plan, PlannedCluster, PlannedModel, PlannedProfile, PlannedSchedule,
    Predicted, SCHEMA, Search as Searched, Stage, StageId, StageMemory,
};
use compiler::profile::Method;
use std::collections::BTreeMap;

/// Down-sets to explore if `--budget` is not set.
pub const DEFAULT_BUDGET: usize = 60_000;

/// Largest number of sums, one per down-set and degree.
const MOST_SUMS: usize = 1 << 20;

/// Step limit over all down-sets, and along one order.
const MOST_STEPS: u64 = 200_000_000;
const MOST_STEPS_ALONG: u64 = 50_000_000;

const MOST_FIGURES: usize = 200_000_000;

/// Number of replica counts of a single stage tried before the search, largest first.
const MOST_COUNTS: usize = 8;

/// Relative precision of the time.
const PRECISION: f64 = 1e-9;

#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Down-sets to explore before falling back.
    pub budget: Option<u64>,
    /// Recorded in the plan; the search is deterministic.
    pub seed: u64,
    pub model: PlannedModel,
    /// SHA-256 of the instance, recorded in the plan.
    pub sha256: String,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SolveError {
    /// Infeasible: no plan was found within memory.
    #[error("no plan for {devices} devices of {limit} bytes was found; {smallest} bytes per device are enough")]
    Memory {
        devices: u32,
        limit: u64,
        /// Smallest number of bytes per device for which a plan was found.
        smallest: u64,
    },
    /// Infeasible: no stages match the degrees that their layers offer.
    #[error("no plan for {devices} devices was found with any memory: {why}")]
    Devices { devices: u32, why: String },
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The plan checker rejected the plan. This is a bug in the search, never an input error.
    #[error("bug in pipec: the plan checker rejects the plan: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Unsound(Vec<PlanFault>),
}

struct Solution {
    time: f64,
    spans: Vec<Span>,
}

struct Answer {
    solution: Solution,
    low: f64,
    states: u64,
    fallback: Option<String>,
}

pub fn solve(hybrid: &Hybrid, request: &Request) -> Result<Plan, SolveError> {
    let layers = Layers::of(hybrid);
    if let Some(unit) = (0..layers.len()).find(|&unit| layers.time[unit].is_infinite()) {
        let name = &hybrid.layers[layers.layer[unit] as usize].name;
        let why = format!("node {} has no choice for so few devices", name.escape_debug());
        return Err(SolveError::Devices { devices: hybrid.devices, why });
    }
    let budget = request.budget.map_or(DEFAULT_BUDGET, |budget| usize::try_from(budget).unwrap_or(usize::MAX));
    let bound = hybrid.lower_bound();
    let Some(answer) = best_plan(&layers, bound, hybrid.bytes_per_device, budget) else {
        return Err(infeasible(&layers, hybrid));
    };
    let Solution { time, spans } = &answer.solution;
    let proven_optimal = *time <= answer.low * (1.0 + PRECISION);
    let lower_bound_us = if proven_optimal { *time } else { answer.low.min(*time) };
    let mut warnings = Vec::new();
    let fallback = answer.fallback.filter(|_| !proven_optimal);
    if let Some(fallback) = &fallback {
        warnings.push(format!("the search is not exhaustive ({fallback}); a better plan may exist"));
    }
    let stages = stages(&layers, spans);
    let [single, data_parallel, uniform] = baselines(&layers);
    let in_flight: Vec<u32> = spans.iter().map(|span| span.in_flight).collect();
    let cluster = read::gpus(hybrid.devices, Some(BytesPerSecond(hybrid.bandwidth)))?;
    let memory = Bytes(hybrid.bytes_per_device as u64);
    let plan = Plan {
        schema: SCHEMA.to_string(),
        model: request.model.clone(),
        dtype: "f32".to_string(),
        element_types: None,
        optimizer: "sgd".to_string(),
        profile: PlannedProfile::new(request.sha256.clone(), Method::Imported),
        cluster: PlannedCluster {
            device: compiler::cluster::Device { memory, ..cluster.device },
            levels: cluster.levels,
            classes: Vec::new(),
            devices: hybrid.devices,
            memory_per_device: Some(memory),
            idle: Vec::new(),
        },
        cost: CostModel::Hybrid,
        objective: Objective::Throughput,
        schedule: PlannedSchedule {
            kind: Schedule::OneFOneB,
            micro_batch: 1,
            microbatches: hybrid.microbatches,
            chunks: 1,
            weight_versions: vec![1; in_flight.len()],
            pending_weight_grads: Vec::new(),
            in_flight,
        },
        edges: edges(hybrid, &stages),
        predicted: Predicted {
            minibatch_us: *time,
            objective_us: None,
            step_us: time * f64::from(hybrid.microbatches),
            throughput_per_s: if *time > 0.0 { 1e6 / time } else { 0.0 },
            bubble: 0.0,
            bottleneck: bottleneck(&layers, spans),
            busiest_link: None,
            ..Predicted::default()
        },
        stages,
        lower_bound_us,
        proven_optimal,
        baselines: Baselines {
            single: single.0,
            data_parallel: data_parallel.0,
            uniform: uniform.0,
            fits: Fits { single: single.1, data_parallel: data_parallel.1, uniform: uniform.1 },
        },
        search: Searched { method: "hybrid".to_string(), states: answer.states, fallback },
        warnings,
        seed: request.seed,
        options: BTreeMap::new(),
        digest: None,
        extra: BTreeMap::new(),
    };
    check::check(hybrid, &plan).map_err(SolveError::Unsound)?;
    Ok(plan)
}

fn best_plan(layers: &Layers<'_>, bound: f64, bytes: f64, budget: usize) -> Option<Answer> {
    let mut incumbent = best_simple_plan(layers, bytes);
    let mut states = 0;
    for order in downset_lattice::orders(&layers.before, &layers.after) {
        let lattice = Lattice::along(&layers.time, &order);
        let mut search = Search::new(layers, &lattice, bytes, MOST_STEPS_ALONG);
        halve(&mut search, layers, bound, &mut incumbent);
        states += lattice.len() as u64;
    }
    let budget = budget.min(MOST_SUMS / layers.degrees.len().max(1)).min(MOST_FIGURES / layers.len().max(1));
    let Some(lattice) = Lattice::whole(&layers.before, &layers.time, budget) else {
        let fallback = Some(format!("more than {budget} down-sets"));
        return incumbent.map(|solution| Answer { solution, low: bound, states, fallback });
    };
    states += lattice.len() as u64;
    let mut search = Search::new(layers, &lattice, bytes, MOST_STEPS);
    let low = halve(&mut search, layers, bound, &mut incumbent);
    let fallback = match () {
        () if search.is_unsure => Some("the choices of a stage have too many sums".to_string()),
        () if search.is_exhausted() => Some(format!("more than {MOST_STEPS} steps")),
        () => None,
    };
    incumbent.map(|solution| Answer { solution, low, states, fallback })
}

/// Bisects the time between `bound` and the known pipeline; returns the largest time proven infeasible for this
/// lattice.
fn halve(search: &mut Search<'_>, layers: &Layers<'_>, bound: f64, incumbent: &mut Option<Solution>) -> f64 {
    let mut low = bound;
    if incumbent.is_none() {
        *incumbent = search.find_spans(f64::INFINITY).map(|spans| priced(layers, spans));
    }
    let Some(best) = incumbent else { return low };
    // The bound itself is often feasible.
    let mut middle = low * (1.0 + PRECISION / 2.0);
    while best.time > low * (1.0 + PRECISION) && !search.is_exhausted() {
        let solution =
            search.find_spans(middle).map(|spans| priced(layers, spans)).filter(|solution| solution.time < best.time);
        match solution {
            Some(solution) => *best = solution,
            None if search.is_exhausted() => break,
            None => low = middle,
        }
        middle = low + (best.time - low) / 2.0;
    }
    if search.is_unsure { bound } else { low }
}

fn priced(layers: &Layers<'_>, spans: Vec<Span>) -> Solution {
    let time = spans.iter().map(|span| time(layers, span)).fold(0.0, f64::max);
    Solution { time, spans }
}

fn time(layers: &Layers<'_>, span: &Span) -> f64 {
    let contains = |unit: u32| span.units.binary_search(&unit).is_ok();
    let (mut time, mut transfer_bytes, mut weights) = (0.0, 0.0, 0.0);
    for (&unit, &pick) in span.units.iter().zip(&span.picks) {
        let choice = &layers.choices(unit, span.degree)[usize::from(pick)];
        time += choice.time;
        weights += choice.weight_bytes;
        let links = layers.links[unit as usize].iter();
        transfer_bytes += links.filter(|(other, _)| !contains(*other)).map(|(_, bytes)| bytes).sum::<f64>();
        transfer_bytes += layers.sync_bytes(unit, choice, &contains);
    }
    Price::of(layers, span.replicas).stage(time, transfer_bytes, weights)
}

/// Stages with the same degree and replica count, first stage first, with the fastest options that fit.
fn straight(layers: &Layers<'_>, parts: Vec<Vec<u32>>, degree: u32, replicas: u32, bytes: f64) -> Option<Vec<Span>> {
    let stages = parts.len() as u32;
    let span = |(at, units): (usize, Vec<u32>)| {
        let in_flight = stages - at as u32;
        match picks(layers, &units, degree, (replicas, in_flight), (bytes, f64::INFINITY), &mut 0) {
            Chosen::Picks(picks) => Some(Span { units, degree, replicas, in_flight, picks }),
            Chosen::No | Chosen::Unknown => None,
        }
    };
    parts.into_iter().enumerate().map(span).collect()
}

/// Parts of a straight pipeline with as many stages as possible and equal numbers of layers.
fn even_parts(layers: &Layers<'_>, degree: u32) -> Vec<Vec<u32>> {
    let hybrid = layers.hybrid;
    let order = layers.in_order();
    let max_stages = (hybrid.devices / degree.max(1)).min(hybrid.microbatches).max(1);
    let stages = order.len().min(max_stages as usize).max(1);
    let mut parts: Vec<Vec<u32>> = Vec::new();
    for part in 0..stages {
        let chunk = &order[part * order.len() / stages..(part + 1) * order.len() / stages];
        let mut units: Vec<u32> = chunk.iter().filter_map(|&layer| layers.unit_of(layer)).collect();
        units.sort_unstable();
        parts.push(units);
    }
    parts.retain(|part| !part.is_empty());
    parts
}

/// The best simple plan that fits: a single stage, or equal numbers of layers per stage.
fn best_simple_plan(layers: &Layers<'_>, bytes: f64) -> Option<Solution> {
    let all_units: Vec<u32> = (0..layers.len() as u32).collect();
    let mut best: Option<Solution> = None;
    for &degree in &layers.degrees {
        let counts = layers.hybrid.replica_counts();
        let fits = |&&count: &&u32| u64::from(count) * u64::from(degree) <= u64::from(layers.hybrid.devices);
        let replicated =
            counts.iter().rev().filter(fits).take(MOST_COUNTS).map(|&count| (vec![all_units.clone()], count));
        for (parts, count) in replicated.chain([(vec![all_units.clone()], 1), (even_parts(layers, degree), 1)]) {
            if all_units.is_empty() {
                continue;
            }
            let solution = straight(layers, parts, degree, count, bytes).map(|spans| priced(layers, spans));
            best = [best, solution].into_iter().flatten().min_by(|a, b| a.time.total_cmp(&b.time));
        }
    }
    // No layer has a cost: one empty stage.
    let empty = || Solution {
        time: 0.0,
        spans: vec![Span { units: all_units.clone(), degree: 1, replicas: 1, in_flight: 1, picks: Vec::new() }],
    };
    if all_units.is_empty() { Some(empty()) } else { best }
}

/// Time of the baselines (one device, all devices, equal numbers of layers) at the smallest common degree, and whether
/// each fits.
fn baselines(layers: &Layers<'_>) -> [(f64, bool); 3] {
    let hybrid = layers.hybrid;
    let all_units: Vec<u32> = (0..layers.len() as u32).collect();
    let has_all = |&&degree: &&u32| all_units.iter().all(|&unit| !layers.choices(unit, degree).is_empty());
    let degree = layers.degrees.iter().find(has_all).copied().unwrap_or(1);
    let counts = hybrid.replica_counts();
    let fits = |&&count: &&u32| u64::from(count) * u64::from(degree) <= u64::from(hybrid.devices);
    let max_count = counts.iter().rev().find(fits).copied().unwrap_or(1);
    [(vec![all_units.clone()], 1), (vec![all_units.clone()], max_count), (even_parts(layers, degree), 1)].map(
        |(parts, count)| {
            let within = |bytes: f64| straight(layers, parts.clone(), degree, count, bytes);
            let fitting = within(hybrid.bytes_per_device);
            let is_fitting = fitting.is_some();
            // Without a common degree there is no such plan; the lower bound is reported.
            let spans = fitting.or_else(|| within(f64::INFINITY));
            (spans.map_or(hybrid.lower_bound(), |spans| priced(layers, spans).time), is_fitting)
        },
    )
}

fn bottleneck(layers: &Layers<'_>, spans: &[Span]) -> String {
    let times: Vec<f64> = spans.iter().map(|span| time(layers, span)).collect();
    let worst = (0..times.len()).max_by(|&a, &b| times[a].total_cmp(&times[b]).then(b.cmp(&a)));
    worst.map_or(String::new(), |stage| format!("stage {stage}"))
}

fn stages(layers: &Layers<'_>, spans: &[Span]) -> Vec<Stage> {
    let hybrid = layers.hybrid;
    let mut stage_of_unit = vec![0; layers.len()];
    let mut pick_of: BTreeMap<u32, u16> = BTreeMap::new();
    for (at, span) in spans.iter().enumerate() {
        for (index, &unit) in span.units.iter().enumerate() {
            stage_of_unit[unit as usize] = at as u32;
            pick_of.insert(layers.layer[unit as usize], span.picks[index]);
        }
    }
    let stage_of = layers.stages_of_layers(&stage_of_unit);
    let mut device = 0;
    let mut stages = Vec::with_capacity(spans.len());
    for (at, span) in spans.iter().enumerate() {
        let ops: Vec<u32> = (0..hybrid.layers.len() as u32).filter(|&op| stage_of[op as usize] == at as u32).collect();
        let choice = |&op: &u32| {
            let choices = hybrid.layers[op as usize].at(span.degree);
            let free_choice = || choices.iter().position(takes_nothing).unwrap_or_default();
            &choices[pick_of.get(&op).map_or_else(free_choice, |&pick| usize::from(pick))]
        };
        let sum =
            |part: &dyn Fn(&crate::piper::model::Choice) -> f64| ops.iter().map(|op| part(choice(op))).sum::<f64>();
        let weights = sum(&|choice| choice.bytes_standing) as u64;
        let activations = sum(&|choice| choice.bytes_in_flight * f64::from(span.in_flight)) as u64;
        let devices = span.replicas * span.degree;
        stages.push(Stage {
            id: StageId(at as u32),
            ops: ranges(&ops),
            op_names: ops.iter().map(|&op| hybrid.layers[op as usize].name.clone()).collect(),
            replicas: span.replicas,
            tensor_degree: Some(span.degree),
            choices: ops.iter().map(|op| choice(op).name.clone()).collect(),
            devices: (device..device + devices).collect(),
            recompute: ops.iter().any(|op| choice(op).recomputes),
            // The instance combines forward and backward time.
            fwd_us: sum(&|choice| choice.time),
            memory: StageMemory { weights, activations, total: weights + activations, ..StageMemory::default() },
            hierarchy: vec![LevelPlacement { group: at as u32, replicas: span.replicas }],
            ..Stage::default()
        });
        device += devices;
    }
    stages
}

fn edges(hybrid: &Hybrid, stages: &[Stage]) -> Vec<Edge> {
    let mut stage_of = vec![0u32; hybrid.layers.len()];
    for stage in stages {
        stage.op_ids().for_each(|op| stage_of[op as usize] = stage.id.0);
    }
    let mut edges: BTreeMap<(u32, u32), Edge> = BTreeMap::new();
    for link in &hybrid.links {
        let (from, to) = (stage_of[link.from as usize], stage_of[link.to as usize]);
        if from == to {
            continue;
        }
        let new_edge = || Edge { from: StageId(from), to: StageId(to), tensors: Vec::new(), bytes: 0 };
        let edge = edges.entry((from, to)).or_insert_with(new_edge);
        let name = &hybrid.layers[link.from as usize].name;
        if !edge.tensors.contains(name) {
            edge.tensors.push(name.clone());
        }
        edge.bytes = edge.bytes.saturating_add(link.bytes as u64);
    }
    edges.into_values().collect()
}

/// The infeasibility report, with the smallest sufficient number of bytes along some orders by bisection.
fn infeasible(layers: &Layers<'_>, hybrid: &Hybrid) -> SolveError {
    let orders = downset_lattice::orders(&layers.before, &layers.after);
    let lattices: Vec<Lattice> = orders.iter().map(|order| Lattice::along(&layers.time, order)).collect();
    let fits = |bytes: f64| {
        let within = |lattice| Search::new(layers, lattice, bytes, MOST_STEPS_ALONG / 5).find_spans(f64::INFINITY);
        lattices.iter().any(|lattice| within(lattice).is_some())
    };
    let devices = hybrid.devices;
    if !fits(f64::INFINITY) {
        let why = "the tensor-parallel degrees of neighbouring nodes need more devices than exist".to_string();
        return SolveError::Devices { devices, why };
    }
    let limit = hybrid.bytes_per_device as u64;
    let choices = hybrid.layers.iter().flat_map(|layer| layer.choices.iter().flat_map(|(_, choices)| choices));
    let total_bytes: f64 =
        choices.map(|choice| choice.bytes_in_flight * f64::from(hybrid.microbatches) + choice.bytes_standing).sum();
    let (mut low, mut high) = (limit, (total_bytes.ceil() as u64).max(limit));
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(middle as f64) { high = middle } else { low = middle + 1 }
    }
    SolveError::Memory { devices, limit, smallest: high }
}
