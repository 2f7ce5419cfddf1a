//! A stage's snapshot for a checkpoint, and the start of a stage from one.
//!
//! A snapshot holds references to weights, like one more stashed version: the next update allocates new buffers.
//! Optimizer state is updated in place, so it is copied. Plans do not count checkpoints, so this memory is counted
//! separately until it is written. Forward passes that run past the checkpoint before its last update leave their
//! weights here. A tied weight with versions of its own reaches the checkpoint later than its stage; the snapshot waits
//! for it.

use crate::checkpoint::{ResumeState, StageSnapshot, StageState};
use crate::comm::communicator::CollectiveError;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::memory_counter::CountedBytes;
use crate::exec::executor::Weights;
use crate::optim::state::ParameterState;
use crate::stage::lag::Lag;
use crate::stage::pending_snapshots::Held;
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
    pub given: Vec<u32>,
    /// First micro-batch that a later checkpoint may need.
    pub next: u32,
    /// Loss-scaling state: scale and number of good steps.
    pub scale: Option<(f64, u32)>,
}

impl StageWorker<'_> {
    /// Restores the state of a resumed run.
    pub(super) fn begin(&mut self, begin: ResumeState) -> Result<(), DeviceError> {
        let ResumeState { version, moves, mut versions, alike, forwards, mut shared } = begin;
        let loaded = versions.values_mut().flatten().filter_map(Arc::get_mut);
        let ledger = self.executor.device.ledger();
        loaded.for_each(|weight| weight.count_in(&ledger));
        let first = std::mem::take(&mut self.versions).into_values().next().unwrap_or_default();
        versions.extend(alike.into_iter().chain([version]).map(|of| (of, first.clone())));
        for weights in versions.values_mut() {
            for late in &self.late {
                weights[late.parameter] = Arc::new(Buffer::empty());
            }
        }
        self.versions = versions;
        for late in &mut self.late {
            late.version = version;
            let mut older = shared.remove(&late.parameter).unwrap_or_default();
            // Versions after the oldest are known up to the checkpoint.
            if let Some((first, weight)) = older.pop_first() {
                let newest = std::mem::replace(&mut late.weight, weight);
                late.version = first;
                older.insert(version, newest);
            }
            late.given = older;
            if self.cutting.window > 0 {
                late.kept = BTreeMap::from([(late.version, late.weight.clone())]);
            }
        }
        self.uncounted = moves.iter().map(|of| i64::from(version) - i64::from(of.updates)).collect();
        self.updater.begin(moves, &self.executor.device)?;
        self.cutting.forwards = forwards;
        Ok(())
    }

    /// The newest version that is gathered completely.
    pub fn newest_version(&self) -> u32 {
        self.versions.keys().rev().find(|version| !self.stepped.contains_key(version)).copied().unwrap_or(0)
    }

    /// Keeps the weights for a micro-batch's forward after a checkpoint, whether or not the forward runs.
    pub fn hold(&mut self, item: u32, version: u32, lag: Lag) -> Result<(), DeviceError> {
        let (weights, predicted) = self.weights_of(item, version, lag)?;
        self.keep(item, version, &weights, predicted)
    }

    pub(super) fn keep(
        &mut self,
        item: u32,
        version: u32,
        weights: &Weights,
        predicted: bool,
    ) -> Result<(), DeviceError> {
        let of_item = |held: &&Held| held.is_version && held.version == version;
        let weights = match self.cutting.held.iter().find(of_item).filter(|_| !predicted) {
            Some(held) => held.weights.clone(),
            None if predicted => weights.clone(),
            None => {
                let weights = self.versions.get(&version).cloned().unwrap_or_default();
                // Replicas may have released their shards by the time of the checkpoint. If one is lost, no checkpoint
                // is written.
                self.whole_unless_lost(version, &weights)?.unwrap_or(weights)
            }
        };
        self.release_all(&weights)?;
        self.cutting.held.push(Held { item, version, weights, is_version: !predicted });
        Ok(())
    }

    /// Gathers a version; `None` if a replica is lost.
    fn whole_unless_lost(&self, version: u32, weights: &Weights) -> Result<Option<Weights>, DeviceError> {
        match self.whole(version, weights) {
            Ok(whole) => Ok(Some(whole)),
            Err(CollectiveError::PeerLost) => Ok(None),
            Err(CollectiveError::Device(fault)) => Err(fault),
        }
    }

    /// Hands weights over to the thread that writes snapshots.
    fn release_all(&self, weights: &Weights) -> Result<(), DeviceError> {
        weights.iter().try_for_each(|weight| self.executor.device.release(weight))
    }

    /// Takes a snapshot, once the version of the last update before the checkpoint is complete.
    pub fn cut(&mut self, cut: CheckpointPoint) -> Result<(), DeviceError> {
        let CheckpointPoint { minibatches, version, replica, older, given, next, scale } = cut;
        let (mut versions, mut forwards) = (BTreeMap::new(), BTreeMap::new());
        for (item, of) in older {
            let held = self.cutting.held.iter().find(|held| held.item == item);
            match held {
                Some(held) if !held.is_version => _ = forwards.insert(item, held.weights.clone()),
                _ if given.contains(&of) => {}
                Some(held) => _ = versions.entry(of).or_insert_with(|| held.weights.clone()),
                // Its forward has not run, so its version still exists.
                None => {
                    if let (Some(weights), false) = (self.versions.get(&of), versions.contains_key(&of)) {
                        let Some(whole) = self.whole_unless_lost(of, weights)? else { return Ok(()) };
                        self.release_all(&whole)?;
                        versions.insert(of, whole);
                    }
                }
            }
        }
        self.cutting.held.retain(|held| held.item >= next);
        let mut whole = None;
        if self.is_first {
            let newest = self.versions.get(&version).map(|weights| self.whole_unless_lost(version, weights));
            let Some(weights) = newest.unwrap_or(Ok(Some(Weights::new())))? else { return Ok(()) };
            self.release_all(&weights)?;
            let moves = (0..self.code.parameters.len()).map(|p| self.moves(p, version));
            let states = self.executor.states.iter().map(|state| {
                let copy = self.executor.device.copy_of(state.region())?;
                self.executor.device.release(&copy)?;
                Ok(copy)
            });
            let (moves, states) = (moves.collect::<Result<_, _>>()?, states.collect::<Result<_, DeviceError>>()?);
            whole = Some(StageState { weights, moves, states, scale });
        }
        let (stage, shared) = (self.stage, BTreeMap::new());
        let replicas = if self.share.shards_any() { self.share.replicas() as u32 } else { 1 };
        let own = |p: usize| match self.share.is_sharded(p) {
            true => self.moves(p, version),
            false => Ok(ParameterState::default()),
        };
        let is_other = replicas > 1 && !self.is_first;
        let moves = match is_other {
            true => (0..self.code.parameters.len()).map(own).collect::<Result<_, _>>()?,
            false => Vec::new(),
        };
        let tensor_rank = self.executor.tensor_rank.as_ref().map_or(0, |rank| rank.rank());
        let mut part = StageSnapshot {
            stage,
            replica,
            tensor_rank,
            minibatches,
            replicas,
            moves,
            whole,
            versions,
            forwards,
            shared,
            counted: None,
        };
        part.counted = Some(CountedBytes::new(&self.cutting.ledger, part.bytes()));
        if self.late.is_empty() || part.whole.is_none() {
            self.cutting.ready.push(part);
        } else {
            self.cutting.waiting.push((version, part));
        }
        Ok(())
    }

    fn moves(&self, p: usize, version: u32) -> Result<ParameterState, DeviceError> {
        let updates = u32::try_from(i64::from(version) - self.uncounted[p]).unwrap_or(0);
        Ok(ParameterState { updates, ..self.updater.moves(p, &self.executor.device)? })
    }

    /// Drops a version's weight. Returns true if a snapshot still holds it: it is then charged to the snapshot and
    /// freed once that is written.
    pub(super) fn drop_weight(&self, weight: &Arc<Buffer>) -> bool {
        let is_kept = self.versions.values().flatten().any(|other| Arc::ptr_eq(other, weight));
        let is_held = self.cutting.window > 0 && Arc::strong_count(weight) > 1 && !is_kept;
        if is_held {
            weight.release_slot();
        }
        is_held
    }

    /// A tied weight has reached another version: completes the snapshots waiting for it.
    pub(super) fn late_came(&mut self, at: usize) -> Result<(), DeviceError> {
        if self.cutting.window == 0 {
            return Ok(());
        }
        let (p, version) = (self.late[at].parameter, self.late[at].version);
        let weight = self.late[at].weight.clone();
        self.executor.device.release(&weight)?;
        self.late[at].kept.insert(version, weight.clone());
        let oldest = version.saturating_sub(self.cutting.window);
        self.late[at].kept.retain(|of, _| *of >= oldest);
        let Some(of) = self.cutting.waiting.iter().position(|(of, _)| *of == version) else { return Ok(()) };
        let moves = self.moves(p, version)?;
        let part = &mut self.cutting.waiting[of].1;
        let older = self.late[at].kept.range(..version).map(|(of, weight)| (*of, weight.clone())).collect();
        part.shared.insert(p, older);
        if let Some(whole) = &mut part.whole {
            whole.weights[p] = weight;
            whole.moves[p] = moves;
        }
        if part.shared.len() == self.late.len() {
            let (_, mut part) = self.cutting.waiting.remove(of);
            part.counted = Some(CountedBytes::new(&self.cutting.ledger, part.bytes()));
            self.cutting.ready.push(part);
        }
        Ok(())
    }

    /// Removes the complete snapshots.
    pub fn parts(&mut self) -> Vec<StageSnapshot> {
        std::mem::take(&mut self.cutting.ready)
    }
}
