//! The runtime: devices and their kernels, links between workers, the worker that runs a program, and training.
//!
//! ```text
//! Graph + placement --compile--> StageCode (kernels and memory, forward and backward)
//! StageCode + Program + data --train--> weights, losses, spans
//! ```
//!
//! A worker is a thread with one loop and one `match` over the instructions of its program ([`worker`]). It knows no
//! schedule: which weights a run uses, what it waits for and when it steps are operands of its instructions.

pub mod buffer;
pub mod checkpoint;
pub mod compile;
pub mod data;
pub mod desk;
pub mod device;
pub mod evaluate;
pub mod execute;
pub mod gradient;
pub mod link;
pub mod memory;
pub mod norm;
pub mod optimizer;
pub mod policy;
pub mod prepare;
pub mod rate;
pub mod seat;
pub mod shared;
pub mod statistics;
pub mod stepper;
pub mod steps;
pub mod train;
pub mod weights;
pub mod wiring;
pub mod worker;
