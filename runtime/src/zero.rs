//! ZeRO: what each replica of a stage holds of optimizer state, gradients and weights (Rajbhandari et al. 2020).

pub mod gradient_shards;
pub mod shard;
pub mod streaming;
pub mod weight_shards;
