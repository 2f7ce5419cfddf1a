//! The range of each parameter that a replica owns under ZeRO: see `compiler::plan::zero`.
//!
//! Every parameter is divided by elements into contiguous ranges, one per replica and as even as possible. Gradients, optimizer
//! state and master weights of a range are buffers of its size. A parameter shared with other stages is not sharded.
//!
//! With a shard degree, groups of so many consecutive replicas shard, and each group has all ranges.

use crate::comm::all_reduce::range;
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::exec::executor::Weights;
use crate::exec::stage_code::NamedTensor;
use std::ops::Range;
use std::sync::Arc;

/// The parameter shards of one replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardRange {
    pub replica: usize,
    pub replicas: usize,
    /// Number of consecutive replicas that shard together.
    pub degree: usize,
    /// True for each parameter that is sharded.
    pub sharded: Vec<bool>,
    /// True if weights are sharded too (ZeRO 3).
    pub shards_weights: bool,
}

impl ShardRange {
    /// The shards of one replica, for parameters with `sharded`. All replicas shard together.
    pub fn of(replica: usize, replicas: usize, sharded: Vec<bool>) -> ShardRange {
        ShardRange { replica, replicas, degree: replicas, sharded, shards_weights: false }
    }

    /// The part of a full weight version that this replica keeps.
    pub fn shard_weights(
        &self,
        parameters: &[NamedTensor],
        whole: &Weights,
        device: &DeviceContext,
    ) -> Result<Weights, DeviceError> {
        let shard = |((parameter, named), weight): ((usize, &NamedTensor), &Arc<Buffer>)| match self.shards_weights
            && self.is_sharded(parameter)
        {
            true => {
                let range = self.own(parameter, weight.len(), named.fact.dtype.size());
                Ok(Arc::new(device.copy_of(weight.region_of(range))?))
            }
            false => Ok(weight.clone()),
        };
        parameters.iter().enumerate().zip(whole).map(shard).collect()
    }

    /// Number of this replica among those that shard together.
    pub fn rank(&self) -> usize {
        self.replica % self.degree.max(1)
    }

    /// The group of replicas that this one shards with.
    pub fn group(&self) -> usize {
        self.replica / self.degree.max(1)
    }

    /// Of so many micro-batches of a round, those of this replica's group. Replicas take them in turn.
    pub fn of_group(&self, before: u32) -> u32 {
        let (before, replicas) = (before as usize, self.replicas.max(1));
        let (turns, more) = (before / replicas, before % replicas);
        let more = more.saturating_sub(self.group() * self.degree).min(self.degree);
        (turns * self.degree + more) as u32
    }

    pub fn is_sharded(&self, parameter: usize) -> bool {
        self.sharded.get(parameter).copied().unwrap_or(false)
    }

    pub fn has_shards(&self) -> bool {
        self.sharded.contains(&true)
    }

    /// Byte range of this replica's shard in a tensor with the parameter's shape; `element` is the element size.
    pub fn own(&self, parameter: usize, bytes: usize, element: usize) -> Range<usize> {
        self.range_of(parameter, bytes, element, self.rank())
    }

    /// Like [`ShardRange::own`], for any replica of the group.
    pub fn range_of(&self, parameter: usize, bytes: usize, element: usize, member: usize) -> Range<usize> {
        if self.is_sharded(parameter) { range(bytes, element, member, self.degree) } else { 0..bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsharded_parameters_are_whole() {
        let shard = ShardRange::of(1, 2, vec![true, false]);
        assert_eq!((shard.own(0, 24, 8), shard.own(1, 24, 8)), (8..24, 0..24));
        assert!(!ShardRange::of(0, 1, vec![false; 2]).has_shards() && shard.has_shards());
    }

    #[test]
    fn a_group_counts_the_micro_batches_of_its_replicas() {
        let (replicas, degree) = (6, 2);
        for replica in 0..replicas {
            let shard = ShardRange { degree, ..ShardRange::of(replica, replicas, Vec::new()) };
            assert_eq!((shard.rank(), shard.group()), (replica % degree, replica / degree));
            for before in 0..20 {
                let of_group = (0..before).filter(|item| item % replicas / degree == shard.group()).count();
                assert_eq!(shard.of_group(before as u32), of_group as u32, "replica {replica}, {before} before");
            }
        }
    }
}
