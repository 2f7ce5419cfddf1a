//! `pipec train`: trains a model under a plan.

use crate::cli::args::checkpoints::CheckpointArguments;
use crate::cli::args::loss::LossName;
use crate::cli::args::optimizer::OptimizerArguments;
use crate::cli::args::policy::PolicyArguments;
use crate::cli::args::processes::ProcessArguments;
use crate::cli::args::{Import, plan, schedule};
use crate::cli::render_error::exit_code;
use crate::cli::screen::{Reader, Screen};
use crate::cli::train_report::report;
use clap::Args;
use compiler::plan::groups::MOST;
use compiler::plan::problem::InFlight;
use pipec::error::Error;
use pipec::loss::Loss;
use pipec::plan::request::ScheduleChoice;
use pipec::train::prepare::Length;
use pipec::train::request::{DataInput, HeldOutInput, PlanInput, TrainRequest};
use pipec::train::run::train;
use std::path::PathBuf;
use std::process;

/// What to train, on what, how.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec train model.onnx --plan model.plan.json --data train.npz --loss cross-entropy --lr 0.1 --epochs 5 --save weights.safetensors\n  pipec train model.onnx --stages 2,1 --synthetic-data --steps 100"
)]
pub struct Arguments {
    /// The model
    #[arg(value_name = "MODEL")]
    file: PathBuf,
    /// The plan; without one, training plans on analytic costs of this CPU
    #[arg(long, value_name = "FILE", conflicts_with_all = ["workers", "stages", "cut_after"], help_heading = "Plan and schedule")]
    plan: Option<PathBuf>,
    /// Workers to plan for [default: one, or as the stages need]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Plan and schedule")]
    workers: Option<u32>,
    /// Replicas of each stage, for example 2,1,1
    #[arg(long, value_name = "R,R,…", value_delimiter = ',', value_parser = plan::replicas, help_heading = "Plan and schedule")]
    stages: Option<Vec<u32>>,
    /// End a stage after each of these nodes, modules or op ids
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', help_heading = "Plan and schedule")]
    cut_after: Option<Vec<String>>,
    /// Arrays named by the model's inputs, the labels `target` or `y`: .npz, .npy or .safetensors
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    data: Option<PathBuf>,
    /// Train on made-up data, whose targets are what another network of the same form answers
    #[arg(long, conflicts_with = "data", help_heading = "Data")]
    synthetic_data: bool,
    /// Keep this share of the rows, the last ones, from training, and tell at the end how good the model is on them
    #[arg(long, value_name = "SHARE", value_parser = share, conflicts_with = "eval_data", help_heading = "Data")]
    eval_split: Option<f64>,
    /// Tell at the end how good the model is on these rows: arrays as in --data
    #[arg(long, value_name = "FILE", help_heading = "Data")]
    eval_data: Option<PathBuf>,
    /// Samples in a minibatch [default: the plan's, else the file's, else 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32), help_heading = "Data")]
    batch: Option<u64>,
    /// Micro-batches in a minibatch [default: the plan's, else 1]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=1 << 20), help_heading = "Data")]
    microbatches: Option<u32>,
    /// Devices that share every stage: its ops are split among so many threads [default: as the plan says, else 1]
    #[arg(long, value_name = "N", value_parser = devices, conflicts_with_all = ["processes", "hosts", "rank"], help_heading = "Plan and schedule")]
    tensor: Option<u32>,
    /// Order of work: a schedule, a table FILE.csv, or programs FILE.json [default: the plan's, else 1f1b-rr, or 1f1b with micro-batches]
    #[arg(long, value_name = "NAME|FILE", value_parser = schedule::name_or_file, help_heading = "Plan and schedule")]
    schedule: Option<ScheduleChoice>,
    /// Minibatches in flight on each replica of a stage: auto (the plan's), pipedream, or one number a stage
    #[arg(long, value_name = "auto|pipedream|N,N,…", default_value = "auto", value_parser = plan::in_flight, help_heading = "Plan and schedule")]
    in_flight: InFlight,
    /// Minibatches to train
    #[arg(long, value_name = "N", conflicts_with = "epochs", value_parser = clap::value_parser!(u32).range(1..=10_000_000), help_heading = "Data")]
    steps: Option<u32>,
    /// Times through the data [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000), help_heading = "Data")]
    epochs: Option<u32>,
    /// See the rows in a new order every epoch
    #[arg(long, conflicts_with = "no_shuffle", help_heading = "Data")]
    shuffle: bool,
    /// See the rows as they stand in the file; this is the default
    #[arg(long, help_heading = "Data")]
    no_shuffle: bool,
    /// What is made small, the mean of it over the micro-batches of a minibatch [default: the plan's; output for a model that returns its loss, else cross-entropy]
    #[arg(long, value_enum, value_name = "NAME", help_heading = "Updates")]
    loss: Option<LossName>,
    /// The axis of classes; negative counts from the end [default: -1]
    #[arg(long, value_name = "AXIS", allow_hyphen_values = true, help_heading = "Updates")]
    class_dim: Option<i64>,
    #[command(flatten)]
    optimizer: OptimizerArguments,
    #[command(flatten)]
    policy: PolicyArguments,
    #[command(flatten)]
    processes: ProcessArguments,
    /// Whether running variances follow the biased batch variance (onnx) or the unbiased one (torch) [default: torch for a .pt2]
    #[arg(long, value_name = "RULE", value_parser = ["onnx", "torch"], help_heading = "Updates")]
    bn_variance: Option<String>,
    /// Initial weights by name: .npz, .safetensors or the folder of a checkpoint [default: those of the model]
    #[arg(long, value_name = "FILE", help_heading = "Weights and results")]
    weights: Option<PathBuf>,
    /// Parameters that are not trained: names, or prefix* for all that start so
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', help_heading = "Weights and results")]
    freeze: Vec<String>,
    /// Write the trained weights: .safetensors or .npz
    #[arg(long, value_name = "FILE", help_heading = "Weights and results")]
    save: Option<PathBuf>,
    /// Write the gradients of the last minibatch by parameter name
    #[arg(long, value_name = "FILE", help_heading = "Weights and results")]
    save_gradients: Option<PathBuf>,
    #[command(flatten)]
    checkpoints: CheckpointArguments,
    /// Write a JSON object for every minibatch, and one with totals at the end
    #[arg(long, value_name = "FILE", help_heading = "Weights and results")]
    metrics: Option<PathBuf>,
    /// Write a trace that Perfetto opens: in its own form as .pftrace or .perfetto-trace, else as JSON, which chrome://tracing opens too
    #[arg(long, value_name = "FILE", help_heading = "Weights and results")]
    trace: Option<PathBuf>,
    /// Where to run
    #[arg(long, value_name = "auto|cpu", default_value = "auto", value_parser = device, help_heading = "Run")]
    device: String,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Run")]
    seed: u64,
    #[command(flatten)]
    import: Import,
    /// Train a file though it is not the model that its framework trains: folded or stored statistics, merged parameters
    #[arg(long, help_heading = "Model")]
    accept_inference_model: bool,
}

/// Reads `--device`.
fn device(text: &str) -> Result<String, String> {
    match text {
        "auto" | "cpu" => Ok(text.to_string()),
        _ if text.starts_with("cuda") => {
            Err("training runs on the CPU so far; `pipec export --to torch` writes a bundle that trains the \
            same plan on GPUs, `pipec doctor` says which are here"
                .to_string())
        }
        _ => Err("write auto or cpu".to_string()),
    }
}

impl Arguments {
    /// The request.
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
            loss: self.loss.map(Loss::from),
            class_dim: self.class_dim,
            optimizer: self.optimizer.request()?,
            policy: self.policy.request()?,
            unbiased_variance: self.bn_variance.as_deref().map(|rule| rule == "torch"),
            weights: self.weights.clone(),
            freeze: self.freeze.clone(),
            save: self.save.clone(),
            save_gradients: self.save_gradients.clone(),
            checkpoints: self.checkpoints.clone().into(),
            metrics: self.metrics.clone(),
            trace: self.trace.clone(),
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

/// Trains and prints.
pub fn run(arguments: Box<Arguments>, screen: &Screen) -> Result<(), Error> {
    if let Some(result) = train(arguments.request(screen)?, screen)? {
        report(&result, screen);
    }
    Ok(())
}

/// A share of the rows: some, and not all.
fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if share > 0.0 && share < 1.0 => Ok(share),
        _ => Err("a share is a number between 0 and 1, as 0.1".to_string()),
    }
}

/// Reads `--tensor`.
fn devices(text: &str) -> Result<u32, String> {
    let known = text.parse().ok().filter(|devices| (1..=MOST).contains(devices));
    known.ok_or_else(|| {
        format!("write how many devices share every stage, 1 to {MOST}; `pipec partition --tensor auto` finds the best number")
    })
}
