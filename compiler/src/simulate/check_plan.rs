//! Checks a plan's stated minibatch time by simulating its program.
//!
//! If `objective_us` is present, `minibatch_us` is the simulated time. With a flush it must match exactly; without one
//! the planner may have chosen the caps with a longer simulation.

use crate::plan::Plan;
use crate::plan::check::error::PlanFault;
use crate::plan::problem::CostModel;
use crate::schedule::pipeline::{generated, pipeline};
use crate::simulate::step_time;

/// Tolerance without a flush.
const SETTLED: f64 = 0.02;

/// Tolerance with a flush: rounding.
const ROUNDED: f64 = 1e-9;

/// The fault if the simulated time differs; `None` if the plan states no simulated time or the run is too long.
pub fn stated(plan: &Plan) -> Option<PlanFault> {
    plan.predicted.objective_us?;
    if plan.cost != CostModel::Pipec {
        return None;
    }
    let (kind, pipeline) = (generated(plan.schedule.kind).ok()?, pipeline(plan).ok()?);
    let us = step_time::step_us(kind, &pipeline, plan.schedule.microbatches).ok()??;
    let said = plan.predicted.minibatch_us;
    let apart = if kind.flushes() { ROUNDED } else { SETTLED };
    let is_within = said >= us * (1.0 - apart) && said <= us * (1.0 + apart);
    (!is_within).then(|| PlanFault::Figure {
        what: "predicted.minibatch_us".into(),
        said: said.to_string(),
        found: format!("{us} by simulation of its program"),
    })
}
