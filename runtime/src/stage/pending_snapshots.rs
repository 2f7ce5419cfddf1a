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
    pub(super) waiting: Vec<WaitingSnapshot>,
    /// Complete snapshots.
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

/// A snapshot that waits until `missing` tied weights have reached its version.
pub(super) struct WaitingSnapshot {
    pub(super) version: u32,
    pub(super) missing: usize,
    pub(super) snapshot: StageSnapshot,
}

/// The weights of a micro-batch's forward pass.
pub(super) struct ForwardWeights {
    pub(super) item: u32,
    pub(super) version: u32,
    pub(super) weights: Weights,
    pub(super) is_version: bool,
}
