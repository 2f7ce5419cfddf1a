//! A job holds the inputs of a training run; options, reports and results go with it.

use crate::checkpoint::StageSnapshot;
use crate::checkpoint::barrier::MinibatchBarrier;
use crate::checkpoint::points::Cuts;
use crate::checkpoint::resume_point::ResumePoint;
use crate::data::Batches;
use crate::device::api::Device;
use crate::exec::stage_code::StageCode;
use crate::optim::optimizer::Optimizer;
use crate::optim::policy::Policy;
use crate::stage::saved_weights::Checkpoint;
use crate::stage::worker::Span;
use compiler::schedule::Program;
use compiler::tensor::Tensor;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The inputs of a training run.
pub struct TrainJob<'a> {
    pub codes: &'a [StageCode],
    pub program: &'a Program,
    /// Initial parameters and states, by name.
    pub weights: &'a BTreeMap<String, Tensor>,
    pub batches: &'a Batches,
    pub optimizer: &'a Optimizer,
    pub policy: Policy,
    /// Return the gradients of the last step.
    pub keep_gradients: bool,
}

/// Resume and checkpoint options. The default starts from the beginning and makes no checkpoints.
#[derive(Default)]
pub struct RunOptions<'a> {
    /// The checkpoint to resume from; its weights are in [`TrainJob::weights`].
    pub start: Option<&'a ResumePoint>,
    /// Minibatches after which checkpoints are made.
    pub cuts: Option<Cuts>,
    pub barrier: Option<&'a MinibatchBarrier<'a>>,
    /// The devices of the workers, in turn; the CPU if there are none. They must accept the kernels of
    /// [`TrainJob::codes`].
    pub devices: Vec<Arc<dyn Device>>,
    /// Receives snapshots, on a separate thread.
    pub on_snapshot: Option<&'a mut (dyn FnMut(StageSnapshot) + Send)>,
    /// Receives the weights of `Checkpoint` instructions while the run continues; those of one worker in order.
    pub on_checkpoint: Option<&'a mut dyn FnMut(Checkpoint)>,
}

/// Progress report of a finished minibatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepDone {
    /// Counted from 0.
    pub step: usize,
    /// Mean loss over the micro-batches.
    pub loss: f64,
    /// Seconds since the start of the run.
    pub seconds: f64,
}

/// The result of a training run.
pub struct Trained {
    /// Parameters and states, by name.
    pub weights: BTreeMap<String, Tensor>,
    /// Averaged gradients of the last step, if requested.
    pub gradients: BTreeMap<String, Tensor>,
    pub losses: Vec<f64>,
    /// Wall time of the workers.
    pub seconds: f64,
    /// Recorded activity, by worker.
    pub spans: Vec<Vec<Span>>,
    /// Peak bytes, by worker.
    pub peak_memory_bytes: Vec<u64>,
    /// Additional peak bytes of unwritten snapshots, by worker.
    pub checkpoint_bytes: Vec<u64>,
}
