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
use crate::exec::stage_code::StageCode;
use crate::exec::stage_tensor::{StageTensor, StageTensors};
use crate::optim::state::ParameterState;
use compiler::plan::StageId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A stage's contribution to a checkpoint from one worker.
pub struct StageSnapshot {
    pub key: SnapshotKey,
    /// Only set by the first replica, which saves what all replicas have in common.
    pub state: Option<StageState>,
    /// The first replica has all weights and states, and the others their shards of the optimizer state. Each has older
    /// versions and predicted weights of its micro-batches after the checkpoint. The versions are without tied weights
    /// that have versions of their own.
    pub tensors: StageTensors,
    pub counted_bytes: Option<CountedBytes>,
}

/// Where a snapshot is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SnapshotKey {
    pub stage: StageId,
    pub replica: u32,
    /// The worker's rank in its tensor-parallel group; 0 without one, and if the shards of all ranks are gathered.
    pub tensor_rank: usize,
    /// Minibatches before the checkpoint.
    pub minibatches: u32,
    /// Number of replicas that share the optimizer state: the replica count under ZeRO, else 1.
    pub replicas: u32,
}

/// What a stage has besides tensors after its last update before a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageState {
    /// Updates of each parameter.
    pub updates: Vec<u32>,
    /// Loss-scaling state: scale and number of good steps.
    pub scale: Option<(f64, u32)>,
}

/// The stage, and the replica, or 0 for shards of several replicas, which are merged.
pub type MergeKey = (u32, u32);

impl SnapshotKey {
    pub fn merge_key(&self) -> MergeKey {
        (self.stage.0, if self.replicas > 1 { 0 } else { self.replica })
    }
}

impl StageSnapshot {
    /// Size of all its buffers, whether shared or copied.
    pub fn bytes(&self) -> usize {
        self.tensors.values().map(|tensor| tensor.len()).sum()
    }

    /// Checks that a snapshot has the tensors of its stage, each with a size that it may have. Optimizer state may be
    /// one of [`SnapshotKey::replicas`] shards.
    pub fn check(&self, code: &StageCode) -> Result<(), &'static str> {
        let shard = (self.key.replica, self.key.replicas);
        if let Some((tensor, _)) =
            self.tensors.iter().find(|(tensor, buffer)| !tensor.has_size(buffer.len(), code, shard))
        {
            return Err(match tensor {
                StageTensor::State(_) => "a state does not have its size",
                StageTensor::Tied(..) => "a tied weight does not have its size",
                StageTensor::Version(..) | StageTensor::Forward(..) => {
                    "a weight of a version does not have the size of its shard"
                }
                _ => "a weight or its optimizer state does not have the size of its shard",
            });
        }
        let has = |tensor: StageTensor| self.tensors.contains_key(&tensor);
        let is_whole = |state: &StageState| {
            state.updates.len() == code.parameters.len()
                && (0..code.parameters.len()).all(|p| has(StageTensor::Weight(p)))
                && (0..code.states.len()).all(|index| has(StageTensor::State(index)))
        };
        match self.state.as_ref().is_none_or(is_whole) {
            true => Ok(()),
            false => Err("it does not have all weights and states"),
        }
    }
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
