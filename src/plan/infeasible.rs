//! Infeasibility reports: why there is no plan.

use crate::error::Error;
use crate::help;
use compiler::partition::error::{Infeasible, PlanError};
use compiler::plan::problem::ProblemError;
use compiler::plan::schedule::Schedule;
use compiler::text::quantity;
use std::path::Path;

/// The error of a planner, with the smallest sufficient memory limit if no plan fits.
pub fn describe(file: &Path, error: PlanError, schedule: Schedule) -> Error {
    let what = format!("cannot plan {}", file.display());
    match &error {
        PlanError::Problem(ProblemError::NoSpeed { class, .. }) => Error::input(what).because(&error).with_help(format!(
            "set `speed` in `[[device]]` table {class} (counted from 0): the speed of its devices relative to those whose costs are used, \
             1.0 for the same, 0.5 for half as fast"
        )),
        PlanError::Problem(problem) => {
            let failure = Error::input(what).because(problem);
            help::problem(problem).into_iter().fold(failure, Error::with_help)
        }
        PlanError::Infeasible { limit, stage, stages, replicas, first_op, last_op, missing, smallest_limit } => {
            let (limit, missing) = (quantity::bytes(*limit), quantity::bytes(*missing));
            let replicas = quantity::plural(u64::from(*replicas), "replica", "replicas");
            let why = format!(
                "no plan fits in {limit} per device: stage {stage} of {stages} (`{first_op}` to `{last_op}`, {replicas}) needs {missing} more"
            );
            let least = quantity::at_least(*smallest_limit);
            Error::infeasible(format!("no feasible plan for {}", file.display())).because(why).with_help(format!(
                "`--memory {least}` is the smallest memory limit for which a plan was found"
            ))
        }
        PlanError::DeviceMemory(small) => too_small(file, small, schedule),
        PlanError::Unsound(_) => Error::bug(&error.to_string()),
    }
}

/// The error for devices whose own memory is too small.
fn too_small(file: &Path, small: &Infeasible, schedule: Schedule) -> Error {
    let Infeasible { class, kind, memory, missing, smallest, limit, stage, stages, replicas, first_op, last_op } =
        small;
    let (memory, missing) = (quantity::bytes(*memory), quantity::bytes(*missing));
    let (replicas, least) =
        (quantity::plural(u64::from(*replicas), "replica", "replicas"), quantity::at_least(*smallest));
    let (needs, place) = match class {
        Some(class) => (
            format!("needs {missing} more on device class {class} (`{kind}`), whose devices have {memory}"),
            format!("in `[[device]]` table {class} (counted from 0) and similar tables"),
        ),
        None => (
            format!(
                "needs {}, but devices of several classes have less, the smallest {memory}",
                quantity::bytes(*smallest)
            ),
            "in every `[[device]]` table that has less".to_string(),
        ),
    };
    let why = format!("no plan fits: stage {stage} of {stages} (`{first_op}` to `{last_op}`, {replicas}) {needs}");
    let also = limit.map_or(String::new(), |limit| format!(", with `--memory {}`", quantity::at_least(limit)));
    Error::infeasible(format!("no feasible plan for {}", file.display())).because(why).with_help(format!(
        "`--memory` cannot exceed the memory of a device; `memory = \"{least}\"` {place} is the smallest with a plan found{also}; \
         use {}a smaller micro-batch or more devices",
        fewer(schedule)
    ))
}

/// Advice for schedules with an in-flight limit.
fn fewer(schedule: Schedule) -> &'static str {
    if schedule.takes_caps() { "fewer in-flight minibatches (`--in-flight`), " } else { "" }
}
