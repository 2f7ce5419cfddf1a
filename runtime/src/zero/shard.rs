//! The range of each parameter that a replica owns under ZeRO: see `compiler::plan::zero`.
//!
//! Every parameter is divided by elements into contiguous ranges, one per replica and as even as possible. Gradients, optimizer
//! state and master weights of a range are buffers of its size. A parameter shared with other stages is not sharded.

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
    replica: usize,
    replicas: usize,
    /// True for each parameter that is sharded.
    sharded: Vec<bool>,
    /// True if weights are sharded too (ZeRO 3).
    shards_weights: bool,
}

impl ShardRange {
    /// No sharding.
    pub fn whole(parameters: usize) -> ShardRange {
        ShardRange { replica: 0, replicas: 1, sharded: vec![false; parameters], shards_weights: false }
    }

    /// The shards of one replica, for parameters with `sharded`.
    pub fn of(replica: usize, replicas: usize, sharded: Vec<bool>) -> ShardRange {
        ShardRange { replica, replicas, sharded, shards_weights: false }
    }

    /// Shards the weights too (ZeRO 3).
    pub fn of_weights(self) -> ShardRange {
        ShardRange { shards_weights: true, ..self }
    }

    /// True if weights are sharded.
    pub fn has_weight_shards(&self) -> bool {
        self.shards_weights
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

    pub fn replica(&self) -> usize {
        self.replica
    }

    /// Number of replicas that contribute shards.
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    pub fn is_sharded(&self, parameter: usize) -> bool {
        self.sharded.get(parameter).copied().unwrap_or(false)
    }

    pub fn has_shards(&self) -> bool {
        self.sharded.contains(&true)
    }

    /// Byte range of this replica's shard in a tensor with the parameter's shape; `element` is the element size.
    pub fn own(&self, parameter: usize, bytes: usize, element: usize) -> Range<usize> {
        self.range_of(parameter, bytes, element, self.replica)
    }

    /// Like [`ShardRange::own`], for any replica.
    pub fn range_of(&self, parameter: usize, bytes: usize, element: usize, member: usize) -> Range<usize> {
        if self.is_sharded(parameter) { range(bytes, element, member, self.replicas) } else { 0..bytes }
    }
}

/// One replica's shards of a weight version, or of its final state, by parameter.
pub struct Shares(pub Vec<(usize, Arc<Buffer>)>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsharded_parameters_are_whole() {
        let shard = ShardRange::of(1, 2, vec![true, false]);
        assert_eq!((shard.own(0, 24, 8), shard.own(1, 24, 8)), (8..24, 0..24));
        assert!(!ShardRange::whole(2).has_shards() && shard.has_shards());
    }
}
