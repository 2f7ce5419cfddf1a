//! Merges the ZeRO optimizer-state shards of a stage's replicas.
//!
//! Checkpoint files do not depend on ZeRO: a run resumes under any plan.

use crate::checkpoint::StageSnapshot;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::optim::state::ParameterState;

/// Merges the shards of one stage's replicas into the first snapshot. Unsharded snapshots are returned unchanged.
pub fn join(mut parts: Vec<StageSnapshot>) -> Result<Vec<StageSnapshot>, DeviceError> {
    parts.sort_by_key(|part| part.replica);
    let Some((first, others)) = parts.split_first_mut() else { return Ok(parts) };
    let (true, Some(whole)) = (first.replicas > 1, first.whole.as_mut()) else { return Ok(parts) };
    for (p, own) in whole.moves.iter_mut().enumerate() {
        let of_others: Vec<&ParameterState> = others.iter().filter_map(|part| part.moves.get(p)).collect();
        for (at, state) in own.state.iter_mut().enumerate() {
            let shares = of_others.iter().filter_map(|of| of.state.get(at));
            append(state, shares)?;
        }
        if let Some(master) = &mut own.master {
            append(master, of_others.iter().filter_map(|of| of.master.as_ref()))?;
        }
    }
    others.iter_mut().for_each(|part| part.moves.clear());
    Ok(parts)
}

/// Concatenates shards in replica order; only the first replica has unsharded tensors.
fn append<'a>(own: &mut Buffer, others: impl Iterator<Item = &'a Buffer>) -> Result<(), DeviceError> {
    let mut whole = own.download()?.to_vec();
    for share in others {
        whole.extend(&*share.download()?);
    }
    *own = Buffer::host_copy(&whole);
    Ok(())
}
