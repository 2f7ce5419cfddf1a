//! The door of mixed-integer planning: improves a known plan, or shows that it cannot be improved.
//!
//! Every choice of replicas is a program of its own, asked for a partition that is faster than the best that is known. Most are
//! refused by their relaxation. What remains is branched on in two rounds, a few nodes for each program and then what is left of
//! the budget, those with the lowest bound first. If all are refused the best is proven; if the budget ends first, the least bound
//! of those still open bounds every plan, and the answer says that it is not proven.
//!
//! What is too large for the solver is not begun. Programs are solved in floating point: a plan that is better by less than one
//! part in 10^8 is not looked for.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::milp::formulation::{Formulation, Scope};
use crate::partition::milp::order::Order;
use crate::partition::milp::replica_choices;
use crate::partition::milp::replica_choices::{Choice, MOST_CHOICES, choices};
use crate::partition::milp::solver::{self, Ended, Limits};
use crate::partition::search::build_plan;
use crate::partition::search::build_plan::StagePosition;
use crate::partition::search::candidates::{PlanCandidate, SearchContext, SearchResult};
use crate::partition::search::constraints;
use crate::plan::cost_estimate::FlowQuery;
use crate::plan::problem::{CostModel, Objective, Problem, ProblemError};
use std::time::Duration;

/// Nodes that are solved when `--budget` does not say, in programs of a few hundred variables some seconds of work.
pub const DEFAULT_NODES: u64 = 4000;

/// Nodes for each program in the first round.
const FIRST_NODES: u64 = 20;

/// The most ops, which are ordered against each other.
const MOST_OPS: usize = 256;

/// The most variables, and rows, of one program.
const MOST_COLUMNS: usize = 1500;
const MOST_ROWS: usize = 4000;

/// Variables times rows of all programs together, beyond which even the relaxations take minutes.
const MOST_WORK: usize = 60_000_000;

/// How long all programs together may take when nothing else is said. The nodes end a search long before; simplex that cycles
/// would not end.
pub const LONGEST: Duration = Duration::from_secs(300);

/// What must at least be gained, as a part of the whole.
const GAIN: f64 = 1e-8;

/// Ways to write a program down, each for a solver whose arithmetic broke down over the one before: the part of a sum below which
/// sizes are left out, and whether rows come in reverse.
const WAYS: [(f64, bool); 4] = [(1e-11, false), (1e-11, true), (1e-5, false), (1e-5, true)];

/// A program and where it stands.
struct Open<'a> {
    choice: &'a Choice,
    /// No partition of it is faster, in microseconds.
    bound_us: f64,
}

/// Improves what is known; its candidates are kept. `longest` ends the search by the clock.
pub fn refine(
    question: &SearchContext<'_>,
    known: SearchResult,
    longest: Option<Duration>,
) -> Result<SearchResult, ProblemError> {
    let problem = question.problem;
    if let Some(why) = unsuited(problem) {
        return Ok(left_alone(known, why));
    }
    let fits = known.candidates.iter().filter(|candidate| candidate.fits);
    let best_us = fits.map(|candidate| candidate.minibatch_us).min_by(f64::total_cmp);
    // What other orders of the devices reach has to be beaten here too.
    let known_us = Some(question.among.known_us).filter(|us| us.is_finite());
    let best_us = best_us.into_iter().chain(known_us).min_by(f64::total_cmp);
    let slowest = known.candidates.iter().map(|candidate| candidate.minibatch_us).fold(0.0, f64::max);
    // Where nothing that is known fits, a plan is worth some time to find.
    let unit_us = best_us.unwrap_or(slowest);
    if !(unit_us.is_normal() && unit_us > 0.0) {
        return Ok(left_alone(known, "there is no time to save".to_string()));
    }
    let flow = build_plan::flow(problem, problem.cluster.devices());
    let asked = FlowQuery::of(&flow, problem.objective == Objective::Latency);
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
        let why = format!("replicas on {devices} devices can be chosen in more than {MOST_CHOICES} ways");
        return Ok(left_alone(known, why));
    };
    let order = Order::of(problem, &asked);
    let most = if best_us.is_some() { 1.0 - GAIN } else { SLOWER };
    let scope = Scope {
        problem,
        asked,
        flow,
        unit_us,
        most,
        finest: WAYS[0].0,
        pins: &pins,
        fixed: fixed.as_deref(),
        order: &order,
    };
    let mut work = 0usize;
    for choice in &choices {
        let Some(program) = Formulation::of(&scope, choice) else { continue };
        let (columns, rows) = program.size();
        work = work.saturating_add(columns.saturating_mul(rows));
        if columns > MOST_COLUMNS || rows > MOST_ROWS || work > MOST_WORK {
            let (stages, programs) = (choice.replicas.len(), choices.len());
            let why = format!(
                "{} ops in {stages} stages make {columns} variables and {rows} rows, and there are {programs} such programs",
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
        nodes: question.budget.unwrap_or(DEFAULT_NODES),
        used: 0,
        // Each program has its share of the clock, so that no program can take all of it.
        clock: longest.unwrap_or(LONGEST),
        ended: Ended::Proven,
    };
    let open = search.run(&choices);
    Ok(search.conclude(known, &open, choices.len()))
}

/// How many times slower than all that does not fit a plan that fits may be.
const SLOWER: f64 = 16.0;

/// Why these programs cannot be written down for a problem.
fn unsuited(problem: &Problem) -> Option<String> {
    let why = match problem.cost {
        _ if problem.objective == Objective::Memory => "it minimises time, not memory",
        CostModel::Load | CostModel::Hybrid => "costs `load` and `hybrid` are planned by searches of their own",
        _ if problem.cluster.levels.len() > 1 => "the devices are joined by several levels",
        _ if problem.constraints.target.is_some_and(|target| target.keeps_modules()) => {
            "the target keeps modules whole"
        }
        _ if problem.graph.ops.len() > MOST_OPS => {
            return Some(format!("{} ops are more than {MOST_OPS}", problem.graph.ops.len()));
        }
        _ => return None,
    };
    Some(why.to_string())
}

/// What is known, and why no program was solved.
fn left_alone(known: SearchResult, why: String) -> SearchResult {
    let why = format!("no integer program was solved: {why}");
    let fallback = Some(match known.fallback {
        Some(before) => format!("{why}; {before}"),
        None => why,
    });
    SearchResult { fallback, ..known }
}

/// The stage of each op, where the cuts are given.
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
    /// The time of the best that is known.
    best_us: Option<f64>,
    /// Nodes that are left, and that were used.
    nodes: u64,
    used: u64,
    clock: Duration,
    /// The worst way in which a program ended.
    ended: Ended,
}

impl Search<'_> {
    /// Solves what the budget allows; what is left open comes back.
    fn run<'c>(&mut self, choices: &'c [Choice]) -> Vec<Open<'c>> {
        let share = self.clock / (choices.len().max(1) as u32 * 2);
        let mut open = Vec::new();
        for choice in choices {
            self.ask(choice, FIRST_NODES.min(self.nodes), share, &mut open);
        }
        // A program whose bound is lowest decides what is proven; equal ones keep their order.
        open.sort_by(|left: &Open<'_>, right| left.bound_us.total_cmp(&right.bound_us));
        let mut left = Vec::new();
        let half = self.clock / 2;
        for (at, Open { choice, bound_us }) in open.iter().enumerate() {
            if self.nodes == 0 {
                left.push(Open { choice, bound_us: *bound_us });
                continue;
            }
            let mut again = Vec::new();
            self.ask(choice, self.nodes, half / (open.len() - at) as u32, &mut again);
            // The first round's bound holds as well.
            left.extend(again.into_iter().map(|again| Open { bound_us: again.bound_us.max(*bound_us), ..again }));
        }
        // Solutions that were found later refuse more.
        left.retain(|open| self.best_us.is_none_or(|best| open.bound_us < best * (1.0 - GAIN)));
        left
    }

    /// Solves one program with so many nodes, and keeps it in `open` if that was not enough.
    fn ask<'c>(&mut self, choice: &'c Choice, nodes: u64, clock: Duration, open: &mut Vec<Open<'c>>) {
        if let Some(best) = self.best_us {
            self.scope.most = best / self.scope.unit_us * (1.0 - GAIN);
        }
        let mut answer = None;
        for (finest, is_reversed) in WAYS {
            self.scope.finest = finest;
            let Some(program) = Formulation::of(&self.scope, choice) else { return };
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
        let Some((answer, meaning)) = answer else { return };
        self.nodes = self.nodes.saturating_sub(answer.nodes);
        self.used += answer.nodes.max(1);
        let mut is_closed = answer.ended == Ended::Proven;
        if let Some(values) = &answer.values {
            // What the solver holds for a solution may, for rounding, be none; then it has shown nothing.
            let offered = meaning.stages(values).map(|stages| self.offer(choice, stages));
            is_closed &= offered == Some(true);
        }
        if !is_closed {
            // The bound is that of a program solved in floating point.
            let bound = if answer.bound.is_finite() { answer.bound * (1.0 - 1e-7) } else { 0.0 };
            let bound_us = bound * self.scope.unit_us;
            open.push(Open { choice, bound_us });
            let worse = |ended| match ended {
                Ended::Proven => 0,
                Ended::Nodes => 1,
                Ended::Failed => 2,
                Ended::Clock => 3,
            };
            if worse(answer.ended) > worse(self.ended) {
                self.ended = answer.ended;
            }
        }
    }

    /// Prices a partition by the cost model itself; whether it fits and is the best so far.
    fn offer(&mut self, choice: &Choice, stages: Vec<Vec<u32>>) -> bool {
        let shape = Shape::flat(stages.into_iter().zip(choice.replicas.iter().copied()).collect(), false);
        let mut spots: Vec<StagePosition> = build_plan::side_by_side(&shape);
        spots.iter_mut().zip(&choice.recompute).for_each(|(spot, recompute)| spot.recompute = *recompute);
        let candidate = self.question.placed("milp", shape, spots);
        let is_better = candidate.fits && self.best_us.is_none_or(|best| candidate.minibatch_us < best);
        if is_better {
            self.best_us = Some(candidate.minibatch_us);
            self.best = Some(candidate);
        }
        is_better
    }

    /// What is known now, `open` of all `programs` being undecided.
    fn conclude(self, known: SearchResult, open: &[Open<'_>], programs: usize) -> SearchResult {
        let mut found = SearchResult { states: known.states + self.used, ..known };
        found.candidates.extend(self.best);
        // What lies between the halves of split backwards is reckoned with a little too much.
        let problem = self.question.problem;
        if open.is_empty() && build_plan::is_limited(problem) && problem.schedule.splits_backward() {
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
            Ended::Clock => "ended by the clock, another run may end elsewhere",
            Ended::Failed => "the solver's arithmetic broke down",
            Ended::Proven | Ended::Nodes => "the budget of nodes is used up",
        };
        found.fallback = Some(format!("{} of {programs} integer programs are not decided: {how}", open.len()));
        found
    }
}
