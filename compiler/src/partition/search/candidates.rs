//! The searches for cost models `paper` and `pipedream`; each returns candidates and reports whether it was complete.
//!
//! Work is bounded. A graph with more down-sets than the budget is searched along linear orders, and ops of a long
//! order are grouped. The best cut of a linear order is always found first, because it prunes the down-set search.

use crate::partition::bounds::local_search::LocalSearch;
use crate::partition::bounds::lower_bound::Bounds;
use crate::partition::dp::nested_partition::Shape;
use crate::partition::dp::pipedream;
use crate::partition::partitioners::exhaustive;
use crate::partition::partitioners::one_stage::{data_parallel, single};
use crate::partition::partitioners::uniform::uniform;
use crate::partition::search::context::{DEFAULT_BUDGET, SearchContext};
use crate::partition::search::downsets::{DownSets, Growth};
use crate::partition::search::linear_dp::Lines;
use crate::partition::search::linear_order::{self, LinearOrder};
use crate::partition::search::memory_dp::{self, FitObjective};
use crate::partition::search::numbers::largest;
use crate::partition::search::op_sets::neighbours;
use crate::partition::search::result::{PlanCandidate, SearchResult};
use crate::partition::search::{fixed_stages, linear_search};
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::problem::{Objective, ProblemError};
use crate::plan::stage_cost::{self, LevelCost, StageCost};

/// Largest number of down-sets per round of local search around a plan's cuts.
const MOST_MOVED: usize = 1500;

impl SearchContext<'_> {
    pub fn baselines(&self) -> [PlanCandidate; 3] {
        let (graph, cluster) = (&self.problem.graph, &self.problem.cluster);
        [
            self.candidate("single", single(graph.ops.len(), cluster)),
            self.candidate("data-parallel", data_parallel(graph.ops.len(), cluster)),
            self.candidate("uniform", uniform(graph, cluster)),
        ]
    }

    /// Hierarchical search over down-sets. `Growth::All` also tries fewer devices and stages that do not fill whole
    /// groups.
    pub fn hierarchical(&self, growth: Growth, baselines: &[PlanCandidate; 3]) -> SearchResult {
        let problem = self.problem;
        let is_ours = growth == Growth::All;
        let name = if is_ours { "pipec" } else { "pipedream" };
        let levels = stage_cost::levels(&problem.cluster);
        let mut found = SearchResult { bound_us: f64::INFINITY, ..SearchResult::default() };
        let mut searches = vec![(levels, false)];
        if is_ours && problem.cluster.levels.len() > 1 {
            searches.push((stage_cost::levels(&problem.cluster.flattened()), true));
        }
        let bounds = Bounds::of(problem);
        let priced = |shape: Shape, is_flat: bool| self.candidate(name, Shape { is_flat, ..shape });
        let mut is_proven = true;
        for (levels, is_flat) in &searches {
            let searched = self.search(levels, growth, is_ours, &bounds, found.fastest_us());
            found.states += searched.states;
            found.fallback = found.fallback.take().or(searched.fallback);
            found.candidates.extend(searched.shapes.into_iter().map(|shape| priced(shape, *is_flat)));
            is_proven &= searched.is_proven;
            found.bound_us = found.bound_us.min(searched.bound_us);
        }
        if !is_ours && problem.cluster.levels.len() > 1 {
            // Plans whose stages do not fill whole groups were bounded but not searched.
            is_proven = false;
            found.bound_us = bounds.of_any_plan(found.bound_us);
        }
        found.proven_us = Some(found.bound_us).filter(|_| is_proven);
        let wants_memory = problem.objective == Objective::Memory;
        let fits = |found: &SearchResult| found.candidates.iter().any(|candidate| candidate.fits);
        let fitted = fits(&found);
        let within = problem.memory_limit.map_or(u64::MAX, |limit| limit.0);
        // Least memory comes last. The search uses an upper bound on the workers for in-flight counts. So this shape
        // may fit although the search for time found nothing.
        for least in [FitObjective::Time { within }, FitObjective::Memory] {
            if if least == FitObjective::Memory { wants_memory || !fits(&found) } else { !wants_memory && !fitted } {
                for (levels, is_flat) in &searches {
                    let shapes = self.fitting(levels, least).into_iter();
                    found.candidates.extend(shapes.map(|shape| priced(shape, *is_flat)));
                }
            }
        }
        if !wants_memory && !fitted {
            found.fallback = found.fallback.take().or(Some("memory: search along topological orders".to_string()));
        }
        if is_ours || !fitted {
            found.candidates.extend(baselines.iter().cloned());
        }
        found
    }

    /// The best shape on these levels: first along linear orders, then over the down-sets that can still improve it.
    ///
    /// `best_us` is the time of the best plan known on other levels.
    fn search(
        &self,
        levels: &[LevelCost],
        growth: Growth,
        is_ours: bool,
        bounds: &Bounds<'_>,
        best_us: f64,
    ) -> Searched {
        let (graph, cost) = (&self.problem.graph, StageCost::of(self.problem));
        let lines = Lines::of(self.problem, levels);
        if is_ours && !lines.are_whole() && best_us.is_finite() {
            let bound_us = bounds.least_us(levels, best_us);
            if is_near(best_us, bound_us) {
                let fallback = Some("other levels are bounded, not searched".to_string());
                return Searched { shapes: Vec::new(), states: 0, fallback, is_proven: false, bound_us };
            }
        }
        let (best, mut states) = lines.exact(is_ours);
        let mut known_us = best.as_ref().map_or(f64::INFINITY, |solution| solution.minibatch_us);
        let mut shape = best.map(|solution| solution.shape);
        let mut bound_us = bounds.least_us(levels, known_us);
        if is_ours && !lines.are_whole() {
            let (far, looked_at) = lines.far(bound_us, known_us);
            states += looked_at;
            if let Some((better, us)) = far {
                known_us = us;
                shape = Some(better);
            }
        }
        let budget = self.options.budget.unwrap_or_else(|| {
            // On several levels the pruning is weaker.
            let most = if levels.len() > 1 { 2e9 } else { 4e9 };
            let affordable = |sets: usize| pipedream::effort(levels, sets).0 <= most;
            largest(DEFAULT_BUDGET as usize, affordable) as u64
        });
        let in_memory = largest(budget.min(1 << 24) as usize, |sets| pipedream::effort(levels, sets).1 <= 1e9);
        let grown = match growth {
            Growth::FirstSource => DownSets::grow(graph, cost.model, growth, in_memory),
            Growth::All => {
                let within = bounds.sets_within(levels, known_us * (1.0 + 1e-9));
                let too_many = within.as_ref().filter(|space| space.len() > in_memory);
                if let Some(many) = too_many.filter(|_| !is_near(known_us, bound_us)) {
                    let few = many.cheapest(in_memory / 3);
                    states += few.len() as u64;
                    let found = pipedream::solve(&few, &cost, levels, is_ours, known_us);
                    if let Some(better) = found.filter(|found| found.minibatch_us < known_us) {
                        known_us = better.minibatch_us;
                        shape = Some(better.shape);
                    }
                }
                within.filter(|space| space.len() <= in_memory)
            }
        };
        if is_ours && grown.is_none() && !is_near(known_us, bound_us) {
            let narrow = bounds.narrow.as_ref().map(|narrow| narrow.sets(graph)).unwrap_or_default();
            let sets = narrow.into_iter().chain(lines.sets()).take(in_memory).collect();
            let few = DownSets::of(graph, cost.model, sets);
            states += few.len() as u64;
            let found = pipedream::solve(&few, &cost, levels, is_ours, known_us);
            if let Some(better) = found.filter(|found| found.minibatch_us < known_us) {
                known_us = better.minibatch_us;
                shape = Some(better.shape);
            }
            if let (Some(near), Some(start)) = (LocalSearch::of(self.problem), &shape) {
                let most = largest(in_memory.min(MOST_MOVED), |sets| pipedream::effort(levels, sets).0 <= 1e9);
                let moved = near.improve(levels, start, known_us, most);
                states += moved.states;
                if let Some((better, us)) = moved.best {
                    known_us = us;
                    shape = Some(better);
                }
            }
        }
        let fallback = grown.is_none().then(|| {
            let along =
                if is_ours || lines.are_whole() { "topological orders" } else { "topological orders of grouped ops" };
            format!("{along}: more than {in_memory} down-sets")
        });
        let exact = grown.and_then(|space| {
            states += space.len() as u64;
            let within = pipedream::solve(&space, &cost, levels, is_ours, known_us);
            // PipeDream's growth may omit the sets with which the linear order reached the bound; then the bound is not
            // valid here.
            let reaches_known_time = |solution: &pipedream::Solution| solution.minibatch_us <= known_us * (1.0 + 1e-9);
            let free = || pipedream::solve(&space, &cost, levels, is_ours, f64::INFINITY);
            within.filter(reaches_known_time).or_else(free)
        });
        let is_complete = growth == Growth::All || self.has_one_source();
        let proven = exact.as_ref().filter(|_| is_complete && fallback.is_none()).map(|exact| exact.least_us);
        bound_us = proven.unwrap_or(bound_us);
        let shapes = exact.map(|solution| solution.shape).or(shape).into_iter().collect();
        Searched { shapes, states, fallback, is_proven: proven.is_some(), bound_us }
    }

    /// The best fitting shapes along each linear order, and among all down-sets if there are few.
    pub fn fitting(&self, levels: &[LevelCost], least: FitObjective) -> Vec<Shape> {
        let (graph, cost) = (&self.problem.graph, StageCost::of(self.problem));
        let passing = GradientBuffers::of(&self.problem.cluster);
        let limit = largest((graph.ops.len() + 1).min(1200), |places| memory_dp::effort(levels, places) <= 6e6);
        let along = |order: Vec<u32>| {
            let ends = linear_order::ends(graph, cost.model, &order, limit.max(2) - 1);
            LinearOrder::over(graph, DownSets::chain(graph, cost.model, order, ends), passing)
        };
        let solve = |line: LinearOrder| memory_dp::fit(self.problem, &line, levels, least);
        let few = largest(600, |sets| memory_dp::effort(levels, sets) <= 6e6);
        let all =
            DownSets::grow(graph, cost.model, Growth::All, few).map(|space| LinearOrder::over(graph, space, passing));
        linear_search::orders(graph).into_iter().map(along).chain(all).filter_map(solve).collect()
    }

    fn has_one_source(&self) -> bool {
        let [before, _] = neighbours(&self.problem.graph);
        before.iter().filter(|before| before.is_empty()).count() == 1
    }

    /// Plans that obey the user's constraints; those with the least memory if nothing fits.
    pub fn pinned(&self) -> Result<SearchResult, ProblemError> {
        let wants_memory = self.problem.objective == Objective::Memory;
        let mut found = SearchResult { states: 1, ..SearchResult::default() };
        for least_memory in [wants_memory, true] {
            if !found.candidates.iter().any(|candidate| candidate.fits) {
                let shapes = fixed_stages::shapes(self.problem, self.joined, least_memory)?;
                found.candidates.extend(shapes.into_iter().map(|shape| self.candidate("pinned", shape)));
            }
        }
        Ok(found)
    }

    /// Exhaustive enumeration; an error if the problem is too large.
    pub fn exhaustive(&self) -> Result<SearchResult, ProblemError> {
        let problem = self.problem;
        let (graph, cost) = (&problem.graph, StageCost::of(problem));
        let too_large =
            |what, limit: u64, found: u64| ProblemError::TooLarge { method: "exhaustive", what, limit, found };
        if graph.ops.len() > exhaustive::MAX_OPS {
            return Err(too_large("ops", exhaustive::MAX_OPS as u64, graph.ops.len() as u64));
        }
        if problem.cluster.levels.len() > 1 && problem.memory_limit.is_some() {
            return Err(too_large("levels under a memory limit", 1, problem.cluster.levels.len() as u64));
        }
        let budget = 1 << (exhaustive::MAX_OPS + 1);
        let space = DownSets::grow(graph, cost.model, Growth::All, budget)
            .ok_or_else(|| too_large("down-sets", budget as u64, budget as u64 + 1))?;
        let fits = |shape: &Shape| problem.memory_limit.is_none() || self.candidate("exhaustive", shape.clone()).fits;
        let levels = stage_cost::levels(&problem.cluster);
        let walked = exhaustive::exhaustive(&space, &cost, &levels, &fits);
        let (shape, states) = walked.map_err(|limit| too_large("steps", limit, limit + 1))?;
        let candidates: Vec<_> = shape.into_iter().map(|shape| self.candidate("exhaustive", shape)).collect();
        let proven_us = candidates.first().filter(|_| levels.len() == 1).map(|candidate| candidate.minibatch_us);
        Ok(SearchResult { candidates, states, proven_us, ..SearchResult::default() })
    }
}

struct Searched {
    shapes: Vec<Shape>,
    states: u64,
    fallback: Option<String>,
    /// True if a complete search proved that the bound is reached.
    is_proven: bool,
    bound_us: f64,
}

/// Returns whether the gap to the bound is too small to search further.
fn is_near(us: f64, bound_us: f64) -> bool {
    us <= bound_us * (1.0 + 3e-5)
}
