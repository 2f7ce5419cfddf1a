//! The worker loop over a program's instructions, and the state of each stage on a worker.

pub mod gradient_round;
pub mod gradients;
pub mod messages;
pub mod recompute;
pub mod saved_weights;
pub mod shard_exchange;
pub mod snapshot;
pub mod stage_worker;
pub mod tied_weights;
pub mod worker;
