//! `pipec partition`: partitions a model into stages and writes the plan.

use crate::cli::args::loss::LossArguments;
use crate::cli::args::plan::PlanArguments;
use crate::cli::args::{Devices, Dims};
use crate::cli::candidates;
use crate::cli::instances::{piper, placement};
use crate::cli::prediction;
use crate::cli::screen::Screen;
use clap::{Args, ValueEnum};
use compiler::export::quantity;
use compiler::plan::problem::CostModel;
use compiler::plan::read;
use compiler::plan::schedule::Schedule;
use pipec::costs::{CostInput, ModelFormat};
use pipec::error::Error;
use pipec::files::output;
use pipec::files::overwrite::Mark;
use pipec::plan::request::{PlanRequest, ScheduleChoice};
use pipec::plan::result::PlanResult;
use pipec::plan::solve;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A file format
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// An ONNX model
    Onnx,
    /// A model written by torch.export.save
    Pt2,
    /// A PipeDream profile, graph.txt
    Pipedream,
    /// A device-placement instance: JSON of Microsoft's dnn-partitioning
    DnnPartitioning,
    /// An instance of layers with several configurations: JSON of Microsoft's Piper
    Piper,
}

impl From<Format> for ModelFormat {
    fn from(format: Format) -> ModelFormat {
        match format {
            Format::Onnx => ModelFormat::Onnx,
            Format::Pt2 => ModelFormat::Pt2,
            Format::Pipedream => ModelFormat::Pipedream,
            Format::DnnPartitioning => ModelFormat::DnnPartitioning,
            Format::Piper => ModelFormat::Piper,
        }
    }
}

/// Arguments of `pipec partition`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec partition model.onnx --gpus 8\n  pipec partition model.onnx --profile profile.json --cluster cluster.toml -o plan.json\n  pipec partition gpt.onnx --levels 8:450GB/s,2:50GB/s --microbatches 16 --optimizer adamw --compare"
)]
pub struct Arguments {
    /// The model, or a published profile
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Format of FILE [default: from its name, pipedream for .txt, otherwise a model; required for instances]
    #[arg(long, value_enum, value_name = "FORMAT", help_heading = "Model")]
    pub from: Option<Format>,
    /// Costs: a file of `pipec profile`, or analytic[:KIND] for the roofline of a device type [default: analytic]
    #[arg(long, value_name = "FILE|analytic[:KIND]", help_heading = "Model")]
    pub profile: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub devices: Devices,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub dims: Dims,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub loss: LossArguments,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub question: PlanArguments,
    /// Samples per minibatch; the planner also chooses the number of micro-batches
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32), help_heading = "Schedule")]
    pub batch: Option<u64>,
    /// Allow non-contiguous sets of nodes on a device (dnn-partitioning instances)
    #[arg(long, help_heading = "Constraints")]
    pub noncontiguous: bool,
    /// Also place nodes on the CPUs of the file (dnn-partitioning instances)
    #[arg(long, help_heading = "Devices")]
    pub cpus: bool,
    /// Also print the candidates that the plan was chosen from
    #[arg(long, help_heading = "Results")]
    pub compare: bool,
    /// Output file of the plan; - is standard output [default: MODEL.plan.json in the current folder, unless that is another model's]
    #[arg(short, long, value_name = "FILE", help_heading = "Results")]
    pub output: Option<PathBuf>,
}

impl Arguments {
    /// The request; `protected_output` is the file that gets the plan if the user named none.
    fn request(&self, protected_output: Option<PathBuf>) -> Result<PlanRequest, Error> {
        if self.from == Some(Format::Pipedream)
            || self.from.is_none() && self.file.extension().is_some_and(|e| e == "txt")
        {
            let flags = [("--profile", self.profile.is_some()), ("--loss", self.loss.loss.is_some())];
            if let Some((flag, _)) = flags.into_iter().find(|(_, is_given)| *is_given) {
                return Err(Error::input(format!(
                    "`{flag}` cannot be combined with `--from pipedream`: the file has its own costs"
                )));
            }
        }
        Ok(PlanRequest {
            model: self.file.clone(),
            format: self.from.map(ModelFormat::from),
            costs: self.profile.as_deref().map(CostInput::from).unwrap_or_default(),
            cluster: self.devices.request()?,
            import: self.dims.import.clone().into(),
            micro_batch: self.dims.micro_batch,
            loss: self.loss.counted(),
            batch: self.batch,
            options: self.question.options()?,
            protected_output,
        })
    }
}

/// Plans, writes the plan and prints it.
pub fn run(arguments: Box<Arguments>, screen: &Screen) -> Result<(), Error> {
    let started = Instant::now();
    match arguments.from {
        Some(Format::DnnPartitioning) => return placement::run(&arguments, screen),
        Some(Format::Piper) => return piper::run(&arguments, screen),
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
    let result = solve::plan(&request, screen)?;
    let PlanResult { planned, untrainable, tried } = &result;
    screen.detail(&format!("planned in {}", quantity::time(started.elapsed().as_secs_f64() * 1e6)));
    let plan = &planned.plan;
    let json = read::to_json(plan).map_err(|error| Error::bug(&error.to_string()))?;
    if output::is_stdout(&path) {
        screen.document(&json);
        return Ok(());
    }
    // Another run may have written the file in the meantime.
    request.protect_output(&plan.model)?;
    let wrote = if path.is_file() { "replaced" } else { "wrote" };
    output::write(&path, json.as_bytes())?;
    if let Some(verdict) = prediction::verdict(plan) {
        screen.prose(&verdict);
    }
    screen.text(&prediction::describe(plan, screen));
    if arguments.compare {
        screen.text(&candidates::table(planned, screen.width()));
    }
    if !tried.is_empty() {
        screen.text(&candidates::combinations(tried, plan.objective, screen.width()));
    }
    plan.warnings.iter().chain(untrainable).for_each(|warning| screen.warn(warning));
    screen.json_file(&json);
    let custom = request.options.schedule.as_ref().and_then(ScheduleChoice::file);
    let next = match plan.cost {
        // Instances have no simulation.
        CostModel::Load | CostModel::Hybrid => format!("next: pipec plan check {}\n", path.display()),
        _ => next(&arguments.file, &path, custom, plan.schedule.kind, untrainable.is_some()),
    };
    screen.text(&format!("\n{wrote} {}", path.display()));
    screen.next(&next);
    Ok(())
}

/// The next commands. A plan for a custom schedule needs the schedule file again, because the plan does not contain it.
/// An inference pipeline is not trained.
fn next(model: &Path, plan: &Path, custom: Option<&Path>, kind: Schedule, is_refused: bool) -> String {
    let plan = plan.display();
    let schedule = match custom {
        Some(file) => format!(" --schedule {}", file.display()),
        None if is_refused => " --schedule 1f1b".to_string(),
        None => String::new(),
    };
    let mut text = format!("next: pipec simulate {plan}{}\n", if custom.is_some() { &schedule } else { "" });
    let trains = kind.trains();
    if trains && model.extension().is_some_and(|extension| extension == "onnx" || extension == "pt2") {
        text += &format!("      pipec train {} --plan {plan}{schedule} --data train.npz\n", model.display());
    }
    text
}
