//! `pipec profile`: the cost of every op of a model, measured on this machine or computed from a device's data sheet.

use crate::cli::args::Dims;
use crate::cli::args::loss::LossArguments;
use crate::cli::args::plan::precision;
use crate::cli::screen::Screen;
use crate::cli::table::{Shrink, fit_table, wrap};
use clap::Args;
use compiler::profile::precision::Precision;
use compiler::profile::read::to_json;
use compiler::profile::{OpProfile, Profile};
use compiler::text::name::short_name;
use compiler::text::quantity;
use pipec::error::Error;
use pipec::files::output;
use pipec::files::overwrite::Mark;
use pipec::profile::torch_engine::TorchEngine;
use pipec::profile::{ProfileDevice, ProfileRequest, profile};
use pipec::train::device_request::one_device;
use profiler::measure::Settings;
use std::path::PathBuf;

/// Number of ops listed, the most expensive first.
const LISTED_OPS: usize = 12;

/// Arguments of `pipec profile`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec profile model.onnx --micro-batch 32 -o profile.json\n  pipec profile model.onnx --device cuda:0\n  pipec profile model.onnx --device analytic:h200\n  pipec profile model.pt2 --engine torch --device cuda:0 --precision bf16"
)]
pub struct Arguments {
    /// The model
    #[arg(value_name = "MODEL")]
    file: PathBuf,
    /// Device: cpu measures on one core of this machine, cuda:N on a GPU; analytic:KIND computes costs from the data sheet of a device type
    #[arg(long, value_name = "cpu|cuda:N|analytic:KIND", default_value = "cpu")]
    device: String,
    /// Kernels to measure: those of pipec, or those of PyTorch for a .pt2 file
    #[arg(long, value_name = "pipec|torch", default_value = "pipec", value_parser = ["pipec", "torch"])]
    engine: String,
    /// --engine torch: the Python with torch [default: that of $VIRTUAL_ENV, else python3]
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// --engine torch: also measure the full model under torch.compile
    #[arg(long)]
    compile: bool,
    #[command(flatten)]
    dims: Dims,
    #[command(flatten)]
    loss: LossArguments,
    /// Precision: fp64, fp32, tf32, bf16 or fp16 [default: the model's when measured; bf16 for device types with bf16 tensor cores]
    #[arg(long, value_name = "NAME", value_parser = precision)]
    precision: Option<Precision>,
    /// Measured runs of each kernel
    #[arg(long, value_name = "N", default_value_t = Settings::default().runs, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    runs: u32,
    /// Warm-up runs of each kernel
    #[arg(long, value_name = "N", default_value_t = Settings::default().warmup, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    warmup: u32,
    /// CPU: number of workers that run the model at the same time, at most one per core; they share memory bandwidth
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// Seed of the input values
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Measure again what is in the cache
    #[arg(long)]
    no_cache: bool,
    /// Output file of the profile; - is standard output [default: MODEL.profile.json in the current folder, unless that is another model's]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Profiles, writes the profile and prints it.
pub fn run(arguments: Arguments, screen: &Screen) -> Result<(), Error> {
    let path = arguments.output.clone().unwrap_or_else(|| output::default_output(&arguments.file, "profile"));
    if !output::is_stdout(&path) {
        output::check(&path, &Mark::profile())?;
    }
    let is_torch = arguments.engine == "torch";
    if !is_torch && (arguments.python.is_some() || arguments.compile) {
        let flag = if arguments.compile { "--compile" } else { "--python" };
        return Err(Error::input(format!("`{flag}` requires `--engine torch`")));
    }
    let is_torch_device = arguments.device == "cpu" || arguments.device.split(':').next() == Some("cuda");
    let device = match arguments.device.strip_prefix("analytic:") {
        _ if is_torch && is_torch_device => ProfileDevice::Torch(TorchEngine {
            device: arguments.device.clone(),
            python: arguments.python.clone(),
            compile: arguments.compile,
        }),
        Some(kind) => ProfileDevice::Analytic(kind.to_string()),
        None => ProfileDevice::Measured(one_device(&arguments.device).map_err(|_| {
            Error::input(format!("unknown `--device {}`", arguments.device)).with_help(
                "`--device cpu` and `--device cuda:0` measure on this machine, `--device analytic:h200` uses a data sheet",
            )
        })?),
    };
    let profile = profile(
        &ProfileRequest {
            model: arguments.file,
            device,
            import: arguments.dims.import.into(),
            micro_batch: arguments.dims.micro_batch,
            precision: arguments.precision,
            loss: arguments.loss.counted_loss().unwrap_or_default(),
            settings: Settings {
                warmup: arguments.warmup,
                runs: arguments.runs,
                seed: arguments.seed,
                workers: arguments.workers,
                ..Settings::default()
            },
            uses_cache: !arguments.no_cache,
            protected_output: arguments.output.is_none().then(|| path.clone()),
        },
        screen,
    )?;
    let json = to_json(&profile).map_err(|error| Error::bug(&error.to_string()))?;
    if output::is_stdout(&path) {
        screen.document(&json);
        return Ok(());
    }
    output::write(&path, json.as_bytes())?;
    screen.text(&show(&profile, screen.width()));
    screen.json_file(&json);
    screen.text(&format!("\nwrote {}", path.display()));
    Ok(())
}

/// The most expensive ops and the totals.
pub fn show(profile: &Profile, width: Option<usize>) -> String {
    let sum = profile.sum();
    let total = sum.fwd_us + sum.bwd_us;
    let mut by_time: Vec<&OpProfile> = profile.ops.iter().collect();
    by_time.sort_by(|a, b| (b.fwd_us + b.bwd_us).total_cmp(&(a.fwd_us + a.bwd_us)).then(a.id.cmp(&b.id)));
    let row = |op: &&OpProfile| {
        let share = if total > 0.0 { (op.fwd_us + op.bwd_us) / total * 100.0 } else { 0.0 };
        vec![
            op.id.to_string(),
            short_name(&op.name),
            op.op.clone(),
            quantity::time(op.fwd_us),
            quantity::time(op.bwd_us),
            format!("{share:.1} %"),
            format!("{:.0} %", op.spread * 100.0),
            op.source.clone(),
        ]
    };
    let header = ["op", "name", "type", "forward", "backward", "share", "spread", "source"];
    let rows = by_time.iter().take(LISTED_OPS).map(row).collect();
    let shrinks = [Shrink::Cut(1, 32), Shrink::Cut(1, 24), Shrink::Omit(7), Shrink::Cut(1, 16), Shrink::Omit(6)];
    let mut text = fit_table(&header, &[0, 3, 4, 5, 6], rows, &shrinks, width);
    if by_time.len() > LISTED_OPS {
        text += &format!("… and {} more\n", by_time.len() - LISTED_OPS);
    }
    let weights = profile.weight_grad_us().filter(|_| sum.bwd_us > 0.0);
    let weights = weights.map_or(String::new(), |us| format!(", of which {} for weight gradients", quantity::time(us)));
    let workers = match profile.settings.workers {
        1 => String::new(),
        workers => format!(", {workers} workers at the same time"),
    };
    let sums = format!(
        "\n{} on {}, micro-batch {}, {}{workers}\nsum of ops   forward {}, backward {}{weights}\n",
        short_name(&profile.model.file),
        short_name(&profile.device.name),
        profile.settings.micro_batch,
        profile.settings.dtype,
        quantity::time(sum.fwd_us),
        quantity::time(sum.bwd_us)
    );
    text += &wrap(&sums, width);
    if let Some(whole) = &profile.whole {
        let range = whole.range_us.map_or(String::new(), |[low, high]| {
            format!("; 5th to 95th percentile of both {} to {}", quantity::time(low), quantity::time(high))
        });
        let [forward, backward] = [whole.fwd_us, whole.bwd_us].map(quantity::time);
        text += &wrap(&format!("full model   forward {forward}, backward {backward}{range}\n"), width);
    }
    text
}
