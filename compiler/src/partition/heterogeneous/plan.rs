//! Planning for heterogeneous devices: runs the planner for several device orders and maps the best answer back to the
//! cluster's devices.
//!
//! Small problems try every order: tables first, whose bounds eliminate most orders, then full searches for the rest.
//! Otherwise every order is ranked by a coarse search (`Depth::Glance`), and the best get a full search. If there are
//! too many orders for that, a local search over orders is used, and the plan says that not all orders were tried.
//!
//! A bound for one order holds for stages along that order. If all orders were searched, the smallest of their bounds
//! holds for all plans; otherwise the bound is all compute spread over all devices.

use crate::cluster::Cluster;
use crate::partition::answer::{Answer, answer, conclude};
use crate::partition::bounds::min_memory;
use crate::partition::error::{PlanError, Refused};
use crate::partition::heterogeneous::class_dp::ClassDp;
use crate::partition::heterogeneous::device_orders::{DeviceOrder, Sequence, Units, is_alike};
use crate::partition::infeasible;
use crate::partition::options::PlannerOptions;
use crate::partition::partitioners::{OrderSearch, Partitioner};
use crate::partition::planned::Planned;
use crate::partition::search::context::{Depth, SearchContext, SearchLimits};
use crate::partition::search::finish_plan;
use crate::partition::search::in_flight::ENOUGH;
use crate::partition::search::numbers::same;
use crate::partition::search::pipec_rules::{self, AllOrdersResult};
use crate::partition::search::result::PlanCandidate;
use crate::partition::search::simulate_candidate;
use crate::plan::Plan;
use crate::plan::check::error::PlanFault;
use crate::plan::check::verify;
use crate::plan::problem::Problem;
use std::collections::BTreeSet;

/// Largest number of orders that are all searched: by tables, by integer programs, and by enumeration.
const MOST_TABLES: usize = 120;
const MOST_WHOLE: usize = 24;
const MOST_EXHAUSTIVE: usize = 5040;

/// Largest number of coarse searches, and the steps for all of them; about a second.
const MOST_GLANCES: usize = 400;
const GLANCES: f64 = 3e7;

/// Number of best orders that get a full search, and how much slower than the best they may have seemed.
const MOST_CLOSELY: usize = 3;
const NEAR: f64 = 1.02;

/// Plans for a cluster of several classes.
pub fn plan(question: &SearchContext<'_>) -> Result<Planned, PlanError> {
    let problem = question.full;
    let units = Units::of(&problem.cluster);
    let known = PlannerOptions { partitioner: Partitioner::Pipec, ..*question.options };
    let options = match question.options.partitioner {
        // Skips the search if memory alone proves that nothing fits in any order.
        Partitioner::Milp | Partitioner::Exhaustive if min_memory::proves_none(question.problem) => &known,
        _ => question.options,
    };
    let question = &SearchContext { options, ..*question };
    let mut search = Search {
        question: *question,
        units: &units,
        asked: Vec::new(),
        least_us: finish_plan::spread(question.problem),
        best: None,
        refused: None,
        states: 0,
    };
    let blended = blended(question)?;
    let mut is_shown = false;
    if let Some(AllOrdersResult { orders, bound_us, .. }) = &blended {
        // A table over all orders proves that nothing fits, or bounds all orders.
        is_shown = bound_us.is_infinite() && !orders.is_empty();
        if is_shown {
            search.question.options = &known;
        }
        if bound_us.is_finite() {
            search.least_us = search.least_us.max(*bound_us);
        }
        let among = SearchLimits { orders: orders.len() as u32, ..SearchLimits::ALONE };
        search.add(orders);
        (0..orders.len()).try_for_each(|at| search.ask(at, among))?;
    }
    let first = search.asked.len();
    let Chosen { orders, looked, is_all } = match blended {
        _ if is_shown || search.is_met() => Chosen { orders: Vec::new(), looked: first, is_all: true },
        blended => chosen(question, &units, blended),
    };
    search.add(&orders);
    let count = search.asked.len();
    let shared = if is_all { (count - first) as u32 } else { 1 };
    if is_all && shared > 1 && options.partitioner == Partitioner::Pipec {
        let among = SearchLimits { orders: shared, depth: Depth::Tables, ..SearchLimits::ALONE };
        (first..count).try_for_each(|at| search.ask(at, among))?;
        let mut next: Vec<usize> = (0..count).collect();
        let key = |at: &usize| (search.asked[*at].bound_us, search.asked[*at].us);
        next.sort_by(|a, b| key(a).0.total_cmp(&key(b).0).then(key(a).1.total_cmp(&key(b).1)).then(a.cmp(b)));
        next.truncate(MOST_WHOLE);
        for (at, &order) in next.iter().enumerate() {
            search.ask(order, SearchLimits { orders: (next.len() - at) as u32, ..SearchLimits::ALONE })?;
        }
    } else {
        // Orders are ranked, so the first gets a larger share of the work.
        let share = |at: usize| if is_all || at == first { shared } else { 4 };
        (first..count).try_for_each(|at| search.ask(at, SearchLimits { orders: share(at), ..SearchLimits::ALONE }))?;
    }
    // The best order once more, with the full budget.
    if let (true, Some((_, at))) = (count > 1 && options.partitioner != Partitioner::Exhaustive, &search.best) {
        search.ask(*at, SearchLimits::ALONE)?;
    }
    let least_us = search.least_us;
    let Some((answer, mut at)) = search.best.take() else {
        // At least one order was tried, so there is an error.
        return Err(search.refused.unwrap_or(PlanError::Unsound(vec![PlanFault::NoStages])));
    };
    let mut planned = search.planned(answer, at)?;
    for other in search.promising(&planned.plan, at) {
        let known_us = planned.plan.predicted.minibatch_us;
        let among = match problem.schedule.flushes() {
            true => SearchLimits::ALONE,
            false => SearchLimits { known_us, orders: MOST_CLOSELY as u32, ..SearchLimits::ALONE },
        };
        let Ok(answer) = run_along_order(question, &search.asked[other].order, among) else { continue };
        let mut next = search.planned(answer, other)?;
        if next.plan.predicted.minibatch_us < known_us {
            // These baselines are the best over all orders.
            next.plan.baselines = planned.plan.baselines;
            (planned, at) = (next, other);
        }
    }
    let Search { asked, states, .. } = search;
    let order = &asked[at].order;
    let Planned { mut plan, compared } = planned;
    plan.search.states = states;
    for stage in &mut plan.stages {
        stage.devices.iter_mut().for_each(|device| *device = order.device[*device as usize]);
        stage.devices.sort_unstable();
    }
    plan.cluster.classes = problem.cluster.classes.clone();
    plan.cluster.device = problem.cluster.device.clone();
    let us = plan.predicted.by_equations_us();
    let least = asked.iter().map(|asked| asked.bound_us).fold(us, f64::min);
    let bound_us = if is_all { least.max(least_us).min(us) } else { least_us };
    (plan.lower_bound_us, plan.proven_optimal) = finish_plan::certificate(
        question.problem,
        us,
        plan.predicted.minibatch_us,
        bound_us,
        options.efficiency.is_some(),
    );
    if !is_all && !plan.proven_optimal {
        plan.warnings.push(format!(
            "the search is not exhaustive: {looked} orders of the device classes along the pipeline were tried, {count} of them \
             in full; another order may be better"
        ));
    }
    // Devices, and so links, have been renumbered.
    plan.predicted.busiest_link = None;
    let checked = verify::check(problem, &plan).map_err(PlanError::Unsound)?;
    if !simulate_candidate::is_from_simulation(&plan.predicted.bottleneck) {
        plan.predicted.bottleneck = checked.bottleneck;
    }
    plan.predicted.busiest_link = checked.busiest_link;
    Ok(Planned { plan, compared })
}

struct SearchedOrder {
    order: DeviceOrder,
    /// The best time found, and a lower bound for stages along this order.
    us: f64,
    bound_us: f64,
}

struct Search<'a> {
    question: SearchContext<'a>,
    units: &'a Units<'a>,
    asked: Vec<SearchedOrder>,
    least_us: f64,
    /// The best answer, and the index of its order.
    best: Option<(Answer, usize)>,
    refused: Option<PlanError>,
    states: u64,
}

impl Search<'_> {
    /// Adds orders, and returns the index of each.
    fn add(&mut self, orders: &[Sequence]) -> Vec<usize> {
        let place = |sequence: &Sequence| {
            let order = self.units.order(sequence);
            self.asked.iter().position(|asked| asked.order.device == order.device).unwrap_or_else(|| {
                self.asked.push(SearchedOrder { order, us: f64::INFINITY, bound_us: self.least_us });
                self.asked.len() - 1
            })
        };
        orders.iter().map(place).collect()
    }

    fn is_met(&self) -> bool {
        let best = self.best.as_ref().map(|(best, _)| best.chosen.minibatch_us);
        best.is_some_and(|us| us <= self.least_us || same(us, self.least_us))
    }

    /// Searches one order, unless its bound shows that it cannot improve the best answer.
    fn ask(&mut self, at: usize, among: SearchLimits) -> Result<(), PlanError> {
        let known_us = self.best.as_ref().map_or(f64::INFINITY, |(best, _)| best.chosen.minibatch_us);
        let SearchedOrder { order, us, bound_us } = &mut self.asked[at];
        if known_us.is_finite() && (*bound_us >= known_us || same(*bound_us, known_us)) {
            return Ok(());
        }
        match run_along_order(&self.question, order, SearchLimits { known_us, ..among }) {
            Ok(answer) => {
                *us = us.min(answer.chosen.minibatch_us);
                *bound_us = bound_us.max(finish_plan::bound_us(self.question.problem, &answer.chosen, &answer.found));
                self.states += answer.found.states;
                self.best = Some(better(self.best.take(), answer, at));
            }
            Err(refused) => {
                *bound_us = bound_us.max(refused.bound_us);
                match refused.error {
                    // Not an error: nothing faster than the known plan was found.
                    _ if known_us.is_finite() => {}
                    error if infeasible::is_infeasible(&error) => {
                        let error =
                            infeasible::in_cluster_order(error, &order.classes, &self.question.problem.cluster.classes);
                        self.refused = Some(infeasible::smaller_need(self.refused.take(), error));
                    }
                    error => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// The plan of an answer, with its devices numbered along the order.
    fn planned(&self, answer: Answer, at: usize) -> Result<Planned, PlanError> {
        let order = &self.asked[at].order;
        let [full, problem] = [self.question.full, self.question.problem].map(|problem| in_order(problem, order));
        conclude(&SearchContext { full: &full, problem: &problem, ..self.question }, answer)
    }

    /// Other orders that may be faster than the simulated time of this plan, most promising first.
    fn promising(&mut self, plan: &Plan, at: usize) -> Vec<usize> {
        let known_us = plan.predicted.minibatch_us;
        let flushes = self.question.problem.schedule.flushes();
        let options = self.question.options;
        let is_simulated = options.partitioner == Partitioner::Pipec && options.efficiency.is_some();
        if !is_simulated || (!flushes && plan.predicted.by_equations_us() >= ENOUGH * known_us) {
            return Vec::new();
        }
        if flushes {
            // The closed form prefers orders that the simulation does not.
            let starts = self.add(&self.units.starts());
            return starts.into_iter().filter(|other| *other != at).take(MOST_CLOSELY).collect();
        }
        let mut others: Vec<usize> = (0..self.asked.len()).collect();
        others.retain(|&other| other != at && self.asked[other].bound_us < known_us);
        let key = |at: usize| (self.asked[at].us, self.asked[at].bound_us);
        others.sort_by(|&a, &b| key(a).0.total_cmp(&key(b).0).then(key(a).1.total_cmp(&key(b).1)).then(a.cmp(&b)));
        others.truncate(MOST_CLOSELY);
        others
    }
}

struct Chosen {
    orders: Vec<Sequence>,
    /// Number of orders that had a coarse search.
    looked: usize,
    is_all: bool,
}

fn chosen(question: &SearchContext<'_>, units: &Units<'_>, blended: Option<AllOrdersResult>) -> Chosen {
    let options = question.options;
    if is_alike(&question.problem.cluster) {
        return Chosen { orders: units.starts()[..1].to_vec(), looked: 1, is_all: true };
    }
    let (most, searches) = match options.partitioner.row().orders {
        OrderSearch::All => (MOST_EXHAUSTIVE, false),
        OrderSearch::Complete => (MOST_WHOLE, true),
        OrderSearch::Tables => (MOST_TABLES, true),
        OrderSearch::Fixed => (MOST_TABLES, false),
    };
    if let Some(orders) = units.all(most) {
        let all = SearchContext { among: SearchLimits { orders: orders.len() as u32, ..question.among }, ..*question };
        // An error in the problem is reported by the search itself.
        if !searches || pipec_rules::affords_all(&all).unwrap_or(true) {
            return Chosen { looked: orders.len(), orders, is_all: true };
        }
    }
    // The table over all orders already returned the best orders that tables can find.
    let seeds = match blended {
        Some(blended) if blended.is_whole => {
            return Chosen { looked: blended.orders.len(), orders: Vec::new(), is_all: false };
        }
        blended => blended.map_or(Vec::new(), |blended| blended.orders),
    };
    let glances = (GLANCES / pipec_rules::glance_effort(question).unwrap_or(GLANCES).max(1.0)) as usize;
    let glances = glances.clamp(MOST_CLOSELY, MOST_GLANCES);
    // Baselines need no coarse search.
    let partitioner = match options.partitioner {
        plain @ (Partitioner::Single | Partitioner::DataParallel | Partitioner::Uniform) => plain,
        _ => Partitioner::Pipec,
    };
    let options = PlannerOptions { partitioner, budget: options.budget, ..PlannerOptions::default() };
    let question = SearchContext { options: &options, ..*question };
    let mut walk = Walk { question, units, seen: BTreeSet::new(), ranked: Vec::new() };
    match units.all(glances) {
        Some(orders) => orders.into_iter().for_each(|order| walk.look(order)),
        None => walk.climb(seeds, glances),
    }
    let looked = walk.ranked.len();
    let near_us = walk.ranked.first().map_or(f64::INFINITY, |best| best.us * NEAR);
    let near = walk.ranked.into_iter().take(MOST_CLOSELY).filter(|glance| glance.us <= near_us);
    Chosen { orders: near.map(|glance| glance.order).collect(), looked, is_all: false }
}

struct Glance {
    order: Sequence,
    /// Microseconds of the best plan that fits; infinite if none fits.
    us: f64,
    /// Memory need if nothing fits.
    needs: (u8, u64),
    /// First device after each stage.
    borders: Vec<u32>,
}

impl Glance {
    fn beats(&self, other: &Glance) -> bool {
        match (self.us.is_finite(), other.us.is_finite()) {
            (true, true) => self.us < other.us && !same(self.us, other.us),
            (false, false) => self.needs < other.needs,
            (is_fitting, _) => is_fitting,
        }
    }
}

struct Walk<'a> {
    question: SearchContext<'a>,
    units: &'a Units<'a>,
    seen: BTreeSet<Sequence>,
    /// Evaluated orders, best first; the earlier of equals.
    ranked: Vec<Glance>,
}

impl Walk<'_> {
    fn look(&mut self, order: Sequence) {
        if !self.seen.insert(order.clone()) {
            return;
        }
        let among = SearchLimits { depth: Depth::Glance, ..SearchLimits::ALONE };
        let nothing = |needs| Glance { order: order.clone(), us: f64::INFINITY, needs, borders: Vec::new() };
        let glance = match run_along_order(&self.question, &self.units.order(&order), among) {
            Ok(Answer { chosen, .. }) => {
                let ends = chosen.spots.iter().zip(chosen.shape.replicas());
                let borders = ends.map(|(spot, replicas)| spot.first + replicas).collect();
                Glance { us: chosen.minibatch_us, borders, ..nothing((0, 0)) }
            }
            // Errors in the problem are reported by the full search.
            Err(Refused { error, .. }) => nothing(infeasible::needs(&error)),
        };
        let at = self.ranked.iter().position(|other| glance.beats(other)).unwrap_or(self.ranked.len());
        self.ranked.insert(at, glance);
    }

    /// Hill climbing from the start orders, until no neighbour is better or `most` orders were evaluated.
    fn climb(&mut self, seeds: Vec<Sequence>, most: usize) {
        for order in seeds.into_iter().chain(self.units.starts()).take(most) {
            self.look(order);
        }
        while let Some(best) = self.ranked.first().map(|best| best.order.clone()) {
            for way in self.units.moves(&best, &self.ranked[0].borders) {
                self.look(way.of(&best));
                if self.ranked.len() >= most {
                    return;
                }
                if self.ranked[0].order != best {
                    break;
                }
            }
            if self.ranked[0].order == best {
                break;
            }
        }
    }
}

/// Searches a table over all orders, if there is one level and the partitioner allows it.
fn blended(question: &SearchContext<'_>) -> Result<Option<AllOrdersResult>, PlanError> {
    let cluster = &question.problem.cluster;
    let is_ours = matches!(question.options.partitioner, Partitioner::Pipec | Partitioner::Milp);
    if !is_ours || cluster.levels.len() > 1 || is_alike(cluster) {
        return Ok(None);
    }
    let Some(counts) = ClassDp::of(&cluster.classes) else { return Ok(None) };
    Ok(pipec_rules::blended(question, &counts)?)
}

fn in_order(problem: &Problem, order: &DeviceOrder) -> Problem {
    let cluster = Cluster { classes: order.classes.clone(), ..problem.cluster.clone() };
    Problem { cluster, ..problem.clone() }
}

fn run_along_order(question: &SearchContext<'_>, order: &DeviceOrder, among: SearchLimits) -> Result<Answer, Refused> {
    let problem = in_order(question.problem, order);
    answer(&SearchContext { problem: &problem, among, ..*question })
}

/// Keeps the faster answer (the earlier of equals) with the better of both sets of baselines.
fn better(known: Option<(Answer, usize)>, answer: Answer, order: usize) -> (Answer, usize) {
    let Some((known, before)) = known else { return (answer, order) };
    let (us, known_us) = (answer.chosen.minibatch_us, known.chosen.minibatch_us);
    match us < known_us && !same(us, known_us) {
        true => (least_baselines(answer, known.baselines), order),
        false => (least_baselines(known, answer.baselines), before),
    }
}

/// Keeps the better baselines; they may use any devices.
fn least_baselines(mut answer: Answer, others: [PlanCandidate; 3]) -> Answer {
    for (own, other) in answer.baselines.iter_mut().zip(others) {
        if (other.fits && !own.fits) || (other.fits == own.fits && other.minibatch_us < own.minibatch_us) {
            *own = other;
        }
    }
    answer
}
