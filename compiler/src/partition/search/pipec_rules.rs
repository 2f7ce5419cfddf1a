//! Planning under cost model `pipec`: chooses the cuts and constraints to search, and collects the candidates.
//!
//! Linear orders come first, coarse and fine, because they are fast at any size and bound the rest; then all down-sets
//! if there are few enough. User constraints become `Rules`: a pinned number of stages, equal replicas for frameworks
//! that require them. Cuts may be restricted to module boundaries.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::heterogeneous::class_dp::ClassDp;
use crate::partition::heterogeneous::device_orders::Sequence;
use crate::partition::heterogeneous::device_ranges::DeviceRanges;
use crate::partition::infeasible;
use crate::partition::search::build_plan::{self, StagePosition};
use crate::partition::search::constraints;
use crate::partition::search::context::{DEFAULT_BUDGET, Depth, SearchContext, SearchLimits};
use crate::partition::search::downsets::{DownSets, Growth};
use crate::partition::search::finish_plan;
use crate::partition::search::first_stage;
use crate::partition::search::interleaved;
use crate::partition::search::linear_order;
use crate::partition::search::linear_search;
use crate::partition::search::module_boundaries::Borders;
use crate::partition::search::numbers::{largest, same};
use crate::partition::search::pipec::PlacedPipeline;
use crate::partition::search::placement::{MemoryScope, PlacementQuery, Rules, StagePlacement};
use crate::partition::search::range_costs::RangeCosts;
use crate::partition::search::result::{PlanCandidate, SearchResult};
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::in_flight::First;
use crate::plan::problem::{CostModel, Objective, Problem, ProblemError, Target};
use crate::plan::schedule::PendingWeightGrads;
use std::cell::Cell;

/// Largest number of cuts along an order: fine, and coarse.
const MAX_PLACES: usize = 1000;
const COARSE: usize = 48;

/// Largest number of down-sets that a draft searches.
const DRAFTED: usize = 100;

/// Steps of the forward search for at most `FEW` down-sets; a sixteenth elsewhere.
const STEPS: u64 = 400_000;

/// The share of the work for larger graphs under schedules with a flush: their plans are improved by simulation
/// afterwards.
const FLUSHED: f64 = 0.1;
const SMALL: usize = 32;

/// Largest number of down-sets for the full number of steps.
const FEW: usize = 2000;

/// Steps for the tables over all device orders; about three nanoseconds each.
const BLEND: f64 = 4e8;

/// Steps per device order in the ranking of many orders.
const GLANCE: f64 = 4e5;

/// Largest number of devices for which each worker count is searched separately, if memory depends on it.
const MOST_WORKERS: u32 = 16;

/// Largest number of first stages that are searched separately, if memory depends on them.
const MOST_FIRSTS: usize = 24;

/// Largest number of stages tried for pinned ops.
const MOST_PINNED: usize = 16;

/// All candidates that satisfy the problem's constraints; includes the baselines if there are no constraints.
pub fn found(question: &SearchContext<'_>, baselines: &[PlanCandidate; 3]) -> Result<SearchResult, ProblemError> {
    let problem = question.problem;
    if problem.chunks > 1 {
        return interleaved::found(question);
    }
    let rules = rules(question)?;
    let mut search = Search { question, found: SearchResult::default() };
    let mut known_us = question.among.known_us;
    let is_free = rules == [free(problem)] && problem.constraints.cut_after.is_none() && !keeps_modules(problem);
    if is_free {
        search.found.candidates.extend(baselines.iter().cloned());
        let best_us = search.found.fastest_us();
        // Optimal: the baseline spreads all compute over all devices.
        if problem.objective != Objective::Memory && best_us <= finish_plan::spread(problem) * (1.0 + 1e-9) {
            search.found.states = baselines.len() as u64;
            search.found.proven_us = Some(best_us);
            return Ok(search.found);
        }
        known_us = best_us.min(known_us);
    }
    search.ask(&rules, known_us)?;
    if search.found.candidates.is_empty() && question.among.known_us.is_infinite() {
        let what = "no partition satisfies all constraints together; use fewer constraints or more devices";
        return Err(ProblemError::Unmet { what: what.to_string() });
    }
    Ok(search.found)
}

fn free(problem: &Problem) -> Rules {
    Rules { recompute: problem.recomputation(), ..Rules::default() }
}

fn keeps_modules(problem: &Problem) -> bool {
    problem.constraints.target.is_some_and(Target::keeps_modules)
}

/// The alternative sets of rules; a plan must satisfy one of them.
fn rules(question: &SearchContext<'_>) -> Result<Vec<Rules>, ProblemError> {
    let problem = question.problem;
    let constraints = &problem.constraints;
    let devices = problem.cluster.devices();
    let most_places = problem.graph.ops.len().min(devices as usize);
    let caps = problem.in_flight.given().map(<[u32]>::to_vec);
    let pins = constraints::pinned(question.joined, &constraints.pins)?;
    let replicas = constraints.replicas.clone();
    let fixed = constraints::stages(problem)?;
    let most = constraints.most_stages.map(|most| most as usize);
    if let (Some(stages), Some(most)) = (fixed, most.filter(|most| fixed.is_some_and(|stages| stages > *most))) {
        return Err(ProblemError::Unmet {
            what: format!("{stages} stages are requested, and at most {most} are allowed"),
        });
    }
    let least_pinned = pins.iter().map(|(_, stage)| stage + 1).max();
    if let (Some(least), Some(most)) = (least_pinned, fixed.or(most).or(Some(most_places)))
        && least > most
    {
        return Err(ProblemError::NoStage { stage: least - 1, most });
    }
    let base = Rules { replicas, caps, pins, ..free(problem) };
    let stages: Vec<Option<usize>> = match (fixed, least_pinned) {
        (Some(stages), _) => vec![Some(stages)],
        (None, Some(least)) => {
            (least..=most.unwrap_or(most_places).min(most_places).min(least.max(MOST_PINNED))).map(Some).collect()
        }
        (None, None) => vec![None],
    };
    let equal: Vec<Option<u32>> = match (constraints.no_replication, constraints.has_equal_replicas()) {
        (true, _) => vec![Some(1)],
        (false, true) => (1..=devices).filter(|r| devices <= 64 || devices.is_multiple_of(*r)).map(Some).collect(),
        (false, false) => vec![None],
    };
    let mut rules = Vec::new();
    for stages in stages {
        for &equal in &equal {
            let most_stages = if stages.is_none() { most.map(|most| most.min(most_places)) } else { None };
            rules.push(Rules { stages, most_stages, equal, ..base.clone() });
        }
    }
    Ok(rules)
}

struct Search<'a> {
    question: &'a SearchContext<'a>,
    found: SearchResult,
}

impl Search<'_> {
    fn ask(&mut self, rules: &[Rules], known_us: f64) -> Result<(), ProblemError> {
        let problem = self.question.problem;
        let graph = &problem.graph;
        let mut known = known_us;
        // The budget is shared between the device orders.
        let SearchLimits { orders, depth, .. } = self.question.among;
        let orders = f64::from(orders);
        let (most, within) = if depth == Depth::Glance { (COARSE, GLANCE) } else { (MAX_PLACES, 2e7 * part(problem)) };
        let fine = largest((graph.ops.len() + 1).min(most), |places| effort(problem, rules, places) * orders <= within);
        if let Some(names) = &problem.constraints.cut_after {
            let (order, ends) = constraints::resolve(graph, self.question.joined, names)?;
            let space = DownSets::chain(graph, CostModel::Pipec, order, ends);
            self.within(&space, rules, &mut known, true);
            return Ok(());
        }
        let borders = Borders::of(problem, self.question.joined);
        let pinned = rules.iter().filter_map(|rules| rules.stages).max().unwrap_or(0) + 1;
        let replicas = rules.iter().find_map(|rules| rules.replicas.clone()).unwrap_or_else(|| vec![1; pinned - 1]);
        let mut lines = linear_search::orders(graph);
        match depth {
            // The last order is depth-first.
            Depth::Glance => lines = lines.split_off(lines.len() - 1),
            // Prefixes of linear orders are down-sets themselves.
            Depth::Tables => lines.clear(),
            Depth::Draft | Depth::Whole => {}
        }
        let twice = |order: Vec<u32>| {
            // Skips the coarse pass if many fixed stages leave it as fine as the other one.
            let is_coarser = fine.max(pinned) > COARSE.max(pinned);
            match depth {
                Depth::Draft if is_coarser => vec![(order, fine.min(COARSE))],
                Depth::Whole if is_coarser => vec![(order.clone(), fine.min(COARSE)), (order, fine)],
                _ => vec![(order, fine)],
            }
        };
        // Pins may forbid the balanced partition; with the memory objective its time is no bound.
        let is_timed = problem.objective != Objective::Memory && problem.constraints.pins.is_empty();
        let mut fixed_first = is_timed && problem.constraints.replicas.is_some() && replicas.len() > 1;
        for (order, places) in lines.into_iter().flat_map(twice) {
            let places = places.max(pinned).max(2);
            let mut ends = linear_order::ends_for(graph, CostModel::Paper, &order, places - 1, &replicas);
            if let Some(borders) = &borders {
                ends = borders.ends(&order);
            } else if rules.iter().any(|rules| rules.stages == Some(replicas.len())) && fixed_first {
                known = known.min(self.balanced(&order, &replicas));
                fixed_first = false;
            }
            let space = DownSets::chain(graph, CostModel::Paper, order, ends);
            self.within(&space, rules, &mut known, false);
        }
        if depth == Depth::Glance {
            return Ok(());
        }
        let affordable = affordable(self.question, rules);
        let affordable = if depth == Depth::Draft { affordable.min(DRAFTED) } else { affordable };
        let grown =
            if borders.is_some() { None } else { DownSets::grow(graph, CostModel::Paper, Growth::All, affordable) };
        if let Some(space) = grown {
            self.within(&space, rules, &mut known, true);
            return Ok(());
        }
        let of_groups = if fine > graph.ops.len() { "" } else { " of grouped ops" };
        self.found.fallback = Some(match borders {
            Some(_) => "only topological orders, cut at module boundaries, were tried".to_string(),
            None => format!("only one topological order{of_groups} was tried: more than {affordable} down-sets"),
        });
        Ok(())
    }

    /// Offers the balanced partition for the given replicas, to bound a search with many fixed stages. Returns its time
    /// if it fits, otherwise infinity.
    fn balanced(&mut self, order: &[u32], replicas: &[u32]) -> f64 {
        let problem = self.question.problem;
        let ends = linear_order::balanced(&problem.graph, order, replicas);
        let stages = ends.windows(2).zip(replicas).map(|(run, &replicas)| {
            let mut ops = order[run[0]..run[1]].to_vec();
            ops.sort_unstable();
            (ops, replicas)
        });
        let shape = Shape::flat(stages.collect(), problem.cluster.levels.len() > 1);
        let spots = build_plan::side_by_side(problem, &shape);
        let candidate = self.question.placed("pipec", shape, spots);
        let us = if candidate.fits { candidate.minibatch_us } else { f64::INFINITY };
        self.found.candidates.push(candidate);
        us
    }

    /// Searches one list of down-sets under each set of rules.
    fn within(&mut self, space: &DownSets, rules: &[Rules], known: &mut f64, is_whole: bool) {
        let problem = self.question.problem;
        let places = RangeCosts::new(&problem.graph, space, GradientBuffers::of(&problem.cluster));
        let fleet = fleet(problem);
        let mut proven: Option<f64> = Some(f64::INFINITY);
        let mut fits = false;
        let numbers = AssumedPipelines::of(problem);
        let steps = (STEPS as f64 * part(problem)) as u64;
        let steps = steps / u64::from(self.question.among.orders) / numbers.list.len() as u64;
        for mut placing in numbers.placings(problem, &places, &fleet, rules) {
            placing.steps = match self.question.among.depth {
                Depth::Glance | Depth::Tables => 0,
                Depth::Draft | Depth::Whole if is_whole && places.space.len() <= FEW => steps,
                Depth::Draft | Depth::Whole => steps / 16,
            };
            if problem.objective == Objective::Memory {
                let Some((bytes, placements)) = placing.least_memory(MemoryScope::All) else { continue };
                self.offer(&places, &placements);
                // Then the fastest partition with this peak memory.
                placing.memory_limit = Some(bytes);
                self.found.states += places.space.len() as u64;
            }
            let free = *known;
            let solved = placing.solve(free);
            self.found.is_pressed |= placing.is_pressed.get();
            let PlacedPipeline { placements, us, bound_us, states, .. } = match solved {
                Ok(pipeline) => pipeline,
                // Nothing is faster than the known plan, or nothing fits.
                Err(bound_us) => {
                    proven = proven.map(|least| least.min(bound_us));
                    continue;
                }
            };
            self.found.states += states;
            fits |= self.offer(&places, &placements);
            if problem.objective != Objective::Memory {
                *known = known.min(us);
            }
            proven = proven.map(|least| least.min(bound_us));
        }
        // On several levels, stages that are not side by side are not searched.
        let is_proof = is_whole
            && numbers.are_exact
            && problem.cluster.levels.len() == 1
            && problem.objective != Objective::Memory;
        self.found.proven_us = proven.filter(|us| is_proof && us.is_finite());
        // The smallest memory is only needed for the infeasibility report.
        if !fits && known.is_infinite() && !self.found.candidates.iter().any(|candidate| candidate.fits) {
            for placing in numbers.placings(problem, &places, &fleet, rules) {
                let placing = PlacementQuery { memory_limit: None, ..placing };
                infeasible::least(&placing).iter().for_each(|placements| {
                    self.offer(&places, placements);
                });
            }
        }
    }

    fn offer(&mut self, places: &RangeCosts<'_>, placements: &[StagePlacement]) -> bool {
        let problem = self.question.problem;
        let stages = placements.iter().map(|one| (places.space.between(one.from, one.to), one.replicas)).collect();
        let spot = |one: &StagePlacement| StagePosition { first: one.first, recompute: one.recompute.into() };
        let spots = placements.iter().map(spot).collect();
        let shape = Shape::flat(stages, problem.cluster.levels.len() > 1);
        let candidate = self.question.placed("pipec", shape, spots);
        let fits = candidate.fits;
        let known = |other: &PlanCandidate| {
            other.shape == candidate.shape
                && other.spots == candidate.spots
                && same(other.minibatch_us, candidate.minibatch_us)
        };
        if !self.found.candidates.iter().any(known) {
            self.found.candidates.push(candidate);
        }
        fits
    }
}

/// The devices of a problem, without their memory if it cannot matter.
fn fleet(problem: &Problem) -> DeviceRanges {
    let fleet = DeviceRanges::of(&problem.cluster.classes);
    if build_plan::is_limited(problem) { fleet } else { fleet.without_memory() }
}

/// The separate searches: one per assumed worker count or first stage.
///
/// With split backwards, a stage's memory depends on the number of workers in the whole pipeline. With vertical sync,
/// weight versions depend on the first stage. A backward search knows neither, so each value is searched separately if
/// there are few. Otherwise an upper bound is assumed, and some stages may be recomputed without need.
struct AssumedPipelines {
    list: Vec<(Option<u32>, First)>,
    are_exact: bool,
}

impl AssumedPipelines {
    fn of(problem: &Problem) -> AssumedPipelines {
        let devices = problem.cluster.devices();
        let is_synced = first_stage::matters(problem);
        let wants = build_plan::is_limited(problem) || problem.objective == Objective::Memory;
        let guesses = (is_synced
            || matches!(problem.schedule.properties().split, Some(PendingWeightGrads::PerEarlierWorker(_))))
            && wants;
        let firsts = || first_stage::each(problem).take(MOST_FIRSTS + 1).map(First::Known).collect();
        let firsts: Vec<First> = if guesses && is_synced { firsts() } else { Vec::new() };
        let of_first = |first: First| (None, first);
        let (list, are_exact) = match guesses && devices <= MOST_WORKERS {
            true if !is_synced => ((1..=devices).map(|workers| (Some(workers), First::Unknown)).collect(), true),
            true if firsts.len() <= MOST_FIRSTS => (firsts.into_iter().map(of_first).collect(), true),
            true => (first_stage::caps(problem).into_iter().map(First::Capped).map(of_first).collect(), false),
            false => (vec![(None, First::Unknown)], !guesses),
        };
        AssumedPipelines { list, are_exact }
    }

    /// The queries over these ranges, for each set of rules and each separate search.
    fn placings<'a>(
        &'a self,
        problem: &'a Problem,
        places: &'a RangeCosts<'a>,
        fleet: &'a DeviceRanges,
        rules: &'a [Rules],
    ) -> impl Iterator<Item = PlacementQuery<'a>> {
        let devices = problem.cluster.devices();
        let each =
            rules.iter().flat_map(move |rules| self.list.iter().map(move |&(exactly, first)| (rules, exactly, first)));
        each.filter_map(move |(rules, exactly, first)| {
            let exceeds = |stages: usize| exactly.is_some_and(|workers| stages > workers as usize);
            if rules.stages.is_some_and(|stages| stages >= places.space.len() || exceeds(stages)) {
                return None;
            }
            if let (First::Known(first), Some(replicas)) = (first, rules.replicas.as_deref())
                && replicas.first() != Some(&first.replicas)
            {
                return None;
            }
            if matches!((first, rules.equal), (First::Known(first), Some(equal)) if first.replicas != equal) {
                return None;
            }
            Some(PlacementQuery {
                problem,
                places,
                levels: &problem.cluster.levels,
                fleet,
                devices,
                exactly,
                asked: build_plan::asked(problem),
                flow: build_plan::flow(problem, exactly.unwrap_or(devices)),
                first,
                memory_limit: problem.memory_limit.map(|limit| limit.0),
                rules,
                steps: 0,
                is_pressed: Cell::new(false),
            })
        })
    }
}

pub struct AllOrdersResult {
    /// The orders, most promising first.
    pub orders: Vec<Sequence>,
    /// Lower bound for all orders; 0 if the search was incomplete, infinite if no plan fits.
    pub bound_us: f64,
    pub is_whole: bool,
}

/// Searches all device orders of one level with a common table; `None` if the table would be too large.
pub fn blended(question: &SearchContext<'_>, counts: &ClassDp) -> Result<Option<AllOrdersResult>, ProblemError> {
    let problem = question.problem;
    let graph = &problem.graph;
    let rules = rules(question)?;
    let numbers = AssumedPipelines::of(problem);
    let tables = if build_plan::asked(problem).adds() { 5.0 } else { 2.0 };
    let effort = |sets: usize| {
        let one = |rules: &Rules| counts.effort(sets, rules.stages.or(rules.most_stages).unwrap_or(1));
        tables * numbers.list.len() as f64 * rules.iter().map(one).sum::<f64>()
    };
    let budget = question.options.budget.unwrap_or(DEFAULT_BUDGET).min(1 << 24) as usize;
    let most = largest(budget, |sets| effort(sets) <= BLEND);
    if effort(most) > BLEND {
        return Ok(None);
    }
    let given = problem.constraints.cut_after.as_ref();
    let fixed = given.map(|names| constraints::resolve(graph, question.joined, names)).transpose()?;
    let (space, is_whole) = match fixed {
        Some((order, ends)) => (DownSets::chain(graph, CostModel::Pipec, order, ends), true),
        None => match DownSets::grow(graph, CostModel::Paper, Growth::All, most).filter(|_| !keeps_modules(problem)) {
            Some(space) => (space, true),
            None => {
                let mut lines = linear_search::orders(graph);
                let order = lines.pop().unwrap_or_default();
                let ends = match Borders::of(problem, question.joined) {
                    Some(borders) => borders.ends(&order),
                    None => linear_order::ends(graph, CostModel::Paper, &order, most - 1),
                };
                (DownSets::chain(graph, CostModel::Paper, order, ends), false)
            }
        },
    };
    if effort(space.len()) > BLEND {
        return Ok(None);
    }
    let places = RangeCosts::new(graph, &space, GradientBuffers::of(&problem.cluster));
    let fleet = fleet(problem);
    let (mut orders, mut bound_us, mut known_us) = (Vec::new(), f64::INFINITY, question.among.known_us);
    for placing in numbers.placings(problem, &places, &fleet, &rules) {
        let solved = counts.solve(&placing, known_us);
        bound_us = bound_us.min(solved.bound_us);
        // The table's value may be below the true time, so only `known_us` prunes.
        known_us = known_us.min(question.among.known_us);
        orders.push((solved.bound_us, solved.orders));
    }
    if orders.iter().all(|(_, orders)| orders.is_empty()) && bound_us.is_infinite() {
        let mut needed = |counted: MemoryScope| {
            let all = numbers.placings(problem, &places, &fleet, &rules);
            let found = all.filter_map(|placing| counts.least_memory(&placing, counted));
            let found: Vec<Sequence> = found.collect();
            let is_any = !found.is_empty();
            orders.push((bound_us, found));
            is_any
        };
        if !needed(MemoryScope::Within) {
            fleet.largest().into_iter().take(infeasible::MOST_CLASSES).for_each(|class| {
                needed(MemoryScope::Class(class));
            });
        }
    }
    orders.sort_by(|left, right| left.0.total_cmp(&right.0));
    let mut once: Vec<Sequence> = Vec::new();
    for order in orders.into_iter().flat_map(|(_, orders)| orders) {
        if !once.contains(&order) {
            once.push(order);
        }
    }
    let is_bound = is_whole && numbers.are_exact;
    Ok(Some(AllOrdersResult { orders: once, bound_us: if is_bound { bound_us } else { 0.0 }, is_whole }))
}

/// Largest number of down-sets that may be searched.
fn affordable(question: &SearchContext<'_>, rules: &[Rules]) -> usize {
    let budget = question.options.budget.unwrap_or(DEFAULT_BUDGET).min(1 << 24) as usize;
    let orders = f64::from(question.among.orders);
    largest(budget, |sets| effort(question.problem, rules, sets) * orders <= 1e8 * part(question.problem))
}

/// Returns whether all down-sets can be searched in every device order.
pub fn affords_all(question: &SearchContext<'_>) -> Result<bool, ProblemError> {
    let most = affordable(question, &rules(question)?);
    Ok(DownSets::grow(&question.problem.graph, CostModel::Paper, Growth::All, most).is_some())
}

pub fn glance_effort(question: &SearchContext<'_>) -> Result<f64, ProblemError> {
    let most = (question.problem.graph.ops.len() + 1).min(COARSE);
    let rules = rules(question)?;
    let places = largest(most, |places| effort(question.problem, &rules, places) <= GLANCE);
    Ok(effort(question.problem, &rules, places))
}

/// The share of the full work.
fn part(problem: &Problem) -> f64 {
    let is_improved = build_plan::asked(problem).adds() && problem.objective == Objective::Throughput;
    if is_improved && problem.graph.ops.len() > SMALL { FLUSHED } else { 1.0 }
}

fn effort(problem: &Problem, rules: &[Rules], places: usize) -> f64 {
    let (places, devices) = (places as f64, f64::from(problem.cluster.devices()));
    let one = |rules: &Rules| {
        let choices = match (rules.equal, &rules.replicas) {
            // Given replicas fix the workers after each stage; only a few checks remain.
            (_, Some(_)) if problem.cluster.levels.len() == 1 => devices.min(8.0),
            (None, None) => devices * devices / 2.0,
            _ => devices,
        };
        let layers = rules.stages.or(rules.most_stages).unwrap_or(1) as f64;
        places * places / 2.0 * choices * layers
    };
    // With flushes nothing bounds the devices of a range from below, and several tables are filled.
    let loose = if build_plan::asked(problem).adds() { 8.0 } else { 1.0 };
    let questions = AssumedPipelines::of(problem).list.len() as f64;
    questions * loose * rules.iter().map(one).sum::<f64>()
}
