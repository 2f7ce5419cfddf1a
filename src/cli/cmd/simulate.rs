//! `pipec simulate`: runs a plan's programs against the plan's own costs.

use crate::cli::args::schedule as schedule_flag;
use crate::cli::prediction;
use crate::cli::screen::Screen;
use crate::cli::stage_table;
use clap::Args;
use compiler::export::quantity;
use compiler::export::trace::Trace;
use compiler::export::trace::encode::encode;
use compiler::plan::StageMemory;
use compiler::plan::problem::CostModel;
use compiler::plan::schedule::Schedule;
use compiler::schedule::Program;
use compiler::schedule::formats::chart::chart;
use compiler::schedule::formats::csv::{ComputeTable, csv};
use compiler::schedule::formats::json::to_json;
use compiler::schedule::pipeline::{generated, pipeline};
use compiler::schedule::scheduler::schedule;
use compiler::schedule::semantics::StepCount;
use compiler::simulate::{run, steady_throughput};
use pipec::error::Error;
use pipec::files::input;
use pipec::files::output;
use pipec::files::overwrite::Mark;
use pipec::plan::custom_schedule;
use pipec::plan::custom_schedule::CustomSchedule;
use pipec::plan::read::{NOT_A_PIPELINE, is_cyclic, read_checked};
use pipec::plan::request::ScheduleChoice;
use serde_json::json;
use std::path::PathBuf;

/// The longest chart, in minibatches: one does not read further, and a terminal does not show more.
const CHARTED: u32 = 24;

/// Minibatches that are run where nobody says how many.
const USUAL: u32 = 100;

/// The same where rounds of many replicas are long.
const MOST_USUAL: u64 = 10_000;

/// Which plan, how far.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec simulate model.plan.json --chart --minibatches 8\n  pipec simulate model.plan.json --schedule gpipe --trace run.pftrace"
)]
pub struct Arguments {
    /// The plan
    #[arg(value_name = "PLAN")]
    file: PathBuf,
    /// Minibatches to run [default: 100, more where many replicas take turns or much is in flight, or as many as the programs of --schedule are for]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    minibatches: Option<u32>,
    /// Another order of work than the plan's, or that of a plan made with a file: a schedule, a table FILE.csv as torch writes them, or programs FILE.json
    #[arg(long, value_name = "NAME|FILE", value_parser = schedule_flag::name_or_file)]
    schedule: Option<ScheduleChoice>,
    /// Write what each worker does: .json with every operand, .csv the computation only in the form of torch, or else text
    #[arg(long, value_name = "FILE")]
    programs: Option<PathBuf>,
    /// Write a trace that Perfetto opens: in its own form as .pftrace or .perfetto-trace, else as JSON, which chrome://tracing opens too
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Let every computation and transfer take up to this share more or less, for example 0.1
    #[arg(long, value_name = "SHARE", value_parser = jitter)]
    jitter: Option<f64>,
    /// What --jitter follows from
    #[arg(long, value_name = "N", default_value_t = 0, requires = "jitter")]
    seed: u64,
    /// Draw who computes what when; every forward and backward takes one column
    #[arg(long)]
    chart: bool,
}

/// Simulates and prints.
pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    arguments.programs.iter().try_for_each(|path| output::check(path, &Mark::Program))?;
    arguments.trace.iter().try_for_each(|path| output::check(path, &Mark::trace(path)))?;
    let plan = read_checked(&arguments.file)?;
    let what = format!("cannot simulate {}", arguments.file.display());
    if plan.cost == CostModel::Hybrid {
        let why = "its times are those of an instance, in a unit of its own, with forward and backward in one";
        return Err(Error::input(what).because(why));
    }
    if is_cyclic(&plan) {
        return Err(Error::input(what).because(NOT_A_PIPELINE).with_help(
            "`pipec plan check` weighs its devices; without `--noncontiguous` an instance is planned as a pipeline, which plays",
        ));
    }
    let fail = |error: &dyn std::fmt::Display| Error::input(&what).because(error);
    let own = custom_schedule::open(arguments.schedule.as_ref().and_then(ScheduleChoice::file), screen)?;
    let kind = own
        .as_ref()
        .map(CustomSchedule::kind)
        .or(arguments.schedule.as_ref().and_then(ScheduleChoice::named))
        .unwrap_or(plan.schedule.kind);
    let asked = arguments.minibatches;
    let pipeline = pipeline(&plan).map_err(|error| fail(&error))?;
    let microbatches = own.as_ref().map_or(plan.schedule.microbatches, CustomSchedule::microbatches);
    let in_flight = steady_throughput::in_flight(&pipeline);
    // Some rounds of all replicas, so that what they do together is seen, and enough to fill what is in flight.
    let usual = if microbatches == 1 {
        let even = pipeline.rounds().saturating_mul(4).max(8 * in_flight);
        even.clamp(USUAL.into(), MOST_USUAL) as u32
    } else {
        USUAL
    };
    let minibatches = own.as_ref().map_or(Ok(asked), |own| own.count("--minibatches", asked))?.unwrap_or(usual);
    let program_of = |minibatches| match &own {
        Some(own) => own.program(&pipeline, minibatches),
        None => {
            let count = StepCount { minibatches, microbatches };
            generated(kind).and_then(|name| schedule(name, &pipeline, count)).map_err(|error| fail(&error))
        }
    };
    let write_program = |path: &PathBuf, program: &Program| -> Result<(), Error> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        let text = match extension {
            Some("json") => to_json(program).map_err(|error| Error::bug(&error.to_string()))?,
            Some("csv") => csv(program),
            _ => program.to_string(),
        };
        output::write(path, text.as_bytes())?;
        screen.note(&format!("wrote {}", path.display()));
        let minibatches = program.items / program.microbatches.max(1);
        let is_replicated = pipeline.stages.iter().any(|stage| stage.replicas > 1);
        if extension == Some("csv") && is_replicated {
            let back = text.parse::<ComputeTable>().map_err(|error| error.to_string());
            let back = back.and_then(|table| table.program(&pipeline, 1).map_err(|error| error.to_string()));
            if let Err(why) = back {
                screen.warn(&format!(
                    "`--schedule` does not take this table back: {why}; `--programs FILE.json` keeps what each worker does"
                ));
            }
        }
        if extension == Some("csv") && minibatches > 1 {
            let minibatches = quantity::plural(minibatches.into(), "minibatch", "minibatches");
            let items = quantity::plural(program.items.into(), "micro-batch", "micro-batches");
            screen.note(&format!(
                "it holds {minibatches}, numbered on; a table does not say where one ends, so that `--schedule` takes it for one minibatch \
                 of {items}: `--minibatches 1` writes the table of one, `--programs FILE.json` keeps the number"
            ));
        }
        Ok(())
    };
    if let Some(path) = &arguments.programs {
        write_program(path, &program_of(minibatches)?)?;
    }
    let drawn = if arguments.chart { Some(program_of(minibatches.min(CHARTED))?) } else { None };
    let program = program_of(minibatches)?;
    let mut machine = run::Machine::of(&pipeline);
    machine.cores = plan.cluster.device.cores;
    machine.jitter = arguments.jitter.map(|share| run::Jitter { share, seed: arguments.seed });
    let timeline = run::simulate(&program, &pipeline, &machine).map_err(|error| fail(&error))?;

    if let Some(cores) = machine.cores.filter(|cores| (*cores as usize) < program.workers.len()) {
        let cores = quantity::plural(u64::from(cores), "core", "cores");
        screen
            .note(&format!("{} workers share {cores}; the plan's own figures give each a core", program.workers.len()));
    }
    let pace = steady_throughput::Run::of(kind, &pipeline, &machine, microbatches);
    // Programs in a file are for as many minibatches as they are.
    let is_fixed = own.as_ref().is_some_and(|own| own.minibatches().is_some());
    let long = Some(pace.minibatches()).filter(|long| *long > minibatches && !is_fixed);
    let step = match long {
        Some(long) => pace.step_us(&program_of(long)?),
        None => None,
    };
    let step = step.unwrap_or_else(|| pace.step_of(&timeline));
    let samples = plan.schedule.micro_batch as f64 * f64::from(microbatches);
    let samples_per_s = if step > 0.0 { samples * 1e6 / step } else { 0.0 };
    let workers: Vec<_> = (0..timeline.workers.len())
        .map(|at| {
            let share = if timeline.makespan > 0.0 { timeline.busy(at) / timeline.makespan } else { 0.0 };
            let beside = program.stages_of(program.workers[at].rank).filter_map(|id| plan.stages.get(id.index()));
            let played = i128::from(timeline.peak_memory(at));
            let held = beside.fold(played, |sum, stage| sum + throughout(&stage.memory, kind));
            let held = u64::try_from(held).unwrap_or(0);
            (timeline.workers[at].name.clone(), share, timeline.peak_in_flight[at], held)
        })
        .collect();
    let mut played = plan.clone();
    (played.schedule.kind, played.schedule.microbatches) = (kind, microbatches);
    let most = workers.iter().map(|(.., bytes)| *bytes).max().unwrap_or(0);
    if let Some(limit) = plan.cluster.memory_per_device.filter(|limit| most > limit.0) {
        let (most, limit) = (quantity::bytes(most), quantity::bytes(limit.0));
        screen.warn(&format!("a worker holds {most} under this order of work, the plan is for {limit} on each device"));
    }
    let rows = workers.iter().map(|(name, busy, peak, bytes)| {
        vec![name.clone(), format!("{:.1} %", busy * 100.0), peak.to_string(), quantity::bytes(*bytes)]
    });
    let pace = match long.is_none() && pace.is_short(minibatches) {
        true => "none in so short a run".to_string(),
        false => format!("{} per minibatch, {} samples/s", quantity::time(step), quantity::samples(samples_per_s)),
    };
    screen.prose(&format!(
        "{}\n{}\nsimulated      {} in {}; {} idle, filling and draining included\n\
         steady state   {pace}; the plan says {} and {} samples/s\n",
        stage_table::heading(&played),
        stage_table::table(&["worker", "busy", "most in flight", "most held"], &[1, 2, 3], rows.collect()),
        quantity::plural(u64::from(minibatches), "minibatch", "minibatches"),
        quantity::time(timeline.makespan),
        format_args!("{:.1} %", timeline.bubble().max(0.0) * 100.0),
        quantity::time(plan.predicted.step_us),
        quantity::samples(plan.predicted.throughput_per_s),
    ));
    if let Some(remark) = prediction::other_links(&plan, step).filter(|_| own.is_none() && kind == plan.schedule.kind) {
        screen.note(&remark);
    }
    let is_own = own.is_none() && kind == plan.schedule.kind && machine.jitter.is_none() && machine.cores.is_none();
    if let Some(remark) = prediction::waits(&plan, step).filter(|_| is_own) {
        screen.note(&remark);
    }
    if let Some(drawn) = &drawn {
        screen.wide(&format!("\n{}", chart(drawn).map_err(|error| fail(&error))?));
    }
    if let Some(path) = &arguments.trace {
        output::write(path, &encode(&Trace::simulation(&timeline), &input::file_name(path)))?;
        screen.note(&format!("wrote {}", path.display()));
    }
    let workers: Vec<_> = workers
        .iter()
        .map(|(name, busy, peak, bytes)| json!({"worker": name, "busy": busy, "in_flight": peak, "bytes": bytes}))
        .collect();
    screen.json(&json!({
        "schedule": kind.name(),
        "minibatches": minibatches,
        "makespan_us": timeline.makespan,
        "step_us": step,
        // Of what the plan's own `minibatch_us` is a time of.
        "minibatch_us": if prediction::is_of_items(&plan) { step / f64::from(microbatches.max(1)) } else { step },
        "throughput_per_s": samples_per_s,
        "update_samples": prediction::update_samples(&played),
        "bubble": timeline.bubble(),
        "planned": {"step_us": plan.predicted.step_us, "minibatch_us": plan.predicted.minibatch_us, "throughput_per_s": plan.predicted.throughput_per_s},
        "workers": workers,
    }));
    Ok(())
}

/// Bytes that a replica of a stage holds whatever runs, beside what is played: weights, gradients of all of them (shares are fewer), and what items
/// in flight have saved, which is nothing where nothing runs backward.
fn throughout(memory: &StageMemory, kind: Schedule) -> i128 {
    let (of_items, trained) = match kind {
        Schedule::Inference => (memory.activations, 0),
        _ => (0, i128::from(memory.gradients) - i128::from(memory.weights)),
    };
    let all = [of_items, memory.optimizer, memory.between, memory.messages, memory.workspace];
    all.into_iter().map(i128::from).sum::<i128>() + trained
}

/// A share of a time that it may be longer or shorter.
fn jitter(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..1.0).contains(&share) => Ok(share),
        _ => Err("a share is a number from 0 to less than 1, as 0.1".to_string()),
    }
}
