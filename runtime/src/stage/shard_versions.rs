//! Shard versions say which weights a replica has stepped and not gathered yet (ZeRO).

use crate::checkpoint::ResumeState;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::exec::executor::Weights;
use crate::exec::stage_code::StageCode;
use crate::zero::shard::ShardRange;

/// A version that this replica has stepped but not yet gathered completely.
pub struct Stepped {
    /// Parameters that the step changed.
    pub parameters: Vec<usize>,
    /// Buckets not gathered yet.
    pub buckets: u32,
}

/// The initial shards of a replica under ZeRO 3; older versions of a resumed run stay unsharded.
pub(super) fn initial_shards(
    shard: &ShardRange,
    code: &StageCode,
    weights: Weights,
    resume: Option<&mut ResumeState>,
    device: &DeviceContext,
) -> Result<Weights, DeviceError> {
    let shards = shard.shard_weights(&code.parameters, &weights, device)?;
    if let Some(resume) = resume {
        let versions = std::mem::take(&mut resume.unknown_versions);
        resume.versions.extend(versions.into_iter().map(|version| (version, weights.clone())));
    }
    Ok(shards)
}
