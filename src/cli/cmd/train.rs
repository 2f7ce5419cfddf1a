//! `pipec train`: trains a model under a plan.

use crate::cli::args::checkpoints::CheckpointArguments;
use crate::cli::args::loss::losses;
use crate::cli::args::optimizer::OptimizerArguments;
use crate::cli::args::policy::PolicyArguments;
use crate::cli::args::processes::ProcessArguments;
use crate::cli::args::{Import, plan, schedule};
use crate::cli::render_error::exit_code;
use crate::cli::screen::{Reader, Screen};
use crate::cli::train_report::report;
use clap::Args;
use compiler::pass::loss::Loss;
use compiler::plan::groups::MOST;
use compiler::plan::problem::InFlight;
use pipec::error::Error;
use pipec::plan::request::ScheduleChoice;
use pipec::train::device_request::DeviceRequest;
use pipec::train::request::{DataInput, HeldOutInput, PlanInput, TrainRequest};
use pipec::train::run::train;
use pipec::train::task::Length;
use std::path::PathBuf;
use std::process;

/// Arguments of `pipec train`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec train model.onnx --plan model.plan.json --data train.npz --loss cross-entropy --lr 0.1 --epochs 5 --save weights.safetensors\n  pipec train model.onnx --stages 2,1 --synthetic-data --steps 100"
)]
pub struct Arguments {
    /// The model
    #[arg(value_name = "MODEL")]
    file: PathBuf,
    /// The plan; without one, pipec plans with analytic costs of this CPU
    #[arg(long, value_name = "FILE", conflicts_with_all = ["workers", "stages", "cut_after"], help_heading = "Plan and schedule")]
    plan: Option<PathBuf>,
    /// Workers to plan for [default: one, or as many as --stages needs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Plan and schedule")]
    workers: Option<u32>,
    /// Replicas of each stage, for example 2,1,1
    #[arg(long, value_name = "R,R,…", value_delimiter = ',', action = clap::ArgAction::Set, num_args = 1, value_parser = plan::replicas, help_heading = "Plan and schedule")]
    stages: Option<Vec<u32>>,
    /// End a stage after each of these nodes, modules or op ids
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', help_heading = "Plan and schedule")]
    cut_after: Option<Vec<String>>,
    /// Arrays named after the model's inputs, and labels named `target` or `y`: .npz, .npy or .safetensors
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    data: Option<PathBuf>,
    /// Train on synthetic data, with targets from a randomly initialised network of the same architecture
    #[arg(long, conflicts_with = "data", help_heading = "Data")]
    synthetic_data: bool,
    /// Hold out this fraction of the rows (the last ones), and evaluate the model on them at the end
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "eval_data", help_heading = "Data")]
    eval_split: Option<f64>,
    /// Evaluate the model at the end on this file; arrays as in --data
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    eval_data: Option<PathBuf>,
    /// Samples per minibatch [default: the plan's, else the file's, else 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32), help_heading = "Data")]
    batch: Option<u64>,
    /// Micro-batches per minibatch [default: the plan's, else 1]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=1 << 20), help_heading = "Data")]
    microbatches: Option<u32>,
    /// Tensor-parallel degree: number of threads or processes that share the ops of every stage [default: the plan's, else 1]
    #[arg(long, value_name = "N", value_parser = devices, help_heading = "Plan and schedule")]
    tensor: Option<u32>,
    /// Pipeline schedule: a name, a table FILE.csv, or programs FILE.json [default: the plan's, else 1f1b-rr, or 1f1b with micro-batches]
    #[arg(long, value_name = "NAME|FILE", value_parser = schedule::name_or_file, help_heading = "Plan and schedule")]
    schedule: Option<ScheduleChoice>,
    /// In-flight minibatches on each replica of a stage: auto (the plan's), pipedream, or one number per stage
    #[arg(long, value_name = "auto|pipedream|N,N,…", default_value = "auto", value_parser = plan::in_flight, help_heading = "Plan and schedule")]
    in_flight: InFlight,
    /// Minibatches to train
    #[arg(long, value_name = "N", conflicts_with = "epochs", value_parser = clap::value_parser!(u32).range(1..=10_000_000), help_heading = "Data")]
    steps: Option<u32>,
    /// Number of epochs [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), help_heading = "Data")]
    epochs: Option<u32>,
    /// Shuffle the rows every epoch
    #[arg(long, conflicts_with = "no_shuffle", help_heading = "Data")]
    shuffle: bool,
    /// Read the rows in file order (default)
    #[arg(long, help_heading = "Data")]
    no_shuffle: bool,
    /// Loss function, a mean over the minibatch [default: the plan's; output for a model that returns its loss, else cross-entropy]
    #[arg(long, value_parser = losses(), value_name = "NAME", help_heading = "Optimizer")]
    loss: Option<Loss>,
    /// Class axis; negative counts from the end [default: -1]
    #[arg(long, value_name = "AXIS", allow_hyphen_values = true, help_heading = "Optimizer")]
    class_dim: Option<i64>,
    #[command(flatten)]
    optimizer: OptimizerArguments,
    #[command(flatten)]
    policy: PolicyArguments,
    #[command(flatten)]
    processes: ProcessArguments,
    /// Running variance: biased (onnx) or unbiased (torch) [default: torch for models of PyTorch]
    #[arg(long, value_name = "RULE", value_parser = ["onnx", "torch"], help_heading = "Optimizer")]
    bn_variance: Option<String>,
    /// Initial weights by name: .npz, .safetensors or the folder of a checkpoint [default: the model's]
    #[arg(long, value_name = "FILE", help_heading = "Input and output files")]
    weights: Option<PathBuf>,
    /// Write the trained weights: .safetensors or .npz
    #[arg(long, value_name = "FILE", help_heading = "Input and output files")]
    save: Option<PathBuf>,
    /// Write the gradients of the last minibatch by parameter name
    #[arg(long, value_name = "FILE", help_heading = "Input and output files")]
    save_gradients: Option<PathBuf>,
    #[command(flatten)]
    checkpoints: CheckpointArguments,
    /// Write one JSON object per minibatch, and one with totals at the end
    #[arg(long, value_name = "FILE", help_heading = "Input and output files")]
    metrics: Option<PathBuf>,
    /// Write a trace for Perfetto: its native format as .pftrace or .perfetto-trace, otherwise JSON, which chrome://tracing also opens
    #[arg(long, value_name = "FILE", help_heading = "Input and output files")]
    trace: Option<PathBuf>,
    /// Device to train on: auto takes GPUs if each worker fits in one, else the CPU
    #[arg(long, value_name = "auto|cpu|cuda|cuda:N,…", default_value = "auto", value_parser = DeviceRequest::read, help_heading = "Device and seed")]
    device: DeviceRequest,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Device and seed")]
    seed: u64,
    #[command(flatten)]
    import: Import,
    /// Train a file that differs from the framework's training model: folded or stored statistics, merged parameters
    #[arg(long, help_heading = "Model")]
    accept_inference_model: bool,
}

impl Arguments {
    fn request(&self, screen: &Screen) -> Result<TrainRequest, Error> {
        let exit: fn(&Error) -> ! = match screen.reader() {
            Reader::Person => exit_as_text,
            Reader::Program => exit_as_json,
        };
        let data = match &self.data {
            Some(path) => Some(DataInput::File(path.clone())),
            None => self.synthetic_data.then_some(DataInput::Synthetic),
        };
        Ok(TrainRequest {
            model: self.file.clone(),
            import: self.import.clone().into(),
            accept_inference_model: self.accept_inference_model,
            plan: self.plan.clone().map(PlanInput::File),
            workers: self.workers,
            replicas: self.stages.clone(),
            cut_after: self.cut_after.clone(),
            tensor_parallel: self.tensor,
            schedule: self.schedule.clone(),
            in_flight: self.in_flight.clone(),
            data,
            held_out: match (&self.eval_data, self.eval_split) {
                (Some(path), _) => Some(HeldOutInput::File(path.clone())),
                (None, fraction) => fraction.map(HeldOutInput::Fraction),
            },
            batch: self.batch,
            microbatches: self.microbatches,
            length: self.steps.map(Length::Steps).or(self.epochs.map(Length::Epochs)),
            shuffle: self.shuffle,
            loss: self.loss,
            class_dim: self.class_dim,
            optimizer: self.optimizer.request()?,
            policy: self.policy.request()?,
            unbiased_variance: self.bn_variance.as_deref().map(|rule| rule == "torch"),
            weights: self.weights.clone(),
            save: self.save.clone(),
            save_gradients: self.save_gradients.clone(),
            checkpoints: self.checkpoints.clone().into(),
            metrics: self.metrics.clone(),
            trace: self.trace.clone(),
            device: self.device.clone(),
            seed: self.seed,
            processes: self.processes.request(exit)?,
        })
    }
}

fn exit_as_text(error: &Error) -> ! {
    Screen::failure(error, Reader::Person);
    process::exit(exit_code(error).into())
}

fn exit_as_json(error: &Error) -> ! {
    Screen::failure(error, Reader::Program);
    process::exit(exit_code(error).into())
}

pub fn run(arguments: Box<Arguments>, screen: &Screen) -> Result<(), Error> {
    if let Some(result) = train(arguments.request(screen)?, screen)? {
        report(&result, screen);
    }
    Ok(())
}

/// Reads `--eval-split`: a fraction of the rows above 0 and below 1.
fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if share > 0.0 && share < 1.0 => Ok(share),
        _ => Err("write a fraction between 0 and 1, for example 0.1".to_string()),
    }
}

/// Reads `--tensor`.
fn devices(text: &str) -> Result<u32, String> {
    let degree = text.parse().ok().filter(|devices| (1..=MOST).contains(devices));
    degree.ok_or_else(|| {
        format!("write a tensor-parallel degree from 1 to {MOST}; `pipec partition --tensor auto` finds the best one")
    })
}
