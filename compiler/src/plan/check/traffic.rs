//! Counts the bytes out of and into every unit of a cluster (a server, for example) per item.
//!
//! Each message and each ring is followed from device to device. A message counts at every level at which it leaves a
//! unit: at the server's link and, between racks, also at the rack's. Items are distributed round-robin: item b goes
//! from replica b mod r_s to replica b mod r_t. Each pair with equal remainders modulo the greatest common divisor is
//! used equally often. A ring of m units moves 2 (m - 1) / m of the gradient sums out of and into each unit, divided equally
//! over its devices. Under 1F1B-RR a stage all-reduces once per round of r items, else once per minibatch.
//!
//! In tensor-parallel plans, every device sends to the same tensor rank of the other group.
//!
//! A unit's devices share one link if the level is shared. They also do if the cost model only supports whole groups
//! and the plan does not use whole groups. Otherwise each device has its own link.

use crate::plan::in_flight::common_divisor;
use crate::plan::problem::{CostModel, Problem};
use crate::plan::{BusiestLink, Plan, Stage};
use std::collections::{BTreeMap, BTreeSet};

/// Bytes out of and into each unit per item, by level and unit.
type Ports = BTreeMap<(usize, u64), [f64; 2]>;

pub struct Traffic {
    pub busiest: BusiestLink,
    /// The busiest link that is part of the objective, and its microseconds: links of shared levels, and of plans that
    /// do not use whole groups. `None` under cost `pipec`, which includes shared links.
    pub binding: Option<(BusiestLink, f64)>,
}

/// Counts the traffic of all units. `None` on a single level.
pub fn traffic(problem: &Problem, plan: &Plan, stage_of: &[usize]) -> Option<Traffic> {
    let levels = &problem.cluster.levels;
    let mut sizes = vec![1u64];
    for level in &levels[..levels.len() - 1] {
        sizes.push(sizes[sizes.len() - 1].saturating_mul(u64::from(level.count.max(1))));
    }
    let knows_groups = problem.cost != CostModel::Pipec;
    let spans = knows_groups && plan.stages.first().is_some_and(|stage| stage.hierarchy.len() < levels.len());
    let flushes = !plan.schedule.kind.is_continuous() || plan.schedule.kind.is_double_buffered();
    let is_whole = problem.cost == CostModel::Pipec && flushes;
    let items = if is_whole { f64::from(plan.schedule.microbatches) } else { 1.0 };
    let (mut busiest, mut binding) = (None::<(BusiestLink, f64)>, None);
    for ((level, unit), both) in ports(problem, plan, stage_of, &sizes) {
        let is_one = levels[level].shared || spans;
        let links = if is_one { 1.0 } else { sizes[level] as f64 };
        for (direction, bytes) in ["out", "in"].into_iter().zip(both) {
            let us = bytes / (levels[level].bandwidth.0 / 1e6) / links;
            let share = if us > 0.0 { (items * us / plan.predicted.minibatch_us).min(1e9) } else { 0.0 };
            let (name, unit, bytes) = (levels[level].name.clone(), unit as u32, bytes.round() as u64);
            let link = BusiestLink { level: name, unit, direction: direction.into(), bytes, share };
            for (most, counts) in [(&mut busiest, true), (&mut binding, is_one && knows_groups)] {
                if counts && most.as_ref().is_none_or(|(_, other)| us > *other) {
                    *most = Some((link.clone(), us));
                }
            }
        }
    }
    busiest.map(|(busiest, _)| Traffic { busiest, binding })
}

fn ports(problem: &Problem, plan: &Plan, stage_of: &[usize], sizes: &[u64]) -> Ports {
    let mut ports = Ports::new();
    let trains = plan.schedule.kind.trains();
    // PipeDream's optimizer treats transfers as free without a compression ratio, and divides by it otherwise.
    let compression = match (problem.cost, problem.activation_compression) {
        (CostModel::Pipedream, None) => f64::INFINITY,
        (CostModel::Pipedream, Some(ratio)) => ratio,
        _ => 1.0,
    };
    let mut sent: BTreeMap<(usize, usize), f64> = BTreeMap::new();
    for tensor in &problem.graph.tensors {
        let from = stage_of[tensor.producer.index()];
        let readers: BTreeSet<usize> = tensor.consumers.iter().map(|op| stage_of[op.index()]).collect();
        for to in readers.into_iter().filter(|&to| to != from) {
            *sent.entry((from, to)).or_default() += tensor.bytes as f64 / compression;
        }
    }
    for (level, size) in sizes.iter().enumerate().skip(1) {
        let unit = |device: u32| u64::from(device) / size;
        for (&(from, to), &bytes) in &sent {
            for rank in 0..ranks(plan) {
                let [from, to] = [from, to].map(|stage| of_rank(&plan.stages[stage], rank));
                for (unit, [out, into]) in leaving(&from, &to, &unit) {
                    let port = ports.entry((level, unit)).or_default();
                    port[0] += bytes * (out + if trains { into } else { 0.0 });
                    port[1] += bytes * (into + if trains { out } else { 0.0 });
                }
            }
        }
    }
    if trains {
        let mut sums = vec![0.0; plan.stages.len()];
        for param in &problem.graph.params {
            let users: BTreeSet<usize> = param.users.iter().map(|op| stage_of[op.index()]).collect();
            users.into_iter().for_each(|stage| sums[stage] += param.sum_bytes as f64);
        }
        for (stage, bytes) in plan.stages.iter().zip(sums) {
            let is_round_robin = plan.schedule.kind.is_round_robin();
            let items = if is_round_robin { stage.replicas } else { plan.schedule.microbatches };
            for rank in 0..ranks(plan) {
                rings(&of_rank(stage, rank), bytes / f64::from(items.max(1)), sizes, &mut ports);
            }
        }
    }
    ports
}

fn ranks(plan: &Plan) -> usize {
    plan.stages.iter().map(Stage::degree).max().unwrap_or(1) as usize
}

/// The devices of one tensor rank. They exchange messages and all-reduce their gradients.
fn of_rank(stage: &Stage, rank: usize) -> Vec<u32> {
    stage.devices.iter().copied().skip(rank).step_by(stage.degree() as usize).collect()
}

/// Per unit, the fraction of items that leave it and that enter it between two stages.
fn leaving(from: &[u32], to: &[u32], unit: &dyn Fn(u32) -> u64) -> BTreeMap<u64, [f64; 2]> {
    let divisor = common_divisor(from.len() as u64, to.len() as u64) as usize;
    let pairs = (from.len() / divisor * to.len()) as f64;
    let mut shares: BTreeMap<u64, [f64; 2]> = BTreeMap::new();
    for rest in 0..divisor {
        let on = |devices: &[u32]| {
            let mut on: BTreeMap<u64, f64> = BTreeMap::new();
            let meet = devices.iter().skip(rest).step_by(divisor);
            meet.for_each(|&device| *on.entry(unit(device)).or_default() += 1.0);
            on
        };
        let (senders, readers) = (on(from), on(to));
        let all = |on: &BTreeMap<u64, f64>| on.values().sum::<f64>();
        for (&unit, &count) in &senders {
            let elsewhere = all(&readers) - readers.get(&unit).copied().unwrap_or(0.0);
            shares.entry(unit).or_default()[0] += count * elsewhere / pairs;
        }
        for (&unit, &count) in &readers {
            let elsewhere = all(&senders) - senders.get(&unit).copied().unwrap_or(0.0);
            shares.entry(unit).or_default()[1] += count * elsewhere / pairs;
        }
    }
    shares
}

/// Adds a ring at each level, among the units in one unit above.
fn rings(devices: &[u32], bytes: f64, sizes: &[u64], ports: &mut Ports) {
    for level in 1..sizes.len() {
        let above = |device: u32| sizes.get(level + 1).map_or(0, |size| u64::from(device) / size);
        let mut members: BTreeMap<u64, BTreeMap<u64, Vec<u32>>> = BTreeMap::new();
        for &device in devices {
            let units = members.entry(above(device)).or_default();
            units.entry(u64::from(device) / sizes[level]).or_default().push(device);
        }
        for units in members.values().filter(|units| units.len() > 1) {
            let m = units.len() as f64;
            for devices in units.values() {
                let each = 2.0 * (m - 1.0) / m * bytes / devices.len() as f64;
                for device in devices {
                    for (lower, size) in sizes.iter().enumerate().take(level + 1).skip(1) {
                        let port = ports.entry((lower, u64::from(*device) / size)).or_default();
                        port.iter_mut().for_each(|bytes| *bytes += each);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_leave_by_pairs_of_replicas() {
        // Six replicas on units 0 and 1, then two on unit 1: odd items go from 1, 3, 5 to 7, even ones from 0, 2, 4 to
        // 6.
        let found = leaving(&[0, 1, 2, 3, 4, 5], &[6, 7], &|device| u64::from(device) / 4);
        assert_eq!(found[&0], [4.0 / 6.0, 0.0]);
        assert_eq!(found[&1], [0.0, 4.0 / 6.0]);
        // Two and three replicas: every pair once in six items.
        let found = leaving(&[2, 3], &[4, 5, 3], &|device| u64::from(device) / 4);
        assert_eq!(found[&0], [2.0 / 3.0, 0.0]);
    }

    #[test]
    fn rings_pass_every_level_below() {
        let mut ports = Ports::new();
        // Two racks of two servers of two devices; five devices are used.
        rings(&[0, 1, 2, 3, 4], 120.0, &[1, 2, 4], &mut ports);
        // The whole ring passes between servers 0 and 1 and between the racks. Each server of the first rack carries
        // half of the latter.
        assert_eq!(ports[&(1, 0)], [120.0 + 60.0; 2]);
        assert_eq!(ports[&(2, 0)], [120.0; 2]);
        assert_eq!(ports[&(1, 2)], [120.0; 2]);
    }
}
