//! Planning for devices that differ: the planner is asked about every order of the devices that is worth it, and the best answer is
//! given the devices that it stands for.
//!
//! A bound of one order is a bound of the stages along that order. Where all orders were asked about, and each gave an answer, the least
//! of their bounds holds for all plans; else all compute on all devices at once, each at its speed.

use crate::cluster::Cluster;
use crate::partition::finish;
use crate::partition::orders::{MOST_ORDERS, Order, is_alike, orders};
use crate::partition::planner::{Partitioner, PlanError, Planned, PlannerOptions, plan_in_order};
use crate::partition::played;
use crate::partition::search::{Among, same};
use crate::plan::check;
use crate::plan::fault::Fault;
use crate::plan::problem::Problem;

/// The most orders that the search through everything takes.
const MOST_EXHAUSTIVE: usize = 5040;

/// Makes a plan for a cluster of several classes.
pub fn plan(problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    let most = if options.partitioner == Partitioner::Exhaustive { MOST_EXHAUSTIVE } else { MOST_ORDERS };
    let (mut orders, mut is_all) = orders(&problem.cluster, most);
    if is_alike(&problem.cluster) {
        (orders, is_all) = (orders.into_iter().take(1).collect(), true);
    }
    let mut best: Option<(Planned, Order)> = None;
    let mut refused: Option<PlanError> = None;
    let mut bound_us = f64::INFINITY;
    let mut states = 0;
    let asked = orders.len();
    for order in orders {
        let known_us = best.as_ref().map_or(f64::INFINITY, |(known, _)| known.plan.predicted.by_equations_us());
        // What does all the work on all devices at once cannot be beaten.
        if known_us.is_finite() && same(known_us, finish::spread(problem)) {
            break;
        }
        match along(problem, options, &order, Among { orders: asked as u32, known_us }) {
            Ok(planned) => {
                bound_us = bound_us.min(planned.plan.lower_bound_us);
                states += planned.plan.search.states;
                best = Some(better(best, planned, order));
            }
            Err(error @ PlanError::Infeasible { .. }) => refused = Some(nearer(refused, error)),
            Err(error) => return Err(error),
        }
    }
    // The best order once more, with all the work for itself.
    if asked > 1
        && let Some((known, order)) = best.take_if(|(known, _)| !same(known.plan.predicted.by_equations_us(), bound_us))
    {
        let among = Among { orders: 1, known_us: known.plan.predicted.by_equations_us() };
        let again = along(problem, options, &order, among).ok();
        states += again.as_ref().map_or(0, |again| again.plan.search.states);
        best = Some(match again {
            Some(again) => better(Some((known, order.clone())), again, order),
            None => (known, order),
        });
    }
    let Some((mut planned, order)) = best else {
        // There is always an order: what was refused says why.
        return Err(refused.unwrap_or(PlanError::Unsound(vec![Fault::NoStages])));
    };
    let plan = &mut planned.plan;
    for stage in &mut plan.stages {
        stage.devices.iter_mut().for_each(|device| *device = order.device[*device as usize]);
        stage.devices.sort_unstable();
    }
    plan.cluster.classes = problem.cluster.classes.clone();
    plan.cluster.device = problem.cluster.device.clone();
    plan.search.states = states;
    // One that does not fit in some order may only not have been found there.
    if !is_all || refused.is_some() {
        bound_us = finish::spread(problem);
    }
    let us = plan.predicted.by_equations_us();
    let is_played = plan.predicted.objective_us.is_some();
    plan.proven_optimal = same(us, bound_us) && finish::is_near(plan.predicted.minibatch_us, us);
    plan.lower_bound_us = match plan.proven_optimal {
        _ if is_played && !problem.schedule.is_continuous() => bound_us.min(plan.predicted.minibatch_us),
        true => us,
        false => bound_us.min(us),
    };
    if !is_all && !plan.proven_optimal {
        plan.warnings.push(format!(
            "devices differ: {asked} orders of their classes along the pipeline were looked at, there are more"
        ));
    }
    // Units have changed places, and their links with them.
    plan.predicted.busiest_link = None;
    let checked = check::check(problem, plan).map_err(PlanError::Unsound)?;
    if !played::tells(&plan.predicted.bottleneck) {
        plan.predicted.bottleneck = checked.bottleneck;
    }
    plan.predicted.busiest_link = checked.busiest_link;
    Ok(planned)
}

/// The plan along one order.
fn along(problem: &Problem, options: &PlannerOptions<'_>, order: &Order, among: Among) -> Result<Planned, PlanError> {
    let cluster = Cluster { classes: order.classes.clone(), ..problem.cluster.clone() };
    plan_in_order(&Problem { cluster, ..problem.clone() }, options, among)
}

/// The faster of two, the earlier of equals, with the better of their plain alternatives.
fn better(known: Option<(Planned, Order)>, planned: Planned, order: Order) -> (Planned, Order) {
    let Some((known, before)) = known else { return (planned, order) };
    let (us, known_us) = (planned.plan.predicted.by_equations_us(), known.plan.predicted.by_equations_us());
    match us < known_us && !same(us, known_us) {
        true => (least_baselines(planned, &known), order),
        false => (least_baselines(known, &planned), before),
    }
}

/// The plain alternatives may stand on any devices too.
fn least_baselines(mut planned: Planned, other: &Planned) -> Planned {
    let (own, other) = (&mut planned.plan.baselines, &other.plan.baselines);
    for (us, fits, other_us, other_fits) in [
        (&mut own.single, &mut own.fits.single, other.single, other.fits.single),
        (&mut own.data_parallel, &mut own.fits.data_parallel, other.data_parallel, other.fits.data_parallel),
        (&mut own.uniform, &mut own.fits.uniform, other.uniform, other.fits.uniform),
    ] {
        if (other_fits && !*fits) || (other_fits == *fits && other_us < *us) {
            (*us, *fits) = (other_us, other_fits);
        }
    }
    planned
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
