//! Entry point of MILP planning: improves a known plan, or proves that it cannot be improved.
//!
//! Each replica choice is a separate program, asked for a plan faster than the best known one. Most are infeasible
//! already in their LP relaxation. The rest is branched in two rounds: a few nodes per program, then the remaining
//! budget in order of their bounds. If all programs are infeasible, the best plan is optimal. If the budget ends first,
//! the smallest open bound bounds every plan, and the plan is not marked as proven.
//!
//! Programs that are too large for the solver are not started. Arithmetic is floating point; improvements below 1e-8
//! are ignored.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::milp::formulation::{Formulation, Scope};
use crate::partition::milp::order::Order;
use crate::partition::milp::replica_choices::{self, Choice, MOST_CHOICES, choices};
use crate::partition::milp::solver::{self, Ended, Limits};
use crate::partition::search::build_plan::{self, StagePosition};
use crate::partition::search::constraints;
use crate::partition::search::context::SearchContext;
use crate::partition::search::result::{PlanCandidate, SearchResult};
use crate::plan::problem::{CostModel, Objective, Problem, ProblemError, Recomputation};
use crate::profile::recompute_scope::RecomputeScope;
use std::time::Duration;

/// Nodes to solve if `--budget` is not set; a few seconds for a few hundred variables.
pub const DEFAULT_NODES: u64 = 4000;

const FIRST_NODES: u64 = 20;

/// Largest number of ops; precedence is quadratic.
const MOST_OPS: usize = 256;

const MOST_COLUMNS: usize = 1500;
const MOST_ROWS: usize = 4000;

/// Limit on the sum of variables times rows over all programs; beyond it even the relaxations take minutes.
const MOST_WORK: usize = 60_000_000;

/// Wall-clock limit for all programs together. The node limit is reached much earlier, except when simplex cycles.
pub const LONGEST: Duration = Duration::from_secs(300);

const GAIN: f64 = 1e-8;

/// Formulations to try in turn after numerical failures: the fraction below which terms are dropped, and whether rows
/// are reversed.
const WAYS: [(f64, bool); 4] = [(1e-11, false), (1e-11, true), (1e-5, false), (1e-5, true)];

struct Open<'a> {
    choice: &'a Choice,
    /// Lower bound on its plans, in microseconds.
    bound_us: f64,
}

/// Improves the known plans, whose candidates are kept.
pub fn refine(question: &SearchContext<'_>, known: SearchResult) -> Result<SearchResult, ProblemError> {
    let problem = question.problem;
    if let Some(why) = unsuited(problem) {
        return Ok(left_alone(known, why));
    }
    let fits = known.candidates.iter().filter(|candidate| candidate.fits);
    let best_us = fits.map(|candidate| candidate.minibatch_us).min_by(f64::total_cmp);
    // Plans of other device orders are also to be beaten.
    let known_us = Some(question.among.known_us).filter(|us| us.is_finite());
    let best_us = best_us.into_iter().chain(known_us).min_by(f64::total_cmp);
    let slowest = known.candidates.iter().map(|candidate| candidate.minibatch_us).fold(0.0, f64::max);
    // If no known plan fits, a slower plan is acceptable.
    let unit_us = best_us.unwrap_or(slowest);
    if !(unit_us.is_normal() && unit_us > 0.0) {
        return Ok(left_alone(known, "all times are zero".to_string()));
    }
    let asked = build_plan::asked(problem);
    let pins = constraints::pinned(question.joined, &problem.constraints.pins)?;
    let fixed = fixed(question)?;
    let within_us = if best_us.is_some() { unit_us } else { unit_us * SLOWER };
    let wanted = replica_choices::Asked {
        stages: fixed.as_ref().map(|stage_of| stage_of.iter().max().map_or(1, |last| last + 1)),
        least_stages: pins.iter().map(|(_, stage)| stage + 1).max().unwrap_or(1),
        within_us,
    };
    let Some(choices) = choices(problem, &wanted) else {
        let devices = problem.cluster.devices();
        let why = format!("there are more than {MOST_CHOICES} ways to choose replicas on {devices} devices");
        return Ok(left_alone(known, why));
    };
    let order = Order::of(problem, &asked);
    let most = if best_us.is_some() { 1.0 - GAIN } else { SLOWER };
    let scope =
        Scope { problem, asked, unit_us, most, finest: WAYS[0].0, pins: &pins, fixed: fixed.as_deref(), order: &order };
    let mut work = 0usize;
    for choice in &choices {
        let Some(program) = Formulation::of(&scope, choice) else { continue };
        let (columns, rows) = program.size();
        work = work.saturating_add(columns.saturating_mul(rows));
        if columns > MOST_COLUMNS || rows > MOST_ROWS || work > MOST_WORK {
            let (stages, programs) = (choice.replicas.len(), choices.len());
            let why = format!(
                "{} ops in {stages} stages give {columns} variables and {rows} rows, in {programs} such programs",
                problem.graph.ops.len()
            );
            return Ok(left_alone(known, why));
        }
    }
    let mut search = Search {
        question,
        scope,
        best: None,
        best_us,
        nodes: question.options.budget.unwrap_or(DEFAULT_NODES),
        used: 0,
        // Each program gets a part of the time, so that none can use all of it.
        clock: question.options.time_limit.unwrap_or(LONGEST),
        ended: Ended::Proven,
    };
    let open = search.run(&choices);
    Ok(search.conclude(known, &open, choices.len()))
}

/// Largest accepted slowdown over the known plans if none of them fits.
const SLOWER: f64 = 16.0;

/// The reason why the problem has no MILP formulation, if it has none.
fn unsuited(problem: &Problem) -> Option<String> {
    let why = match problem.cost {
        _ if problem.objective == Objective::Memory => "it minimises time, not memory",
        CostModel::Load | CostModel::Hybrid => "costs `load` and `hybrid` have their own solvers",
        _ if problem.cluster.levels.len() > 1 => "the cluster has several interconnect levels",
        _ if problem.constraints.target.is_some_and(|target| target.keeps_modules()) => {
            "the target cannot split modules"
        }
        _ if problem.graph.ops.len() > MOST_OPS => {
            return Some(format!("{} ops are more than {MOST_OPS}", problem.graph.ops.len()));
        }
        _ => return None,
    };
    Some(why.to_string())
}

/// Returns the known result, with the reason why no program was solved.
fn left_alone(known: SearchResult, why: String) -> SearchResult {
    let why = format!("no integer program was solved: {why}");
    let fallback = Some(match known.fallback {
        Some(before) => format!("{why}; {before}"),
        None => why,
    });
    SearchResult { fallback, ..known }
}

fn fixed(question: &SearchContext<'_>) -> Result<Option<Vec<usize>>, ProblemError> {
    let graph = &question.problem.graph;
    let Some(names) = &question.problem.constraints.cut_after else { return Ok(None) };
    let (order, ends) = constraints::resolve(graph, question.joined, names)?;
    let mut stage_of = vec![0; graph.ops.len()];
    for (stage, ends) in ends.windows(2).enumerate() {
        order[ends[0]..ends[1]].iter().for_each(|&op| stage_of[op as usize] = stage);
    }
    Ok(Some(stage_of))
}

struct Search<'a> {
    question: &'a SearchContext<'a>,
    scope: Scope<'a>,
    best: Option<PlanCandidate>,
    best_us: Option<f64>,
    nodes: u64,
    used: u64,
    clock: Duration,
    /// The most severe reason why a program stayed undecided.
    ended: Ended,
}

impl Search<'_> {
    /// Solves the programs within the budget; returns the undecided ones.
    fn run<'c>(&mut self, choices: &'c [Choice]) -> Vec<Open<'c>> {
        let share = self.clock / (choices.len().max(1) as u32 * 2);
        let first = choices.iter().filter_map(|choice| self.ask(choice, FIRST_NODES.min(self.nodes), share));
        let mut open: Vec<Open<'_>> = first.collect();
        // Programs with the lowest bounds first, because they determine the proven bound; the sort is stable.
        open.sort_by(|left, right| left.bound_us.total_cmp(&right.bound_us));
        let mut left = Vec::new();
        let half = self.clock / 2;
        for (at, Open { choice, bound_us }) in open.iter().enumerate() {
            if self.nodes == 0 {
                left.push(Open { choice, bound_us: *bound_us });
                continue;
            }
            let again = self.ask(choice, self.nodes, half / (open.len() - at) as u32);
            // The bound of the first round also holds.
            left.extend(again.map(|again| Open { bound_us: again.bound_us.max(*bound_us), ..again }));
        }
        // Later solutions may close earlier programs.
        left.retain(|open| self.best_us.is_none_or(|best| open.bound_us < best * (1.0 - GAIN)));
        left
    }

    /// Solves one program with a node limit; returns it if it stays undecided.
    fn ask<'c>(&mut self, choice: &'c Choice, nodes: u64, clock: Duration) -> Option<Open<'c>> {
        if let Some(best) = self.best_us {
            self.scope.most = best / self.scope.unit_us * (1.0 - GAIN);
        }
        let mut answer = None;
        for (finest, is_reversed) in WAYS {
            self.scope.finest = finest;
            let program = Formulation::of(&self.scope, choice)?;
            let (mut program, meaning) = program.into_parts();
            if is_reversed {
                program.rows.reverse();
            }
            let tried = solver::solve(program, &Limits { nodes, clock });
            let is_done = tried.ended != Ended::Failed;
            answer = Some((tried, meaning));
            if is_done {
                break;
            }
        }
        let (answer, meaning) = answer?;
        self.nodes = self.nodes.saturating_sub(answer.nodes);
        self.used += answer.nodes.max(1);
        let mut is_closed = answer.ended == Ended::Proven;
        if let Some(values) = &answer.values {
            // Rounding can make the solver's solution infeasible; then nothing is proven.
            let offered = meaning.stages(values).map(|stages| self.offer(choice, stages));
            is_closed &= offered == Some(true);
        }
        if is_closed {
            return None;
        }
        self.ended = self.ended.max(answer.ended);
        // Slack, because the bound was computed in floating point.
        let bound = if answer.bound.is_finite() { answer.bound * (1.0 - 1e-7) } else { 0.0 };
        Some(Open { choice, bound_us: bound * self.scope.unit_us })
    }

    /// Prices a partition with the cost model; returns whether it fits and is the best so far.
    fn offer(&mut self, choice: &Choice, stages: Vec<Vec<u32>>) -> bool {
        let shape = Shape::flat(stages.into_iter().zip(choice.replicas.iter().copied()).collect(), false);
        let mut spots: Vec<StagePosition> = build_plan::side_by_side(self.question.problem, &shape);
        spots.iter_mut().zip(&choice.recompute).for_each(|(spot, recompute)| spot.recompute = (*recompute).into());
        let candidate = self.question.placed("milp", shape, spots);
        let is_better = candidate.fits && self.best_us.is_none_or(|best| candidate.minibatch_us < best);
        if is_better {
            self.best_us = Some(candidate.minibatch_us);
            self.best = Some(candidate);
        }
        is_better
    }

    /// Builds the result; `open` are the undecided of all `programs`.
    fn conclude(self, known: SearchResult, open: &[Open<'_>], programs: usize) -> SearchResult {
        let mut found = SearchResult { states: known.states + self.used, ..known };
        found.candidates.extend(self.best);
        // The rows overestimate the memory of split backwards and of recomputed layers, so infeasibility proves nothing.
        let problem = self.question.problem;
        let recomputes_layers = problem.recomputation() != Recomputation::Never
            && problem.graph.ops.iter().any(|op| op.recompute != RecomputeScope::Stage);
        let is_over = problem.schedule.splits_backward() || recomputes_layers;
        if open.is_empty() && build_plan::is_limited(problem) && is_over {
            return found;
        }
        if open.is_empty() {
            found.proven_us = self.best_us.or(found.proven_us);
            found.fallback = None;
            return found;
        }
        let bound_us = open.iter().map(|open| open.bound_us).fold(self.best_us.unwrap_or(f64::INFINITY), f64::min);
        found.bound_us = found.bound_us.max(bound_us);
        let how = match self.ended {
            Ended::Clock => "time limit reached; another run may give another result",
            Ended::Failed => "numerical failure in the solver",
            Ended::Proven | Ended::Nodes => "node budget used up",
        };
        found.fallback = Some(format!("{} of {programs} integer programs are undecided: {how}", open.len()));
        found
    }
}
