//! Shared-link lower bound for cost models `paper` and `pipedream`.
//!
//! Those models give every group at a level its own link. If stages do not fill whole groups, or the level's link is
//! shared, all stages of a unit share one link. No plan is faster than its busiest link. Bytes are counted as in
//! `plan::traffic`, computed here from device ranges.

use crate::cluster::Level;
use crate::partition::dp::nested_partition::Shape;
use crate::partition::search::build_plan::{self, StagePosition};
use crate::plan::problem::{CostModel, Problem};
use std::collections::BTreeMap;

/// The devices of a stage, from `first` to before `end`.
#[derive(Clone, Copy)]
struct DeviceSpan {
    first: u64,
    end: u64,
}

impl DeviceSpan {
    fn len(self) -> u64 {
        self.end - self.first
    }

    /// The replicas of the stage that are on a unit, as a range of replica indices.
    fn on(self, unit: u64, size: u64) -> (u64, u64) {
        let place = |device: u64| device.clamp(self.first, self.end) - self.first;
        (place(unit * size), place((unit + 1) * size))
    }

    fn units(self, size: u64) -> std::ops::RangeInclusive<u64> {
        self.first / size..=(self.end - 1) / size
    }
}

/// Microseconds of the busiest shared link per micro-batch; 0 if every device has its own link.
pub fn busiest_us(problem: &Problem, shape: &Shape, spots: &[StagePosition]) -> f64 {
    let levels = &problem.cluster.levels;
    let spans = shape.is_flat && levels.len() > 1;
    let is_one = |at: usize| at > 0 && (spans || levels[at].shared);
    if problem.cost == CostModel::Pipec || !(0..levels.len()).any(is_one) {
        return 0.0;
    }
    let trains = problem.schedule.trains();
    let per_byte = match (problem.cost, problem.activation_compression) {
        (CostModel::Pipedream, None) => 0.0,
        (CostModel::Pipedream, Some(ratio)) => 1.0 / ratio,
        _ => 1.0,
    };
    let replicas = shape.replicas();
    let range = |(spot, &replicas): (&StagePosition, &u32)| {
        let first = u64::from(spot.first);
        DeviceSpan { first, end: first + u64::from(replicas.max(1)) }
    };
    let ranges: Vec<DeviceSpan> = spots.iter().zip(&replicas).map(range).collect();
    let edges = if per_byte > 0.0 { build_plan::edges(problem, shape) } else { Vec::new() };
    let holdings = if trains { build_plan::holdings(problem, shape) } else { Vec::new() };
    let mut busiest = 0.0f64;
    for at in (1..levels.len()).filter(|&at| is_one(at)) {
        let size = unit(levels, at);
        let mut ports: BTreeMap<u64, [f64; 2]> = BTreeMap::new();
        for edge in &edges {
            let (from, to) = (ranges[edge.from.index()], ranges[edge.to.index()]);
            let bytes = edge.bytes as f64 * per_byte;
            let mut add = |unit: u64, way: usize, stays: f64, own: (u64, u64), of: DeviceSpan| {
                let leaves = bytes * ((own.1 - own.0) as f64 / of.len() as f64 - stays);
                let port = ports.entry(unit).or_default();
                port[way] += leaves;
                port[1 - way] += if trains { leaves } else { 0.0 };
            };
            let share = |unit| same_unit_fraction(from.on(unit, size), to.on(unit, size), from, to);
            for unit in from.units(size) {
                add(unit, 0, share(unit), from.on(unit, size), from);
            }
            for unit in to.units(size) {
                add(unit, 1, share(unit), to.on(unit, size), to);
            }
        }
        for (holdings, range) in holdings.iter().zip(&ranges) {
            let items = match problem.schedule.is_round_robin() {
                true => range.len(),
                false => u64::from(problem.microbatches),
            };
            let weights = holdings.weights as f64 / items as f64;
            for unit in range.units(size) {
                let bytes = weights * ring_parts(levels, at, *range, unit);
                ports.entry(unit).or_default().iter_mut().for_each(|port| *port += bytes);
            }
        }
        let bytes_per_us = levels[at].bandwidth.0 / 1e6;
        busiest = ports.values().flatten().map(|bytes| bytes / bytes_per_us).fold(busiest, f64::max);
    }
    busiest
}

fn unit(levels: &[Level], at: usize) -> u64 {
    levels[..at].iter().fold(1, |size, level| size.saturating_mul(u64::from(level.count.max(1))))
}

/// Fraction of micro-batches whose sender and receiver replicas both lie in these replica ranges.
fn same_unit_fraction(left: (u64, u64), right: (u64, u64), from: DeviceSpan, to: DeviceSpan) -> f64 {
    if left.0 >= left.1 || right.0 >= right.1 {
        return 0.0;
    }
    let (mut divisor, mut rest) = (from.len(), to.len());
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    // Replica indices below `end` with that remainder.
    let below = |end: u64, rest: u64| (end + divisor - 1 - rest) / divisor;
    let of = |(first, end): (u64, u64), rest: u64| (below(end, rest) - below(first, rest)) as f64;
    let pairs: f64 = (0..divisor).map(|rest| of(left, rest) * of(right, rest)).sum();
    pairs / (from.len() / divisor * to.len()) as f64
}

/// Bytes that one all-reduce sends out of a unit of level `at`, as a multiple of the stage's weights. Counts the ring
/// of that level, and the outer rings to which the unit contributes a part.
fn ring_parts(levels: &[Level], at: usize, range: DeviceSpan, own: u64) -> f64 {
    let mut parts = 0.0;
    let (low, high) = range.on(own, unit(levels, at));
    for add_offset in at..levels.len() {
        let size = unit(levels, add_offset);
        let inside = own * unit(levels, at) / size;
        let above = if add_offset + 1 < levels.len() { unit(levels, add_offset + 1) } else { u64::MAX };
        let around = inside * size / above;
        let (first, last) =
            (range.first.max(around.saturating_mul(above)), range.end.min((around + 1).saturating_mul(above)));
        let members = ((last - 1) / size - first / size + 1) as f64;
        let (from, to) = range.on(inside, size);
        parts += 2.0 * (members - 1.0) / members * (high - low) as f64 / (to - from) as f64;
    }
    parts
}
