//! Runs the requested partitioner with the devices in a given order, and turns its answer into a plan.

use crate::partition::bounds::lower_bound::Bounds;
use crate::partition::error::{PlanError, Refused};
use crate::partition::infeasible;
use crate::partition::options::Effort;
use crate::partition::partitioners::{Partitioner, Request};
use crate::partition::planned::{ComparedPlan, Planned};
use crate::partition::search::context::SearchContext;
use crate::partition::search::finish_plan;
use crate::partition::search::improve::{improve, polish};
use crate::partition::search::memory_dp::FitObjective;
use crate::partition::search::numbers::same;
use crate::partition::search::result::{PlanCandidate, SearchResult};
use crate::partition::search::select::{
    Simulated, best, candidates_without_limit, play_baselines, with_less_recompute,
};
use crate::partition::search::{pipec_rules, replica_search};
use crate::plan::problem::{CostModel, Problem};
use crate::plan::stage_cost;

/// The result of a partitioner, before it becomes a plan.
pub struct Answer {
    /// The other candidates, and how complete the search was.
    pub found: SearchResult,
    pub chosen: PlanCandidate,
    /// Single device, data parallelism, uniform pipeline.
    pub baselines: [PlanCandidate; 3],
}

fn is_pinned(problem: &Problem) -> bool {
    problem.constraints.replicas.is_some()
        || problem.constraints.cut_after.is_some()
        || problem.constraints.require_pipec_cost()
        || problem.in_flight.given().is_some()
}

/// Runs a partitioner with the devices in the order of the problem's cluster.
pub fn answer(question: &SearchContext<'_>) -> Result<Answer, Refused> {
    let mut answer = without_bound(question, question.baselines())?;
    let found = &mut answer.found;
    if found.bound_us == 0.0 && Bounds::are_valid_for(question.problem) {
        found.bound_us = Bounds::of(question.problem).of_any_plan(answer.chosen.minibatch_us);
    }
    Ok(answer)
}

/// The same, without a bound unless the search has one.
pub fn without_bound(question: &SearchContext<'_>, baselines: [PlanCandidate; 3]) -> Result<Answer, Refused> {
    let &SearchContext { problem, options, .. } = question;
    let is_pinned = is_pinned(problem);
    let request = Request { question, baselines: &baselines, is_pinned };
    let mut found = (options.partitioner.row().find)(&request)?;
    let is_ours = options.partitioner == Partitioner::Pipec && problem.cost == CostModel::Pipec && !is_pinned;
    let has_missed = problem.chunks > 1 || !found.candidates.iter().any(|candidate| candidate.fits);
    if is_ours && has_missed && question.among.is_alone() && !problem.constraints.no_replication {
        add_candidates_without_replication(question, &baselines, &mut found);
    }
    let Some(chosen) = found.take_best(problem.objective) else {
        let error = infeasible(question, &found, is_pinned);
        return Err(Refused { error, bound_us: found.proven_us.unwrap_or(0.0) });
    };
    let is_simulated = options.partitioner == Partitioner::Pipec && options.efficiency.is_some();
    if is_simulated && found.is_pressed && question.among.is_alone() {
        let more = candidates_without_limit(question, &mut found.states);
        found.candidates.extend(more);
    }
    if problem.cluster.is_mixed() && options.partitioner == Partitioner::Pipedream {
        // PipeDream's search ignores device classes, so its bounds do not hold here.
        (found.bound_us, found.proven_us) = (0.0, None);
    }
    Ok(Answer { found, chosen, baselines })
}

/// Adds the candidates found without replication: an incomplete search over all plans may miss them.
fn add_candidates_without_replication(
    question: &SearchContext<'_>,
    baselines: &[PlanCandidate; 3],
    found: &mut SearchResult,
) {
    let mut narrower = question.problem.clone();
    narrower.constraints.no_replication = true;
    let Ok(more) = pipec_rules::found(&question.about(&narrower), baselines) else { return };
    let best_us = more.fastest_us();
    // The proof covers all plans, unless one of the new ones is faster.
    found.proven_us = found.proven_us.filter(|proven_us| *proven_us <= best_us);
    found.states += more.states;
    found.candidates.extend(more.candidates.into_iter().filter(|candidate| candidate.name == "pipec"));
}

/// Turns an answer into a plan and verifies it.
pub fn conclude(question: &SearchContext<'_>, answer: Answer) -> Result<Planned, PlanError> {
    let Answer { mut found, chosen, mut baselines } = answer;
    let best = best(question, &mut found, chosen);
    let best = improved(question, &mut found, best);
    let best = with_less_recompute(question, &mut found, best);
    let &SearchContext { full, options, .. } = question;
    if !options.without_baselines {
        play_baselines(question, &mut baselines, best.played.minibatch_us);
    }
    let is_pinned = is_pinned(full) && options.partitioner != Partitioner::Milp;
    let plan = finish_plan::finish(question, &best, &found, &baselines, is_pinned).map_err(PlanError::Unsound)?;
    let rest = found.candidates.iter().chain(&baselines);
    let compared = std::iter::once(&best.candidate).chain(rest).map(ComparedPlan::of).collect();
    Ok(Planned { plan, compared })
}

/// The plan after local improvement, unless it is proven to be the best already.
fn improved(question: &SearchContext<'_>, found: &mut SearchResult, best: Simulated) -> Simulated {
    let &SearchContext { problem, options, .. } = question;
    let is_ours =
        options.partitioner == Partitioner::Pipec && question.among.is_alone() && options.effort != Effort::Draft;
    // Without a flush the closed form is a lower bound, which the plan of a complete search reaches unless it waits.
    let waits = best.played.minibatch_us > best.candidate.minibatch_us * (1.0 + options.gap);
    // Under a memory limit the search covers only plans that recompute whole stages.
    let is_complete = !problem.schedule.flushes() && found.proven_us.is_some() && !waits && !found.is_pressed;
    let least_us = finish_plan::spread(problem);
    if is_ours && !is_complete && best.played.minibatch_us > least_us * (1.0 + options.gap) {
        let part = if options.effort == Effort::Climb { 2 } else { 1 };
        let (better, states) = improve(question, &best, &found.candidates, part);
        found.states += states;
        let mut better = better;
        if options.effort == Effort::Whole {
            for search in [replica_search::search, polish] {
                let (faster, states) = search(question, better.as_ref().unwrap_or(&best));
                found.states += states;
                better = faster.or(better);
            }
        }
        if let Some(better) = better {
            if !same(better.candidate.minibatch_us, best.candidate.minibatch_us) {
                found.proven_us = None;
            }
            found.candidates.push(best.candidate);
            return better;
        }
    }
    best
}

/// The infeasibility report, based on the candidate that needs the least memory.
fn infeasible(question: &SearchContext<'_>, found: &SearchResult, is_pinned: bool) -> PlanError {
    let problem = question.problem;
    let mut candidates = found.candidates.clone();
    // The other searches already looked for the least memory; the enumeration only keeps what fits.
    if question.options.partitioner == Partitioner::Exhaustive && !is_pinned && problem.cost != CostModel::Pipec {
        let shapes = question.fitting(&stage_cost::levels(&problem.cluster), FitObjective::Memory);
        candidates.extend(shapes.into_iter().map(|shape| question.candidate("least memory", shape)));
    }
    infeasible::error(question, &candidates)
}
