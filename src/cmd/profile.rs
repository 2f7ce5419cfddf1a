//! `pipec profile`: what every op of a model costs on this machine, or by the data sheet of another.

use crate::arguments::Dims;
use crate::failure::Failure;
use crate::loss::{Counted, LossArguments, attributed};
use crate::model::{self, Loaded};
use crate::narrow::{Give, fitted, folded};
use crate::replaced::Mark;
use crate::screen::Screen;
use crate::{machines, memory, output, quantity, source, stages};
use clap::Args;
use compiler::import::onnx::name::shown;
use compiler::pass::analytic::{self, Subject};
use compiler::pass::attribution::AttributionError;
use compiler::profile::read::to_json;
use compiler::profile::{OpProfile, Profile};
use profiler::cache::Cache;
use profiler::measure::{MeasureError, Model, Settings, measure};
use std::path::PathBuf;

/// How many ops are listed, the most expensive first.
const LISTED: usize = 12;

/// Which model, on what.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec profile model.onnx --micro-batch 32 -o profile.json\n  pipec profile model.onnx --device analytic:h200"
)]
pub struct Arguments {
    /// The model
    #[arg(value_name = "MODEL")]
    file: PathBuf,
    /// Where: cpu measures on one core of this machine, analytic:KIND takes the data sheet of a device kind
    #[arg(long, value_name = "cpu|analytic:KIND", default_value = "cpu")]
    device: String,
    #[command(flatten)]
    dims: Dims,
    #[command(flatten)]
    loss: LossArguments,
    /// Runs of each kernel that count
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: Option<u32>,
    /// Runs of each kernel before the first that counts
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=10_000))]
    warmup: Option<u32>,
    /// Seed of the values that ops are run on
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Measure again what was measured before
    #[arg(long)]
    no_cache: bool,
    /// Where to write the profile; - is standard output [default: MODEL.profile.json in the current folder, unless that is another model's]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Profiles, prints, writes.
pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Failure> {
    let path = arguments.output.clone().unwrap_or_else(|| source::default_output(&arguments.file, "profile"));
    if !source::is_stdout(&path) {
        output::check(&path, &Mark::profile())?;
    }
    let profile = match arguments.device.strip_prefix("analytic:") {
        Some(kind) => by_data_sheet(&arguments, kind, screen)?,
        None if arguments.device == "cpu" => {
            let (warmup, runs, seed) = (arguments.warmup, arguments.runs, arguments.seed);
            let usual = Settings::default();
            let settings =
                Settings { warmup: warmup.unwrap_or(usual.warmup), runs: runs.unwrap_or(usual.runs), seed, ..usual };
            let loaded = loaded(&arguments, screen)?;
            let micro_batch = loaded.micro_batch(None, screen);
            let counted = arguments.loss.said().unwrap_or_default();
            measured(&loaded, micro_batch, counted, &settings, !arguments.no_cache, screen)?
        }
        None => {
            return Err(Failure::input(format!("`--device {}` is not known", arguments.device))
                .help("`--device cpu` measures here, `--device analytic:h200` takes a data sheet"));
        }
    };
    let json = to_json(&profile).map_err(|error| Failure::bug(&error.to_string()))?;
    if source::is_stdout(&path) {
        screen.document(&json);
        return Ok(());
    }
    source::write(&path, json.as_bytes())?;
    screen.text(&show(&profile, screen.width()));
    screen.json_file(&json);
    screen.text(&format!("\nwrote {}", path.display()));
    Ok(())
}

/// Measures the model on this machine.
pub fn measured(
    loaded: &Loaded,
    micro_batch: u64,
    counted: Counted,
    settings: &Settings,
    uses_cache: bool,
    screen: &Screen,
) -> Result<Profile, Failure> {
    let graph = loaded.at(micro_batch)?;
    let needed = memory::of_graph(&graph);
    memory::check("profiling this model", needed, "`--micro-batch N` sets a smaller one")?;
    let weights = loaded.known_weights();
    let known = attributed(&graph, counted).map_err(|error| unprofiled(&loaded.model.file, &error))?;
    let model = Model {
        graph: &graph,
        training: known.training,
        loss: known.counted.written(),
        model: loaded.profiled(),
        micro_batch,
        weights: &weights,
    };
    let cache = if uses_cache { Cache::of_user() } else { None };
    let bar = screen.progress(0, "profiling {bar:30} {pos}/{len} {wide_msg}");
    let measured = measure(&model, settings, cache.as_ref(), &mut |progress| {
        bar.set_length(progress.total as u64);
        bar.set_position(progress.done as u64);
        bar.set_message(shown(progress.name).into_owned());
    });
    bar.finish_and_clear();
    let measured = measured.map_err(|error| {
        let failure = Failure::input(format!("cannot profile {}", loaded.model.file)).because(&error);
        match error {
            MeasureError::Memory { .. } => failure.help("`--micro-batch N` sets a smaller one"),
            _ => failure,
        }
    })?;
    if let Some(fault) = &measured.cache_fault {
        screen.warn(&format!("the measured times were not kept for the next run: {fault}"));
    }
    let all = stages::plural(measured.kernels as u64, "kernel", "kernels");
    screen.note(&match measured.measured {
        0 => format!("{all}: all were measured before, `--no-cache` measures again"),
        now if now == measured.kernels => format!("{all} measured"),
        now => format!("{all}: {now} measured now, the others before"),
    });
    Ok(measured.profile)
}

/// The model, where its profile would not be written over that of another one.
fn loaded(arguments: &Arguments, screen: &Screen) -> Result<Loaded, Failure> {
    let loaded = model::load(&arguments.file, &arguments.dims.import, screen)?.asked(arguments.dims.micro_batch);
    let digest = &loaded.profiled().sha256;
    output::keep_others(arguments.output.as_deref(), &arguments.file, &[("sha256", digest)], "profile")?;
    Ok(loaded)
}

fn by_data_sheet(arguments: &Arguments, kind: &str, screen: &Screen) -> Result<Profile, Failure> {
    let device = machines::kind(kind)?.device();
    let loaded = loaded(arguments, screen)?;
    let micro_batch = loaded.micro_batch(None, screen);
    let graph = loaded.at(micro_batch)?;
    let known = attributed(&graph, arguments.loss.said().unwrap_or_default())
        .map_err(|error| unprofiled(&loaded.model.file, &error))?;
    let subject = Subject { model: loaded.profiled(), micro_batch, loss: known.counted.written() };
    Ok(analytic::profile(&graph, &known.attribution, &device, &subject))
}

fn unprofiled(file: &str, error: &AttributionError) -> Failure {
    let failure = Failure::input(format!("cannot profile {file}")).because(error);
    match error {
        AttributionError::Loss(_) => failure.help("`--loss` names another"),
        _ => failure,
    }
}

/// The dearest ops and the sums.
pub fn show(profile: &Profile, width: Option<usize>) -> String {
    let sum = profile.sum();
    let all = sum.fwd_us + sum.bwd_us;
    let mut dearest: Vec<&OpProfile> = profile.ops.iter().collect();
    dearest.sort_by(|a, b| (b.fwd_us + b.bwd_us).total_cmp(&(a.fwd_us + a.bwd_us)).then(a.id.cmp(&b.id)));
    let row = |op: &&OpProfile| {
        let share = if all > 0.0 { (op.fwd_us + op.bwd_us) / all * 100.0 } else { 0.0 };
        vec![
            op.id.to_string(),
            shown(&op.name).into_owned(),
            op.op.clone(),
            quantity::time(op.fwd_us),
            quantity::time(op.bwd_us),
            format!("{share:.1} %"),
            format!("{:.0} %", op.spread * 100.0),
            op.source.clone(),
        ]
    };
    let header = ["op", "name", "kind", "forward", "backward", "share", "spread", "source"];
    let rows = dearest.iter().take(LISTED).map(row).collect();
    let gives = [Give::Cut(1, 32), Give::Cut(1, 24), Give::Leave(7), Give::Cut(1, 16), Give::Leave(6)];
    let mut text = fitted(&header, &[0, 3, 4, 5, 6], rows, &gives, width);
    if dearest.len() > LISTED {
        text += &format!("… and {} more\n", dearest.len() - LISTED);
    }
    let weights = profile.weight_us().filter(|_| sum.bwd_us > 0.0);
    let weights = weights.map_or(String::new(), |us| format!(", of it {} for weights", quantity::time(us)));
    let sums = format!(
        "\n{} on {}, micro-batch {}, {}\nsum of ops   forward {}, backward {}{weights}\n",
        shown(&profile.model.file),
        shown(&profile.device.name),
        profile.settings.micro_batch,
        profile.settings.dtype,
        quantity::time(sum.fwd_us),
        quantity::time(sum.bwd_us)
    );
    text += &folded(&sums, width);
    if let Some(whole) = &profile.whole {
        text += &format!(
            "whole model  forward {}, backward {}\n",
            quantity::time(whole.fwd_us),
            quantity::time(whole.bwd_us)
        );
    }
    text
}
