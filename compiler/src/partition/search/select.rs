//! Final selection: simulates the best candidates and chooses the plan.
//!
//! The searches assume the in-flight limits of the schedule's rule. If these caps keep the busiest stage waiting and
//! memory does not allow higher ones, other partitions with more free memory may be faster. So the search is repeated
//! with memory reserved for more in-flight micro-batches, while the estimate is below the simulated time.

use crate::partition::options::PlannerOptions;
use crate::partition::partitioners::Partitioner;
use crate::partition::search::build_plan::{self, Recompute, StagePosition};
use crate::partition::search::context::{SearchContext, SearchLimits};
use crate::partition::search::fused_graph::FusedGraph;
use crate::partition::search::in_flight::{self, ENOUGH};
use crate::partition::search::partial_recompute;
use crate::partition::search::pipec_rules;
use crate::partition::search::result::{PlanCandidate, SearchResult, baseline_times, order};
use crate::partition::search::simulate_candidate::{Played, played};
use crate::plan::Baselines;
use crate::plan::problem::{CostModel, InFlight, Objective, Problem, Recomputation};

/// Number of candidates that are simulated besides the best one, and the number for flushed schedules, whose estimates
/// are less exact.
const MOST_PLAYED: usize = 4;
const MOST_FLUSHED: usize = 8;

/// A candidate must be faster than another by this factor to be preferred.
const CLEARLY: f64 = 0.995;

/// Smallest assumed ratio of the simulated time to the estimate for flushed schedules.
const LEAST_OF_EQUATIONS: f64 = 0.6;

/// Largest number of extra in-flight micro-batches that memory is reserved for.
const MOST_ROOM: u32 = 4;

/// A candidate with its simulation.
#[derive(Clone)]
pub struct Simulated {
    pub candidate: PlanCandidate,
    pub played: Played,
}

/// Returns the best candidate. Another candidate replaces the best estimate only if its simulated time is clearly
/// smaller. The others stay in `found`.
pub fn best(question: &SearchContext<'_>, found: &mut SearchResult, chosen: PlanCandidate) -> Simulated {
    let &SearchContext { full: problem, options, .. } = question;
    let played = plays(question, &chosen);
    let mut best = Simulated { candidate: chosen, played };
    if options.efficiency.is_none() || problem.cost != CostModel::Pipec || problem.objective != Objective::Throughput {
        return best;
    }
    // Without flushes the estimate never exceeds the simulated time; with flushes it may.
    let (least, most) = match problem.schedule.is_continuous() {
        true => (1.0, MOST_PLAYED),
        false => (LEAST_OF_EQUATIONS, MOST_FLUSHED),
    };
    let prefer = |best: &mut Simulated, others: &mut [PlanCandidate], most: usize| {
        for other in others.iter_mut().filter(|candidate| candidate.fits).take(most) {
            if other.minibatch_us * least >= best.played.minibatch_us {
                continue;
            }
            let played = plays(question, other);
            if played.minibatch_us < best.played.minibatch_us * CLEARLY {
                best.played = played;
                std::mem::swap(&mut best.candidate, other);
            }
        }
    };
    prefer(&mut best, &mut found.candidates, most);
    let may_ask = options.partitioner == Partitioner::Pipec && in_flight::matters(problem) && problem.chunks == 1;
    if !may_ask || problem.in_flight != InFlight::Auto {
        return best;
    }
    for room in 1..=MOST_ROOM {
        let Simulated { candidate, played } = &best;
        // If memory is not the limit, the caps already are as high as useful.
        if !played.lacks_memory || candidate.minibatch_us >= ENOUGH * played.minibatch_us {
            break;
        }
        let mut more = candidates_with_reserved_memory(question, room, played.minibatch_us, found);
        prefer(&mut best, &mut more, MOST_PLAYED);
        found.candidates.append(&mut more);
    }
    without_needless_recompute(question, best)
}

/// Turns off recomputation in stages that fit without it under the chosen caps; reserved memory may not be used up
/// everywhere.
fn without_needless_recompute(question: &SearchContext<'_>, best: Simulated) -> Simulated {
    if question.problem.recomputation().is_full() {
        return best;
    }
    let PlanCandidate { name, shape, spots, .. } = &best.candidate;
    let holdings = build_plan::holdings(question.problem, shape);
    let mut fewer = spots.clone();
    for at in 0..fewer.len() {
        let before = std::mem::replace(&mut fewer[at].recompute, Recompute::None);
        if before.is_any() {
            let memory = build_plan::memory(question.problem, shape, &fewer, &holdings, &best.played.caps, &[]);
            if !build_plan::fits(question.problem, shape, &fewer, &memory) {
                fewer[at].recompute = before;
            }
        }
    }
    if fewer == *spots {
        return best;
    }
    let candidate = question.placed(name, shape.clone(), fewer);
    let played = plays(question, &candidate);
    if played.minibatch_us <= best.played.minibatch_us { Simulated { candidate, played } } else { best }
}

/// Turns the best candidate into stages over all ops that recompute no more ops than fit. Candidates that recompute whole
/// stages are compared with it, because with fewer ops they may be faster.
pub fn with_less_recompute(question: &SearchContext<'_>, found: &mut SearchResult, mut chosen: Simulated) -> Simulated {
    chosen.candidate.shape = question.joined.spread(&chosen.candidate.shape);
    if !recomputes_less(question) {
        return chosen;
    }
    let known_us = chosen.played.minibatch_us;
    let mut best = reduced(question, chosen);
    let recomputes = |one: &PlanCandidate| one.spots.iter().any(|spot| spot.recompute.is_any());
    let mut others: Vec<&PlanCandidate> = found.candidates.iter().filter(|one| one.fits && recomputes(one)).collect();
    let least_us = |other: &PlanCandidate| {
        let spots: Vec<StagePosition> =
            other.spots.iter().map(|spot| StagePosition { recompute: Recompute::None, ..*spot }).collect();
        build_plan::minibatch_us(question.problem, &other.shape, &spots, &other.caps)
    };
    others.sort_by(|left, right| least_us(left).total_cmp(&least_us(right)));
    for other in others.into_iter().take(MOST_PLAYED) {
        let candidate = PlanCandidate { shape: question.joined.spread(&other.shape), ..other.clone() };
        let PlanCandidate { shape, spots, caps, minibatch_us, .. } = &candidate;
        let played = played(question.full, shape, spots, caps, *minibatch_us, question.options.efficiency);
        let other = reduced(question, Simulated { candidate, played });
        if other.played.minibatch_us < best.played.minibatch_us * CLEARLY {
            best = other;
        }
    }
    if best.played.minibatch_us < known_us || recomputes(&best.candidate) {
        // The searches bound plans that recompute whole stages.
        (found.proven_us, found.bound_us) = (None, 0.0);
    }
    best
}

/// Recomputes fewer ops of a candidate over all ops, unless that makes it slower.
fn reduced(question: &SearchContext<'_>, one: Simulated) -> Simulated {
    let problem = question.full;
    let PlanCandidate { shape, spots, caps, pending_weight_grads, .. } = &one.candidate;
    let limits = (&one.played.caps[..], &pending_weight_grads[..]);
    let Some(fewer) = partial_recompute::reduced(problem, shape, spots, limits) else { return one };
    let minibatch_us = build_plan::minibatch_us(problem, shape, &fewer, caps);
    let played = played(problem, shape, &fewer, caps, minibatch_us, question.options.efficiency);
    if played.minibatch_us > one.played.minibatch_us {
        return one;
    }
    let holdings = build_plan::holdings(problem, shape);
    let memory = build_plan::memory(problem, shape, &fewer, &holdings, caps, pending_weight_grads);
    Simulated { candidate: PlanCandidate { minibatch_us, memory, spots: fewer, ..one.candidate }, played }
}

/// The best candidates without a memory limit, with recomputation of all stages, if they fit. With fewer ops recomputed
/// they may be faster than candidates that were cut to fit.
pub fn candidates_without_limit(question: &SearchContext<'_>, states: &mut u64) -> Vec<PlanCandidate> {
    let problem = question.problem;
    let may = problem.recomputation() == Recomputation::Auto && problem.objective == Objective::Throughput;
    if !may || problem.chunks > 1 || !problem.cluster.classes.is_empty() {
        return Vec::new();
    }
    let roomy = Problem { memory_limit: None, recompute: Recomputation::Never, ..problem.clone() };
    let Ok(found) = pipec_rules::found(&question.about(&roomy), &unfit_baselines(question)) else { return Vec::new() };
    *states += found.states;
    let mut candidates = found.candidates;
    candidates.retain(|candidate| candidate.name == "pipec");
    candidates.sort_by(|left, right| order(problem.objective, left, right));
    let recomputed = |PlanCandidate { name, shape, spots, .. }: PlanCandidate| {
        let spots = spots.into_iter().map(|spot| StagePosition { recompute: Recompute::All, ..spot }).collect();
        question.placed(name, shape, spots)
    };
    candidates.into_iter().take(MOST_PLAYED).map(recomputed).filter(|candidate| candidate.fits).collect()
}

/// Candidates found with memory reserved for `room` more micro-batches and an estimate below `known_us`; best first.
fn candidates_with_reserved_memory(
    question: &SearchContext<'_>,
    room: u32,
    known_us: f64,
    found: &mut SearchResult,
) -> Vec<PlanCandidate> {
    let problem = Problem { room, ..question.problem.clone() };
    let among = SearchLimits { known_us, ..question.among };
    let asked = SearchContext { problem: &problem, among, ..*question };
    let Ok(more) = pipec_rules::found(&asked, &unfit_baselines(question)) else { return Vec::new() };
    found.states += more.states;
    let mut candidates: Vec<PlanCandidate> = more
        .candidates
        .into_iter()
        .filter(|candidate| candidate.name == "pipec" && candidate.fits)
        .map(|candidate| question.placed(candidate.name, candidate.shape, candidate.spots))
        .collect();
    candidates.sort_by(|left, right| order(problem.objective, left, right));
    candidates
}

/// Baselines that do not stop a search early.
fn unfit_baselines(question: &SearchContext<'_>) -> [PlanCandidate; 3] {
    question.baselines().map(|baseline| PlanCandidate { fits: false, ..baseline })
}

/// Simulates the baselines whose estimates are not comparable: all under a flush, otherwise those that seem faster than
/// the plan, which takes `plan_us`.
pub fn play_baselines(question: &SearchContext<'_>, baselines: &mut [PlanCandidate; 3], plan_us: f64) {
    let problem = question.full;
    if problem.cost != CostModel::Pipec || problem.objective == Objective::Latency {
        return;
    }
    let flushes = !problem.schedule.is_continuous();
    let seems = |baseline: &&mut PlanCandidate| flushes || (baseline.fits && baseline.minibatch_us < plan_us);
    for baseline in baselines.iter_mut().filter(seems) {
        baseline.minibatch_us = plays(question, baseline).minibatch_us;
    }
}

/// The baselines of a plan of this problem that takes `plan_us`; simulated, unless the options say otherwise.
pub fn baselines(problem: &Problem, options: &PlannerOptions<'_>, plan_us: f64) -> Baselines {
    let joined = FusedGraph::of(&problem.graph);
    let asked = joined.problem(problem);
    let question = SearchContext::new(problem, &asked, &joined, options);
    let mut all = question.baselines();
    if !options.without_baselines {
        play_baselines(&question, &mut all, plan_us);
    }
    baseline_times(&all)
}

/// Simulates a candidate over fused ops with all ops, whose gradients are complete earlier. It recomputes no more of
/// these ops than it needs to fit.
pub fn plays(question: &SearchContext<'_>, candidate: &PlanCandidate) -> Played {
    let (problem, efficiency) = (question.full, question.options.efficiency);
    let PlanCandidate { shape, spots, caps, pending_weight_grads, minibatch_us, .. } = candidate;
    let shape = question.joined.spread(shape);
    let fewer = || partial_recompute::reduced(problem, &shape, spots, (caps, pending_weight_grads));
    match recomputes_less(question).then(fewer).flatten() {
        Some(fewer) => {
            let us = build_plan::minibatch_us(problem, &shape, &fewer, caps);
            played(problem, &shape, &fewer, caps, us, efficiency)
        }
        None => played(problem, &shape, spots, caps, *minibatch_us, efficiency),
    }
}

/// True if stages recompute no more ops than they need to fit.
fn recomputes_less(question: &SearchContext<'_>) -> bool {
    let problem = question.full;
    problem.recomputation() == Recomputation::Auto
        && problem.objective == Objective::Throughput
        && question.options.efficiency.is_some()
}
