//! Closed sets near those that a plan is cut at, and what is won by cutting there instead.
//!
//! Each cut of a plan moves a little: by single ops that are ready or that nothing inside reads, a few of them at a time, and by any
//! op with all that must move with it. The search over closed sets then chooses among all the moved cuts at once. That is done
//! again from where it led, until nothing is won.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::dp::pipedream;
use crate::partition::search::candidates::same;
use crate::partition::search::downsets::DownSets;
use crate::plan::problem::Problem;
use crate::plan::stage_cost::{LevelCost, StageCost};
use std::collections::{BTreeSet, VecDeque};

/// How often a plan is moved at most.
const ROUNDS: usize = 12;

/// The most ops of a graph whose plans are moved.
const MOST_OPS: usize = 8000;

/// The most figures of all sets of one round: sets times ops.
const MOST_FIGURES: usize = 8_000_000;

/// What moving the cuts of a shape came to.
pub struct Moved {
    /// The best shape that was found, and its time in microseconds; nothing where none is better.
    pub best: Option<(Shape, f64)>,
    /// Sets looked at.
    pub states: u64,
}

/// Who reads whom, and what leads to what.
pub struct LocalSearch<'a> {
    problem: &'a Problem,
    reads: Vec<Vec<u32>>,
    readers: Vec<Vec<u32>>,
    /// Each op with all that precede it, and with all that follow it, as bits.
    before: Vec<Vec<u64>>,
    after: Vec<Vec<u64>>,
}

impl LocalSearch<'_> {
    /// Prepares the moves of a problem; `None` for graphs that are too large.
    pub fn of(problem: &Problem) -> Option<LocalSearch<'_>> {
        let ops = problem.graph.ops.len();
        if ops > MOST_OPS {
            return None;
        }
        let (mut reads, mut readers) = (vec![Vec::new(); ops], vec![Vec::new(); ops]);
        for (from, to) in problem.graph.edges() {
            reads[to.index()].push(from.0);
            readers[from.index()].push(to.0);
        }
        let mut before = vec![vec![0u64; ops.div_ceil(64)]; ops];
        let mut after = before.clone();
        (0..ops).for_each(|op| close(&mut before, op, &reads[op]));
        (0..ops).rev().for_each(|op| close(&mut after, op, &readers[op]));
        Some(LocalSearch { problem, reads, readers, before, after })
    }

    /// Moves the cuts of `shape`, which takes `us`, on these levels. No round looks at more sets than `most`.
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

    /// The sets that a shape is cut at, without the empty one and the whole.
    fn cuts(&self, shape: &Shape) -> Vec<Vec<u64>> {
        let mut set = vec![0u64; self.reads.len().div_ceil(64)];
        let leaves = shape.leaves();
        let mut cuts = Vec::with_capacity(leaves.len());
        for leaf in &leaves[..leaves.len().saturating_sub(1)] {
            leaf.ops.iter().for_each(|&op| set[op as usize / 64] |= 1 << (op % 64));
            cuts.push(set.clone());
        }
        cuts
    }

    /// At most so many closed sets around one: half of them by any op with all that must move with it, the smallest moves first;
    /// the others by ever more single ops.
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
                    true => !self.readers[op].iter().any(|&to| has(&set, to as usize)),
                    false => self.reads[op].iter().all(|&from| has(&set, from as usize)),
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

/// Adds an op, and all that its neighbours are already closed under, to its set.
fn close(sets: &mut [Vec<u64>], op: usize, neighbours: &[u32]) {
    let mut set = std::mem::take(&mut sets[op]);
    set[op / 64] |= 1 << (op % 64);
    for &other in neighbours {
        set.iter_mut().zip(&sets[other as usize]).for_each(|(set, other)| *set |= other);
    }
    sets[op] = set;
}

fn has(set: &[u64], op: usize) -> bool {
    set[op / 64] >> (op % 64) & 1 == 1
}
