//! Merges the ZeRO optimizer-state shards of a stage's replicas.
//!
//! Checkpoint files do not depend on ZeRO: a run resumes under any plan.

use crate::checkpoint::StageSnapshot;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::optim::state::ParameterState;

/// Merges the shards of one stage's replicas into the first snapshot. Unsharded snapshots are returned unchanged.
pub fn merge_shards(mut snapshots: Vec<StageSnapshot>) -> Result<Vec<StageSnapshot>, DeviceError> {
    snapshots.sort_by_key(|snapshot| snapshot.replica);
    let Some((first, others)) = snapshots.split_first_mut() else { return Ok(snapshots) };
    let (true, Some(state)) = (first.replicas > 1, first.state.as_mut()) else { return Ok(snapshots) };
    for (p, optimizer_state) in state.optimizer_states.iter_mut().enumerate() {
        let other_states: Vec<&ParameterState> =
            others.iter().filter_map(|snapshot| snapshot.optimizer_states.get(p)).collect();
        for (index, state) in optimizer_state.state.iter_mut().enumerate() {
            let shards = other_states.iter().filter_map(|other_state| other_state.state.get(index));
            append(state, shards)?;
        }
        if let Some(master) = &mut optimizer_state.master {
            append(master, other_states.iter().filter_map(|other_state| other_state.master.as_ref()))?;
        }
    }
    others.iter_mut().for_each(|snapshot| snapshot.optimizer_states.clear());
    Ok(snapshots)
}

/// Concatenates shards in replica order; only the first replica has unsharded tensors.
fn append<'a>(buffer: &mut Buffer, shards: impl Iterator<Item = &'a Buffer>) -> Result<(), DeviceError> {
    let mut bytes = buffer.download()?.to_vec();
    for shard in shards {
        bytes.extend(&*shard.download()?);
    }
    *buffer = Buffer::host_copy(&bytes);
    Ok(())
}
