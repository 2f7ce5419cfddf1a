//! Recomputes cost `pipec` from the definitions, for any devices in any order.
//!
//! It shares no code with `cost_estimate` and `links`, which have the equations. Every port of every device and of
//! every shared unit has its own sum; the largest counts.

pub mod chunks;

use crate::cluster::{DeviceClass, Level};
use crate::plan::buckets::USUAL_BYTES;
use crate::plan::check::recompute;
use crate::plan::groups;
use crate::plan::problem::{Objective, Problem};
use crate::plan::schedule::UpdateRule;
use crate::plan::{Plan, Stage};
use std::collections::{BTreeMap, BTreeSet};

/// The fraction of the busiest time above which waits for items in flight are the bottleneck.
const MUCH: f64 = 0.01;

/// Microseconds per item over one level.
#[derive(Clone, Copy, Debug, Default)]
pub struct LevelLoad {
    pub comes: f64,
    pub goes: f64,
    pub reduces: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Loads {
    /// Forward microseconds per item, on the slowest device of the stage.
    pub forward: Vec<f64>,
    /// As `forward`, plus backward and recomputation.
    pub compute: Vec<f64>,
    /// Gradient bytes; each parameter counts once.
    pub gradients: Vec<f64>,
    /// Microseconds per update to exchange the gradients of tied parameters.
    pub tied: Vec<f64>,
    /// Forward bytes per item between stages.
    pub sent: BTreeMap<(usize, usize), f64>,
}

impl Loads {
    fn of_model(problem: &Problem, plan: &Plan, stage_of: &[usize]) -> Loads {
        let count = plan.stages.len();
        let trains = plan.schedule.kind.trains();
        let mut forward = vec![0.0; count];
        let mut backward = vec![0.0; count];
        for (op, &stage) in problem.graph.ops.iter().zip(stage_of) {
            forward[stage] += op.fwd_us;
            backward[stage] += op.bwd_us;
        }
        let mut compute = vec![0.0; count];
        for (at, stage) in plan.stages.iter().enumerate() {
            let (again, _) = recompute::time(&problem.graph, stage);
            let pace = pace(problem, stage);
            compute[at] = (forward[at] + if trains { backward[at] + again } else { 0.0 }) / pace;
            forward[at] /= pace;
        }
        let mut gradients = vec![0.0; count];
        for param in &problem.graph.params {
            let users: BTreeSet<usize> = param.users.iter().map(|op| stage_of[op.index()]).collect();
            users.into_iter().for_each(|stage| gradients[stage] += param.sum_bytes as f64);
        }
        let tied = if trains { tied(problem, plan, stage_of) } else { vec![0.0; count] };
        let mut sent: BTreeMap<(usize, usize), f64> = BTreeMap::new();
        for tensor in &problem.graph.tensors {
            let from = stage_of[tensor.producer.index()];
            let readers: BTreeSet<usize> = tensor.consumers.iter().map(|op| stage_of[op.index()]).collect();
            readers
                .into_iter()
                .filter(|&to| to != from)
                .for_each(|to| *sent.entry((from, to)).or_default() += tensor.bytes as f64);
        }
        Loads { forward, compute, gradients, tied, sent }
    }

    pub fn stated(plan: &Plan) -> Loads {
        let trains = plan.schedule.kind.trains();
        let all = |of: &dyn Fn(&Stage) -> f64| plan.stages.iter().map(of).collect();
        let mut sent: BTreeMap<(usize, usize), f64> = BTreeMap::new();
        for edge in &plan.edges {
            *sent.entry((edge.from.index(), edge.to.index())).or_default() += edge.bytes as f64;
        }
        Loads {
            forward: all(&|stage| stage.fwd_us),
            compute: all(&|stage| stage.fwd_us + if trains { stage.bwd_us } else { 0.0 }),
            gradients: all(&|stage| stage.reduced_bytes() as f64),
            tied: all(&|stage| stage.tied_us),
            sent,
        }
    }
}

/// The plan's objective in microseconds, and its bottleneck.
pub fn time(problem: &Problem, plan: &Plan, stage_of: &[usize]) -> (f64, String) {
    under(&problem.cluster.levels, problem.objective, plan, &Loads::of_model(problem, plan, stage_of))
}

/// [`time`] for given loads.
pub fn under(levels: &[Level], objective: Objective, plan: &Plan, loads: &Loads) -> (f64, String) {
    let Loads { forward, compute, gradients, tied, sent } = loads;
    let loads_of = loads;
    // One device represents each tensor-parallel group.
    if let Some((levels, stages)) = groups::led(levels, &plan.stages) {
        return under(&levels, objective, &Plan { stages, ..plan.clone() }, loads);
    }
    let kind = plan.schedule.kind;
    let m = f64::from(plan.schedule.microbatches.max(1));
    let trains = kind.trains();
    let wants_latency = objective == Objective::Latency;
    let is_round_robin = kind.is_round_robin();
    let never_flushed = is_round_robin || matches!(kind.update(), UpdateRule::DoubleBuffered | UpdateRule::None);
    let count = plan.stages.len();

    let mut over = vec![vec![LevelLoad::default(); levels.len()]; count];
    let mut way_in = vec![0.0; count];
    for (&(from, to), &bytes) in sent {
        let Some(level) = crate::plan::check::cost::chunks::between(levels, plan, from, to) else { continue };
        let us = latency_us(levels, level) + bytes / bytes_per_us(levels, level);
        over[to][level].comes += us;
        over[from][level].goes += us;
        way_in[to] += us;
    }
    let mut reduce = vec![0.0; count];
    for (at, stage) in plan.stages.iter().enumerate().filter(|(_, stage)| trains && stage.replicas > 1) {
        for (level, us) in rings(levels, stage, gradients[at]) {
            over[at][level].reduces = us;
            reduce[at] += us;
        }
    }
    let reduce_after: Vec<f64> = reduce.iter().zip(tied).map(|(reduce, tied)| reduce + tied).collect();
    if plan.schedule.chunks > 1 {
        let sums = crate::plan::check::cost::chunks::Sums {
            forward,
            compute,
            over: &over,
            way_in: &way_in,
            reduce: &reduce_after,
        };
        return crate::plan::check::cost::chunks::time(levels, plan, &sums);
    }
    if wants_latency {
        return ((0..count).map(|at| compute[at] + way_in[at]).sum(), "the latency of one micro-batch".to_string());
    }

    // Contribution to the objective, total time, and name.
    let mut loads: Vec<(f64, f64, String)> = Vec::new();
    let mut ports: BTreeMap<(usize, u64), [f64; 3]> = BTreeMap::new();
    for (at, stage) in plan.stages.iter().enumerate() {
        let r = f64::from(stage.replicas);
        let per_item = if is_round_robin {
            1.0
        } else if kind.is_double_buffered() {
            1.0 / (m / r).ceil().max(1.0)
        } else {
            0.0
        };
        let items_per_replica = (m / r).ceil().max(1.0);
        let times = match kind.update() {
            UpdateRule::DoubleBuffered => items_per_replica,
            UpdateRule::Round | UpdateRule::None => 1.0 / r,
            UpdateRule::Flush => items_per_replica - 1.0,
        };
        let rings_an_item = match kind.update() {
            UpdateRule::DoubleBuffered => 1.0 / m,
            _ => per_item / r,
        };
        let all = if never_flushed { times } else { items_per_replica };
        let busy = compute[at] + per_item * tied[at];
        loads.push((times * busy, all * busy, format!("compute of stage {at}")));
        loads.push((times * per_item * reduce[at], all * per_item * reduce[at], format!("all-reduce of stage {at}")));
        let mut unit = 1u64;
        for (level, &LevelLoad { comes, goes, reduces }) in over[at].iter().enumerate() {
            let messages = if trains { comes + goes } else { comes.max(goes) };
            let what = format!("links of stage {at} on {}", levels[level].name.escape_debug());
            let item = messages + per_item * reduces;
            loads.push((times * item, all * item, what));
            if levels[level].shared && level > 0 {
                let mut on: BTreeMap<u64, f64> = BTreeMap::new();
                stage.devices.iter().for_each(|device| *on.entry(u64::from(*device) / unit).or_default() += 1.0 / r);
                for (unit, share) in on {
                    let port = ports.entry((level, unit)).or_default();
                    port[0] += share * comes;
                    port[1] += share * goes;
                    port[2] += rings_an_item * reduces;
                }
            }
            unit = unit.saturating_mul(u64::from(levels[level].count.max(1)));
        }
    }
    for ((level, unit), [comes, goes, reduces]) in ports {
        let messages = if trains { comes + goes } else { comes.max(goes) };
        let times = match kind.update() {
            UpdateRule::DoubleBuffered => m,
            UpdateRule::Round | UpdateRule::None => 1.0,
            UpdateRule::Flush => m - 1.0,
        };
        let what = format!("the shared link of unit {unit} on {}", levels[level].name.escape_debug());
        let all = if never_flushed { times } else { m };
        loads.push((times * (messages + reduces), all * (messages + reduces), what));
    }
    let mut worst = loads.iter().map(|load| load.0).fold(0.0, f64::max);
    let mut busiest = (0.0, "compute of stage 0".to_string());
    for (_, all, what) in loads {
        if all > busiest.0 {
            busiest = (all, what);
        }
    }
    if never_flushed {
        return (worst, busiest.1);
    }
    let ways = if trains { 2.0 } else { 1.0 };
    let way: f64 = (0..count).map(|at| compute[at] + ways * way_in[at]).sum();
    let waiting = waiting_us(plan, worst, compute, &way_in);
    if waiting > MUCH * worst {
        busiest.1 = "the in-flight limits, while messages are on their way".to_string();
    }
    worst += waiting;
    (worst + way + exposed_us(plan, loads_of, &way_in, &reduce), busiest.1)
}

/// The exchange of gradients of tied parameters between stages on different devices, as a ring; see `plan::tied`.
pub fn tied(problem: &Problem, plan: &Plan, stage_of: &[usize]) -> Vec<f64> {
    let levels = &problem.cluster.levels;
    let mut us = vec![0.0; plan.stages.len()];
    for param in &problem.graph.params {
        let users: BTreeSet<usize> = param.users.iter().map(|op| stage_of[op.index()]).collect();
        let places: BTreeSet<&[u32]> = users.iter().map(|&stage| &*plan.stages[stage].devices).collect();
        let devices: Vec<u32> = places.iter().flat_map(|devices| devices.iter().copied()).collect();
        let Some(level) = farthest(levels, &devices).filter(|_| places.len() > 1) else { continue };
        let members = places.len() as f64;
        let each = latency_us(levels, level) + param.sum_bytes as f64 / members / bytes_per_us(levels, level);
        users.into_iter().for_each(|stage| us[stage] += 2.0 * (members - 1.0) * each);
    }
    us
}

/// How much longer than `worst` the minibatch takes because replicas wait until items in flight have come back.
fn waiting_us(plan: &Plan, worst: f64, compute: &[f64], way_in: &[f64]) -> f64 {
    let kind = plan.schedule.kind;
    if !kind.flushes() || kind.splits_backward() {
        return 0.0;
    }
    let mut longest = 0.0f64;
    for (at, stage) in plan.stages.iter().enumerate() {
        let later = at + 1..plan.stages.len();
        let trip = compute[at] + later.map(|next| compute[next] + 2.0 * way_in[next]).sum::<f64>();
        let items = plan.schedule.microbatches.div_ceil(stage.replicas.max(1)).max(1) - 1;
        let in_flight = plan.schedule.in_flight.get(at).copied().unwrap_or(1).max(1);
        let meanwhile = worst * f64::from(in_flight) / f64::from(items.max(1));
        longest = longest.max(f64::from(items / in_flight) * (trip - meanwhile));
    }
    longest
}

/// The longest part of an all-reduce that is left when the first stage ends its last backward.
fn exposed_us(plan: &Plan, loads: &Loads, way_in: &[f64], reduce: &[f64]) -> f64 {
    let bucket = plan.options.get("bucket_bytes").and_then(serde_json::Value::as_f64).unwrap_or(USUAL_BYTES as f64);
    let mut longest = 0.0f64;
    for (at, &us) in reduce.iter().enumerate() {
        let backward = |stage: usize| loads.compute[stage] - loads.forward[stage];
        let last = (bucket / loads.gradients[at].max(1.0)).min(1.0);
        let behind = (us - (1.0 - last) * backward(at)).max(us * last) + loads.tied[at];
        let before: f64 = (0..at).map(|stage| backward(stage) + way_in[stage + 1]).sum();
        longest = longest.max(behind - before - way_in[0]);
    }
    longest
}

/// Speed of a stage's slowest device. Replicas work round-robin, so it determines the speed of all.
pub fn pace(problem: &Problem, stage: &Stage) -> f64 {
    let mut slowest: Option<f64> = None;
    for &device in &stage.devices {
        let speed = class_of(&problem.cluster.classes, device).and_then(|class| class.speed).unwrap_or(1.0);
        slowest = Some(slowest.map_or(speed, |slowest| slowest.min(speed)));
    }
    slowest.unwrap_or(1.0)
}

/// The class of a device; `None` on a homogeneous cluster.
pub fn class_of(classes: &[DeviceClass], device: u32) -> Option<&DeviceClass> {
    let mut left = device;
    for class in classes {
        match left.checked_sub(class.count) {
            Some(rest) => left = rest,
            None => return Some(class),
        }
    }
    None
}

/// The outermost level that separates any two of the devices.
fn farthest(levels: &[Level], devices: &[u32]) -> Option<usize> {
    let mut unit = 1u64;
    let mut found = None;
    for (at, level) in levels.iter().enumerate() {
        let units: BTreeSet<u64> = devices.iter().map(|device| u64::from(*device) / unit).collect();
        if units.len() > 1 {
            found = Some(at);
        }
        unit = unit.saturating_mul(u64::from(level.count.max(1)));
    }
    found
}

fn latency_us(levels: &[Level], level: usize) -> f64 {
    levels[..=level].iter().map(|level| level.latency.0 * 1e6).fold(0.0, f64::max)
}

fn bytes_per_us(levels: &[Level], level: usize) -> f64 {
    levels[..=level].iter().map(|level| level.bandwidth.0 / 1e6).fold(f64::INFINITY, f64::min)
}

/// All-reduce time per level: a ring over the most units in one unit above, for one shard of the level below. At a
/// shared level all shards use one port.
fn rings(levels: &[Level], stage: &Stage, sums: f64) -> Vec<(usize, f64)> {
    let mut rings = Vec::new();
    let (mut unit, mut shards) = (1u64, 1u64);
    for (at, level) in levels.iter().enumerate() {
        let above = unit.saturating_mul(u64::from(level.count.max(1)));
        let mut members: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for device in &stage.devices {
            members.entry(u64::from(*device) / above).or_default().insert(u64::from(*device) / unit);
        }
        let most = members.values().map(BTreeSet::len).max().unwrap_or(1) as f64;
        if most > 1.0 {
            let bytes = if level.shared { sums } else { sums / shards as f64 };
            let each = latency_us(levels, at) + bytes / most / bytes_per_us(levels, at);
            rings.push((at, 2.0 * (most - 1.0) * each));
        }
        shards *= members.values().map(BTreeSet::len).min().unwrap_or(1) as u64;
        unit = above;
    }
    rings
}
