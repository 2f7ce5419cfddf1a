//! Planning for devices that differ: the planner is asked about orders of the devices, and the best answer is given the devices that it
//! stands for.
//!
//! Small questions are asked about every order. Else each order gets a glance, a search along coarse lines, and the few best a whole
//! search: every order has its glance where they are not too many, and otherwise a walk goes from the best order so far to those
//! near it, as long as one of them is better. The plan says when there were orders that nobody looked at.
//!
//! A bound of one order is a bound of the stages along that order. Where all orders were asked about, the least of their bounds holds
//! for all plans; else all compute on all devices at once, each at its speed.

use crate::cluster::Cluster;
use crate::partition::finish;
use crate::partition::orders::{Order, Sequence, Units, is_alike};
use crate::partition::placement;
use crate::partition::planner::{Answer, Partitioner, PlanError, Planned, PlannerOptions, Refused, answer, conclude};
use crate::partition::search::{Among, Candidate, Question, same};
use crate::plan::check;
use crate::plan::fault::Fault;
use crate::plan::problem::Problem;
use std::collections::BTreeSet;

/// The most orders that are searched whole; and of the search through everything.
const MOST_WHOLE: usize = 120;
const MOST_EXHAUSTIVE: usize = 5040;

/// The most glances; and the steps for all of them, about two seconds.
const MOST_GLANCES: usize = 400;
const GLANCES: f64 = 6e7;

/// How many of the best orders are searched whole after the glances.
const MOST_CLOSELY: usize = 3;

/// Makes a plan for `problem`, on a cluster of several classes; `question` is the same over joined ops.
pub fn plan(problem: &Problem, question: &Question<'_>, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    let units = Units::of(&problem.cluster);
    let Chosen { orders, looked, is_all } = chosen(question, options, &units)?;
    let shared = orders.len() as u32;
    let spread = finish::spread(question.problem);
    let mut best: Option<(Answer, Order)> = None;
    let mut refused: Option<PlanError> = None;
    let mut bound_us = f64::INFINITY;
    let mut states = 0;
    for (at, sequence) in orders.iter().enumerate() {
        let known_us = best.as_ref().map_or(f64::INFINITY, |(known, _)| known.chosen.minibatch_us);
        // What does all the work on all devices at once cannot be beaten.
        if known_us.is_finite() && same(known_us, spread) {
            break;
        }
        let order = units.order(sequence);
        // Where the orders are ranked, the first is worth as much work as all others.
        let orders = if is_all { shared } else { 1 + at as u32 };
        match along(question, options, &order, Among { orders, known_us, is_glance: false }) {
            Ok(answer) => {
                bound_us = bound_us.min(finish::bound_us(question.problem, &answer.chosen, &answer.found));
                states += answer.found.states;
                best = Some(better(best, answer, order));
            }
            Err(Refused { error: error @ PlanError::Infeasible { .. }, bound_us: own_us }) => {
                bound_us = bound_us.min(own_us.max(spread));
                refused = Some(nearer(refused, error));
            }
            Err(Refused { error, .. }) => return Err(error),
        }
    }
    // The best order once more, with all the work for itself.
    if is_all
        && orders.len() > 1
        && let Some((known, order)) = best.take_if(|(known, _)| !same(known.chosen.minibatch_us, bound_us))
    {
        let among = Among { known_us: known.chosen.minibatch_us, ..Among::ALONE };
        let again = along(question, options, &order, among).ok();
        states += again.as_ref().map_or(0, |again| again.found.states);
        best = Some(match again {
            Some(again) => better(Some((known, order.clone())), again, order),
            None => (known, order),
        });
    }
    let Some((mut answer, order)) = best else {
        // There is always an order: what was refused says why.
        return Err(refused.unwrap_or(PlanError::Unsound(vec![Fault::NoStages])));
    };
    answer.found.states = states;
    let (ordered, asked) = (in_order(problem, &order), in_order(question.problem, &order));
    let Planned { mut plan, compared } = conclude(&ordered, &question.about(&asked), options, answer)?;
    for stage in &mut plan.stages {
        stage.devices.iter_mut().for_each(|device| *device = order.device[*device as usize]);
        stage.devices.sort_unstable();
    }
    plan.cluster.classes = problem.cluster.classes.clone();
    plan.cluster.device = problem.cluster.device.clone();
    if !is_all {
        bound_us = spread;
    }
    let us = plan.predicted.minibatch_us;
    plan.proven_optimal = same(us, bound_us);
    plan.lower_bound_us = if plan.proven_optimal { us } else { bound_us.min(us) };
    if !is_all && !plan.proven_optimal {
        let (looked, closely) = (looked.max(orders.len()), orders.len());
        plan.warnings.push(format!(
            "devices differ: of the orders of their classes along the pipeline {looked} were looked at, {closely} of them closely, \
             not all; another may be better"
        ));
    }
    // Units have changed places, and their links with them.
    plan.predicted.busiest_link = None;
    let checked = check::check(problem, &plan).map_err(PlanError::Unsound)?;
    plan.predicted.bottleneck = checked.bottleneck;
    plan.predicted.busiest_link = checked.busiest_link;
    Ok(Planned { plan, compared })
}

/// The orders that get a whole search.
struct Chosen {
    orders: Vec<Sequence>,
    /// How many got a glance.
    looked: usize,
    /// Whether there are no others.
    is_all: bool,
}

fn chosen(question: &Question<'_>, options: &PlannerOptions<'_>, units: &Units<'_>) -> Result<Chosen, PlanError> {
    if is_alike(&question.problem.cluster) {
        return Ok(Chosen {
            orders: units.all(1).unwrap_or_else(|| units.starts()[..1].to_vec()),
            looked: 1,
            is_all: true,
        });
    }
    let is_exhaustive = options.partitioner == Partitioner::Exhaustive;
    let most = if is_exhaustive { MOST_EXHAUSTIVE } else { MOST_WHOLE };
    if let Some(orders) = units.all(most) {
        let among = Among { orders: orders.len() as u32, ..question.among };
        let all = Question { among, ..*question };
        let searches = matches!(options.partitioner, Partitioner::Pipec | Partitioner::Milp | Partitioner::Pipedream);
        if !searches || placement::affords_all(&all)? {
            return Ok(Chosen { looked: orders.len(), orders, is_all: true });
        }
    }
    let glances = (GLANCES / placement::glance_effort(question)?.max(1.0)) as usize;
    let glances = glances.clamp(MOST_CLOSELY, MOST_GLANCES);
    // The plain alternatives are their own glance.
    let partitioner = match options.partitioner {
        plain @ (Partitioner::Single | Partitioner::DataParallel | Partitioner::Uniform) => plain,
        _ => Partitioner::Pipec,
    };
    let options = PlannerOptions { partitioner, ..PlannerOptions::default() };
    let mut walk = Walk { question, options, units, seen: BTreeSet::new(), ranked: Vec::new() };
    match units.all(glances) {
        Some(orders) => orders.into_iter().for_each(|order| walk.look(order)),
        None => walk.climb(glances),
    }
    let looked = walk.ranked.len();
    let orders = walk.ranked.into_iter().take(MOST_CLOSELY).map(|glance| glance.order).collect();
    Ok(Chosen { orders, looked, is_all: false })
}

/// What a glance at an order told.
struct Glance {
    order: Sequence,
    /// Microseconds of the best that fits, infinite where nothing does.
    us: f64,
    /// Bytes that the fullest stage needs where nothing fits.
    bytes: u64,
    /// Where its stages end.
    borders: Vec<u32>,
}

impl Glance {
    fn beats(&self, other: &Glance) -> bool {
        match same(self.us, other.us) {
            true => false,
            false if self.us.is_infinite() && other.us.is_infinite() => self.bytes < other.bytes,
            false => self.us < other.us,
        }
    }
}

/// A walk over orders, with a glance at each.
struct Walk<'a> {
    question: &'a Question<'a>,
    options: PlannerOptions<'a>,
    units: &'a Units<'a>,
    seen: BTreeSet<Sequence>,
    /// What was looked at, the best first, the earlier of equals.
    ranked: Vec<Glance>,
}

impl Walk<'_> {
    fn look(&mut self, order: Sequence) {
        if !self.seen.insert(order.clone()) {
            return;
        }
        let among = Among { is_glance: true, ..Among::ALONE };
        let nothing = |bytes| Glance { order: order.clone(), us: f64::INFINITY, bytes, borders: Vec::new() };
        let glance = match along(self.question, &self.options, &self.units.order(&order), among) {
            Ok(Answer { chosen, .. }) => {
                let ends = chosen.spots.iter().zip(chosen.shape.replicas());
                let borders = ends.map(|(spot, replicas)| spot.first + replicas).collect();
                Glance { us: chosen.minibatch_us, borders, ..nothing(0) }
            }
            Err(Refused { error: PlanError::Infeasible { missing, .. }, .. }) => nothing(missing),
            // What is wrong with the question itself is told by a whole search, which finds more than a glance does.
            Err(_) => nothing(u64::MAX),
        };
        let at = self.ranked.iter().position(|other| glance.beats(other)).unwrap_or(self.ranked.len());
        self.ranked.insert(at, glance);
    }

    /// Looks at the starts, and from the best at those near it, until none is better or as many were looked at as may be.
    fn climb(&mut self, most: usize) {
        for order in self.units.starts().into_iter().take(most) {
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

/// The problem with its devices in this order.
fn in_order(problem: &Problem, order: &Order) -> Problem {
    let cluster = Cluster { classes: order.classes.clone(), ..problem.cluster.clone() };
    Problem { cluster, ..problem.clone() }
}

/// The answer along one order.
fn along(
    question: &Question<'_>,
    options: &PlannerOptions<'_>,
    order: &Order,
    among: Among,
) -> Result<Answer, Refused> {
    let problem = in_order(question.problem, order);
    answer(&Question { among, ..question.about(&problem) }, options)
}

/// The faster of two, the earlier of equals, with the better of their plain alternatives.
fn better(known: Option<(Answer, Order)>, answer: Answer, order: Order) -> (Answer, Order) {
    let Some((known, before)) = known else { return (answer, order) };
    let (us, known_us) = (answer.chosen.minibatch_us, known.chosen.minibatch_us);
    match us < known_us && !same(us, known_us) {
        true => (least_baselines(answer, known.baselines), order),
        false => (least_baselines(known, answer.baselines), before),
    }
}

/// The plain alternatives may stand on any devices too.
fn least_baselines(mut answer: Answer, others: [Candidate; 3]) -> Answer {
    for (own, other) in answer.baselines.iter_mut().zip(others) {
        if (other.fits && !own.fits) || (other.fits == own.fits && other.minibatch_us < own.minibatch_us) {
            *own = other;
        }
    }
    answer
}

/// Of two explained noes the one that needs less.
fn nearer(known: Option<PlanError>, error: PlanError) -> PlanError {
    let needs = |error: &PlanError| match error {
        PlanError::Infeasible { smallest_limit, .. } => *smallest_limit,
        _ => u64::MAX,
    };
    match known {
        Some(known) if needs(&known) <= needs(&error) => known,
        _ => error,
    }
}
