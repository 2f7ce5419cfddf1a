//! A training task: what is trained, on which data, and how.

use crate::model::LoadedModel;
use crate::plan::custom_schedule::CustomSchedule;
use crate::train::request::TrainRequest;
use compiler::pass::loss::Loss;
use compiler::plan::Plan;
use compiler::plan::schedule::Schedule;
use compiler::tensor::{DType, Tensor};
use runtime::checkpoint::writer::Saved;
use runtime::data::RowOrder;
use runtime::device::api::Device;
use runtime::optim::optimizer::Optimizer;
use runtime::optim::policy::Policy;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The length of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// A number of minibatches.
    Steps(u32),
    /// A number of epochs.
    Epochs(u32),
}

/// The source of the data.
pub enum Data {
    /// Arrays by name.
    Arrays(BTreeMap<String, Tensor>),
    /// Synthetic data from this seed.
    Synthetic(u64),
}

/// Held-out rows.
pub enum HeldOut {
    Nothing,
    /// The last rows of the data: this fraction.
    Share(f64),
    /// Separate arrays.
    Arrays(BTreeMap<String, Tensor>),
}

pub struct Task<'a> {
    /// The request, for the settings that neither the plan nor the model decides.
    pub request: &'a TrainRequest,
    pub loaded: &'a LoadedModel,
    /// Its initial weights.
    pub weights: &'a BTreeMap<String, Tensor>,
    pub plan: &'a Plan,
    pub schedule: Schedule,
    /// The custom schedule, if it is in a file.
    pub custom_schedule: Option<&'a CustomSchedule>,
    pub loss: Option<Loss>,
    /// The class axis.
    pub class_dim: Option<i64>,
    /// The type of all floats, if not the model's own.
    pub dtype: Option<DType>,
    /// True if running variances use the unbiased variance, as in PyTorch.
    pub unbiased: bool,
    /// Clipping, running statistics, loss scaling and weight staleness.
    pub policy: Policy,
    /// Samples per minibatch.
    pub batch: u64,
    /// Micro-batches per minibatch.
    pub microbatches: u32,
    /// The length of the run.
    pub length: Length,
    pub data: Data,
    /// Held-out rows for the evaluation at the end.
    pub held_out: HeldOut,
    pub order: RowOrder,
    pub optimizer: &'a Optimizer,
    /// Settings of resumable checkpoints, if any.
    pub checkpoint_settings: Option<CheckpointSettings<'a>>,
    pub tensor: usize,
    /// The devices of the workers, in turn.
    pub devices: &'a [Arc<dyn Device>],
    /// True if the run has several processes.
    pub has_processes: bool,
}

impl Task<'_> {
    /// Number of minibatches between the checkpoints of the run, if it writes others than the one at the end.
    pub fn checkpoint_interval(&self) -> Option<u32> {
        self.checkpoint_settings.as_ref().and(self.request.checkpoints.every)
    }

    /// True if all workers are on GPUs.
    pub fn is_on_gpus(&self) -> bool {
        self.devices.iter().all(|device| device.is_asynchronous())
    }
}

/// Settings of the checkpoints that a run writes.
pub struct CheckpointSettings<'a> {
    pub folder: &'a Path,
    /// Called for each checkpoint that was written or failed.
    pub on_saved: &'a dyn Fn(&Saved),
}
