//! Checkpoints from which a run resumes with bitwise identical results.
//!
//! A checkpoint contains every stage after minibatch N: weights, optimizer state and running statistics after the
//! updates of the rounds up to N. No worker stops for it. Each contributes a [`StageSnapshot`] at its last update
//! before N; the snapshots are written in the background, and the checkpoint is complete when all are written.
//!
//! Without a flush, micro-batches after N have already started with older weights. The snapshot includes the weights of
//! their forwards, also predicted ones. A resumed run executes only the instructions of micro-batches after N
//! (`schedule::resume`). It repeats those forwards with the same weights.
//!
//! ```text
//! step-00000012/                        renamed last: a folder of this name is complete
//!   manifest.json                       run, position and hashes of all files
//!   stage-0.safetensors                 parameters and states by the model's names; narrow parameters in f32
//!   stage-0.optimizer.safetensors       `NAME/exp_avg` and the like by PyTorch's names, `NAME/step` updates so far
//!   stage-0.in-flight.safetensors       `v5/NAME` of older versions, `item7/NAME` of predicted weights
//!   stage-0.replica-1.in-flight.safetensors
//! ```

pub mod barrier;
pub mod encode;
pub mod error;
pub mod files;
pub mod find;
pub mod lock;
pub mod manifest;
pub mod merge_shards;
pub mod points;
pub mod resume_point;
pub mod writer;

use crate::device::buffer::Buffer;
use crate::device::memory_counter::CountedBytes;
use crate::exec::executor::Weights;
use crate::optim::state::ParameterState;
use compiler::plan::StageId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A stage's contribution to a checkpoint from one worker.
pub struct StageSnapshot {
    pub stage: StageId,
    pub replica: u32,
    /// The worker's rank in its tensor-parallel group; 0 without one, and if the shards of all ranks are gathered.
    pub tensor_rank: usize,
    /// Minibatches before the checkpoint.
    pub minibatches: u32,
    /// Number of replicas that share the optimizer state: the replica count under ZeRO, else 1.
    pub replicas: u32,
    /// Optimizer-state shards of a replica other than the first.
    pub optimizer_states: Vec<ParameterState>,
    /// State common to all replicas, and the first one's shards. Only set by the first replica.
    pub state: Option<StageState>,
    /// Older versions used by micro-batches after the checkpoint, without tied weights that have versions of their own.
    pub versions: BTreeMap<u32, Weights>,
    /// Forward weights of micro-batches after the checkpoint that are not a version (predicted weights).
    pub forwards: BTreeMap<u32, Weights>,
    /// Older versions of tied weights that have versions of their own, by parameter index.
    pub tied_weights: BTreeMap<usize, BTreeMap<u32, Arc<Buffer>>>,
    pub counted_bytes: Option<CountedBytes>,
}

/// The stage, and the replica, or 0 for shards of several replicas, which are merged.
pub type MergeKey = (u32, u32);

impl StageSnapshot {
    pub fn merge_key(&self) -> MergeKey {
        (self.stage.0, if self.replicas > 1 { 0 } else { self.replica })
    }

    /// Size of all its buffers, whether shared or copied.
    pub fn bytes(&self) -> usize {
        let state_bytes = |state: &ParameterState| {
            state.state.iter().chain(&state.master).chain(&state.drift).map(Buffer::len).sum::<usize>()
        };
        let tied_weights = self.tied_weights.values().flat_map(BTreeMap::values);
        let versions =
            self.versions.values().chain(self.forwards.values()).chain(self.state.iter().map(|state| &state.weights));
        let weights = versions.flatten().chain(tied_weights).map(|weight| weight.len()).sum::<usize>();
        let stage_bytes = |state: &StageState| {
            state.optimizer_states.iter().map(state_bytes).sum::<usize>()
                + state.states.iter().map(Buffer::len).sum::<usize>()
        };
        let weights = weights + self.optimizer_states.iter().map(state_bytes).sum::<usize>();
        weights + self.state.as_ref().map_or(0, stage_bytes)
    }
}

/// A stage after its last update before a checkpoint.
pub struct StageState {
    pub weights: Weights,
    pub optimizer_states: Vec<ParameterState>,
    pub states: Vec<Buffer>,
    /// Loss-scaling state: scale and number of good steps.
    pub scale: Option<(f64, u32)>,
}

/// The state of a stage in a resumed run, besides weights and running statistics.
#[derive(Default)]
pub struct ResumeState {
    pub version: u32,
    /// Optimizer state by parameter; masters come with the weights.
    pub optimizer_states: Vec<ParameterState>,
    pub versions: BTreeMap<u32, Weights>,
    /// Older versions that are unknown; the checkpoint's version replaces them.
    pub unknown_versions: Vec<u32>,
    /// Weights of forwards to repeat, by micro-batch.
    pub forwards: BTreeMap<u32, Weights>,
    /// Older versions of tied weights, by parameter index.
    pub tied_weights: BTreeMap<usize, BTreeMap<u32, Arc<Buffer>>>,
}
