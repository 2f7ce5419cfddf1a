//! Infeasibility reports: why there is no plan, and which change of the request gives one.

use crate::costs::CostInput;
use crate::error::{Error, ErrorKind};
use crate::events::Silent;
use crate::help;
use crate::plan::request::{PlanRequest, ScheduleChoice};
use crate::plan::request_costs;
use crate::plan::solve::solve;
use crate::plan::zero::ZeroStage;
use compiler::export::quantity;
use compiler::partition::error::Infeasible;
use compiler::partition::error::PlanError;
use compiler::plan::device_memory::fullest;
use compiler::plan::problem::{CostModel, ProblemError};
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::MOST;
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

/// Adds the single changes that make an infeasible request feasible, found by planning with each of them. Large requests get generic
/// advice instead.
pub fn with_remedies(request: &PlanRequest, size: Size, failure: Error) -> Error {
    if failure.kind() != ErrorKind::Infeasible {
        return failure;
    }
    if size.ops > MOST_OPS || size.devices > MOST_DEVICES {
        return failure.with_more_help("use a smaller micro-batch or more devices");
    }
    let options = &request.options;
    let changed = |change: &dyn Fn(&mut PlanRequest)| {
        let mut other = request.clone();
        change(&mut other);
        other
    };
    // For each kind of change, the smallest step that helps.
    let mut ways: Vec<Vec<(String, PlanRequest)>> = Vec::new();
    if matches!(request.costs, CostInput::Analytic(_)) {
        let halves =
            std::iter::successors(Some(size.micro_batch / 2), |half| Some(half / 2)).take_while(|half| *half > 0);
        let way = |half| (format!("`--micro-batch {half}`"), changed(&|other| other.micro_batch = Some(half)));
        ways.push(halves.map(way).collect());
    }
    if let Some(count) = request.cluster.gpus {
        let more = [2, 4].map(|times| count.saturating_mul(times));
        let way = |count| (format!("`--gpus {count}`"), changed(&|other| other.cluster.gpus = Some(count)));
        ways.push(more.into_iter().map(way).collect());
    }
    if options.zero == ZeroStage::Level(0) && !options.is_inference() && options.cost == CostModel::Pipec {
        let way = |level| (format!("`--zero {level}`"), changed(&|other| other.options.zero = ZeroStage::Level(level)));
        ways.push((1..=MOST).map(way).collect());
    }
    if options.schedule.is_none() && options.microbatches == 1 && !options.is_inference() {
        let flushed = changed(&|other| other.options.schedule = Some(ScheduleChoice::Named(Schedule::OneFOneB)));
        ways.push(vec![("`--schedule 1f1b`".to_string(), flushed)]);
    }
    let fits = |(name, other): &(String, PlanRequest)| {
        let costs = request_costs::costs(other, &Silent).ok()?;
        let plan = solve(&other.model, costs, &other.options).ok()?.plan;
        let speed = quantity::samples(plan.predicted.throughput_per_s);
        Some(format!("{name} (peak memory {}, {speed} samples/s)", quantity::bytes(fullest(&plan))))
    };
    let found: Vec<String> = ways.iter().filter_map(|way| way.iter().find_map(fits)).collect();
    let last: Vec<String> = ways.iter().filter_map(|way| Some(way.last()?.0.clone())).collect();
    match (found.is_empty(), last.is_empty()) {
        (false, _) => failure.with_more_help(format!("other changes that fit: {}", found.join(", "))),
        (true, false) => failure.with_more_help(format!("no single one of {} is sufficient", last.join(", "))),
        (true, true) => failure,
    }
}

/// The size of a request.
#[derive(Clone, Copy)]
pub struct Size {
    /// Ops of the model.
    pub ops: usize,
    /// Devices.
    pub devices: u32,
    /// Samples per micro-batch.
    pub micro_batch: u64,
}

/// The largest requests that are planned again with changes.
const MOST_OPS: usize = 400;
const MOST_DEVICES: u32 = 16;

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
