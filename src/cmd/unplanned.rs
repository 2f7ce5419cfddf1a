//! Why nothing can be planned, and what would do.

use crate::cmd::partition::{Arguments, ask};
use crate::failure::{Failure, INFEASIBLE};
use crate::screen::Screen;
use crate::zero::Zero;
use crate::{advice, quantity, source, stages};
use compiler::partition::explain::infeasible::Infeasible;
use compiler::partition::planner::PlanError;
use compiler::plan::ScheduleKind;
use compiler::plan::device_memory::fullest;
use compiler::plan::problem::ProblemError;
use compiler::plan::zero::MOST;
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
                "`--memory {least}` is the least that was found to do"
            ))
        }
        PlanError::TooSmall(small) => too_small(file, small, schedule),
        PlanError::Unsound(_) => Failure::bug(&error.to_string()),
    }
}

/// The failure with the ways out that are known to help: each change by itself is planned for, and those that fit are told with what they bring.
/// For large models that would take long, and ways are told untried.
pub fn tried(arguments: &Arguments, size: Size, failure: Failure) -> Failure {
    if failure.code != INFEASIBLE {
        return failure;
    }
    if size.ops > MOST_OPS || size.devices > MOST_DEVICES {
        return failure.and("a smaller micro-batch or more devices need less");
    }
    let question = &arguments.question;
    let changed = |change: &dyn Fn(&mut Arguments)| {
        let mut other = arguments.clone();
        change(&mut other);
        other
    };
    // Of each way the smallest step that helps.
    let mut ways: Vec<Vec<(String, Arguments)>> = Vec::new();
    if source::is_analytic(arguments.profile.as_deref()) {
        let halves =
            std::iter::successors(Some(size.micro_batch / 2), |half| Some(half / 2)).take_while(|half| *half > 0);
        let way = |half| (format!("`--micro-batch {half}`"), changed(&|other| other.dims.micro_batch = Some(half)));
        ways.push(halves.map(way).collect());
    }
    if let Some(count) = arguments.devices.gpus {
        let more = [2, 4].map(|times| count.saturating_mul(times));
        let way = |count| (format!("`--gpus {count}`"), changed(&|other| other.devices.gpus = Some(count)));
        ways.push(more.into_iter().map(way).collect());
    }
    if question.zero == Zero::Level(0) && !question.infers() && question.cost == "pipec" {
        let way = |level| (format!("`--zero {level}`"), changed(&|other| other.question.zero = Zero::Level(level)));
        ways.push((1..=MOST).map(way).collect());
    }
    if question.schedule.is_none() && question.microbatches == 1 && !question.infers() {
        let flushed = changed(&|other| other.question.schedule = Some(ScheduleKind::OneFOneB.name().to_string()));
        ways.push(vec![("`--schedule 1f1b`".to_string(), flushed)]);
    }
    let fits = |(name, other): &(String, Arguments)| {
        let costs = source::costs(other, &Screen::silent()).ok()?;
        let plan = ask(&other.file, costs, &other.question).ok()?.plan;
        let speed = quantity::samples(plan.predicted.throughput_per_s);
        Some(format!("{name} ({} on the fullest device, {speed} samples/s)", quantity::bytes(fullest(&plan))))
    };
    let found: Vec<String> = ways.iter().filter_map(|way| way.iter().find_map(fits)).collect();
    let last: Vec<String> = ways.iter().filter_map(|way| Some(way.last()?.0.clone())).collect();
    match (found.is_empty(), last.is_empty()) {
        (false, _) => failure.and(format!("what fits without that: {}", found.join(", "))),
        (true, false) => failure.and(format!("none of {} alone is enough", last.join(", "))),
        (true, true) => failure,
    }
}

/// How large a question is.
#[derive(Clone, Copy)]
pub struct Size {
    /// Ops of the model.
    pub ops: usize,
    /// Devices.
    pub devices: u32,
    /// Samples in a micro-batch.
    pub micro_batch: u64,
}

/// The largest questions that are asked again in other ways.
const MOST_OPS: usize = 400;
const MOST_DEVICES: u32 = 16;

/// What to do where devices hold too little themselves.
fn too_small(file: &Path, small: &Infeasible, schedule: ScheduleKind) -> Failure {
    let Infeasible { class, kind, memory, missing, smallest, limit, stage, stages, replicas, first_op, last_op } =
        small;
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
