//! Whether a plan's own program takes what the plan says: its stages and edges are played once more.
//!
//! Where a plan's `minibatch_us` is not the figure of the cost model's equations, `objective_us`, it is what the program takes. Under a
//! flush that is so to the last digit; without one the caps may have been chosen by a longer play.

use crate::plan::Plan;
use crate::plan::check::error::PlanFault;
use crate::plan::problem::CostModel;
use crate::schedule::pipeline::{pipeline, schedule_of};
use crate::simulate::step_time;

/// How far apart what was played under two lists of caps may be, when both are good enough.
const SETTLED: f64 = 0.02;

/// How far apart the same play may be by rounding.
const ROUNDED: f64 = 1e-9;

/// The fault of a plan whose program takes something else than the plan says; none where nothing was played, or it is too long.
pub fn stated(plan: &Plan) -> Option<PlanFault> {
    plan.predicted.objective_us?;
    if plan.cost != CostModel::Pipec {
        return None;
    }
    let (kind, pipeline) = (schedule_of(plan.schedule.kind).ok()?, pipeline(plan).ok()?);
    let us = step_time::step_us(kind, &pipeline, plan.schedule.microbatches).ok()??;
    let said = plan.predicted.minibatch_us;
    let apart = if kind.flushes() { ROUNDED } else { SETTLED };
    let is_within = said >= us * (1.0 - apart) && said <= us * (1.0 + apart);
    (!is_within).then(|| PlanFault::Figure {
        what: "predicted.minibatch_us".into(),
        said: said.to_string(),
        found: format!("{us} when its program is played"),
    })
}
