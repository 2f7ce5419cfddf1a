//! Chooses the ZeRO stage for `--zero auto`.
//!
//! ZeRO 0 is tried first and kept if memory rules nothing out. Otherwise all kinds are planned and the best plan
//! wins; ties go to the lowest stage. A higher stage may free memory for a faster partition. By itself it is no faster under
//! the cost model, which counts the whole optimizer step at every stage, although from ZeRO 1 a replica steps only its shard.

use crate::partition::error::PlanError;
use crate::partition::options::PlannerOptions;
use crate::partition::planned::Planned;
use crate::partition::planner::plan;
use crate::partition::search::build_plan;
use crate::plan::Plan;
use crate::plan::check::verify::TOLERANCE;
use crate::plan::device_memory::fullest;
use crate::plan::problem::{Objective, Problem};
use crate::plan::zero::Zero;
use serde_json::json;

pub fn least(problem: &Problem, kinds: &[Zero], options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    let at = |zero: Zero| plan(&Problem { zero, ..problem.clone() }, options);
    let mut best = at(Zero::default());
    let counts = build_plan::is_limited(problem) || problem.objective == Objective::Memory;
    for zero in kinds.iter().skip(1).filter(|_| counts) {
        best = match (best, at(*zero)) {
            (Ok(known), Ok(next)) if is_better(problem, &next.plan, &known.plan) => Ok(next),
            (Ok(known), _) => Ok(known),
            // The highest ZeRO stage needs the least memory, so its report is returned.
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
