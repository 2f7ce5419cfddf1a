//! Why nothing can be planned, and what would do.

use crate::failure::Failure;
use crate::{advice, quantity, stages};
use compiler::partition::lack::TooSmall;
use compiler::partition::planner::PlanError;
use compiler::plan::ScheduleKind;
use compiler::plan::problem::ProblemError;
use std::path::Path;

/// The failure, with the least that would do where something does not fit.
pub fn unplanned(file: &Path, error: PlanError, schedule: ScheduleKind) -> Failure {
    let what = format!("cannot plan {}", file.display());
    match &error {
        PlanError::Problem(ProblemError::NoSpeed { class, .. }) => Failure::input(what).because(&error).help(format!(
            "`speed` in `[[device]]` table {class}, counted from 0, says how fast its devices are against those whose costs are used: 1.0 \
             for these themselves, 0.5 for half as fast"
        )),
        PlanError::Problem(problem) => {
            let failure = Failure::input(what).because(problem);
            advice::problem(problem).into_iter().fold(failure, Failure::help)
        }
        PlanError::Infeasible { limit, stage, stages, replicas, first_op, last_op, missing, smallest_limit } => {
            let (limit, missing) = (quantity::bytes(*limit), quantity::bytes(*missing));
            let replicas = stages::plural(u64::from(*replicas), "replica", "replicas");
            let why = format!(
                "no plan fits in {limit} per device: stage {stage} of {stages} (`{first_op}` to `{last_op}`, {replicas}) lacks {missing}"
            );
            let least = quantity::at_least(*smallest_limit);
            Failure::infeasible(format!("no feasible plan for {}", file.display())).because(why).help(format!(
                "`--memory {least}` is the least that was found to do; {}a smaller micro-batch or more devices need less",
                fewer(schedule)
            ))
        }
        PlanError::TooSmall(small) => too_small(file, small, schedule),
        PlanError::Unsound(_) => Failure::bug(&error.to_string()),
    }
}

/// What to do where devices hold too little themselves.
fn too_small(file: &Path, small: &TooSmall, schedule: ScheduleKind) -> Failure {
    let TooSmall { class, kind, memory, missing, smallest, limit, stage, stages, replicas, first_op, last_op } = small;
    let (memory, missing) = (quantity::bytes(*memory), quantity::bytes(*missing));
    let (replicas, least) =
        (stages::plural(u64::from(*replicas), "replica", "replicas"), quantity::at_least(*smallest));
    let (lacks, place) = match class {
        Some(class) => (
            format!("lacks {missing} on device class {class} (`{kind}`), whose devices hold {memory}"),
            format!("in `[[device]]` table {class}, counted from 0, and in tables like it,"),
        ),
        None => (
            format!(
                "needs {}, and devices of several classes hold less, the smallest {memory}",
                quantity::bytes(*smallest)
            ),
            "in every `[[device]]` table that has less".to_string(),
        ),
    };
    let why = format!("no plan fits: stage {stage} of {stages} (`{first_op}` to `{last_op}`, {replicas}) {lacks}");
    let also = limit.map_or(String::new(), |limit| format!(", with `--memory {}`", quantity::at_least(limit)));
    Failure::infeasible(format!("no feasible plan for {}", file.display())).because(why).help(format!(
        "no `--memory` gives devices more than they have; `memory = \"{least}\"` {place} is the least that was found to do{also}; \
         {}a smaller micro-batch or more devices need less",
        fewer(schedule)
    ))
}

/// What can be asked of schedules that do not say themselves how much is in flight.
fn fewer(schedule: ScheduleKind) -> &'static str {
    if schedule.takes_caps() { "fewer minibatches in flight (`--in-flight`), " } else { "" }
}
