//! The cuts through an element of a [`chain`](crate::partition::bounds::chain): its down-sets.

use crate::partition::bounds::chain::Work;
use crate::profile::cost_graph::{CostGraph, TensorCost};
use std::collections::HashSet;

/// Limits of an element: its ops, and its down-sets.
const MOST_OPS: usize = 128;
const MOST_SETS: usize = 2000;

/// What is true of some cuts through an element.
#[derive(Clone, Copy, Debug)]
pub struct Division {
    /// Forward and backward of the ops before the cut, in microseconds: least and most.
    pub least_us: f64,
    pub most_us: f64,
    /// Gradient sums of the parameters before the cut, in bytes: least and most.
    pub least_summed: f64,
    pub most_summed: f64,
    /// The longest path before the cut, at least.
    pub way: Work,
    /// Bytes of the tensors that cross it, at least: all, and those that the element or the next one reads.
    pub sent: f64,
    pub read_next: f64,
}

impl Division {
    fn with(self, other: Division) -> Division {
        Division {
            least_us: self.least_us.min(other.least_us),
            most_us: self.most_us.max(other.most_us),
            least_summed: self.least_summed.min(other.least_summed),
            most_summed: self.most_summed.max(other.most_summed),
            way: self.way.min(other.way),
            sent: self.sent.min(other.sent),
            read_next: self.read_next.min(other.read_next),
        }
    }
}

/// The ops of an element, and the tensors that may cross its cuts.
pub struct Members<'a> {
    pub graph: &'a CostGraph,
    /// Ascending.
    pub ops: &'a [usize],
    /// Gradient sums of the parameters that only this op uses.
    pub summed: &'a dyn Fn(usize) -> f64,
    /// The tensors of the ops, and of the op before the element.
    pub tensors: &'a [&'a TensorCost],
    /// False for ops that are left out.
    pub is_kept: &'a dyn Fn(usize) -> bool,
    /// True for the ops of the element and of the next one.
    pub is_near: &'a dyn Fn(usize) -> bool,
}

impl Members<'_> {
    /// All cuts that leave ops on both sides, joined to at most `parts` groups by their work. `None` if there are too many.
    pub fn divisions(&self, parts: usize) -> Option<Vec<Division>> {
        let count = self.ops.len();
        if count > MOST_OPS {
            return None;
        }
        let place = |op: usize| self.ops.binary_search(&op).ok();
        // Members that an op reads, as a bit set.
        let mut reads = vec![0u128; count];
        for tensor in self.tensors {
            let Some(from) = place(tensor.producer.index()) else { continue };
            for to in tensor.consumers.iter().filter_map(|op| place(op.index())) {
                reads[to] |= 1 << from;
            }
        }
        let mut sets: Vec<u128> = vec![0];
        let mut known: HashSet<u128> = HashSet::from([0]);
        let mut at = 0;
        while at < sets.len() {
            let set = sets[at];
            for op in (0..count).filter(|&op| set >> op & 1 == 0 && reads[op] & !set == 0) {
                if known.insert(set | 1 << op) {
                    sets.push(set | 1 << op);
                }
            }
            if sets.len() > MOST_SETS {
                return None;
            }
            at += 1;
        }
        let work: Vec<Work> = self.ops.iter().map(|&op| Work::of(&self.graph.ops[op])).collect();
        let all_us: f64 = work.iter().map(Work::us).sum();
        let mut groups: Vec<Option<Division>> = vec![None; parts.max(1)];
        // The empty set is first, and the whole element last.
        for &set in &sets[1..sets.len().saturating_sub(1).max(1)] {
            let one = self.division(set, &work, &reads);
            let group = (one.least_us / all_us.max(1e-12) * groups.len() as f64) as usize;
            let group = group.min(groups.len() - 1);
            groups[group] = Some(groups[group].map_or(one, |other| other.with(one)));
        }
        Some(groups.into_iter().flatten().collect())
    }

    fn division(&self, set: u128, work: &[Work], reads: &[u128]) -> Division {
        let has = |op: usize| set >> op & 1 == 1;
        let members = || (0..work.len()).filter(|&op| has(op));
        let us = members().map(|op| work[op].us()).sum();
        let summed = members().map(|op| (self.summed)(self.ops[op])).sum();
        let mut ways = vec![Work::default(); work.len()];
        let mut way = Work::default();
        for op in members() {
            let before = (0..op).filter(|&other| reads[op] >> other & 1 == 1);
            ways[op] = before.map(|other| ways[other]).fold(Work::default(), Work::max).plus(work[op]);
            way = way.max(ways[op]);
        }
        let is_before = |op: usize| match self.ops.binary_search(&op) {
            Ok(place) => has(place),
            Err(_) => op < self.ops[0],
        };
        let crossing = |is_counted: &dyn Fn(usize) -> bool| -> f64 {
            let is_read = |op: usize| (self.is_kept)(op) && !is_before(op) && is_counted(op);
            let crosses = |tensor: &&&TensorCost| {
                is_before(tensor.producer.index()) && tensor.consumers.iter().any(|op| is_read(op.index()))
            };
            self.tensors.iter().filter(crosses).map(|tensor| tensor.bytes as f64).sum()
        };
        let (sent, read_next) = (crossing(&|_| true), crossing(self.is_near));
        Division { least_us: us, most_us: us, least_summed: summed, most_summed: summed, way, sent, read_next }
    }
}
