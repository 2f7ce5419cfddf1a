//! ZeRO: sharding of optimizer state, gradients and weights over the replicas of a stage (Rajbhandari et al. 2020).

pub mod gradient_shards;
pub mod shard;
pub mod shard_message;
pub mod streaming;
pub mod weight_shards;
