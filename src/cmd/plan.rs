//! `pipec plan show` and `pipec plan check`.

use crate::failure::Failure;
use crate::own::{self, Own};
use crate::screen::Screen;
use crate::{prediction, source, stages};
use clap::{Args, Subcommand};
use compiler::plan::sound::sound;
use compiler::plan::{Plan, ScheduleKind};
use compiler::schedule::check;
use compiler::schedule::pipeline::{pipeline, schedule_of};
use compiler::schedule::rule::StepCount;
use compiler::schedule::scheduler::schedule;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Minibatches for which `plan check` makes programs: enough for every cap to be reached and rounds to end short.
const CHECKED: u32 = 50;

/// What to do with a plan.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Print the stage table and the prediction
    Show {
        /// The plan
        #[arg(value_name = "PLAN")]
        file: PathBuf,
    },
    /// Check that the plan holds together and that its programs cannot go wrong or wait for ever
    Check {
        /// The plan
        #[arg(value_name = "PLAN")]
        file: PathBuf,
        /// The order of work of a plan that has none of its own: a table FILE.csv, or programs FILE.json
        #[arg(long, value_name = "FILE", value_parser = own::said_file)]
        schedule: Option<String>,
    },
}

/// Shows or checks.
pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Failure> {
    match arguments.what {
        What::Show { file } => {
            let plan = sound_plan(&file)?;
            if let Some(verdict) = prediction::verdict(&plan) {
                screen.text(&verdict);
            }
            screen.text(&format!(
                "{}\n{}\n{}",
                stages::heading(&plan),
                stages::stages(&plan),
                prediction::prediction(&plan)
            ));
            plan.warnings.iter().for_each(|warning| screen.warn(warning));
            screen.json(&serde_json::to_value(&plan).unwrap_or_default());
            Ok(())
        }
        What::Check { file, schedule } => judge(&file, own::read(schedule.as_deref())?.as_ref(), screen),
    }
}

/// A plan that holds together.
pub fn sound_plan(path: &Path) -> Result<Plan, Failure> {
    let plan = source::plan(path)?;
    sound(&plan).map_err(|faults| {
        let failure = Failure::input(format!("{} is no sound plan", path.display()));
        faults.iter().take(16).fold(failure, Failure::because)
    })?;
    Ok(plan)
}

fn judge(path: &Path, own: Option<&Own>, screen: &Screen) -> Result<(), Failure> {
    let plan = source::plan(path)?;
    let mut faults: Vec<String> = sound(&plan).err().unwrap_or_default().iter().map(ToString::to_string).collect();
    if faults.is_empty() {
        faults.extend(program_fault(&plan, own));
    }
    screen.json(&json!({"file": path.display().to_string(), "sound": faults.is_empty(), "faults": faults}));
    if faults.is_empty() {
        let stages = stages::plural(plan.stages.len() as u64, "stage", "stages");
        screen.text(&format!(
            "{} is sound: {stages}, every op once, memory adds up, and its {} programs run to the end",
            path.display(),
            plan.schedule.kind.name()
        ));
        return Ok(());
    }
    let failure = Failure::no(format!("{} is not sound", path.display()));
    let failure = faults.iter().take(16).fold(failure, Failure::because);
    let is_open = plan.schedule.kind == ScheduleKind::Csv && own.is_none();
    Err(if is_open { failure.help("`--schedule FILE` names the file of its order of work") } else { failure })
}

fn program_fault(plan: &Plan, own: Option<&Own>) -> Option<String> {
    let count = StepCount { minibatches: CHECKED, microbatches: plan.schedule.microbatches };
    let made = pipeline(plan).and_then(|pipeline| match own {
        Some(own) => own.unchecked(&pipeline, CHECKED),
        None => schedule(schedule_of(plan.schedule.kind)?, &pipeline, count),
    });
    match made {
        Ok(program) => check::check(&program).err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    }
}
