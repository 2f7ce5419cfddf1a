//! Merges the ZeRO optimizer-state shards of a stage's replicas.
//!
//! Checkpoint files do not depend on ZeRO: a run resumes under any plan.

use crate::checkpoint::StageSnapshot;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::exec::stage_tensor::StageTensor;
use std::sync::Arc;

/// Merges the shards of one stage's replicas into the first snapshot, in replica order. Unsharded snapshots are
/// returned unchanged.
pub fn merge_shards(mut snapshots: Vec<StageSnapshot>) -> Result<Vec<StageSnapshot>, DeviceError> {
    snapshots.sort_by_key(|snapshot| snapshot.key.replica);
    let Some((first, others)) = snapshots.split_first_mut() else { return Ok(snapshots) };
    if first.key.replicas <= 1 || first.state.is_none() {
        return Ok(snapshots);
    }
    let is_optimizer = |place: &StageTensor| matches!(place, StageTensor::Optimizer(..));
    for (place, tensor) in first.tensors.iter_mut().filter(|(place, _)| is_optimizer(place)) {
        let mut bytes = tensor.download()?.to_vec();
        // Only the first replica has unsharded tensors.
        for shard in others.iter().filter_map(|snapshot| snapshot.tensors.get(place)) {
            bytes.extend(&*shard.download()?);
        }
        *tensor = Arc::new(Buffer::host_copy(&bytes));
    }
    others.iter_mut().for_each(|snapshot| snapshot.tensors.retain(|place, _| !is_optimizer(place)));
    snapshots.iter_mut().for_each(|snapshot| snapshot.key.replicas = 1);
    Ok(snapshots)
}
