//! Training is exact: schedules, replicas, ZeRO, precision, tensor parallelism.

mod delayed;
mod diverged;
mod gpu_memory;
mod gpu_results;
mod gpus;
mod held_out;
mod kept_results;
mod launches;
mod losses;
mod nccl;
mod parity;
mod parity_matrix;
mod parity_processes;
mod policy;
mod recompute;
mod shared_runs;
mod shares;
mod sums;
mod tensor_parallel;
mod traffic;
mod train;
mod zero;

#[path = "../support/mod.rs"]
mod support;
