//! The level of ZeRO, where the planner may choose it.
//!
//! Without shares first: where memory rules nothing out that is the answer. Else every level is asked for a plan, and of plans that fit
//! the best one is taken, of equals the one of the least level: a higher one never takes less time, and may leave room for stages that do.

use crate::partition::planner::{PlanError, Planned, PlannerOptions, plan};
use crate::partition::search::build_plan;
use crate::plan::check::verify::TOLERANCE;
use crate::plan::device_memory::fullest;
use crate::plan::problem::{Objective, Problem};
use crate::plan::{Plan, zero};
use serde_json::json;

/// Makes a plan of the best level.
pub fn least(problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    let at = |zero: u32| plan(&Problem { zero, ..problem.clone() }, options);
    let mut best = at(0);
    let counts = build_plan::is_limited(problem) || problem.objective == Objective::Memory;
    for level in (1..=zero::MOST).filter(|_| counts) {
        best = match (best, at(level)) {
            (Ok(known), Ok(next)) if is_better(problem, &next.plan, &known.plan) => Ok(next),
            (Ok(known), _) => Ok(known),
            // The highest level says what memory would do.
            (Err(_), next) => next,
        };
    }
    let mut planned = best?;
    planned.plan.options.insert("zero".to_string(), json!("auto"));
    Ok(planned)
}

fn is_better(problem: &Problem, next: &Plan, known: &Plan) -> bool {
    match problem.objective {
        Objective::Memory => fullest(next) < fullest(known),
        _ => next.predicted.minibatch_us < known.predicted.minibatch_us * (1.0 - TOLERANCE),
    }
}
