//! Compiles a stage graph into kernels with fixed memory offsets (stage code), and executes it forward and backward.

pub mod compile;
pub mod compile_error;
pub mod evaluate;
pub mod executor;
mod memory_limit;
pub mod moving_average;
pub mod phase;
pub mod sequence;
pub mod stage_code;
pub mod stage_tensor;
pub mod step_hook;
