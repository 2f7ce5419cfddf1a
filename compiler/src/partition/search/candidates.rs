//! The searches behind the names: each gives candidates, and says how complete it was.
//!
//! Work is bounded. A graph with more closed sets than the budget is searched along linear orders; a line longer than can be
//! borne is grouped. The best cut of a line is found first in any case, because it bounds the search over sets.

use crate::partition::baselines::{data_parallel, exhaustive, single, uniform};
use crate::partition::bounds::local_search::LocalSearch;
use crate::partition::bounds::lower_bound::Bounds;
use crate::partition::dp::nested_partition::Shape;
use crate::partition::dp::pipedream;
use crate::partition::search::downsets::{DownSets, Growth};
use crate::partition::search::fused_graph::FusedGraph;
use crate::partition::search::linear_dp::Lines;
use crate::partition::search::linear_order;
use crate::partition::search::linear_order::LinearOrder;
use crate::partition::search::memory_dp;
use crate::partition::search::memory_dp::{Fit, FitObjective};
use crate::partition::search::{build_plan, fixed_stages, linear_search};
use crate::plan::StageMemory;
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::problem::{InFlight, Objective, Problem, ProblemError};
use crate::plan::stage_cost::{self, LevelCost, StageCost};
use crate::profile::cost_graph::CostGraph;
use std::collections::BTreeMap;

/// Closed sets that are looked at when `--budget` does not say.
pub const DEFAULT_BUDGET: u64 = 10_000;

/// Sets around the cuts of a plan that are searched at once.
const MOST_MOVED: usize = 1500;

/// A shape with what it costs and holds.
#[derive(Clone, Debug)]
pub struct PlanCandidate {
    /// Who made it.
    pub name: &'static str,
    /// The partition.
    pub shape: Shape,
    /// Its time in microseconds for one minibatch.
    pub minibatch_us: f64,
    /// In-flight caps by the schedule's rule, or as given.
    pub caps: Vec<u32>,
    /// Items between the halves of their backward; none where it is whole.
    pub apart: Vec<u32>,
    /// Where each stage stands.
    pub spots: Vec<build_plan::StagePosition>,
    /// What each stage holds under them.
    pub memory: Vec<StageMemory>,
    /// Whether all of it is within the limit.
    pub fits: bool,
}

impl PlanCandidate {
    /// Bytes of the fullest device.
    pub fn peak(&self) -> u64 {
        fullest(&self.spots, &self.memory)
    }

    /// Devices that its stages stand on: chunks of one rank on the same.
    pub fn devices(&self) -> u32 {
        let ranks: BTreeMap<u32, u32> =
            self.spots.iter().zip(self.shape.replicas()).map(|(spot, replicas)| (spot.first, replicas)).collect();
        ranks.into_values().fold(0, u32::saturating_add)
    }
}

/// Bytes of the fullest device: chunks of one rank stand on the same.
pub fn fullest(spots: &[build_plan::StagePosition], memory: &[StageMemory]) -> u64 {
    let mut held: BTreeMap<u32, u64> = BTreeMap::new();
    for (spot, memory) in spots.iter().zip(memory) {
        let sum = held.entry(spot.first).or_default();
        *sum = sum.saturating_add(memory.total);
    }
    held.into_values().max().unwrap_or(0)
}

/// What a partitioner says about its answer.
pub struct SearchResult {
    /// In no order.
    pub candidates: Vec<PlanCandidate>,
    /// Sets or steps looked at.
    pub states: u64,
    /// Why the search was not complete, if it was not.
    pub fallback: Option<String>,
    /// The least time that any partition needs, where a complete search has shown it.
    pub proven_us: Option<f64>,
    /// A time that no partition beats; 0 where none was looked for.
    pub bound_us: f64,
}

impl SearchResult {
    /// One candidate and no search.
    pub fn of(candidate: PlanCandidate) -> SearchResult {
        SearchResult { candidates: vec![candidate], states: 1, ..SearchResult::nothing() }
    }

    /// Nothing yet.
    pub fn nothing() -> SearchResult {
        SearchResult { candidates: Vec::new(), states: 0, fallback: None, proven_us: None, bound_us: 0.0 }
    }
}

/// A problem, and how much work may go into it.
pub struct SearchContext<'a> {
    /// The problem, over joined ops.
    pub problem: &'a Problem,
    /// How they come together.
    pub joined: &'a FusedGraph<'a>,
    /// Closed sets to look at before falling back.
    pub budget: Option<u64>,
    /// The other questions beside it.
    pub among: SearchLimits,
}

/// Where the same is asked about several orders of the devices: how many share the work, and what is known from those before.
#[derive(Clone, Copy, Debug)]
pub struct SearchLimits {
    /// How many.
    pub orders: u32,
    /// A time that some plan reaches, or infinity.
    pub known_us: f64,
    /// How closely this one is looked at.
    pub depth: Depth,
}

/// How closely an order of the devices is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Along one coarse line, to tell it from other orders.
    Glance,
    /// Over all closed sets, by their tables alone, whose bounds tell what may be left out.
    Tables,
    /// As if it were the only one.
    Whole,
}

impl SearchLimits {
    /// No other.
    pub const ALONE: SearchLimits = SearchLimits { orders: 1, known_us: f64::INFINITY, depth: Depth::Whole };

    /// Whether nothing else was asked before or will be.
    pub fn is_alone(&self) -> bool {
        self.orders == 1 && self.known_us.is_infinite() && self.depth == Depth::Whole
    }
}

impl SearchContext<'_> {
    /// The same about a problem that differs in its devices only.
    pub fn about<'b>(&'b self, problem: &'b Problem) -> SearchContext<'b> {
        SearchContext { problem, joined: self.joined, budget: self.budget, among: self.among }
    }

    /// A shape with its costs.
    pub fn candidate(&self, name: &'static str, shape: Shape) -> PlanCandidate {
        let spots = build_plan::side_by_side(&shape);
        self.placed(name, shape, spots)
    }

    /// A shape whose stages stand there, with its costs.
    pub fn placed(&self, name: &'static str, shape: Shape, spots: Vec<build_plan::StagePosition>) -> PlanCandidate {
        let problem = self.problem;
        let caps = match &problem.in_flight {
            InFlight::Given(caps) if caps.len() == shape.replicas().len() => caps.clone(),
            _ => build_plan::published_caps(problem, &shape),
        };
        let apart = build_plan::apart(problem, &shape, &caps);
        let memory = build_plan::memory(problem, &shape, &spots, &build_plan::holdings(problem, &shape), &caps, &apart);
        let fits = build_plan::fits(problem, &shape, &spots, &memory);
        let minibatch_us = build_plan::minibatch_us(problem, &shape, &spots);
        PlanCandidate { name, shape, minibatch_us, caps, apart, spots, memory, fits }
    }

    /// One device, data parallelism, and the uniform pipeline, in this order.
    pub fn baselines(&self) -> [PlanCandidate; 3] {
        let (graph, cluster) = (&self.problem.graph, &self.problem.cluster);
        let order: Vec<u32> = (0..graph.ops.len() as u32).collect();
        [
            self.candidate("single", single::single(graph.ops.len(), cluster)),
            self.candidate("data-parallel", data_parallel::data_parallel(graph.ops.len(), cluster)),
            self.candidate("uniform", uniform::uniform(graph, cluster, &order)),
        ]
    }

    /// The hierarchical search over closed sets; for `Growth::All` also with fewer devices and with stages that span groups.
    pub fn hierarchical(&self, growth: Growth, baselines: &[PlanCandidate; 3]) -> SearchResult {
        let problem = self.problem;
        let is_ours = growth == Growth::All;
        let name = if is_ours { "pipec" } else { "pipedream" };
        let levels = stage_cost::levels(&problem.cluster);
        let mut found = SearchResult { bound_us: f64::INFINITY, ..SearchResult::nothing() };
        let mut searches = vec![(levels, false)];
        if is_ours && problem.cluster.levels.len() > 1 {
            searches.push((stage_cost::levels(&problem.cluster.flattened()), true));
        }
        let bounds = Bounds::of(problem);
        let mut is_proven = true;
        for (levels, is_flat) in &searches {
            let known = found.candidates.iter().filter(|candidate| candidate.fits);
            let best_us = known.map(|candidate| candidate.minibatch_us).fold(f64::INFINITY, f64::min);
            let searched = self.search(levels, growth, is_ours, &bounds, best_us);
            found.states += searched.states;
            found.fallback = found.fallback.take().or(searched.fallback);
            found.candidates.extend(searched.shapes.into_iter().map(|mut shape| {
                shape.is_flat = *is_flat;
                self.candidate(name, shape)
            }));
            is_proven &= searched.is_proven;
            found.bound_us = found.bound_us.min(searched.bound_us);
        }
        if !is_ours && problem.cluster.levels.len() > 1 {
            // Plans whose stages do not take whole groups were not searched, but are bounded.
            is_proven = false;
            found.bound_us = bounds.of_any_plan(found.bound_us);
        }
        found.proven_us = Some(found.bound_us).filter(|_| is_proven);
        let wants_memory = problem.objective == Objective::Memory;
        let fits = |found: &SearchResult| found.candidates.iter().any(|candidate| candidate.fits);
        let fitted = fits(&found);
        let within = problem.memory_limit.map_or(u64::MAX, |limit| limit.0);
        // The least memory comes last: where the workers of a pipeline are only bounded while it is searched, it may fit though
        // the search for time within the limit found nothing.
        for least in [FitObjective::Time { within }, FitObjective::Memory] {
            if if least == FitObjective::Memory { wants_memory || !fits(&found) } else { !wants_memory && !fitted } {
                for (levels, is_flat) in &searches {
                    found.candidates.extend(self.fitting(levels, least).into_iter().map(|mut shape| {
                        shape.is_flat = *is_flat;
                        self.candidate(name, shape)
                    }));
                }
            }
        }
        if !wants_memory && !fitted {
            found.fallback = found.fallback.take().or(Some("memory: search along linear orders".to_string()));
        }
        if is_ours || !fitted {
            found.candidates.extend(baselines.iter().cloned());
        }
        found
    }

    /// The best shape on these levels: along lines, and then over closed sets within their bound.
    ///
    /// `best_us` is what a plan on other levels is known to reach.
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
            if let Some(far) = far {
                known_us = far.us;
                shape = Some(far.shape);
            }
        }
        let budget = self.budget.unwrap_or_else(|| {
            // Over several levels little is ruled out before it is worked out.
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
            let along = if is_ours || lines.are_whole() { "linear orders" } else { "linear orders of grouped ops" };
            format!("{along}: more than {in_memory} closed sets")
        });
        let exact = grown.and_then(|space| {
            states += space.len() as u64;
            let within = pipedream::solve(&space, &cost, levels, is_ours, known_us);
            // PipeDream's growth may leave out the sets with which the line reached the bound; then it is no bound here.
            let reaches = |solution: &pipedream::Solution| solution.minibatch_us <= known_us * (1.0 + 1e-9);
            let free = || pipedream::solve(&space, &cost, levels, is_ours, f64::INFINITY);
            within.filter(reaches).or_else(free)
        });
        let is_complete = growth == Growth::All || sources(&self.problem.graph) == 1;
        let proven = exact.as_ref().filter(|_| is_complete && fallback.is_none()).map(|exact| exact.least_us);
        bound_us = proven.unwrap_or(bound_us);
        let shapes = exact.map(|solution| solution.shape).or(shape).into_iter().collect();
        Searched { shapes, states, fallback, is_proven: proven.is_some(), bound_us }
    }

    /// What fits best along each line, and among all closed sets where they are few.
    pub fn fitting(&self, levels: &[LevelCost], least: FitObjective) -> Vec<Shape> {
        let (graph, cost) = (&self.problem.graph, StageCost::of(self.problem));
        let passing = GradientBuffers::of(&self.problem.cluster);
        let limit = largest((graph.ops.len() + 1).min(1200), |places| memory_dp::effort(levels, places) <= 6e6);
        let along = |order: Vec<u32>| {
            let ends = linear_order::ends(graph, cost.model, &order, limit.max(2) - 1);
            LinearOrder::new(graph, cost.model, order, ends, passing)
        };
        let solve = |line: LinearOrder| {
            let settings = Fit {
                line: &line,
                cost: &cost,
                levels,
                flow: build_plan::flow(self.problem, self.problem.cluster.devices()),
                optimizer_state: self.problem.optimizer_state,
                zero: self.problem.zero,
            };
            memory_dp::fit(&settings, least).map(|(_, shape)| shape)
        };
        let few = largest(600, |sets| memory_dp::effort(levels, sets) <= 6e6);
        let all =
            DownSets::grow(graph, cost.model, Growth::All, few).map(|space| LinearOrder::over(graph, space, passing));
        linear_search::orders(graph).into_iter().map(along).chain(all).filter_map(solve).collect()
    }

    /// What obeys the user's constraints; with the least memory where nothing fits.
    pub fn pinned(&self) -> Result<SearchResult, ProblemError> {
        let wants_memory = self.problem.objective == Objective::Memory;
        let mut found = SearchResult { states: 1, ..SearchResult::nothing() };
        for least_memory in [wants_memory, true] {
            if !found.candidates.iter().any(|candidate| candidate.fits) {
                let shapes = fixed_stages::shapes(self.problem, self.joined, least_memory)?;
                found.candidates.extend(shapes.into_iter().map(|shape| self.candidate("pinned", shape)));
            }
        }
        Ok(found)
    }

    /// Everything.
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
            .ok_or_else(|| too_large("closed sets", budget as u64, budget as u64 + 1))?;
        let fits = |shape: &Shape| problem.memory_limit.is_none() || self.candidate("exhaustive", shape.clone()).fits;
        let levels = stage_cost::levels(&problem.cluster);
        let walked = exhaustive::exhaustive(&space, &cost, &levels, &fits);
        let (shape, states) = walked.map_err(|limit| too_large("steps", limit, limit + 1))?;
        let candidates: Vec<_> = shape.into_iter().map(|shape| self.candidate("exhaustive", shape)).collect();
        let proven_us = candidates.first().filter(|_| levels.len() == 1).map(|candidate| candidate.minibatch_us);
        Ok(SearchResult { candidates, states, proven_us, ..SearchResult::nothing() })
    }
}

struct Searched {
    shapes: Vec<Shape>,
    states: u64,
    fallback: Option<String>,
    /// Whether the bound is reached by a partition, which a complete search has shown.
    is_proven: bool,
    bound_us: f64,
}

/// Whether two times are the same but for rounding.
pub fn same(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * left.abs().max(right.abs())
}

/// Whether a bound leaves too little to look for.
fn is_near(us: f64, bound_us: f64) -> bool {
    us <= bound_us * (1.0 + 3e-5)
}

/// The largest number up to `most` that is `affordable`, which holds for all smaller ones; at least 2.
pub fn largest(most: usize, affordable: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (2, most.max(2));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if affordable(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

fn sources(graph: &CostGraph) -> usize {
    let mut is_source = vec![true; graph.ops.len()];
    graph.edges().iter().for_each(|(_, to)| is_source[to.index()] = false);
    is_source.into_iter().filter(|is_source| *is_source).count()
}
