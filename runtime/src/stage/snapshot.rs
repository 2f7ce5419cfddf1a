//! A stage's snapshot for a checkpoint, and the start of a stage from one.
//!
//! A snapshot holds references to weights, like one more stashed version: the next update allocates new buffers.
//! Optimizer state is updated in place, so it is copied. Plans do not count checkpoints, so this memory is counted
//! separately until it is written. Forward passes that run past the checkpoint before its last update leave their
//! weights here. A tied weight with versions of its own reaches the checkpoint later than its stage; the snapshot waits
//! for it.

use crate::checkpoint::{ResumeState, SnapshotKey, StageSnapshot, StageState};
use crate::comm::communicator::PEER_LOST;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::memory_counter::CountedBytes;
use crate::exec::executor::Weights;
use crate::exec::stage_code::StageCode;
use crate::exec::stage_tensor::{StageTensor, StageTensors};
use crate::stage::lag::Lag;
use crate::stage::pending_snapshots::{ForwardWeights, WaitingSnapshot};
use crate::stage::stage_worker::StageWorker;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A checkpoint position on one worker.
pub struct CheckpointPoint {
    /// Minibatches before the checkpoint.
    pub minibatches: u32,
    /// Updates before the checkpoint.
    pub version: u32,
    pub replica: u32,
    /// Micro-batches of this replica after the checkpoint that see older weights, with their versions.
    pub older: Vec<(u32, u32)>,
    /// Versions among those that the first replica saves.
    pub first_replica_versions: Vec<u32>,
    /// First micro-batch that a later checkpoint may need.
    pub next_item: u32,
    /// Loss-scaling state: scale and number of good steps.
    pub scale: Option<(f64, u32)>,
}

impl StageWorker<'_> {
    /// Restores the state of a resumed run.
    pub(super) fn restore(&mut self, resume: ResumeState) -> Result<(), DeviceError> {
        let ResumeState { version, optimizer_states, mut versions, unknown_versions, forwards, mut tied_weights } =
            resume;
        let weights = versions.values_mut().flatten().filter_map(Arc::get_mut);
        let counter = self.executor.device.ledger();
        weights.for_each(|weight| weight.count_in(&counter));
        let first = std::mem::take(&mut self.versions).into_values().next().unwrap_or_default();
        versions.extend(unknown_versions.into_iter().chain([version]).map(|version| (version, first.clone())));
        for weights in versions.values_mut() {
            for late in &self.late_weights {
                weights[late.parameter] = Arc::new(Buffer::empty());
            }
        }
        self.versions = versions;
        for late in &mut self.late_weights {
            late.version = version;
            let mut older = tied_weights.remove(&late.parameter).unwrap_or_default();
            // Versions after the oldest are known up to the checkpoint.
            if let Some((first, weight)) = older.pop_first() {
                let newest = std::mem::replace(&mut late.weight, weight);
                late.version = first;
                older.insert(version, newest);
            }
            late.restored = older;
            if self.snapshots.window > 0 {
                late.recent = BTreeMap::from([(late.version, late.weight.clone())]);
            }
        }
        self.skipped_updates =
            optimizer_states.iter().map(|state| i64::from(version) - i64::from(state.updates)).collect();
        self.updater.restore(optimizer_states, &self.executor.device)?;
        self.snapshots.forwards = forwards;
        Ok(())
    }

    /// The newest version that is gathered completely.
    pub fn newest_version(&self) -> u32 {
        self.versions.keys().rev().find(|version| !self.stepped.contains_key(version)).copied().unwrap_or(0)
    }

    /// Keeps the weights for a micro-batch's forward after a checkpoint, whether or not the forward runs.
    pub fn keep_forward_weights(&mut self, item: u32, version: u32, lag: Lag) -> Result<(), DeviceError> {
        let (weights, predicted) = self.weights_of(item, version, lag)?;
        self.keep_weights(item, version, &weights, predicted)
    }

    pub(super) fn keep_weights(
        &mut self,
        item: u32,
        version: u32,
        weights: &Weights,
        predicted: bool,
    ) -> Result<(), DeviceError> {
        let is_same_version = |weights: &&ForwardWeights| weights.is_version && weights.version == version;
        let weights = match self.snapshots.forward_weights.iter().find(is_same_version).filter(|_| !predicted) {
            Some(held) => held.weights.clone(),
            None if predicted => weights.clone(),
            None => {
                let weights = self.versions.get(&version).cloned().unwrap_or_default();
                // Replicas may have released their shards by the time of the checkpoint. If one is lost, no checkpoint
                // is written.
                self.try_gather_weights(version, &weights)?.unwrap_or(weights)
            }
        };
        self.release_all(&weights)?;
        self.snapshots.forward_weights.push(ForwardWeights { item, version, weights, is_version: !predicted });
        Ok(())
    }

    /// Gathers a version; `None` if a replica is lost.
    fn try_gather_weights(&self, version: u32, weights: &Weights) -> Result<Option<Weights>, DeviceError> {
        match self.gather_weights(version, weights) {
            Ok(whole) => Ok(Some(whole)),
            Err(PEER_LOST) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    /// Hands weights over to the thread that writes snapshots.
    fn release_all(&self, weights: &Weights) -> Result<(), DeviceError> {
        weights.iter().try_for_each(|weight| self.executor.device.release(weight))
    }

    /// Takes a snapshot, once the version of the last update before the checkpoint is complete.
    pub fn take_snapshot(&mut self, point: CheckpointPoint) -> Result<(), DeviceError> {
        let CheckpointPoint { minibatches, version, replica, older, first_replica_versions, next_item, scale } = point;
        let (mut versions, mut tensors) = (BTreeMap::new(), StageTensors::new());
        for (item, version) in older {
            let forward_weights =
                self.snapshots.forward_weights.iter().find(|forward_weights| forward_weights.item == item);
            match forward_weights {
                Some(forward_weights) if !forward_weights.is_version => {
                    insert_weights(&mut tensors, self.code, &forward_weights.weights, |p| StageTensor::Forward(item, p))
                }
                _ if first_replica_versions.contains(&version) => {}
                Some(forward_weights) => _ = versions.entry(version).or_insert_with(|| forward_weights.weights.clone()),
                // Its forward has not run, so its version still exists.
                None => {
                    if let (Some(weights), false) = (self.versions.get(&version), versions.contains_key(&version)) {
                        let Some(whole) = self.try_gather_weights(version, weights)? else { return Ok(()) };
                        self.release_all(&whole)?;
                        versions.insert(version, whole);
                    }
                }
            }
        }
        for (version, weights) in versions {
            insert_weights(&mut tensors, self.code, &weights, |p| StageTensor::Version(version, p));
        }
        self.snapshots.forward_weights.retain(|forward_weights| forward_weights.item >= next_item);
        let mut state = None;
        if self.is_first {
            let newest = self.versions.get(&version).map(|weights| self.try_gather_weights(version, weights));
            let Some(weights) = newest.unwrap_or(Ok(Some(Weights::new())))? else { return Ok(()) };
            self.release_all(&weights)?;
            insert_weights(&mut tensors, self.code, &weights, StageTensor::Weight);
            for (index, state) in self.executor.states.iter().enumerate() {
                let copy = self.executor.device.copy_of(state.region())?;
                self.executor.device.release(&copy)?;
                tensors.insert(StageTensor::State(index), Arc::new(copy));
            }
            let updates = (0..self.code.parameters.len()).map(|p| self.updates(p, version)).collect();
            state = Some(StageState { updates, scale });
        }
        // Every group has all shards, and the first one saves them.
        let saves_shards = self.shard.has_shards() && self.shard.group() == 0;
        let replicas = if saves_shards { self.shard.degree as u32 } else { 1 };
        let is_saved = |p: &usize| self.is_first || replicas > 1 && self.shard.is_sharded(*p);
        for p in (0..self.code.parameters.len()).filter(is_saved) {
            self.copy_optimizer_state(p, &mut tensors)?;
        }
        let tensor_rank = self.executor.tensor_rank.as_ref().map_or(0, |rank| rank.rank());
        let key = SnapshotKey { stage: self.stage, replica, tensor_rank, minibatches, replicas };
        let mut snapshot = StageSnapshot { key, state, tensors, counted_bytes: None };
        snapshot.counted_bytes = Some(CountedBytes::new(&self.snapshots.counter, snapshot.bytes()));
        if self.late_weights.is_empty() || snapshot.state.is_none() {
            self.snapshots.ready.push(snapshot);
        } else {
            self.snapshots.waiting.push(WaitingSnapshot { version, missing: self.late_weights.len(), snapshot });
        }
        Ok(())
    }

    /// The updates of a parameter before a version of the stage.
    fn updates(&self, p: usize, version: u32) -> u32 {
        u32::try_from(i64::from(version) - self.skipped_updates[p]).unwrap_or(0)
    }

    fn copy_optimizer_state(&self, p: usize, to: &mut StageTensors) -> Result<(), DeviceError> {
        let state = self.updater.copy_state(p, &self.executor.device)?;
        to.extend(state.into_iter().map(|(tensor, copy)| (tensor, Arc::new(copy))));
        Ok(())
    }

    /// Drops a version's weight. Returns true if a snapshot still holds it: it is then charged to the snapshot and
    /// freed once that is written.
    pub(super) fn drop_weight(&self, weight: &Arc<Buffer>) -> bool {
        let is_kept = self.versions.values().flatten().any(|other| Arc::ptr_eq(other, weight));
        let is_held = self.snapshots.window > 0 && Arc::strong_count(weight) > 1 && !is_kept;
        if is_held {
            weight.release_slot();
        }
        is_held
    }

    /// A tied weight has reached another version: completes the snapshots waiting for it.
    pub(super) fn complete_snapshots(&mut self, index: usize) -> Result<(), DeviceError> {
        if self.snapshots.window == 0 {
            return Ok(());
        }
        let (p, version) = (self.late_weights[index].parameter, self.late_weights[index].version);
        let weight = self.late_weights[index].weight.clone();
        self.executor.device.release(&weight)?;
        self.late_weights[index].recent.insert(version, weight.clone());
        let oldest = version.saturating_sub(self.snapshots.window);
        self.late_weights[index].recent.retain(|version, _| *version >= oldest);
        let waiting = self.snapshots.waiting.iter().position(|waiting| waiting.version == version);
        let Some(index_of_waiting) = waiting else { return Ok(()) };
        let mut tensors = StageTensors::from([(StageTensor::Weight(p), weight)]);
        self.copy_optimizer_state(p, &mut tensors)?;
        let older = self.late_weights[index].recent.range(..version);
        tensors.extend(older.map(|(of, weight)| (StageTensor::Tied(p, *of), weight.clone())));
        let updates = self.updates(p, version);
        let waiting = &mut self.snapshots.waiting[index_of_waiting];
        waiting.snapshot.tensors.append(&mut tensors);
        waiting.snapshot.state.iter_mut().for_each(|state| state.updates[p] = updates);
        waiting.missing -= 1;
        if waiting.missing == 0 {
            let WaitingSnapshot { mut snapshot, .. } = self.snapshots.waiting.remove(index_of_waiting);
            snapshot.counted_bytes = Some(CountedBytes::new(&self.snapshots.counter, snapshot.bytes()));
            self.snapshots.ready.push(snapshot);
        }
        Ok(())
    }

    /// Removes the complete snapshots.
    pub fn take_ready_snapshots(&mut self) -> Vec<StageSnapshot> {
        std::mem::take(&mut self.snapshots.ready)
    }
}

/// Adds the weights of a version. A tied weight with versions of its own is empty there, and comes by itself.
fn insert_weights(
    tensors: &mut StageTensors,
    code: &StageCode,
    weights: &Weights,
    place: impl Fn(usize) -> StageTensor,
) {
    let weights = code.parameters.iter().zip(weights).enumerate();
    let present = weights.filter(|(_, (named, weight))| !weight.is_empty() || named.bytes == 0);
    tensors.extend(present.map(|(p, (_, weight))| (place(p), weight.clone())));
}
