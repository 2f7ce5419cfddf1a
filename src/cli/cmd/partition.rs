//! `pipec partition`: partitions a model into stages and writes the plan.

use crate::cli::args::partition::Arguments;
use crate::cli::instances::{piper, placement};
use crate::cli::screen::Screen;
use crate::cli::shell::word;
use crate::cli::{candidates, prediction};
use compiler::plan::Plan;
use compiler::plan::digest::to_json_with_digest;
use compiler::plan::problem::{CostModel, Target};
use compiler::text::quantity;
use pipec::costs::ModelFormat;
use pipec::error::Error;
use pipec::files::output;
use pipec::files::overwrite::Mark;
use pipec::plan::interruptible;
use pipec::plan::optimizer::Optimizer;
use pipec::plan::request::ScheduleChoice;
use pipec::plan::result::PlanResult;
use std::path::Path;
use std::time::Instant;

/// Plans, writes the plan and prints it.
pub fn run(arguments: Box<Arguments>, screen: &Screen) -> Result<(), Error> {
    let started = Instant::now();
    match arguments.from {
        Some(ModelFormat::DnnPartitioning) => return placement::run(&arguments, screen),
        Some(ModelFormat::Piper) => return piper::run(&arguments, screen),
        _ => {}
    }
    if arguments.noncontiguous {
        return Err(Error::input("`--noncontiguous` requires `--from dnn-partitioning`")
            .because("the stages of a training pipeline are contiguous"));
    }
    if arguments.cpus {
        return Err(Error::input("`--cpus` requires `--from dnn-partitioning`")
            .because("the CPUs are those that the instance lists"));
    }
    let path = arguments.output.clone().unwrap_or_else(|| output::default_output(&arguments.file, "plan"));
    if !output::is_stdout(&path) {
        output::check(&path, &Mark::plan())?;
    }
    let request = arguments.request(arguments.output.is_none().then(|| path.clone()))?;
    let result = screen.interruptible(|| interruptible::plan(&request, screen))?;
    let PlanResult { planned, untrainable, tried, alternative, too_large } = &result;
    screen.detail(&format!("planned in {}", quantity::time(started.elapsed().as_secs_f64() * 1e6)));
    let plan = &planned.plan;
    let json = to_json_with_digest(plan).map_err(|error| Error::bug(&error.to_string()))?;
    if output::is_stdout(&path) {
        screen.document(&json);
        return Ok(());
    }
    // Another run may have written the file in the meantime.
    request.protect_output(&plan.model)?;
    let verb = output::verb(&path);
    output::write(&path, json.as_bytes())?;
    if let Some(verdict) = prediction::verdict(plan) {
        screen.prose(&verdict);
    }
    screen.text(&prediction::describe(plan, screen));
    if arguments.compare && tried.is_empty() {
        screen.text(&candidates::table(planned, screen.width()));
    }
    if let Some(alternative) = alternative {
        screen.text(&prediction::asynchronous_text(alternative, plan.predicted.step_us));
    }
    if arguments.compare && !tried.is_empty() {
        screen.text(&candidates::combinations(tried, screen.width()));
        too_large.iter().for_each(|kind| screen.prose(&format!("{kind}\n")));
    }
    plan.warnings.iter().chain(untrainable).for_each(|warning| screen.warn(warning));
    screen.json_file(&json);
    let schedule_file = request.options.schedule.as_ref().and_then(ScheduleChoice::file);
    let next_steps = match plan.cost {
        // Instances have no simulation.
        CostModel::Load | CostModel::Hybrid => format!("next: pipec plan check {}\n", word(&path)),
        _ => match request.options.target {
            Some(target) => export_commands(&arguments.file, &path, schedule_file, target),
            None => next_commands(&arguments, &path, schedule_file, plan, untrainable.is_some()),
        },
    };
    screen.text(&format!("\n{verb} {}", path.display()));
    screen.next(&next_steps);
    Ok(())
}

/// The next command of a plan for a framework.
fn export_commands(model: &Path, plan: &Path, schedule_file: Option<&Path>, target: Target) -> String {
    let schedule = schedule_file.map_or(String::new(), |file| format!(" --schedule {}", word(file)));
    let (plan, name) = (word(plan), target.name());
    let model = if target == Target::Torch { format!(" --model {}", word(model)) } else { String::new() };
    format!("next: pipec simulate {plan}{schedule}\n      pipec export {plan} --to {name}{model}{schedule}\n")
}

/// The next commands. A plan for a custom schedule needs the schedule file again, because the plan does not contain it.
/// An inference pipeline is not trained.
fn next_commands(
    arguments: &Arguments,
    path: &Path,
    schedule_file: Option<&Path>,
    plan: &Plan,
    is_untrainable: bool,
) -> String {
    let (model, path) = (&arguments.file, word(path));
    let schedule = match schedule_file {
        Some(file) => format!(" --schedule {}", word(file)),
        None if is_untrainable => " --schedule 1f1b".to_string(),
        None => String::new(),
    };
    let mut text = format!("next: pipec simulate {path}{}\n", if schedule_file.is_some() { &schedule } else { "" });
    if plan.schedule.kind.trains()
        && model.extension().is_some_and(|extension| extension == "onnx" || extension == "pt2")
    {
        let optimizer = match plan.optimizer.as_str() {
            "" | "sgd" => String::new(),
            name => format!(" --optimizer {name}"),
        };
        let default_momentum = Optimizer::from_name(&plan.optimizer).map_or(0.0, Optimizer::default_momentum);
        let momentum = arguments.plan_options.momentum.filter(|it| *it != default_momentum);
        let momentum = momentum.map_or(String::new(), |it| format!(" --momentum {it}"));
        text += &format!(
            "      pipec train {} --plan {path}{schedule}{optimizer}{momentum} --data train.npz\n",
            word(model)
        );
    }
    text
}
