//! The errors that end a training run.

use crate::device::error::DeviceError;
use crate::exec::evaluate::EvaluateError;
use crate::process::run_status::LinkError;
use crate::stage::worker_error::WorkerError;
use crate::train::losses::Diverged;
use crate::train::resume::ResumeError;
use crate::train::shard_gatherer::GatherError;
use compiler::plan::schedule::Schedule;
use compiler::tensor::DType;
use thiserror::Error;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum TrainError {
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error(transparent)]
    Weights(#[from] EvaluateError),
    #[error("parameter `{name}` is {value} before the first step")]
    NotFinite { name: String, value: f64 },
    #[error(
        "parameter `{name}` is tied between stages {first} and {second}, whose copies would diverge under {schedule}"
    )]
    TiedParameter { name: String, first: usize, second: usize, schedule: Schedule },
    #[error("the running statistic `{name}` is shared by stages {first} and {second}; put both readers in one stage")]
    SharedState { name: String, first: usize, second: usize },
    #[error("parameter `{name}` is {dtype}; only float parameters can be trained")]
    ElementType { name: String, dtype: DType },
    #[error("gradients in f16 need one loss scale for all stages after every minibatch, but {schedule} does not flush")]
    LossScale { schedule: Schedule },
    #[error("weight prediction needs an optimizer with momentum")]
    NoVelocity,
    #[error("weight prediction and correction need f32 or f64 weights; parameter `{name}` is {dtype}")]
    Narrow { name: String, dtype: DType },
    #[error(
        "weight prediction and correction need the whole optimizer state, which ZeRO shards over the replicas of \
         stage {stage}; use {schedule} without `--staleness`, or a schedule with weight stashing"
    )]
    Shares { stage: usize, schedule: Schedule },
    #[error("worker {worker}, instruction {at} (`{instruction}`): the run has no checkpoint folder")]
    NoPlace { worker: String, at: usize, instruction: String },
    #[error(transparent)]
    Resume(#[from] ResumeError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("bug in pipec: the program splits the backward of stage {stage}, which is compiled as one")]
    Parts { stage: u32 },
    #[error("bug in pipec: worker {worker} panicked: {what}")]
    Panic { worker: String, what: String },
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("weight `{name}` is {got:?}, which does not match the sharding of its stage over {devices} devices")]
    Weight { name: String, got: Vec<usize>, devices: usize },
    #[error(transparent)]
    Gather(#[from] GatherError),
    #[error("training diverged: {0}")]
    Diverged(Diverged),
}

impl TrainError {
    /// True if the error only reports that another worker stopped.
    pub fn lost_another(&self) -> bool {
        match self {
            TrainError::Worker(error) => error.lost_another(),
            _ => false,
        }
    }
}
