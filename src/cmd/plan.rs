//! `pipec plan show`, `pipec plan check` and `pipec plan diff`.

use crate::asked::{self, Source};
use crate::beyond::{self, beyond};
use crate::failure::Failure;
use crate::loss::Counted;
use crate::own::{self, Own};
use crate::screen::Screen;
use crate::{cmd, device_placement, hybrid, prediction, source, stages};
use clap::{Args, Subcommand};
use compiler::plan::check::consistency::sound;
use compiler::plan::check::error::PlanFault;
use compiler::plan::check::figures::figures;
use compiler::plan::check::verify::check as judged;
use compiler::plan::problem::CostModel;
use compiler::plan::read;
use compiler::plan::{Plan, ScheduleKind};
use compiler::schedule::Program;
use compiler::schedule::check::verify;
use compiler::schedule::pipeline::{pipeline, schedule_of};
use compiler::schedule::scheduler::schedule;
use compiler::schedule::semantics::StepCount;
use compiler::simulate::check_plan::stated;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Minibatches for which `plan check` makes programs: enough for every cap to be reached and rounds to end short.
const CHECKED: u32 = 50;

/// Why a placement of nodes from anywhere is not played.
pub const BOTH_WAYS: &str = "its devices hold nodes from anywhere in the graph, so that tensors go back and forth between them: the published cost adds up what \
     each device computes, sends and receives, and there is no order of stages that a program could follow";

/// What to do with a plan.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Print the stage table and the prediction
    #[command(after_help = "Example:\n  pipec plan show model.plan.json")]
    Show {
        /// The plan
        #[arg(value_name = "PLAN")]
        file: PathBuf,
    },
    #[command(after_help = "Example:\n  pipec plan check model.plan.json --model model.onnx")]
    /// Check that the plan holds together, that its figures follow from each other, and that its programs cannot go wrong or wait for ever
    Check {
        /// The plan
        #[arg(value_name = "PLAN")]
        file: PathBuf,
        /// The plan's model, published profile or instance: stages, edges, times and memory are then worked out again from its costs
        #[arg(long, value_name = "FILE")]
        model: Option<PathBuf>,
        /// The plan's costs: a file of `pipec profile`, or analytic[:KIND] [default: as the plan says]
        #[arg(long, value_name = "FILE|analytic[:KIND]", requires = "model")]
        profile: Option<String>,
        /// The order of work of a plan that has none of its own: a table FILE.csv, or programs FILE.json
        #[arg(long, value_name = "FILE", value_parser = own::said_file)]
        schedule: Option<String>,
    },
    #[command(after_help = "Example:\n  pipec plan diff before.json after.json")]
    /// Tell two plans apart: which ops changed their stage, and what that does to times and memory. Exit code 1 where they differ
    Diff {
        /// The first plan
        #[arg(value_name = "PLAN")]
        before: PathBuf,
        /// The second plan
        #[arg(value_name = "OTHER")]
        after: PathBuf,
    },
}

/// Shows or checks.
pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Failure> {
    match arguments.what {
        What::Show { file } => {
            let plan = sound_plan(&file)?;
            if let Some(verdict) = prediction::verdict(&plan) {
                screen.prose(&verdict);
            }
            screen.text(&prediction::told(&plan, screen));
            plan.warnings.iter().for_each(|warning| screen.warn(warning));
            screen.json_file(&read::to_json(&plan).map_err(|error| Failure::bug(&error.to_string()))?);
            Ok(())
        }
        What::Check { file, model, profile, schedule } => {
            let own = own::open(schedule.as_deref(), screen)?;
            judge(&file, model.as_deref(), profile.as_deref(), own.as_ref(), screen)
        }
        What::Diff { before, after } => cmd::diff::run(&before, &after, screen),
    }
}

/// A plan that holds together.
pub fn sound_plan(path: &Path) -> Result<Plan, Failure> {
    let plan = source::plan(path)?;
    sound(&plan).map_err(|faults| {
        let failure = Failure::input(format!("{} is no sound plan", path.display()));
        let failure = faults.iter().take(16).fold(failure, Failure::because);
        failure.help("`pipec partition` writes sound plans: `--stages`, `--cut-after` and `--pin` say what to change, not the file")
    })?;
    Ok(plan)
}

fn judge(
    path: &Path,
    model: Option<&Path>,
    profile: Option<&str>,
    own: Option<&Own>,
    screen: &Screen,
) -> Result<(), Failure> {
    let plan = source::plan(path)?;
    let told = |faults: &[PlanFault]| faults.iter().map(ToString::to_string).collect::<Vec<_>>();
    let mut faults = told(&sound(&plan).err().unwrap_or_default());
    if faults.is_empty() {
        if let Some(model) = model {
            faults.extend(told(&by_model(&plan, model, profile, screen)?));
        }
        // What the model contradicts would be told again.
        if faults.is_empty() {
            faults.extend(told(&figures(&plan)));
        }
    }
    faults.extend(Counted::read(plan.model.import.loss.as_deref()).err().map(|failure| failure.line()));
    if faults.is_empty() {
        faults.extend(stated(&plan).map(|fault| fault.to_string()));
    }
    let plays = !goes_both_ways(&plan);
    let mut exceeds = false;
    if faults.is_empty() && plays {
        match checked(&plan, own) {
            Ok(program) if own.is_some() => {
                faults.extend(beyond(&plan, &program));
                exceeds = !faults.is_empty();
            }
            Ok(_) => {}
            Err(fault) => faults.push(fault),
        }
    }
    screen.json(&json!({"file": path.display().to_string(), "sound": faults.is_empty(), "faults": faults}));
    if faults.is_empty() {
        let stages = stages::plural(plan.stages.len() as u64, "stage", "stages");
        let figures =
            if model.is_some() { "stages, edges, times and memory follow from the model" } else { "its figures agree" };
        let programs = match plays {
            true => format!("its {} programs run to the end", plan.schedule.kind.name()),
            false => "tensors go back and forth between its devices, so that no program could run it".to_string(),
        };
        screen.prose(&format!("{} is sound: {stages}, every op once, {figures}, and {programs}", path.display()));
        return Ok(());
    }
    let failure = Failure::no(format!("{} is not sound", path.display()));
    let failure = faults.iter().take(16).fold(failure, Failure::because);
    let is_open = plan.schedule.kind == ScheduleKind::Csv && own.is_none();
    Err(match (is_open, exceeds) {
        (true, _) => failure.help("`--schedule FILE` names the file of its order of work"),
        (false, true) => failure.help(beyond::HELP),
        (false, false) => failure,
    })
}

/// What the costs of the model, or of the instance, say against the plan.
fn by_model(plan: &Plan, model: &Path, profile: Option<&str>, screen: &Screen) -> Result<Vec<PlanFault>, Failure> {
    match plan.cost {
        CostModel::Load => device_placement::check(plan, model),
        CostModel::Hybrid => hybrid::check(plan, model),
        CostModel::Pipec | CostModel::Paper | CostModel::Pipedream => {
            let source = Source::of_plan(model, profile, plan, screen)?;
            let costs = source.costs(plan, plan.schedule.micro_batch)?;
            Ok(judged(&asked::problem(plan, costs)?, plan).err().unwrap_or_default())
        }
    }
}

/// Whether tensors go from later devices to earlier ones, as in placements that take nodes from anywhere.
pub fn goes_both_ways(plan: &Plan) -> bool {
    plan.cost == CostModel::Load && plan.edges.iter().any(|edge| edge.from >= edge.to)
}

/// The programs of the plan, or under an order of the user's own, if nothing is wrong with them.
fn checked(plan: &Plan, own: Option<&Own>) -> Result<Program, String> {
    let count = StepCount { minibatches: CHECKED, microbatches: plan.schedule.microbatches };
    let made = pipeline(plan).and_then(|pipeline| match own {
        Some(own) => own.unchecked(&pipeline, CHECKED),
        None => schedule(schedule_of(plan.schedule.kind)?, &pipeline, count),
    });
    let program = made.map_err(|error| error.to_string())?;
    verify::check(&program).map_err(|error| error.to_string())?;
    Ok(program)
}
