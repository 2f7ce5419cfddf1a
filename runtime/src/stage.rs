//! The worker loop over a program's instructions, and the state of each stage on a worker.

pub mod gradient_buckets;
pub mod gradient_round;
pub mod gradients;
pub mod lag;
pub mod messages;
pub mod optimizer_step;
pub mod pending_snapshots;
pub mod recompute;
pub mod saved_weights;
pub mod shard_exchange;
pub mod shard_versions;
pub mod snapshot;
pub mod stage_comms;
pub mod stage_worker;
pub mod tied_parameter;
pub mod tied_weights;
pub mod worker;
pub mod worker_error;
