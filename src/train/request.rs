//! Training requests: the model, its plan, the data, and the settings of the run.

use crate::error::Error;
use crate::launch::role::ProcessRequest;
use crate::model::ImportRequest;
use crate::plan::optimizer::Optimizer;
use crate::plan::request::ScheduleChoice;
use crate::train::device_request::DeviceRequest;
use crate::train::task::Length;
use compiler::pass::loss::Loss;
use compiler::plan::Plan;
use compiler::plan::problem::InFlight;
use compiler::plan::schedule::Schedule;
use compiler::profile::precision::Precision;
use runtime::exec::moving_average::Statistics;
use runtime::optim::lr_schedule::Rate;
use runtime::optim::optimizer::{Optimizer as UpdateRule, Rule};
use runtime::optim::policy::{self, Policy};
use std::path::{Path, PathBuf};

/// A request to train a model.
#[derive(Clone, Debug, Default)]
pub struct TrainRequest {
    pub model: PathBuf,
    pub import: ImportRequest,
    /// True to train a model that differs from the framework's training model, such as an inference export.
    pub accept_inference_model: bool,
    /// The plan; without one, the model is planned with analytic costs of this CPU.
    pub plan: Option<PlanInput>,
    /// The number of workers to plan for.
    pub workers: Option<u32>,
    /// Replicas of each stage to plan for.
    pub replicas: Option<Vec<u32>>,
    /// Names after which a stage ends.
    pub cut_after: Option<Vec<String>>,
    /// The tensor-parallel degree; the plan's, else 1, if absent.
    pub tensor_parallel: Option<u32>,
    /// The schedule; the plan's if absent.
    pub schedule: Option<ScheduleChoice>,
    /// In-flight micro-batches of each stage.
    pub in_flight: InFlight,
    pub data: Option<DataInput>,
    /// Rows that are held out for evaluation.
    pub held_out: Option<HeldOutInput>,
    /// Samples per minibatch; the plan's, else the model's, else 32, if absent.
    pub batch: Option<u64>,
    /// Micro-batches per minibatch; the plan's, else 1, if absent.
    pub microbatches: Option<u32>,
    /// The length of the run; one epoch if absent.
    pub length: Option<Length>,
    /// True to shuffle rows in every epoch.
    pub shuffle: bool,
    /// The loss; the plan's, else the model's default, if absent.
    pub loss: Option<Loss>,
    /// The class axis; the last one if absent.
    pub class_dim: Option<i64>,
    pub optimizer: OptimizerRequest,
    /// Precision, clipping, running statistics and stale weights.
    pub policy: PolicyRequest,
    /// True if running variances use the unbiased batch variance; if absent, true for a model of PyTorch.
    pub unbiased_variance: Option<bool>,
    /// Initial weights; the model's if absent.
    pub weights: Option<PathBuf>,
    /// The file for trained weights.
    pub save: Option<PathBuf>,
    /// The file for the gradients of the last minibatch.
    pub save_gradients: Option<PathBuf>,
    pub checkpoints: CheckpointRequest,
    /// The file for metrics, one JSON object per minibatch.
    pub metrics: Option<PathBuf>,
    /// The file for a trace.
    pub trace: Option<PathBuf>,
    pub device: DeviceRequest,
    /// The seed of all random numbers.
    pub seed: u64,
    pub processes: ProcessRequest,
}

impl TrainRequest {
    /// A request with default settings: SGD, one epoch.
    pub fn new(model: impl AsRef<Path>, data: DataInput) -> TrainRequest {
        TrainRequest { model: model.as_ref().to_path_buf(), data: Some(data), ..TrainRequest::default() }
    }
}

/// A plan in a file or in memory.
#[derive(Clone, Debug)]
pub enum PlanInput {
    File(PathBuf),
    Plan(Box<Plan>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DataInput {
    /// A file of arrays named after the model's inputs.
    File(PathBuf),
    /// Synthetic data, with targets from a randomly initialised network of the same architecture.
    Synthetic,
}

/// Rows that are held out for evaluation.
#[derive(Clone, Debug, PartialEq)]
pub enum HeldOutInput {
    /// The last rows of the data: this fraction of them.
    Fraction(f64),
    /// A file of arrays.
    File(PathBuf),
}

#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerRequest {
    pub optimizer: Optimizer,
    pub rule: Rule,
    /// The learning-rate schedule.
    pub rate: Rate,
}

impl Default for OptimizerRequest {
    /// SGD with learning rate 0.01.
    fn default() -> OptimizerRequest {
        let rule = Rule::Sgd { learning_rate: 0.01, momentum: 0.0, nesterov: false, weight_decay: 0.0 };
        OptimizerRequest { optimizer: Optimizer::Sgd, rule, rate: Rate::CONSTANT }
    }
}

impl OptimizerRequest {
    /// The learning rate before its schedule.
    pub fn learning_rate(&self) -> f64 {
        match self.rule {
            Rule::Sgd { learning_rate, .. }
            | Rule::Adam { learning_rate, .. }
            | Rule::RmsProp { learning_rate, .. }
            | Rule::Adagrad { learning_rate, .. } => learning_rate,
        }
    }

    /// The update rule and learning-rate schedule for the runtime.
    pub fn update_rule(&self) -> UpdateRule {
        UpdateRule { rule: self.rule.clone(), rate: self.rate }
    }
}

/// The treatment of weights that change while a minibatch is in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Staleness {
    /// Weight stashing: the backward uses the weights of its forward.
    Stash,
    /// Vertical sync: all stages use the weights of the same minibatch.
    VerticalSync,
    /// Weight prediction: forwards use weights predicted for the time of the update.
    Predict,
    /// PipeMare; the number of minibatches of the learning-rate warm-up, a quarter of the run if absent.
    Pipemare(Option<u32>),
    /// Every forward and backward uses the newest weights.
    None,
}

/// Precision, clipping, running statistics and stale weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicyRequest {
    /// The precision; the plan's, else the model's, if absent.
    pub precision: Option<Precision>,
    /// The gradient norm to clip to.
    pub clip_norm: Option<f64>,
    /// True to update running statistics once per minibatch.
    pub deferred_statistics: bool,
    /// The treatment of stale weights; the schedule's if absent.
    pub staleness: Option<Staleness>,
}

impl PolicyRequest {
    /// True if the default schedule may be asynchronous.
    pub fn allows_continuous(&self) -> bool {
        self.precision != Some(Precision::Fp16)
    }

    /// True if only the newest weight version is kept.
    pub fn is_newest(&self) -> bool {
        matches!(self.staleness, Some(Staleness::Predict | Staleness::Pipemare(_) | Staleness::None))
    }

    /// The schedule with the requested treatment of stale weights.
    pub fn schedule(&self, schedule: Schedule, is_given: bool) -> Result<Schedule, Error> {
        let Some(staleness) = self.staleness else { return Ok(schedule) };
        if !schedule.is_round_robin() {
            let message = format!("`--staleness` requires schedule 1f1b-rr, but this is {}", schedule.name());
            return Err(Error::input(message).with_help("synchronous schedules have no stale weights"));
        }
        match (staleness, schedule) {
            (Staleness::VerticalSync, _) => Ok(Schedule::OneFOneBRrVsync),
            (_, Schedule::OneFOneBRrVsync) if is_given => {
                Err(Error::input("`--schedule 1f1b-rr-vsync` implies `--staleness vertical-sync`")
                    .with_help("omit one of the two"))
            }
            _ => Ok(Schedule::OneFOneBRr),
        }
    }

    /// The policy for the runtime.
    pub fn build(&self, unbiased: bool) -> Policy {
        let staleness = match self.staleness {
            Some(Staleness::Predict) => policy::Staleness::Predict,
            Some(Staleness::Pipemare(anneal)) => policy::Staleness::PipeMare { anneal: anneal.unwrap_or(0) },
            _ => policy::Staleness::None,
        };
        let statistics = if self.deferred_statistics { Statistics::Deferred { unbiased } } else { Statistics::Batch };
        Policy { clip_norm: self.clip_norm, statistics, staleness, ..Policy::default() }
    }
}

/// The checkpoint that a run resumes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume<'a> {
    /// The newest complete checkpoint in this folder.
    Newest(&'a Path),
    /// This checkpoint.
    From(&'a Path),
}

/// Checkpoints of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckpointRequest {
    /// The folder of checkpoints and trained weights.
    pub folder: Option<PathBuf>,
    /// The number of minibatches between checkpoints.
    pub every: Option<u32>,
    /// The number of checkpoints that are kept; all if absent.
    pub keep: Option<u32>,
    /// The checkpoint to resume from: a folder, or `auto` for the newest complete one.
    pub resume: Option<PathBuf>,
}

impl CheckpointRequest {
    pub fn resume(&self) -> Result<Option<Resume<'_>>, Error> {
        let Some(from) = &self.resume else { return Ok(None) };
        match (from.as_os_str() == "auto", &self.folder) {
            (false, _) => Ok(Some(Resume::From(from))),
            (true, Some(folder)) => Ok(Some(Resume::Newest(folder))),
            (true, None) => Err(Error::input("`--resume auto` requires `--checkpoint-dir FOLDER`")
                .with_help("add that folder, or pass one checkpoint: `--resume FOLDER/step-00000012`")),
        }
    }
}
