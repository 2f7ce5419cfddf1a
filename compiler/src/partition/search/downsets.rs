//! Down-sets of a graph (sets of ops that are closed under predecessors), with their compute, weights and cut bytes.
//!
//! [`DownSets`] lists such sets from the empty set to the whole model; each set comes before its supersets. The
//! difference of two nested sets can become a stage. PipeDream calls the sets states and identifies each by its
//! antichain of last ops.

use crate::partition::search::numbers::running_sums;
use crate::partition::search::op_sets::{closures, has, insert, neighbours};
use crate::plan::cut_bytes::CutBytes;
use crate::plan::problem::CostModel;
use crate::plan::stage_cost::StageRange;
use crate::profile::cost_graph::CostGraph;
use std::collections::HashSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// PipeDream's growth: starts at the first op and adds a reader of the current set with all its predecessors. Omits
    /// sets that contain a later source but none of its readers.
    FirstSource,
    All,
}

#[derive(Clone, Debug)]
pub struct DownSets {
    sets: Sets,
    /// Forward plus backward microseconds of each set; non-decreasing.
    pub compute: Vec<f64>,
    pub weights: Vec<f64>,
    /// Bytes that cross the cut after each set.
    pub cut: Vec<f64>,
}

#[derive(Clone, Debug)]
enum Sets {
    /// Bit sets of `words` words each.
    Bits { words: usize, bits: Vec<u64> },
    /// Prefixes of one order: set i holds `order[..ends[i]]`.
    Chain { order: Vec<u32>, ends: Vec<usize> },
}

impl DownSets {
    pub fn grow(graph: &CostGraph, model: CostModel, growth: Growth, budget: usize) -> Option<DownSets> {
        let ops = graph.ops.len();
        if ops >= budget {
            return None;
        }
        Some(DownSets::of(graph, model, closed_sets(graph, growth, budget)?))
    }

    /// Builds the list from bit sets; adds the empty set and the whole model, and removes duplicates.
    pub fn of(graph: &CostGraph, model: CostModel, mut bits: Vec<Vec<u64>>) -> DownSets {
        let ops = graph.ops.len();
        let words = ops.div_ceil(64);
        let (none, mut all) = (vec![0u64; words], vec![0u64; words]);
        (0..ops).for_each(|op| insert(&mut all, op));
        bits.extend([none, all]);
        let sum =
            |set: &[u64], value: &dyn Fn(usize) -> f64| (0..ops).filter(|&op| has(set, op)).map(value).sum::<f64>();
        let mut sets: Vec<(f64, u32, Vec<u64>)> = Vec::with_capacity(bits.len());
        for set in bits {
            let compute = sum(&set, &|op| graph.ops[op].fwd_us + graph.ops[op].bwd_us);
            sets.push((compute, set.iter().map(|word| word.count_ones()).sum(), set));
        }
        // Sums of non-negative terms in a fixed order are monotonic, so a subset never sorts after its superset.
        sets.sort_by(|left, right| {
            left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)).then_with(|| left.2.cmp(&right.2))
        });
        sets.dedup_by(|left, right| left.2 == right.2);
        let weights = sets.iter().map(|(_, _, set)| sum(set, &|op| graph.ops[op].param_bytes as f64)).collect();
        let charged = CutBytes::new(model, graph);
        let cut = sets.iter().map(|(_, _, set)| charged.at(|op| has(set, op))).collect();
        let compute = sets.iter().map(|(compute, ..)| *compute).collect();
        let bits = sets.into_iter().flat_map(|(_, _, set)| set).collect();
        DownSets { sets: Sets::Bits { words, bits }, compute, weights, cut }
    }

    /// Prefixes of `order` (a topological order); set i holds the first `ends[i]` ops. `ends` rises from 0 to the
    /// number of ops.
    pub fn chain(graph: &CostGraph, model: CostModel, order: Vec<u32>, ends: Vec<usize>) -> DownSets {
        let charged = CutBytes::new(model, graph);
        let mut place = vec![0usize; order.len()];
        order.iter().enumerate().for_each(|(at, &op)| place[op as usize] = at);
        let cut = ends.iter().map(|&end| charged.at(|op| place[op] < end)).collect();
        let op = |&op: &u32| &graph.ops[op as usize];
        let compute = running_sums(&order, |sum, at| sum + (op(at).fwd_us + op(at).bwd_us));
        let weights = running_sums(&order, |sum, at| sum + op(at).param_bytes as f64);
        let pick = |values: &[f64]| ends.iter().map(|&end| values[end]).collect::<Vec<_>>();
        let (compute, weights) = (pick(&compute), pick(&weights));
        DownSets { sets: Sets::Chain { order, ends }, compute, weights, cut }
    }

    /// Keeps the sets whose index satisfies `fine`, the empty set and the whole model.
    pub fn only(&self, fine: impl Fn(usize) -> bool) -> DownSets {
        let last = self.len() - 1;
        let kept: Vec<usize> = (0..=last).filter(|&at| at == 0 || at == last || fine(at)).collect();
        let pick = |values: &[f64]| kept.iter().map(|&at| values[at]).collect::<Vec<_>>();
        let sets = match &self.sets {
            Sets::Bits { words, bits } => {
                let bits = kept.iter().flat_map(|&at| bits[at * words..(at + 1) * words].iter().copied()).collect();
                Sets::Bits { words: *words, bits }
            }
            Sets::Chain { order, ends } => {
                Sets::Chain { order: order.clone(), ends: kept.iter().map(|&at| ends[at]).collect() }
            }
        };
        DownSets { sets, compute: pick(&self.compute), weights: pick(&self.weights), cut: pick(&self.cut) }
    }

    /// Keeps about `most` sets: of those with nearly equal compute the one with the fewest cut bytes.
    pub fn cheapest(&self, most: usize) -> DownSets {
        let whole = self.compute[self.len() - 1].max(f64::MIN_POSITIVE);
        let mut best: Vec<Option<usize>> = vec![None; most.max(1)];
        for at in 0..self.len() {
            let slice = ((self.compute[at] / whole * most as f64) as usize).min(best.len() - 1);
            if best[slice].is_none_or(|other| self.cut[at] < self.cut[other]) {
                best[slice] = Some(at);
            }
        }
        let mut is_best = vec![false; self.len()];
        best.into_iter().flatten().for_each(|at| is_best[at] = true);
        self.only(|at| is_best[at])
    }

    pub fn len(&self) -> usize {
        self.compute.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() < 2
    }

    /// Returns whether set `inner` is contained in set `outer`; `inner` must come first in the list.
    pub fn nested(&self, inner: usize, outer: usize) -> bool {
        match &self.sets {
            Sets::Chain { .. } => true,
            Sets::Bits { words, bits } => {
                let inner = &bits[inner * words..(inner + 1) * words];
                let outer = &bits[outer * words..(outer + 1) * words];
                inner.iter().zip(outer).all(|(inner, outer)| inner & !outer == 0)
            }
        }
    }

    /// The ops between two sets as a part of a plan that takes `inner_us` on one unit.
    pub fn range(&self, from: usize, to: usize, replicas: u32, is_first: bool, inner_us: f64) -> StageRange {
        StageRange {
            is_first,
            is_last: to + 1 == self.len(),
            replicas,
            inner_us,
            weight_bytes: self.weights[to] - self.weights[from],
            in_bytes: self.cut[from],
            out_bytes: self.cut[to],
        }
    }

    pub fn between(&self, inner: usize, outer: usize) -> Vec<u32> {
        match &self.sets {
            Sets::Chain { order, ends } => {
                let mut ops = order[ends[inner]..ends[outer]].to_vec();
                ops.sort_unstable();
                ops
            }
            Sets::Bits { words, bits } => {
                let inner = &bits[inner * words..(inner + 1) * words];
                let outer = &bits[outer * words..(outer + 1) * words];
                (0..words * 64).filter(|&op| has(outer, op) && !has(inner, op)).map(|op| op as u32).collect()
            }
        }
    }
}

fn closed_sets(graph: &CostGraph, growth: Growth, budget: usize) -> Option<Vec<Vec<u64>>> {
    let ops = graph.ops.len();
    let [before, after] = neighbours(graph);
    // Each op with its predecessors; ops are in topological order.
    let closure = closures(&before, 0..ops);
    let empty = vec![0u64; ops.div_ceil(64)];
    let mut seen: HashSet<Vec<u64>> = HashSet::from([empty.clone()]);
    let mut found = vec![empty];
    let mut next = 0;
    while let Some(set) = found.get(next).cloned() {
        next += 1;
        let mut grows: Vec<usize> = match growth {
            Growth::All => {
                (0..ops).filter(|&op| !has(&set, op) && before[op].iter().all(|&from| has(&set, from))).collect()
            }
            Growth::FirstSource => {
                let inside = (0..ops).filter(|&op| has(&set, op));
                let mut readers: Vec<usize> =
                    inside.flat_map(|op| after[op].iter().copied()).filter(|&op| !has(&set, op)).collect();
                readers.sort_unstable();
                readers.dedup();
                readers
            }
        };
        // The empty set, and disconnected graphs: continue at the first remaining op.
        if grows.is_empty() {
            grows.extend((0..ops).find(|&op| !has(&set, op)));
        }
        for op in grows {
            let grown: Vec<u64> = set.iter().zip(&closure[op]).map(|(left, right)| left | right).collect();
            if seen.insert(grown.clone()) {
                if found.len() >= budget {
                    return None;
                }
                found.push(grown);
            }
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partition::bounds::test_graphs::of_edges;

    const COST: CostModel = CostModel::Pipedream;

    #[test]
    fn a_diamond_has_its_closed_sets() {
        let diamond = of_edges(&[(0, 1), (0, 2), (1, 3), (2, 3)], &[10, 20, 40, 80]);
        let space = DownSets::grow(&diamond, COST, Growth::FirstSource, 100).unwrap();
        // {}, {0}, {0,1}, {0,2}, {0,1,2}, all
        assert_eq!(space.len(), 6);
        assert_eq!(space.between(0, 1), [0]);
        assert_eq!(space.between(1, 5), [1, 2, 3]);
        assert!(space.nested(2, 4) && space.nested(3, 4) && !space.nested(2, 3));
        // After {0, 1} or {0, 2}: op 0 sends to one branch, op 1 or 2 to op 3.
        assert_eq!((space.cut[2], space.cut[3]), (10.0 + 20.0, 10.0 + 40.0));
        assert!(DownSets::grow(&diamond, COST, Growth::FirstSource, 5).is_none());
    }

    #[test]
    fn parts_that_nothing_joins_are_all_covered() {
        let graph = of_edges(&[(0, 2), (1, 3)], &[10, 20, 40, 80]);
        let space = DownSets::grow(&graph, COST, Growth::FirstSource, 100).unwrap();
        assert_eq!(space.between(0, space.len() - 1), [0, 1, 2, 3]);
        let all = DownSets::grow(&graph, COST, Growth::All, 100).unwrap();
        assert_eq!(all.len(), 9);
    }

    #[test]
    fn wide_graphs_stop_at_the_budget() {
        let edges: Vec<_> =
            (0..24).flat_map(|chain| (0..23).map(move |at| (chain * 24 + at, chain * 24 + at + 1))).collect();
        let bomb = of_edges(&edges, &[1; 576]);
        assert!(DownSets::grow(&bomb, COST, Growth::All, 5000).is_none());
    }
}
