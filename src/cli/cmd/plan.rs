//! `pipec plan show`, `pipec plan check` and `pipec plan diff`.

use crate::cli::args::schedule as schedule_flag;
use crate::cli::instances::{piper, placement};
use crate::cli::screen::Screen;
use crate::cli::{cmd, prediction};
use clap::{Args, Subcommand};
use compiler::plan::check::error::PlanFault;
use compiler::plan::check::labels;
use compiler::plan::check::verify::check as judged;
use compiler::plan::problem::CostModel;
use compiler::plan::schedule::Schedule;
use compiler::plan::{Plan, read};
use compiler::schedule::Program;
use compiler::schedule::check::verify;
use compiler::schedule::generators::schedule;
use compiler::schedule::pipeline::{generated, pipeline};
use compiler::schedule::semantics::StepCount;
use compiler::text::quantity;
use instances::piper::read::MAX_COUNT;
use pipec::costs::cost_source::CostSource;
use pipec::costs::{CostInput, Costs};
use pipec::error::Error;
use pipec::files::input;
use pipec::plan::custom_schedule::CustomSchedule;
use pipec::plan::read::{contradictions, is_cyclic, read_checked, structural_faults};
use pipec::plan::schedule_memory::beyond;
use pipec::plan::{custom_schedule, replan, schedule_memory};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Minibatches in the programs of `plan check`: enough to reach every in-flight limit and to end with a partial round.
const CHECKED_MINIBATCHES: u32 = 50;

/// The same for schedules with a flush, which repeat the first.
const CHECKED_FLUSHES: u32 = 2;

/// Micro-batches of an instance for which `plan check` makes programs, at most: as many as devices.
const CHECKED_MICROBATCHES: u32 = MAX_COUNT as u32;

/// Arguments of `pipec plan`.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print the stage table and the prediction
    #[command(after_help = "Example:\n  pipec plan show model.plan.json")]
    Show {
        /// The plan
        #[arg(value_name = "PLAN")]
        file: PathBuf,
    },
    #[command(after_help = "Example:\n  pipec plan check model.plan.json --model model.onnx")]
    /// Check that the plan and its figures are consistent, and that its programs are correct and cannot deadlock
    Check {
        /// The plan
        #[arg(value_name = "PLAN")]
        file: PathBuf,
        /// The plan's model, published profile or instance; stages, edges, times and memory are recomputed from its costs
        #[arg(long, value_name = "FILE")]
        model: Option<PathBuf>,
        /// The plan's costs: a file of `pipec profile`, or analytic[:KIND] [default: as in the plan]
        #[arg(long, value_name = "FILE|analytic[:KIND]", requires = "model")]
        profile: Option<CostInput>,
        /// Schedule of a plan made for a custom schedule: a table FILE.csv, or programs FILE.json
        #[arg(long, value_name = "FILE", value_parser = schedule_flag::file)]
        schedule: Option<PathBuf>,
    },
    #[command(after_help = "Example:\n  pipec plan diff before.json after.json")]
    /// Compare two plans: ops that moved between stages, times and memory. Exit code 1 if they differ
    Diff {
        /// The first plan
        #[arg(value_name = "PLAN")]
        before: PathBuf,
        /// The second plan
        #[arg(value_name = "OTHER")]
        after: PathBuf,
    },
}

pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    match arguments.action {
        Action::Show { file } => {
            let plan = read_checked(&file)?;
            if let Some(verdict) = prediction::verdict(&plan) {
                screen.prose(&verdict);
            }
            screen.text(&prediction::describe(&plan, screen));
            plan.warnings.iter().for_each(|warning| screen.warn(warning));
            screen.json_file(&read::to_json(&plan).map_err(|error| Error::bug(&error.to_string()))?);
            Ok(())
        }
        Action::Check { file, model, profile, schedule } => {
            let custom_schedule = custom_schedule::open(schedule.as_deref(), screen)?;
            check_file(&file, model.as_deref(), profile.as_ref(), custom_schedule.as_ref(), screen)
        }
        Action::Diff { before, after } => cmd::diff::run(&before, &after, screen),
    }
}

fn check_file(
    path: &Path,
    model: Option<&Path>,
    profile: Option<&CostInput>,
    custom_schedule: Option<&CustomSchedule>,
    screen: &Screen,
) -> Result<(), Error> {
    let plan = input::plan(path)?;
    let mut faults = structural_faults(&plan);
    if let Some(model) = model.filter(|_| faults.is_empty()) {
        faults.extend(check_by_model(&plan, model, profile, screen)?.iter().map(ToString::to_string));
    }
    // Faults found with the model would be reported twice.
    if faults.is_empty() {
        faults.extend(contradictions(&plan));
    }
    let is_pipeline = !is_cyclic(&plan);
    let mut exceeds = false;
    if faults.is_empty() && is_pipeline {
        match build_program(&plan, custom_schedule) {
            Ok(program) if custom_schedule.is_some() => {
                faults.extend(beyond(&plan, &program));
                exceeds = !faults.is_empty();
            }
            Ok(_) => {}
            Err(fault) => faults.push(fault),
        }
    }
    screen.json(&json!({"file": path.display().to_string(), "valid": faults.is_empty(), "faults": faults}));
    if faults.is_empty() {
        let stages = quantity::plural(plan.stages.len() as u64, "stage", "stages");
        let figures = if model.is_some() {
            "stages, edges, times and memory follow from the model"
        } else {
            "its figures are consistent"
        };
        let programs = match is_pipeline {
            true => format!("its {} programs do not deadlock", plan.schedule.kind.name()),
            false => "no program can run it, because its stages are not contiguous".to_string(),
        };
        screen.prose(&format!("{} is valid: {stages}, every op once, {figures}, and {programs}", path.display()));
        return Ok(());
    }
    let failure = Error::negative(format!("{} is not valid", path.display()));
    let failure = faults.iter().take(16).fold(failure, Error::because);
    let lacks_schedule = plan.schedule.kind == Schedule::Csv && custom_schedule.is_none();
    Err(match (lacks_schedule, exceeds) {
        (true, _) => failure.with_help("pass its custom schedule with `--schedule FILE`"),
        (false, true) => failure.with_help(schedule_memory::HELP),
        (false, false) => failure,
    })
}

/// The faults of the plan under the costs of the model or instance.
fn check_by_model(
    plan: &Plan,
    model: &Path,
    profile: Option<&CostInput>,
    screen: &Screen,
) -> Result<Vec<PlanFault>, Error> {
    match plan.cost {
        CostModel::Load => placement::check(plan, model),
        CostModel::Hybrid => piper::check(plan, model),
        CostModel::Pipec | CostModel::Paper | CostModel::Pipedream => {
            let source = CostSource::of_plan(model, profile, plan, screen)?;
            let costs = source.costs(plan, plan.schedule.micro_batch)?;
            let mut faults = origin(plan, &costs);
            let problem = replan::problem(plan, costs)?;
            match judged(&problem, plan) {
                Ok(checked) => faults.extend(labels::faults(&problem, plan, &checked.bottleneck)),
                Err(others) => faults.extend(others),
            }
            Ok(faults)
        }
    }
}

/// Faults in what the plan states about its model.
fn origin(plan: &Plan, costs: &Costs) -> Vec<PlanFault> {
    let stated = [("model.sha256", &plan.model.sha256, &costs.model.sha256), ("dtype", &plan.dtype, &costs.dtype)];
    let differing = stated.into_iter().filter(|(_, said, found)| said != found);
    let fault = |(what, said, found): (&str, &String, &String)| PlanFault::Figure {
        what: what.to_string(),
        said: said.clone(),
        found: found.clone(),
    };
    differing.map(fault).collect()
}

/// The programs of the plan, or of a custom schedule, if they are correct.
fn build_program(plan: &Plan, custom_schedule: Option<&CustomSchedule>) -> Result<Program, String> {
    // Programs of more micro-batches than an instance has in flight repeat themselves, and would take gigabytes.
    let max_microbatches = if plan.cost == CostModel::Hybrid { CHECKED_MICROBATCHES } else { u32::MAX };
    let is_repeated = plan.schedule.kind.flushes() && custom_schedule.is_none();
    let minibatches = if is_repeated { CHECKED_FLUSHES } else { CHECKED_MINIBATCHES };
    let count = StepCount { minibatches, microbatches: plan.schedule.microbatches.min(max_microbatches) };
    let program = pipeline(plan).and_then(|pipeline| match custom_schedule {
        Some(custom_schedule) => custom_schedule.unchecked(&pipeline, CHECKED_MINIBATCHES),
        None => schedule(generated(plan.schedule.kind)?, &pipeline, count),
    });
    let program = program.map_err(|error| error.to_string())?;
    verify::check(&program).map_err(|error| error.to_string())?;
    Ok(program)
}
