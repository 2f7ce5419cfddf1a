//! Pending snapshots wait for their last weights, or for the checkpoint writer.

use crate::checkpoint::StageSnapshot;
use crate::device::memory_counter::MemoryCounter;
use crate::exec::executor::Weights;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Default)]
pub struct PendingSnapshots {
    /// Number of tied-weight versions to keep; 0 without checkpoints.
    pub window: u32,
    pub(super) forward_weights: Vec<ForwardWeights>,
    /// Snapshots waiting for a tied weight to reach a version, and complete ones.
    pub(super) waiting: Vec<(u32, StageSnapshot)>,
    pub(super) ready: Vec<StageSnapshot>,
    /// Restored weights of forward passes that are repeated after a resume.
    pub forwards: BTreeMap<u32, Weights>,
    pub(super) counter: Arc<MemoryCounter>,
}

impl PendingSnapshots {
    pub fn new(window: u32, counter: &Arc<MemoryCounter>) -> PendingSnapshots {
        PendingSnapshots { window, counter: counter.clone(), ..PendingSnapshots::default() }
    }
}

/// The weights of a micro-batch's forward pass.
pub(super) struct ForwardWeights {
    pub(super) item: u32,
    pub(super) version: u32,
    pub(super) weights: Weights,
    pub(super) is_version: bool,
}
