//! Training: builds workers and channels from a graph and a plan, and runs them.

pub mod channels;
pub mod error;
pub mod job;
pub mod losses;
pub mod prepare;
pub mod results;
pub mod resume;
pub mod run;
pub mod shard_gatherer;
pub mod tensor_parallel;
pub mod tensor_shards;
pub mod validate;
