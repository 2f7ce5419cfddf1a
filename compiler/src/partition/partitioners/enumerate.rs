//! Exhaustive enumeration under cost model `pipec`, for small models: the test oracle for the search in `search/pipec`.
//!
//! Enumerates all chains of down-sets with all replica counts. On several levels a pipeline may also start at a later
//! device or leave the last devices of a unit unused. A branch is pruned if one stage alone is slower than the best
//! plan. No partial result is memoised. A stage is recomputed only if it does not fit otherwise.

use crate::cluster::class;
use crate::partition::dp::nested_partition::Shape;
use crate::partition::heterogeneous::device_ranges::DeviceRanges;
use crate::partition::infeasible::Need;
use crate::partition::search::build_plan::{self, Recompute, StagePosition};
use crate::partition::search::context::SearchContext;
use crate::partition::search::result::PlanCandidate;
use crate::plan::problem::{Objective, ProblemError, Recomputation};

pub const MAX_OPS: usize = 12;

pub const MAX_STEPS: u64 = 3_000_000;

/// Returns the best candidate that fits (if none fits, the one that needs the least memory) and the number of steps.
pub fn every(question: &SearchContext<'_>) -> Result<(Option<PlanCandidate>, u64), ProblemError> {
    let graph = &question.problem.graph;
    let ops = graph.ops.len();
    let too_large = |what, limit: u64, found: u64| ProblemError::TooLarge { method: "exhaustive", what, limit, found };
    if ops > MAX_OPS {
        return Err(too_large("ops", MAX_OPS as u64, ops as u64));
    }
    let mut before = vec![0u32; ops];
    graph.edges().iter().for_each(|(from, to)| before[to.index()] |= 1 << from.index());
    let closed = |set: &u32| (0..ops).all(|op| set >> op & 1 == 0 || before[op] & !set == 0);
    let sets: Vec<u32> = (1..1u32 << ops).filter(closed).collect();
    let unit = match &question.problem.cluster.levels[..] {
        [inner, _, ..] => inner.count,
        _ => 0,
    };
    let mut walk = Walk {
        question,
        sets,
        unit,
        best: None,
        least: None,
        fleet: DeviceRanges::of(&question.problem.cluster.classes),
        best_us: f64::INFINITY,
        stages: Vec::new(),
        steps: 0,
    };
    for first in 0..unit.max(1) {
        walk.extend(0, first);
    }
    if walk.steps > MAX_STEPS {
        return Err(too_large("steps", MAX_STEPS, walk.steps));
    }
    Ok((walk.best.or(walk.least.map(|(_, candidate)| candidate)), walk.steps))
}

struct Walk<'a> {
    question: &'a SearchContext<'a>,
    /// Down-sets as bit masks over the ops.
    sets: Vec<u32>,
    /// Devices per innermost unit; 0 on a single level.
    unit: u32,
    best: Option<PlanCandidate>,
    /// The infeasible candidate that needs the least memory.
    least: Option<(Need, PlanCandidate)>,
    fleet: DeviceRanges,
    /// Time of `best`; stays infinite if the objective is memory.
    best_us: f64,
    /// Ops, first device and replicas of each stage so far.
    stages: Vec<(Vec<u32>, u32, u32)>,
    steps: u64,
}

impl Walk<'_> {
    fn extend(&mut self, inside: u32, first: u32) {
        let ops = self.question.problem.graph.ops.len();
        let devices = self.question.problem.cluster.devices();
        if inside.count_ones() as usize == ops {
            return self.price();
        }
        for at in 0..self.sets.len() {
            let set = self.sets[at];
            if set & inside != inside || set == inside {
                continue;
            }
            let added: Vec<u32> = (0..ops as u32).filter(|op| (set & !inside) >> op & 1 == 1).collect();
            for replicas in 1..=devices.saturating_sub(first) {
                if self.steps > MAX_STEPS {
                    return;
                }
                // Prunes: this stage alone is slower than the best plan.
                if self.busiest_us(&added, replicas) > self.best_us {
                    continue;
                }
                let end = first + replicas;
                self.stages.push((added.clone(), first, replicas));
                self.extend(set, end);
                if self.unit > 0 && !end.is_multiple_of(self.unit) && set.count_ones() < ops as u32 {
                    self.extend(set, end.next_multiple_of(self.unit));
                }
                self.stages.pop();
            }
        }
    }

    fn busiest_us(&self, added: &[u32], replicas: u32) -> f64 {
        let problem = self.question.problem;
        let asked = build_plan::asked(problem);
        let op = |op: &u32| {
            let op = &problem.graph.ops[*op as usize];
            op.fwd_us + if asked.trains() { op.bwd_us } else { 0.0 }
        };
        asked.weight(replicas) * added.iter().map(op).sum::<f64>() / class::fastest(&problem.cluster.classes)
    }

    fn price(&mut self) {
        self.steps += 1;
        let stages = self.stages.iter().map(|(ops, _, replicas)| (ops.clone(), *replicas)).collect();
        let shape = Shape::flat(stages, self.unit > 0);
        let problem = self.question.problem;
        let recomputation = problem.recomputation();
        let recompute = Recompute::from(recomputation.choices()[0]);
        let mut spots: Vec<StagePosition> =
            self.stages.iter().map(|&(_, first, _)| StagePosition { first, recompute }).collect();
        let mut candidate = self.question.placed("exhaustive", shape, spots.clone());
        let wants_memory = problem.objective == Objective::Memory;
        if recomputation == Recomputation::Auto && (wants_memory || !candidate.fits) {
            let again: Vec<StagePosition> =
                spots.iter().map(|spot| StagePosition { recompute: Recompute::All, ..*spot }).collect();
            let other = self.question.placed("exhaustive", candidate.shape.clone(), again);
            let replicas = candidate.shape.replicas();
            for (at, spot) in spots.iter_mut().enumerate() {
                let limit = problem.limit_of(spot.first..spot.first + replicas[at]).unwrap_or(u64::MAX);
                let (plain, recomputed) = (candidate.memory[at].total, other.memory[at].total);
                spot.recompute = (recomputed < plain && (wants_memory || plain > limit)).into();
            }
            candidate = self.question.placed("exhaustive", candidate.shape, spots);
        }
        let value = |candidate: &PlanCandidate| match problem.objective {
            Objective::Memory => (candidate.peak() as f64, candidate.minibatch_us),
            Objective::Throughput | Objective::Latency => (candidate.minibatch_us, 0.0),
        };
        let better = |best: &Option<PlanCandidate>| best.as_ref().is_none_or(|best| value(&candidate) < value(best));
        if candidate.fits && better(&self.best) {
            if !wants_memory {
                self.best_us = candidate.minibatch_us;
            }
            self.best = Some(candidate.clone());
        }
        if self.best.is_none() {
            let need = Need::of(problem, &self.fleet, &candidate);
            if self.least.as_ref().is_none_or(|(least, _)| need < *least) {
                self.least = Some((need, candidate));
            }
        }
    }
}
