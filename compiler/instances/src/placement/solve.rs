//! Entry point of device placement: returns the best placement found as a plan.
//!
//! Contiguous placements are optimal if all down-sets can be searched; otherwise only some linear orders are, with a
//! warning. Non-contiguous placements are improved by local search, and only a lower bound indicates their quality.
//!
//! In a plan with hosts, accelerators and hosts are two device classes, in this order.

use crate::placement::anywhere;
use crate::placement::check;
use crate::placement::contiguous::{Limits, Part, contiguous};
use crate::placement::model::{Node, Placement};
use crate::placement::units::Units;
use compiler::cluster::device;
use compiler::cluster::read::{self, ClusterError};
use compiler::cluster::{Bytes, Device, DeviceClass};
use compiler::partition::search::build_plan::ranges;
use compiler::partition::search::downset_lattice;
use compiler::partition::search::downset_lattice::Lattice;
use compiler::plan::check::error::PlanFault;
use compiler::plan::problem::{CostModel, HOST, NOMINAL, Objective};
use compiler::plan::schedule::Schedule;
use compiler::plan::{
    Baselines, Edge, Fits, LevelPlacement, Plan, PlannedCluster, PlannedModel, PlannedProfile, PlannedSchedule,
    Predicted, SCHEMA, Search, Stage, StageId, StageMemory,
};
use compiler::profile::Method;
use serde_json::json;
use std::collections::BTreeMap;

/// Down-sets to explore if `--budget` is not set.
pub const DEFAULT_BUDGET: usize = 60_000;

/// Largest table of the dynamic program, in entries.
const MOST_ENTRIES: usize = 1 << 27;

#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Allows non-contiguous placements.
    pub anywhere: bool,
    /// Down-sets to explore before falling back.
    pub budget: Option<u64>,
    /// Seed of the local search.
    pub seed: u64,
    /// Bytes per device; overrides the instance.
    pub memory: Option<Bytes>,
    pub model: PlannedModel,
    /// SHA-256 of the instance, recorded in the plan.
    pub sha256: String,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SolveError {
    /// Infeasible: no placement was found.
    #[error(
        "no placement on {devices} devices of {limit} bytes was found: {why}; {smallest} bytes per device are \
        enough"
    )]
    Infeasible {
        devices: u32,
        limit: u64,
        why: String,
        /// Smallest number of bytes per device for which a placement was found.
        smallest: u64,
    },
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("{units} units on {devices} devices are too many to place")]
    TooLarge { units: usize, devices: u32 },
    /// The plan checker rejected the placement. This is a bug in the search, never an input error.
    #[error("bug in pipec: the plan checker rejects the placement: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Unsound(Vec<PlanFault>),
}

struct Answer {
    stages: Vec<Part>,
    states: usize,
    is_proven: bool,
    fallback: Option<String>,
}

pub fn solve(placement: &Placement, request: &Request) -> Result<Plan, SolveError> {
    let units = Units::of(placement);
    let bytes = request.memory.map_or(placement.bytes_per_device, |bytes| bytes.0 as f64);
    let limits =
        Limits { devices: placement.devices as usize, hosts: placement.hosts as usize, bytes, below: f64::INFINITY };
    if entries(&units, limits, units.len() + 1) > MOST_ENTRIES {
        return Err(SolveError::TooLarge { units: units.len(), devices: placement.devices });
    }
    let budget = request.budget.map_or(DEFAULT_BUDGET, |budget| usize::try_from(budget).unwrap_or(usize::MAX));
    let Some(mut answer) = chain(&units, limits, budget) else {
        return Err(infeasible(placement, &units, bytes));
    };
    let contiguous_load = load(placement, &units, &answer.stages);
    let bound = placement.lower_bound();
    let mut proven = answer.is_proven.then_some(contiguous_load);
    let mut warnings = Vec::new();
    if request.anywhere {
        let mut start = vec![0; units.len()];
        for (device, stage) in devices(placement, &answer.stages).into_iter().zip(&answer.stages) {
            stage.units.iter().for_each(|&unit| start[unit as usize] = device);
        }
        let Limits { devices, hosts, bytes, .. } = limits;
        let device_of = anywhere::anywhere(&units, &start, anywhere::Limits { devices, hosts, bytes }, request.seed);
        answer.stages = (0..placement.devices + placement.hosts)
            .map(|device| Part {
                units: (0..units.len() as u32).filter(|&unit| device_of[unit as usize] == device).collect(),
                is_host: placement.is_host(device),
            })
            .filter(|stage| !stage.units.is_empty())
            .collect();
        proven = None;
        answer.is_proven = false;
        answer.fallback = Some("local search".to_string());
        warnings.push("devices have nodes from anywhere in the graph; such a placement cannot be trained".into());
    }
    let max_load = load(placement, &units, &answer.stages);
    let is_optimal = max_load <= bound * (1.0 + 1e-9);
    if let Some(fallback) = answer.fallback.as_ref().filter(|_| !is_optimal) {
        warnings.push(format!("the search is not exhaustive ({fallback}); a better placement may exist"));
    }
    let lower_bound_us = proven.unwrap_or(bound).min(max_load);
    let stages = stages(placement, &units, &answer.stages);
    let has_backward = placement.nodes.iter().any(|node| node.is_backward);
    let kind = if has_backward { Schedule::OneFOneBRr } else { Schedule::Inference };
    let in_flight: Vec<u32> = (1..=stages.len() as u32).rev().collect();
    let weight_versions = if has_backward { in_flight.clone() } else { vec![1; stages.len()] };
    let time: f64 = placement.nodes.iter().map(|node| node.time).sum();
    let host_time: f64 = placement.nodes.iter().map(|node| node.host_time).sum();
    // Nodes that run on hosts only leave no other single device.
    let is_accelerated = time.is_finite();
    let single = if is_accelerated { time } else { host_time };
    let fits_single = !is_accelerated || placement.nodes.iter().map(|node| node.bytes).sum::<f64>() <= bytes;
    let uniform = match is_accelerated {
        true => load(placement, &units, &evenly(&units, limits.devices)),
        false => host_time,
    };
    let mut options = BTreeMap::from([("noncontiguous".to_string(), json!(request.anywhere))]);
    if placement.hosts > 0 {
        options.insert("hosts".to_string(), json!(placement.hosts));
    }
    let plan = Plan {
        schema: SCHEMA.to_string(),
        model: request.model.clone(),
        dtype: "f32".to_string(),
        element_types: None,
        optimizer: "sgd".to_string(),
        profile: PlannedProfile::new(request.sha256.clone(), Method::Imported),
        cluster: cluster(placement, bytes)?,
        cost: CostModel::Load,
        objective: Objective::Throughput,
        schedule: PlannedSchedule {
            kind,
            micro_batch: 1,
            microbatches: 1,
            chunks: 1,
            in_flight,
            weight_versions,
            pending_weight_grads: Vec::new(),
        },
        edges: edges(placement, &stages),
        predicted: Predicted {
            minibatch_us: max_load,
            objective_us: None,
            step_us: max_load,
            throughput_per_s: if max_load > 0.0 { 1e6 / max_load } else { 0.0 },
            bubble: 0.0,
            bottleneck: bottleneck(placement, &units, &answer.stages),
            busiest_link: None,
            ..Predicted::default()
        },
        stages,
        lower_bound_us,
        proven_optimal: answer.is_proven || is_optimal,
        baselines: Baselines {
            single,
            // Devices cannot be replicas here, so data parallelism uses a single device.
            data_parallel: single,
            uniform,
            fits: Fits { single: fits_single, data_parallel: fits_single, uniform: false },
        },
        search: Search {
            method: if request.anywhere { "anywhere" } else { "contiguous" }.to_string(),
            states: answer.states as u64,
            fallback: answer.fallback,
        },
        warnings,
        seed: request.seed,
        options,
        digest: None,
        extra: BTreeMap::new(),
    };
    let judged_placement = Placement { bytes_per_device: bytes, ..placement.clone() };
    check::check(&judged_placement, &plan).map_err(SolveError::Unsound)?;
    Ok(plan)
}

/// Entries of the table of the dynamic program.
fn entries(units: &Units, limits: Limits, sets: usize) -> usize {
    let axis_len = |max: usize| max.min(units.len()) + 1;
    axis_len(limits.devices).saturating_mul(axis_len(limits.hosts)).saturating_mul(sets)
}

fn chain(units: &Units, limits: Limits, budget: usize) -> Option<Answer> {
    let mut best: Option<(f64, Vec<Part>)> = None;
    let mut states = 0;
    for order in downset_lattice::orders(&units.before, &units.after) {
        let lattice = Lattice::along(&units.work, &order);
        states += lattice.len();
        // An even cut of the order bounds the search on long orders.
        let greedy = order_bound(units, &order, limits.devices, limits.bytes);
        let below = best.as_ref().map_or(f64::INFINITY, |(value, _)| *value).min(greedy);
        best = contiguous(units, &lattice, Limits { below, ..limits }).or(best);
    }
    let fits = |lattice: &Lattice| entries(units, limits, lattice.len()) <= MOST_ENTRIES;
    let Some(lattice) = Lattice::whole(&units.before, &units.work, budget).filter(fits) else {
        let fallback = Some(format!("more than {budget} down-sets"));
        return best.map(|(_, stages)| Answer { stages, states, is_proven: false, fallback });
    };
    states += lattice.len();
    let below = best.as_ref().map_or(f64::INFINITY, |(value, _)| *value);
    best = contiguous(units, &lattice, Limits { below, ..limits }).or(best);
    best.map(|(_, stages)| Answer { stages, states, is_proven: true, fallback: None })
}

/// Slightly above the largest load of an order cut into parts of equal time; infinite if a part does not fit.
fn order_bound(units: &Units, order: &[u32], devices: usize, bytes: f64) -> f64 {
    let stages = cut(units, order, devices);
    if stages.iter().any(|stage| stage.iter().map(|&unit| units.bytes[unit as usize]).sum::<f64>() > bytes) {
        return f64::INFINITY;
    }
    let mut part_of = vec![0; units.len()];
    for (at, stage) in stages.iter().enumerate() {
        stage.iter().for_each(|&unit| part_of[unit as usize] = at);
    }
    let mut max_load: f64 = 0.0;
    for (at, stage) in stages.iter().enumerate() {
        let mut tensors: Vec<u32> =
            stage.iter().flat_map(|&unit| units.touching[unit as usize].iter().copied()).collect();
        tensors.sort_unstable();
        tensors.dedup();
        let time: f64 = stage.iter().map(|&unit| units.time[unit as usize]).sum();
        let transfer: f64 = tensors.into_iter().map(|t| units.charge(t, |unit| part_of[unit as usize] == at)).sum();
        max_load = max_load.max(time + transfer);
    }
    max_load * (1.0 + 1e-9) + f64::MIN_POSITIVE
}

fn cut(units: &Units, order: &[u32], devices: usize) -> Vec<Vec<u32>> {
    let total: f64 = units.time.iter().sum();
    let mut stages = vec![Vec::new()];
    let mut assigned = 0.0;
    for &unit in order {
        let time = units.time[unit as usize];
        let is_full = assigned + time / 2.0 > total * stages.len() as f64 / devices as f64;
        if is_full && stages.len() < devices {
            stages.push(Vec::new());
        }
        assigned += time;
        stages.last_mut().expect("there is a first stage").push(unit);
    }
    stages.retain(|stage| !stage.is_empty());
    stages
}

fn evenly(units: &Units, devices: usize) -> Vec<Part> {
    let order: Vec<u32> = (0..units.len() as u32).collect();
    cut(units, &order, devices).into_iter().map(|units| Part { units, is_host: false }).collect()
}

/// The device of each stage.
fn devices(placement: &Placement, stages: &[Part]) -> Vec<u32> {
    let (mut accelerators, mut hosts) = (0..placement.devices, placement.devices..placement.devices + placement.hosts);
    let next = |stage: &Part| if stage.is_host { hosts.next() } else { accelerators.next() };
    stages.iter().map(next).map(|device| device.expect("the search uses no more devices than there are")).collect()
}

fn stage_of(units: &Units, stages: &[Part]) -> Vec<u32> {
    let mut of_unit = vec![0; units.len()];
    for (at, stage) in stages.iter().enumerate() {
        stage.units.iter().for_each(|&unit| of_unit[unit as usize] = at as u32);
    }
    units.of_node.iter().map(|&unit| of_unit[unit as usize]).collect()
}

/// The load of each stage.
fn loads(placement: &Placement, units: &Units, stages: &[Part]) -> Vec<f64> {
    let devices = devices(placement, stages);
    let device_of: Vec<u32> = stage_of(units, stages).into_iter().map(|stage| devices[stage as usize]).collect();
    let loads = placement.loads(&device_of, (placement.devices + placement.hosts) as usize);
    devices.into_iter().map(|device| loads[device as usize]).collect()
}

fn load(placement: &Placement, units: &Units, stages: &[Part]) -> f64 {
    loads(placement, units, stages).into_iter().fold(0.0, f64::max)
}

fn bottleneck(placement: &Placement, units: &Units, stages: &[Part]) -> String {
    let loads = loads(placement, units, stages);
    let worst = (0..loads.len()).max_by(|&a, &b| loads[a].total_cmp(&loads[b]).then(b.cmp(&a)));
    worst.map_or(String::new(), |stage| format!("load of stage {stage}"))
}

fn cluster(placement: &Placement, bytes: f64) -> Result<PlannedCluster, ClusterError> {
    let devices = placement.devices + placement.hosts;
    let mut cluster = read::gpus(devices, Some(NOMINAL))?;
    cluster.device.memory = Bytes(bytes as u64);
    // With hosts, the classes state the limits.
    let memory_per_device = (placement.hosts == 0).then_some(cluster.device.memory);
    let classes = match (placement.hosts, device::find(HOST)) {
        (1.., Some(host)) => {
            // A host holds everything.
            let total_bytes: f64 = placement.nodes.iter().map(|node| node.bytes).sum();
            let host = Device { memory: Bytes(total_bytes.ceil() as u64), ..host.device() };
            vec![
                DeviceClass { device: cluster.device.clone(), count: placement.devices, speed: None },
                DeviceClass { device: host, count: placement.hosts, speed: None },
            ]
        }
        _ => Vec::new(),
    };
    Ok(PlannedCluster {
        levels: cluster.levels,
        devices,
        memory_per_device,
        device: cluster.device,
        classes,
        idle: Vec::new(),
    })
}

fn stages(placement: &Placement, units: &Units, parts: &[Part]) -> Vec<Stage> {
    let (of_node, devices) = (stage_of(units, parts), devices(placement, parts));
    let stage = |at: usize| {
        let is_in_stage = |&op: &u32| of_node[op as usize] == at as u32;
        let ops: Vec<u32> = (0..placement.nodes.len() as u32).filter(is_in_stage).collect();
        let node = |op: u32| &placement.nodes[op as usize];
        let weights = ops.iter().map(|&op| node(op).bytes).sum::<f64>() as u64;
        let time = |backward: bool| {
            let nodes = ops.iter().map(|&op| node(op)).filter(|node: &&Node| node.is_backward == backward);
            nodes.map(|node| if parts[at].is_host { node.host_time } else { node.time }).sum()
        };
        Stage {
            id: StageId(at as u32),
            ops: ranges(&ops),
            op_names: ops.iter().map(|&op| node(op).name.clone()).collect(),
            replicas: 1,
            devices: vec![devices[at]],
            fwd_us: time(false),
            bwd_us: time(true),
            memory: StageMemory { weights, total: weights, ..StageMemory::default() },
            hierarchy: vec![LevelPlacement { group: at as u32, replicas: 1 }],
            ..Stage::default()
        }
    };
    (0..parts.len()).map(stage).collect()
}

/// The transfers between devices; costs are converted to bytes at the nominal bandwidth.
fn edges(placement: &Placement, stages: &[Stage]) -> Vec<Edge> {
    let mut stage_of = vec![0u32; placement.nodes.len()];
    for stage in stages {
        stage.op_ids().for_each(|op| stage_of[op as usize] = stage.id.0);
    }
    let mut edges: BTreeMap<(u32, u32), Edge> = BTreeMap::new();
    for (node, &from) in placement.nodes.iter().zip(&stage_of) {
        let mut readers: Vec<u32> = node.readers.iter().map(|&to| stage_of[to as usize]).collect();
        readers.sort_unstable();
        readers.dedup();
        for to in readers.into_iter().filter(|&to| to != from) {
            let new_edge = || Edge { from: StageId(from), to: StageId(to), tensors: Vec::new(), bytes: 0 };
            let edge = edges.entry((from, to)).or_insert_with(new_edge);
            edge.tensors.push(node.name.clone());
            edge.bytes = edge.bytes.saturating_add((node.transfer * NOMINAL.0 / 1e6).round() as u64);
        }
    }
    edges.into_values().collect()
}

/// The infeasibility report, with the smallest sufficient number of bytes by bisection.
fn infeasible(placement: &Placement, units: &Units, bytes: f64) -> SolveError {
    let devices = placement.devices as usize;
    let total: f64 = units.bytes.iter().sum();
    let largest = units.bytes.iter().copied().fold(0.0, f64::max);
    let (mut low, mut high) = (bytes.max(largest).max(total / devices as f64).floor() as u64, total.ceil() as u64);
    let limits = |bytes: u64| Limits { devices, hosts: 0, bytes: bytes as f64, below: f64::INFINITY };
    let fits = |bytes: u64| chain(units, limits(bytes), DEFAULT_BUDGET / 10).is_some();
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(middle) { high = middle } else { low = middle + 1 }
    }
    let why = if largest > bytes {
        let unit = units.bytes.iter().position(|&size| size == largest).unwrap_or(0);
        let node = units.of_node.iter().position(|&of| of as usize == unit).unwrap_or(0);
        let name = &placement.nodes[node].name;
        format!("node {} and the nodes on its device need {} bytes", name.escape_debug(), largest as u64)
    } else if total > bytes * devices as f64 {
        format!("all nodes need {} bytes", total as u64)
    } else {
        format!("all nodes need {} bytes, and no split fits", total as u64)
    };
    SolveError::Infeasible { devices: placement.devices, limit: bytes as u64, why, smallest: high }
}
