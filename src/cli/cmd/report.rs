//! `pipec report`: an HTML page about a plan, and its figures as SVG.

use crate::cli::args::schedule as schedule_flag;
use crate::cli::screen::Screen;
use crate::cli::{path_conflicts, prediction, stage_table, what_if};
use clap::Args;
use compiler::export::report::page::PICTURES;
use compiler::export::report::{Alternative, Measured, ModelInfo, Played, Report, measured, moves, page, play};
use compiler::graph::hash::sha256;
use compiler::plan::Plan;
use compiler::plan::problem::CostModel;
use compiler::plan::schedule::Schedule;
use compiler::schedule::pipeline::pipeline;
use compiler::text::quantity;
use pipec::costs::CostInput;
use pipec::costs::cost_source::CostSource;
use pipec::error::Error;
use pipec::files::overwrite::Mark;
use pipec::files::{input, output};
use pipec::plan::read::{NOT_A_PIPELINE, is_cyclic, read_checked};
use pipec::plan::schedule_memory::beyond;
use pipec::plan::{custom_schedule, replan, schedule_memory};
use serde_json::json;
use std::path::{Path, PathBuf};

/// Maximum size of a metrics file in bytes.
const MOST_METRICS_BYTES: u64 = 256 << 20;

/// Why the plan of an instance is neither simulated nor evaluated.
const INSTANCE_REASON: &str = "it is for a published instance, which has nodes with times but is not a runnable model";

/// The most stages listed when a schedule needs more memory than the plan estimates.
const MOST_LISTED: usize = 16;

/// Arguments of `pipec report`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec report model.plan.json --model model.onnx --html plan.html\n  pipec report model.plan.json --svg pictures"
)]
pub struct Arguments {
    /// The plan
    #[arg(value_name = "PLAN")]
    file: PathBuf,
    /// The plan's model or published profile: adds costs per op, the effect of moving each cut, and what-if plans
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// The plan's costs: a file of `pipec profile`, or analytic[:KIND] [default: as in the plan]
    #[arg(long, value_name = "FILE|analytic[:KIND]", requires = "model")]
    profile: Option<CostInput>,
    /// Metrics of a training run with this plan, shown next to the prediction
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
    /// Custom schedule, required if the plan was made for one: a table FILE.csv, or programs FILE.json
    #[arg(long, value_name = "FILE", value_parser = schedule_flag::file)]
    schedule: Option<PathBuf>,
    /// Skip the what-if plans for other numbers of devices
    #[arg(long)]
    no_what_if: bool,
    /// Output file of the page [default: PLAN.html in the current folder]
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the figures as SVG into this folder, created if missing
    #[arg(long, value_name = "FOLDER")]
    svg: Option<PathBuf>,
}

/// Builds the report, writes it and prints the paths.
pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    let plan = read_checked(&arguments.file)?;
    if let Some(path) = page_path(&arguments) {
        path_conflicts::check_output(&[&arguments.file], &path)?;
        output::check(&path, &Mark::Page)?;
    }
    arguments.svg.iter().try_for_each(|folder| output::pictures(folder, PICTURES))?;
    if is_instance(&plan) && (arguments.model.is_some() || arguments.schedule.is_some()) {
        let flag = if arguments.model.is_some() { "--model" } else { "--schedule" };
        let message = format!("`{flag}` cannot be combined with the plan of an instance");
        return Err(Error::input(message).because(format!("{}: {INSTANCE_REASON}", arguments.file.display())));
    }
    let open = |path: &PathBuf| CostSource::of_plan(path, arguments.profile.as_ref(), &plan, screen);
    let source = arguments.model.as_ref().map(open).transpose()?;
    let modelled = match &source {
        Some(source) => Ok(evaluate_moves(source, &plan)?),
        None if is_instance(&plan) => Err(format!("Moves of the plan's cuts are not evaluated: {INSTANCE_REASON}.")),
        None => {
            Err("A plan has no costs per op: `pipec report PLAN --model FILE` shows them, and the effect of moving \
                     each cut."
                .to_string())
        }
    };
    let what_if = match &source {
        Some(source) if !arguments.no_what_if => what_if::cells(source, &arguments.file, &plan, screen),
        _ => Vec::new(),
    };
    let simulation = simulate(&plan, arguments.schedule.as_deref(), screen)?;
    let report = Report {
        heading: stage_table::heading(&plan).lines().map(str::to_string).collect(),
        verdict: prediction::verdict(&plan),
        bound: prediction::bound_sentence(&plan),
        bound_us: prediction::bound_us(&plan),
        alternatives: alternatives(&plan),
        played: simulation,
        modelled,
        what_if,
        measured: arguments.metrics.as_deref().map(|path| read_metrics(path, &plan)).transpose()?,
        plan_sha256: sha256(input::text(&arguments.file, input::MOST_PLAN_BYTES)?.as_bytes()),
        plan: &plan,
    };
    write(&arguments, &report, screen)
}

/// The simulated programs, or why they cannot be simulated. A custom schedule that does not match the plan is an error.
fn simulate(plan: &Plan, path: Option<&Path>, screen: &Screen) -> Result<Result<Played, String>, Error> {
    let Some(custom_schedule) = custom_schedule::open(path, screen)? else {
        return Ok(match plan.schedule.kind {
            _ if is_cyclic(plan) => Err(NOT_A_PIPELINE.to_string()),
            _ if is_instance(plan) => Err(INSTANCE_REASON.to_string()),
            Schedule::Csv => Err("the plan is for a custom schedule; pass it with `--schedule FILE`".to_string()),
            _ => play::play(plan).map_err(|error| error.to_string()),
        });
    };
    let fail = |error: &dyn std::fmt::Display| Error::input("cannot simulate the schedule").because(error);
    let pipeline = pipeline(plan).map_err(|error| fail(&error))?;
    let program = custom_schedule.program(&pipeline, custom_schedule.minibatches().unwrap_or(2))?;
    let excesses = beyond(plan, &program);
    excesses
        .iter()
        .take(MOST_LISTED)
        .for_each(|excess| screen.warn(&format!("the schedule does not match the plan: {excess}")));
    if !excesses.is_empty() {
        screen.note(schedule_memory::HELP);
    }
    play::play_program(plan, &pipeline, program).map(Ok).map_err(|error| fail(&error))
}

/// True for a plan of a published instance, which has nodes and costs but is not a model.
fn is_instance(plan: &Plan) -> bool {
    matches!(plan.cost, CostModel::Hybrid | CostModel::Load)
}

fn evaluate_moves(source: &CostSource, plan: &Plan) -> Result<ModelInfo, Error> {
    let costs = source.costs(plan, plan.schedule.micro_batch)?;
    Ok(moves::modelled(replan::problem(plan, costs)?, plan))
}

fn alternatives(plan: &Plan) -> Vec<Alternative> {
    let this_plan = Alternative { name: "this plan".to_string(), us: plan.predicted.step_us, fits: true };
    std::iter::once(this_plan).chain(prediction::alternatives(plan)).collect()
}

fn read_metrics(path: &Path, plan: &Plan) -> Result<Measured, Error> {
    let text = input::text(path, MOST_METRICS_BYTES)?;
    let measured = measured::read(&text).map_err(|error| {
        Error::file("read the metrics", path, error).with_help("`pipec train --metrics FILE` writes a metrics file")
    })?;
    measured::check_plan(plan, &measured).map_err(|error| {
        Error::file("use the metrics", path, error)
            .with_help("`pipec train --plan PLAN --metrics FILE` writes the metrics of this plan")
    })?;
    Ok(measured)
}

/// The path of the page, if one is requested.
fn page_path(arguments: &Arguments) -> Option<PathBuf> {
    let stem = arguments.file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let default_path = || PathBuf::from(format!("{stem}.html"));
    (arguments.html.is_some() || arguments.svg.is_none()).then(|| arguments.html.clone().unwrap_or_else(default_path))
}

fn write(arguments: &Arguments, report: &Report<'_>, screen: &Screen) -> Result<(), Error> {
    let mut outputs: Vec<(PathBuf, u64)> = Vec::new();
    let mut write_output = |path: PathBuf, bytes: &[u8]| -> Result<(), Error> {
        output::write(&path, bytes)?;
        outputs.push((path, bytes.len() as u64));
        Ok(())
    };
    if let Some(path) = page_path(arguments) {
        write_output(path, page::html(report).as_bytes())?;
    }
    if let Some(folder) = &arguments.svg {
        for (name, picture) in page::pictures(report) {
            write_output(folder.join(name), picture.file().as_bytes())?;
        }
    }
    if let Ok(ModelInfo { faults, .. }) = &report.modelled
        && !faults.is_empty()
    {
        screen.warn(&format!("the plan's figures do not match these costs: {}", faults.join("; ")));
    }
    for (path, size) in &outputs {
        screen.text(&format!("wrote {} ({})", path.display(), quantity::bytes(*size)));
    }
    let simulated = report.played.as_ref().ok().map(|simulation: &Played| {
        json!({"minibatches": simulation.minibatches, "makespan_us": simulation.timeline.makespan, "bubble": simulation.timeline.bubble()})
    });
    let files: Vec<_> =
        outputs.iter().map(|(path, size)| json!({"file": path.display().to_string(), "bytes": size})).collect();
    screen.json(&json!({"files": files, "simulated": simulated}));
    Ok(())
}
