//! Searches the replicas of stages near those of a plan: each with the best cuts for them, compared by simulation.
//!
//! A search that is free in its replicas spends little on each. Here they are fixed, first those of the plan itself, then
//! those that differ by one merge, split or device, and equal ones. The most promising are improved move by move, and the
//! search goes on from the fastest.

use crate::partition::answer::{Answer, without_bound};
use crate::partition::search::context::{Depth, SearchContext, SearchLimits};
use crate::partition::search::improve::{improve, may_improve};
use crate::partition::search::pipec_rules;
use crate::partition::search::result::{PlanCandidate, order};
use crate::partition::search::select::{self, Simulated};
use crate::partition::search::simulate_candidate::short_us;
use crate::plan::problem::{Constraints, InFlight, Problem};
use std::collections::HashSet;

/// Largest number of devices.
const MOST_DEVICES: u32 = 16;

/// Rounds, and plans of a round that are improved. Without a flush, where a simulation takes longer, there are fewer.
const ROUNDS: [usize; 2] = [4, 2];
const IMPROVED: [usize; 2] = [4, 2];

/// How much slower than the best a plan may seem.
const NEAR: f64 = 1.1;

/// The work of a climb is divided by this number.
const PART: u64 = 6;

/// Candidates of one search that are simulated.
const SIMULATED: usize = 8;

/// Without a flush they are simulated with more micro-batches in flight as well.
const MORE: u32 = 4;

/// A plan replaces the best if its time falls below this fraction.
const FASTER: f64 = 0.998;

/// A faster plan than this one, if one is found, and the number of plans that were compared.
pub fn search(context: &SearchContext<'_>, start: &Simulated) -> (Option<Simulated>, u64) {
    let problem = context.problem;
    let is_free = problem.constraints == Constraints::default() && problem.in_flight == InFlight::Auto;
    if !is_free || problem.cluster.devices() > MOST_DEVICES || !may_improve(context) {
        return (None, 0);
    }
    let mut search = ReplicaSearch { context, baselines: context.baselines(), states: 0 };
    let best = search.run(start);
    ((best.played.minibatch_us < start.played.minibatch_us).then_some(best), search.states)
}

struct ReplicaSearch<'a> {
    context: &'a SearchContext<'a>,
    /// Of the free search; a search with fixed replicas has no use for them.
    baselines: [PlanCandidate; 3],
    states: u64,
}

impl ReplicaSearch<'_> {
    fn run(&mut self, start: &Simulated) -> Simulated {
        let mut best = start.clone();
        let problem = self.context.problem;
        let own = best.candidate.shape.replicas();
        let mut tried: HashSet<Vec<u32>> = HashSet::from([own.clone()]);
        if own.len() > 1 {
            self.replace(&mut best, &own);
        }
        let devices = problem.cluster.devices();
        let mut next: Vec<Vec<u32>> = (1..=devices).map(|stages| vec![devices / stages; stages as usize]).collect();
        let without_flush = usize::from(!problem.schedule.flushes());
        for _ in 0..ROUNDS[without_flush] {
            let mut found: Vec<(f64, Vec<u32>)> = Vec::new();
            next.extend(neighbours(&best.candidate.shape.replicas(), devices));
            for replicas in next.drain(..) {
                if tried.insert(replicas.clone())
                    && let Some(us) = self.drafted(&replicas)
                {
                    found.push((us, replicas));
                }
            }
            found.sort_by(|left, right| left.0.total_cmp(&right.0));
            let known_us = best.played.minibatch_us;
            found.retain(|(us, _)| *us < NEAR * known_us);
            for (_, replicas) in found.iter().take(IMPROVED[without_flush]) {
                self.replace(&mut best, replicas);
            }
            if best.played.minibatch_us >= known_us {
                break;
            }
        }
        best
    }

    /// Replaces a plan by the improved one with these replicas, if that is faster.
    fn replace(&mut self, best: &mut Simulated, replicas: &[u32]) {
        let fixed = self.fixed(replicas);
        let context = self.context.about(&fixed);
        let answer = without_bound(&context, self.baselines.clone());
        let Ok(Answer { mut found, chosen, .. }) = answer else { return };
        let draft = select::best(&context, &mut found, chosen);
        let (better, states) = improve(&context, &draft, &found.candidates, PART);
        self.states += states;
        let better = better.unwrap_or(draft);
        if better.played.minibatch_us < best.played.minibatch_us * FASTER {
            *best = better;
        }
    }

    fn fixed(&self, replicas: &[u32]) -> Problem {
        let mut fixed = self.context.problem.clone();
        fixed.constraints.replicas = Some(replicas.to_vec());
        fixed
    }

    /// The time of the best plan of a coarse search with these replicas, by a short simulation.
    fn drafted(&mut self, replicas: &[u32]) -> Option<f64> {
        let fixed = self.fixed(replicas);
        let among = SearchLimits { depth: Depth::Draft, ..SearchLimits::ALONE };
        let context = SearchContext { among, ..self.context.about(&fixed) };
        let found = pipec_rules::found(&context, &self.baselines).ok()?;
        self.states += found.states;
        let mut candidates = found.candidates;
        candidates.retain(|one| one.fits && one.name == "pipec" && one.shape.replicas() == replicas);
        candidates.sort_by(|left, right| order(fixed.objective, left, right));
        let with = |one: &PlanCandidate, more: u32| {
            let caps: Vec<u32> = one.caps.iter().map(|cap| cap + more).collect();
            short_us(&fixed, &one.shape, &one.spots, &caps).unwrap_or(one.minibatch_us)
        };
        let more = if fixed.schedule.flushes() { 0 } else { MORE };
        let us = |one: &PlanCandidate| with(one, 0).min(with(one, more));
        candidates.iter().take(SIMULATED).map(us).min_by(f64::total_cmp)
    }
}

/// Replicas that differ by one merge of neighbours, one split, or one device.
fn neighbours(replicas: &[u32], devices: u32) -> Vec<Vec<u32>> {
    let idle = devices.saturating_sub(replicas.iter().sum());
    let mut all = Vec::new();
    let mut push = |change: &dyn Fn(&mut Vec<u32>)| {
        let mut next = replicas.to_vec();
        change(&mut next);
        all.push(next);
    };
    for at in 0..replicas.len() {
        if at + 1 < replicas.len() {
            push(&|next| next[at] += next.remove(at + 1));
        }
        let have = replicas[at] + idle;
        for first in [1, have / 2, have.saturating_sub(1)] {
            if first > 0 && first < have {
                push(&|next| next.splice(at..=at, [first, have - first]).for_each(drop));
            }
        }
        if idle > 0 {
            push(&|next| next[at] += 1);
        }
        if replicas[at] > 1 {
            push(&|next| next[at] -= 1);
            for to in (0..replicas.len()).filter(|to| *to != at) {
                push(&|next| (next[at], next[to]) = (next[at] - 1, next[to] + 1));
            }
        }
    }
    all.sort();
    all.dedup();
    all
}
