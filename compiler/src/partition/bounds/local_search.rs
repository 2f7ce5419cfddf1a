//! Local search around the cuts of a plan.
//!
//! Each cut moves by single ops that are ready or removable, a few at a time. It also moves by any op with all ops that
//! must move with it. PipeDream's dynamic program then optimises over the down-sets of all moved cuts together. This
//! repeats until the plan no longer improves.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::dp::pipedream;
use crate::partition::search::downsets::DownSets;
use crate::partition::search::numbers::same;
use crate::partition::search::op_sets::{closures, has, insert, neighbours};
use crate::plan::problem::Problem;
use crate::plan::stage_cost::{LevelCost, StageCost};
use std::collections::{BTreeSet, VecDeque};

const ROUNDS: usize = 12;

const MOST_OPS: usize = 8000;

/// Limit on down-sets times ops per round.
const MOST_FIGURES: usize = 8_000_000;

pub struct Moved {
    /// A better shape and its time in microseconds, if one was found.
    pub best: Option<(Shape, f64)>,
    pub states: u64,
}

/// Readers, predecessors and successors of each op.
pub struct LocalSearch<'a> {
    problem: &'a Problem,
    reads: Vec<Vec<usize>>,
    readers: Vec<Vec<usize>>,
    /// Each op with all its predecessors, and with all its successors, as bit sets.
    before: Vec<Vec<u64>>,
    after: Vec<Vec<u64>>,
}

impl LocalSearch<'_> {
    pub fn of(problem: &Problem) -> Option<LocalSearch<'_>> {
        let ops = problem.graph.ops.len();
        if ops > MOST_OPS {
            return None;
        }
        let [reads, readers] = neighbours(&problem.graph);
        let (before, after) = (closures(&reads, 0..ops), closures(&readers, (0..ops).rev()));
        Some(LocalSearch { problem, reads, readers, before, after })
    }

    /// Moves the cuts of `shape`, whose time is `us`. Each round explores at most `most` down-sets.
    pub fn improve(&self, levels: &[LevelCost], shape: &Shape, us: f64, most: usize) -> Moved {
        let cost = StageCost::of(self.problem);
        let mut moved = Moved { best: None, states: 0 };
        let most = most.min(MOST_FIGURES / self.problem.graph.ops.len().max(1));
        for _ in 0..ROUNDS {
            let (shape, us) = moved.best.as_ref().map_or((shape, us), |(shape, us)| (shape, *us));
            let cuts = self.cuts(shape);
            if cuts.is_empty() {
                break;
            }
            let sets: Vec<Vec<u64>> = cuts.iter().flat_map(|cut| self.around(cut, most / cuts.len())).collect();
            let space = DownSets::of(&self.problem.graph, cost.model, sets);
            moved.states += space.len() as u64;
            let found = pipedream::solve(&space, &cost, levels, true, us);
            let Some(better) = found.filter(|found| found.minibatch_us < us && !same(found.minibatch_us, us)) else {
                break;
            };
            moved.best = Some((better.shape, better.minibatch_us));
        }
        moved
    }

    /// The down-sets at the cuts of a shape, without the empty set and the whole model.
    fn cuts(&self, shape: &Shape) -> Vec<Vec<u64>> {
        let mut set = vec![0u64; self.reads.len().div_ceil(64)];
        let leaves = shape.leaves();
        let mut cuts = Vec::with_capacity(leaves.len());
        for leaf in &leaves[..leaves.len().saturating_sub(1)] {
            leaf.ops.iter().for_each(|&op| insert(&mut set, op as usize));
            cuts.push(set.clone());
        }
        cuts
    }

    /// At most `most` down-sets around a cut. Half of them move any op with all ops that must move with it, smallest
    /// moves first. The others move ever more single ops.
    fn around(&self, cut: &[u64], most: usize) -> Vec<Vec<u64>> {
        let ops = self.reads.len();
        let graph = &self.problem.graph;
        let us = |set: &[u64]| -> f64 {
            (0..ops).filter(|&op| has(set, op)).map(|op| graph.ops[op].fwd_us + graph.ops[op].bwd_us).sum()
        };
        let whole = |op: usize| -> (f64, usize, Vec<u64>) {
            let changed: Vec<u64> = match has(cut, op) {
                true => cut.iter().zip(&self.after[op]).map(|(cut, after)| cut & after).collect(),
                false => cut.iter().zip(&self.before[op]).map(|(cut, before)| before & !cut).collect(),
            };
            (us(&changed), op, cut.iter().zip(&changed).map(|(cut, changed)| cut ^ changed).collect())
        };
        let mut moves: Vec<(f64, usize, Vec<u64>)> = (0..ops).map(whole).collect();
        moves.sort_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
        let mut found: BTreeSet<Vec<u64>> = BTreeSet::from([cut.to_vec()]);
        found.extend(moves.into_iter().map(|(_, _, set)| set).take(most / 2));
        let mut seen: BTreeSet<Vec<u64>> = BTreeSet::from([cut.to_vec()]);
        let mut queue = VecDeque::from([cut.to_vec()]);
        while let Some(set) = queue.pop_front() {
            for op in 0..ops {
                let free = match has(&set, op) {
                    true => !self.readers[op].iter().any(|&to| has(&set, to)),
                    false => self.reads[op].iter().all(|&from| has(&set, from)),
                };
                if !free {
                    continue;
                }
                let mut next = set.clone();
                next[op / 64] ^= 1 << (op % 64);
                if seen.insert(next.clone()) {
                    found.insert(next.clone());
                    queue.push_back(next);
                }
                if found.len() >= most {
                    return found.into_iter().collect();
                }
            }
        }
        found.into_iter().collect()
    }
}
