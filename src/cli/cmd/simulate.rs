//! `pipec simulate`: simulates a plan's programs with the plan's costs.

use crate::cli::args::schedule as schedule_flag;
use crate::cli::screen::Screen;
use crate::cli::worker_table::{self, Worker};
use crate::cli::{prediction, stage_table};
use clap::Args;
use compiler::export::trace::Trace;
use compiler::export::trace::encode::encode;
use compiler::plan::problem::CostModel;
use compiler::plan::schedule::Schedule;
use compiler::plan::{Stage, StageMemory};
use compiler::schedule::Program;
use compiler::schedule::formats::chart::chart;
use compiler::schedule::formats::csv::{ComputeTable, csv};
use compiler::schedule::formats::json::to_json;
use compiler::schedule::generators::schedule;
use compiler::schedule::pipeline::{generated, pipeline};
use compiler::schedule::semantics::StepCount;
use compiler::simulate::{run, steady_throughput};
use compiler::text::quantity;
use pipec::error::Error;
use pipec::files::overwrite::Mark;
use pipec::files::{input, output};
use pipec::plan::custom_schedule::{self, CustomSchedule};
use pipec::plan::read::{NOT_A_PIPELINE, is_cyclic, read_checked};
use pipec::plan::request::ScheduleChoice;
use serde_json::json;
use std::path::PathBuf;

/// The longest chart in minibatches; a terminal does not show more.
const MAX_CHARTED: u32 = 24;

const DEFAULT_MINIBATCHES: u32 = 100;

/// Maximum of the default number of minibatches when rounds of many replicas are long.
const MAX_DEFAULT_MINIBATCHES: u64 = 10_000;

/// Arguments of `pipec simulate`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec simulate model.plan.json --chart --minibatches 8\n  pipec simulate model.plan.json --schedule gpipe --trace run.pftrace"
)]
pub struct Arguments {
    /// The plan
    #[arg(value_name = "PLAN")]
    file: PathBuf,
    /// Minibatches to simulate [default: 100; more with many round-robin replicas or in-flight minibatches; the number in the programs of --schedule]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    minibatches: Option<u32>,
    /// Schedule in place of the plan's, required if the plan was made with a file: a name, a table FILE.csv in torch's format, or programs FILE.json
    #[arg(long, value_name = "NAME|FILE", value_parser = schedule_flag::name_or_file)]
    schedule: Option<ScheduleChoice>,
    /// Write the program of each worker: .json with every operand, .csv computation only in torch's format, otherwise text
    #[arg(long, value_name = "FILE")]
    programs: Option<PathBuf>,
    /// Write a trace for Perfetto: its native format as .pftrace or .perfetto-trace, otherwise JSON, which chrome://tracing also opens
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Vary the time of every computation and transfer by up to this fraction, for example 0.1
    #[arg(long, value_name = "SHARE", value_parser = jitter)]
    jitter: Option<f64>,
    /// Seed of --jitter
    #[arg(long, value_name = "N", default_value_t = 0, requires = "jitter")]
    seed: u64,
    /// Draw the timeline; every forward and backward takes one column
    #[arg(long)]
    chart: bool,
}

pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    arguments.programs.iter().try_for_each(|path| output::check(path, &Mark::Program))?;
    arguments.trace.iter().try_for_each(|path| output::check(path, &Mark::trace(path)))?;
    let plan = read_checked(&arguments.file)?;
    let message = format!("cannot simulate {}", arguments.file.display());
    if plan.cost == CostModel::Hybrid {
        let why = "its times are those of an instance, in an unknown unit, with forward and backward combined";
        return Err(Error::input(message).because(why));
    }
    if is_cyclic(&plan) {
        return Err(Error::input(message).because(NOT_A_PIPELINE).with_help(
            "`pipec plan check` checks it; without `--noncontiguous` an instance is planned as a pipeline, which can be simulated",
        ));
    }
    let fail = |error: &dyn std::fmt::Display| Error::input(&message).because(error);
    let custom_schedule = custom_schedule::open(arguments.schedule.as_ref().and_then(ScheduleChoice::file), screen)?;
    let kind = custom_schedule
        .as_ref()
        .map(CustomSchedule::kind)
        .or(arguments.schedule.as_ref().and_then(ScheduleChoice::named))
        .unwrap_or(plan.schedule.kind);
    let requested = arguments.minibatches;
    let pipeline = pipeline(&plan).map_err(|error| fail(&error))?;
    let microbatches = custom_schedule.as_ref().map_or(plan.schedule.microbatches, CustomSchedule::microbatches);
    let in_flight = steady_throughput::in_flight(&pipeline);
    // Several rounds of all replicas, to show their interaction, and enough minibatches to reach the in-flight limit.
    let default_count = if microbatches == 1 {
        let balanced = pipeline.rounds().saturating_mul(4).max(8 * in_flight);
        balanced.clamp(DEFAULT_MINIBATCHES.into(), MAX_DEFAULT_MINIBATCHES) as u32
    } else {
        DEFAULT_MINIBATCHES
    };
    let minibatches = custom_schedule
        .as_ref()
        .map_or(Ok(requested), |custom_schedule| custom_schedule.count("--minibatches", requested))?
        .unwrap_or(default_count);
    let program_of = |minibatches| match &custom_schedule {
        Some(custom_schedule) => custom_schedule.program(&pipeline, minibatches),
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
            let reparsed = text.parse::<ComputeTable>().map_err(|error| error.to_string());
            let reparsed = reparsed.and_then(|table| table.program(&pipeline, 1).map_err(|error| error.to_string()));
            if let Err(why) = reparsed {
                screen.warn(&format!(
                    "`--schedule` cannot read this table back: {why}; `--programs FILE.json` keeps the full programs"
                ));
            }
        }
        if extension == Some("csv") && minibatches > 1 {
            let minibatches = quantity::plural(minibatches.into(), "minibatch", "minibatches");
            let items = quantity::plural(program.items.into(), "micro-batch", "micro-batches");
            screen.note(&format!(
                "the table has {minibatches}, numbered consecutively, without their boundaries; `--schedule` reads it as one minibatch \
                 of {items}: `--minibatches 1` writes a table of one, `--programs FILE.json` keeps the number"
            ));
        }
        Ok(())
    };
    if let Some(path) = &arguments.programs {
        write_program(path, &program_of(minibatches)?)?;
    }
    let chart_program = if arguments.chart { Some(program_of(minibatches.min(MAX_CHARTED))?) } else { None };
    let program = program_of(minibatches)?;
    let mut machine = run::Machine::of(&pipeline);
    machine.cores = plan.cluster.device.cores;
    machine.jitter = arguments.jitter.map(|share| run::Jitter { share, seed: arguments.seed });
    let timeline = run::simulate(&program, &pipeline, &machine).map_err(|error| fail(&error))?;

    if let Some(cores) = machine.cores.filter(|cores| (*cores as usize) < program.workers.len()) {
        let cores = quantity::plural(u64::from(cores), "core", "cores");
        screen.note(&format!(
            "{} workers share {cores}; the plan's figures assume one core per worker",
            program.workers.len()
        ));
    }
    let steady_state = steady_throughput::Run::of(kind, &pipeline, &machine, microbatches);
    // Programs in a file have a fixed number of minibatches.
    let is_fixed = custom_schedule.as_ref().is_some_and(|custom_schedule| custom_schedule.minibatches().is_some());
    let long_run = Some(steady_state.minibatches()).filter(|long_run| *long_run > minibatches && !is_fixed);
    let step = match long_run {
        Some(long_run) => steady_state.step_us(&program_of(long_run)?),
        None => None,
    };
    let step = step.unwrap_or_else(|| steady_state.step_of(&timeline));
    let samples = plan.schedule.micro_batch as f64 * f64::from(microbatches);
    let samples_per_s = if step > 0.0 { samples * 1e6 / step } else { 0.0 };
    let workers: Vec<_> = (0..timeline.workers.len())
        .map(|at| {
            let busy = if timeline.makespan > 0.0 { timeline.busy(at) / timeline.makespan } else { 0.0 };
            let stages = program.stages_of(program.workers[at].rank).filter_map(|id| plan.stages.get(id.index()));
            let simulated_bytes = i128::from(timeline.peak_memory(at));
            let bytes = stages.fold(simulated_bytes, |sum, stage| sum + unsimulated_bytes(&stage.memory, kind));
            let bytes = u64::try_from(bytes).unwrap_or(0);
            let (name, in_flight) = (timeline.workers[at].name.clone(), timeline.peak_in_flight[at] as usize);
            Worker { name, busy, in_flight, bytes }
        })
        .collect();
    let mut simulated_plan = plan.clone();
    (simulated_plan.schedule.kind, simulated_plan.schedule.microbatches) = (kind, microbatches);
    let peak = workers.iter().map(|worker| worker.bytes).max().unwrap_or(0);
    if let Some(limit) = plan.cluster.memory_per_device.filter(|limit| peak > limit.0) {
        let (peak, limit) = (quantity::bytes(peak), quantity::bytes(limit.0));
        screen.warn(&format!("a worker needs {peak} with this schedule, above the plan's limit of {limit} per device"));
    }
    let degree = plan.stages.iter().map(Stage::degree).max().unwrap_or(1);
    let steady_state = match long_run.is_none() && steady_state.is_short(minibatches) {
        true => "not reached in this short run".to_string(),
        false => format!("{} per minibatch, {} samples/s", quantity::time(step), quantity::samples(samples_per_s)),
    };
    screen.prose(&format!(
        "{}\n{}\nsimulated      {} in {}; {} idle, including fill and drain\n\
         steady state   {steady_state}; the plan predicts {} and {} samples/s\n",
        stage_table::heading(&simulated_plan),
        worker_table::workers(&workers, degree),
        quantity::plural(u64::from(minibatches), "minibatch", "minibatches"),
        quantity::time(timeline.makespan),
        format_args!("{:.1} %", timeline.bubble().max(0.0) * 100.0),
        quantity::time(plan.predicted.step_us),
        quantity::samples(plan.predicted.throughput_per_s),
    ));
    if let Some(remark) =
        prediction::explain_links(&plan, step).filter(|_| custom_schedule.is_none() && kind == plan.schedule.kind)
    {
        screen.note(&remark);
    }
    let is_as_planned =
        custom_schedule.is_none() && kind == plan.schedule.kind && machine.jitter.is_none() && machine.cores.is_none();
    if let Some(remark) = prediction::explain_waits(&plan, step).filter(|_| is_as_planned) {
        screen.note(&remark);
    }
    if let Some(chart_program) = &chart_program {
        screen.wide(&format!("\n{}", chart(chart_program).map_err(|error| fail(&error))?));
    }
    if let Some(path) = &arguments.trace {
        output::write(path, &encode(&Trace::simulation(&timeline), &input::file_name(path)))?;
        screen.note(&format!("wrote {}", path.display()));
    }
    let worker_json = |Worker { name, busy, in_flight, bytes }: &Worker| json!({"worker": name, "busy": busy, "in_flight": in_flight, "bytes": bytes});
    screen.json(&json!({
        "schedule": kind.name(),
        "minibatches": minibatches,
        "makespan_us": timeline.makespan,
        "step_us": step,
        // In the unit of the plan's `minibatch_us`: a micro-batch or a minibatch.
        "minibatch_us": if prediction::is_per_microbatch(&plan) { step / f64::from(microbatches.max(1)) } else { step },
        "throughput_per_s": samples_per_s,
        "update_samples": prediction::update_samples(&simulated_plan),
        "bubble": timeline.bubble(),
        "planned": {"step_us": plan.predicted.step_us, "minibatch_us": plan.predicted.minibatch_us, "throughput_per_s": plan.predicted.throughput_per_s},
        "workers": workers.iter().map(worker_json).collect::<Vec<_>>(),
    }));
    Ok(())
}

/// Bytes of a stage replica that the simulation does not count. Gradients replace the weights it counted, because ZeRO shards are smaller.
/// Inference adds its activations, because nothing is saved for a backward.
fn unsimulated_bytes(memory: &StageMemory, kind: Schedule) -> i128 {
    let (activations, trained) = match kind {
        Schedule::Inference => (memory.activations, 0),
        _ => (0, i128::from(memory.gradients) - i128::from(memory.weights)),
    };
    let terms =
        [activations, memory.frozen, memory.optimizer, memory.split_backward, memory.messages, memory.workspace];
    terms.into_iter().map(i128::from).sum::<i128>() + trained
}

/// Reads `--jitter`.
fn jitter(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..1.0).contains(&share) => Ok(share),
        _ => Err("write a fraction from 0 to less than 1, for example 0.1".to_string()),
    }
}
