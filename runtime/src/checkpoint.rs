//! Checkpoints from which a run goes on as if nothing had happened.
//!
//! A checkpoint is a cut after minibatch N at every stage: weights, optimizer state and running statistics as they are after the
//! updates of the rounds up to N. Nobody stops for it. Each worker gives its [`StageSnapshot`] when it makes the last of those updates, the
//! parts are written beside the run, and the checkpoint is there when all are.
//!
//! Without a flush, items behind the cut have begun by then with older weights. What their forwards computed with belongs to the part,
//! predicted weights too. A resumed run has the instructions of items behind the cut and nothing else (`schedule::rest`); it runs
//! those forwards again with the same weights, and so comes to the same bits.
//!
//! ```text
//! step-00000012/                        the name is given last: what bears it is whole
//!   manifest.json                       what run it is of, where it stands, hashes of all files
//!   stage-0.safetensors                 parameters and states by the model's names; narrow parameters in f32
//!   stage-0.optimizer.safetensors       `NAME/exp_avg` and the like by PyTorch's names, `NAME/step` updates so far
//!   stage-0.in-flight.safetensors       `v5/NAME` of older versions, `item7/NAME` of predicted weights
//!   stage-0.replica-1.in-flight.safetensors
//! ```

pub mod barrier;
pub mod devices;
pub mod encode;
pub mod files;
pub mod find;
pub mod lock;
pub mod manifest;
pub mod merge_shards;
pub mod points;
pub mod writer;

use crate::device::buffer::{Buffer, CountedBytes};
use crate::exec::executor::Weights;
use compiler::plan::StageId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What one worker gives of one of its stages to a checkpoint.
pub struct StageSnapshot {
    /// The stage.
    pub stage: StageId,
    /// Which of its replicas.
    pub replica: u32,
    /// Minibatches in front of the cut.
    pub minibatches: u32,
    /// Replicas whose parts tell together what moves the parameters: as many as have shares of that, 1 where each has all.
    pub replicas: u32,
    /// This one's share of what moves the parameters, where the first has another.
    pub moves: Vec<ParameterState>,
    /// What all replicas have alike, and the first one's share of what they have not: the first one's part has it.
    pub whole: Option<StageState>,
    /// Older versions that items behind the cut see, without shared parameters that have versions of their own.
    pub versions: BTreeMap<u32, Weights>,
    /// What forwards of items behind the cut computed with, where that is no version.
    pub forwards: BTreeMap<u32, Weights>,
    /// Older versions of shared parameters that have versions of their own, by the parameter's place.
    pub shared: BTreeMap<usize, BTreeMap<u32, Arc<Buffer>>>,
    /// Counts what the part holds until it is written.
    pub counted: Option<CountedBytes>,
}

impl StageSnapshot {
    /// All bytes that it holds, by reference or as copies.
    pub fn bytes(&self) -> usize {
        let moved =
            |of: &ParameterState| of.state.iter().chain(&of.master).chain(&of.drift).map(Buffer::len).sum::<usize>();
        let shared = self.shared.values().flat_map(BTreeMap::values);
        let sets = self.versions.values().chain(self.forwards.values()).chain(self.whole.iter().map(|of| &of.weights));
        let weights = sets.flatten().chain(shared).map(|weight| weight.len()).sum::<usize>();
        let whole = |of: &StageState| {
            of.moves.iter().map(moved).sum::<usize>() + of.states.iter().map(Buffer::len).sum::<usize>()
        };
        let weights = weights + self.moves.iter().map(moved).sum::<usize>();
        weights + self.whole.as_ref().map_or(0, whole)
    }
}

/// A stage after the last update in front of a cut.
pub struct StageState {
    /// Parameters.
    pub weights: Weights,
    /// How they move.
    pub moves: Vec<ParameterState>,
    /// States.
    pub states: Vec<Buffer>,
    /// The scale of the loss, and good steps since it last changed, where it is scaled.
    pub scale: Option<(f64, u32)>,
}

/// What the next update of a parameter needs beside its gradient.
#[derive(Default)]
pub struct ParameterState {
    /// The weights in `f32`, where they are narrow.
    pub master: Option<Buffer>,
    /// The optimizer's tensors.
    pub state: Vec<Buffer>,
    /// The moving average of its steps, where there is one.
    pub drift: Option<Buffer>,
    /// Updates so far.
    pub updates: u32,
}

/// The state of a stage in the middle of a run, beside weights and running statistics.
#[derive(Default)]
pub struct ResumeState {
    /// Updates that the weights have seen.
    pub version: u32,
    /// How parameters move; masters come with the weights.
    pub moves: Vec<ParameterState>,
    /// Older versions.
    pub versions: BTreeMap<u32, Weights>,
    /// Older versions for which this one stands in, where nobody knows them any more.
    pub alike: Vec<u32>,
    /// Weights of forwards that are run again.
    pub forwards: BTreeMap<u32, Weights>,
    /// Older versions of shared parameters, by the parameter's place.
    pub shared: BTreeMap<usize, BTreeMap<u32, Arc<Buffer>>>,
}
