//! Interleaved schedules: each of p ranks runs v model chunks of about equal time.
//!
//! For every rank count that divides the devices, and along several linear orders: (1) find the smallest possible
//! longest chunk by bisection; (2) among cuts with chunks at most slightly longer, minimise the bytes sent by a dynamic
//! program over cuts and chunks; (3) move single cuts while the cost model improves. The result is not proven optimal,
//! and the plan says so.

use crate::partition::search::balanced_cuts::Line;
use crate::partition::search::build_plan::{self, Recompute, StagePosition};
use crate::partition::search::context::SearchContext;
use crate::partition::search::module_boundaries::Borders;
use crate::partition::search::result::{PlanCandidate, SearchResult};
use crate::partition::search::{finish_plan, linear_search};
use crate::plan::chunks::rank_of;
use crate::plan::problem::{Problem, ProblemError, Recomputation};
use crate::plan::schedule::Schedule;
use crate::schedule::action::pending_weight_grads;
use crate::schedule::generators::schedule;
use crate::schedule::pipeline::generated;
use crate::schedule::semantics::StepCount;
use crate::schedule::{Pipeline, StageSpec};
use std::collections::BTreeMap;

/// Tolerances over the shortest longest chunk, to trade balance for fewer bytes.
const SLACK: [f64; 4] = [0.0, 0.01, 0.04, 0.15];

/// Step limit of one dynamic program; a quarter of it bounds evaluations times ops in the final moves.
const MOST_STEPS: usize = 50_000_000;

const MOST_CHOICES: usize = 24;

/// Micro-batches per stage after which no schedule has more in flight; except bfs, which keeps all in flight.
const SETTLED: u32 = 4;

/// The best plan with `problem.chunks` stages on every rank.
pub fn found(question: &SearchContext<'_>) -> Result<SearchResult, ProblemError> {
    let problem = question.problem;
    let constraints = &problem.constraints;
    let unmet = |what: String| Err(ProblemError::Unmet { what });
    if constraints.cut_after.is_some() || !constraints.pins.is_empty() || problem.in_flight.given().is_some() {
        return unmet(
            "`--cut-after`, `--pin` and in-flight limits cannot be combined with a schedule of several stages per rank"
                .to_string(),
        );
    }
    let choices = choices(problem)?;
    let mut found = SearchResult { bound_us: finish_plan::spread(problem), ..SearchResult::default() };
    let borders = Borders::of(problem, question.joined);
    for order in linear_search::orders(&problem.graph) {
        let ends = borders.as_ref().map_or_else(|| (0..=order.len()).collect(), |borders| borders.ends(&order));
        let line = Line::new(problem, order, ends);
        for &(ranks, replicas) in &choices {
            line.cut(question, ranks, replicas, &mut found);
        }
    }
    if found.candidates.is_empty() {
        let (chunks, ops) = (problem.chunks, problem.graph.ops.len());
        return unmet(format!("{chunks} stages on each of at least 2 ranks do not fit {ops} ops and these devices"));
    }
    let reason = "only equal cuts along topological orders were tried";
    found.fallback = Some(reason.to_string());
    Ok(found)
}

/// Pairs of rank count and replicas: the given ones, or those that use the devices best.
fn choices(problem: &Problem) -> Result<Vec<(u32, u32)>, ProblemError> {
    let (devices, chunks) = (problem.cluster.devices(), problem.chunks);
    if let Some(given) = &problem.constraints.replicas {
        let stages = given.len() as u32;
        if given.iter().any(|r| *r != given[0]) || !stages.is_multiple_of(chunks) || stages / chunks < 2 {
            let what = format!(
                "with {chunks} stages per rank and at least 2 ranks, `--stages` takes a multiple of {chunks} equal \
                numbers, {} or more",
                2 * u64::from(chunks)
            );
            return Err(ProblemError::Unmet { what });
        }
        let ranks = stages / chunks;
        if ranks.saturating_mul(given[0]) > devices {
            let wanted = u64::from(ranks) * u64::from(given[0]);
            return Err(ProblemError::TooManyReplicas { wanted, devices });
        }
        return Ok(vec![(ranks, given[0])]);
    }
    let most = problem.constraints.most_stages.unwrap_or(u32::MAX).min(problem.graph.ops.len() as u32) / chunks;
    let alone = problem.constraints.no_replication;
    let all = (2..=devices.min(most)).filter(|ranks| alone || devices.is_multiple_of(*ranks) || *ranks == most);
    let mut all: Vec<(u32, u32)> = all.map(|ranks| (ranks, if alone { 1 } else { devices / ranks })).collect();
    if all.len() > MOST_CHOICES {
        let last = all.len() - 1;
        all = (0..MOST_CHOICES).map(|at| all[at * last / (MOST_CHOICES - 1)]).collect();
    }
    Ok(all)
}

impl Line<'_> {
    /// Adds the best candidate of this order for a rank count.
    fn cut(&self, question: &SearchContext<'_>, ranks: u32, replicas: u32, found: &mut SearchResult) {
        let stages = (ranks * self.problem.chunks) as usize;
        if stages >= self.ends.len() || stages.saturating_mul(self.ends.len()) > MOST_STEPS {
            return;
        }
        let Some(counts) = counts(self.problem, ranks, replicas) else { return };
        let spots = |recompute: Recompute| -> Vec<StagePosition> {
            let rank = |stage| rank_of(self.problem.schedule, ranks, stage as u32);
            (0..stages).map(|stage| StagePosition { first: rank(stage) * replicas, recompute }).collect()
        };
        let shortest = self.shortest(stages);
        let mut best: Option<(f64, Vec<usize>)> = None;
        for slack in SLACK {
            let Some(cuts) = self.cheapest(stages, shortest * (1.0 + slack)) else { continue };
            let us = self.time(&cuts, replicas, &spots(Recompute::None));
            found.states += 1;
            if best.as_ref().is_none_or(|(known, _)| us < *known) {
                best = Some((us, cuts));
            }
        }
        let Some((us, mut cuts)) = best else { return };
        self.improve(&mut cuts, us, replicas, &spots(Recompute::None), found);
        let Counts { caps, pending_weight_grads: pending } = counts;
        let candidate =
            |spots| question.priced("pipec", self.shape(&cuts, replicas), spots, caps.clone(), pending.clone());
        if self.problem.recomputation().is_full() {
            found.candidates.push(candidate(spots(Recompute::All)));
            return;
        }
        let plain = candidate(spots(Recompute::None));
        // Recomputes only if the plan does not fit otherwise.
        if !plain.fits && self.problem.recomputation() == Recomputation::Auto {
            let again = candidate(spots(Recompute::All));
            found.candidates.push(candidate(self.recomputed(&plain, &again)));
        }
        found.candidates.push(plain);
    }

    /// On each device over the limit, recomputes the chunks that free the most bytes per forward time until it fits, or
    /// all of them.
    fn recomputed(&self, plain: &PlanCandidate, again: &PlanCandidate) -> Vec<StagePosition> {
        let PlanCandidate { shape, caps, pending_weight_grads, .. } = plain;
        let limit = self.problem.memory_limit.map_or(u64::MAX, |limit| limit.0);
        let ops = &self.problem.graph.ops;
        let time = |ops_of: &[u32]| ops_of.iter().map(|&op| ops[op as usize].fwd_us).sum::<f64>();
        let times: Vec<f64> = shape.leaves().iter().map(|leaf| time(leaf.ops)).collect();
        let let_go = |at: usize| plain.memory[at].total.saturating_sub(again.memory[at].total);
        let holdings = build_plan::holdings(self.problem, shape);
        let bytes = |spots: &[StagePosition], held: &[usize]| {
            let memory = build_plan::memory(self.problem, shape, spots, &holdings, caps, pending_weight_grads);
            held.iter().fold(0u64, |sum, &at| sum.saturating_add(memory[at].total))
        };
        let mut spots = plain.spots.clone();
        let mut ranks: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        spots.iter().enumerate().for_each(|(at, spot)| ranks.entry(spot.first).or_default().push(at));
        for mut held in ranks.into_values() {
            let worth = |at: usize| let_go(at) as f64 / times[at].max(f64::MIN_POSITIVE);
            held.sort_by(|&left, &right| worth(right).total_cmp(&worth(left)).then(left.cmp(&right)));
            for &at in &held {
                if bytes(&spots, &held) <= limit {
                    break;
                }
                spots[at].recompute = Recompute::All;
            }
        }
        spots
    }

    fn improve(
        &self,
        cuts: &mut [usize],
        mut us: f64,
        replicas: u32,
        spots: &[StagePosition],
        found: &mut SearchResult,
    ) {
        let weight = (self.problem.graph.ops.len() + self.problem.graph.tensors.len()) * (cuts.len() - 1) + 1;
        let mut left = MOST_STEPS / 4 / weight;
        let mut improved = true;
        while improved {
            improved = false;
            for at in 1..cuts.len() - 1 {
                for step in [-1i64, 1, -3, 3] {
                    let (old, moved) = (cuts[at], cuts[at] as i64 + step);
                    if moved <= cuts[at - 1] as i64 || moved >= cuts[at + 1] as i64 {
                        continue;
                    }
                    if left == 0 {
                        return;
                    }
                    left -= 1;
                    found.states += 1;
                    cuts[at] = moved as usize;
                    let new = self.time(cuts, replicas, spots);
                    if new < us * (1.0 - 1e-12) {
                        us = new;
                        improved = true;
                    } else {
                        cuts[at] = old;
                    }
                }
            }
        }
    }

    fn time(&self, cuts: &[usize], replicas: u32, spots: &[StagePosition]) -> f64 {
        let shape = self.shape(cuts, replicas);
        build_plan::minibatch_us(self.problem, &shape, spots, &build_plan::caps(self.problem, &shape.replicas()))
    }
}

/// Micro-batches in flight at each stage.
#[derive(Clone, Debug)]
pub struct Counts {
    pub caps: Vec<u32>,
    /// Those with a pending weight gradient; empty if backwards are not split.
    pub pending_weight_grads: Vec<u32>,
}

/// The micro-batches in flight under the problem's schedule, from its program for equal stages.
pub fn counts(problem: &Problem, ranks: u32, replicas: u32) -> Option<Counts> {
    let stages = ranks * problem.chunks;
    let items = problem.microbatches.div_ceil(replicas);
    if problem.schedule == Schedule::Bfs {
        return Some(Counts { caps: vec![items; stages as usize], pending_weight_grads: Vec::new() });
    }
    let chain = Pipeline::chain((0..stages).map(|_| StageSpec::new(1, 1.0, 2.0)).collect());
    let pipeline = if problem.schedule.is_on_a_v() { chain.folded() } else { chain.looped(ranks) };
    let microbatches = items.min(stages.saturating_mul(SETTLED));
    let count = StepCount { minibatches: 1, microbatches };
    let program = schedule(generated(problem.schedule).ok()?, &pipeline, count).ok()?;
    let caps = program.stages.iter().map(|stage| stage.cap).collect();
    let pending_weight_grads =
        if problem.schedule.splits_backward() { pending_weight_grads(&program) } else { Vec::new() };
    Some(Counts { caps, pending_weight_grads })
}
