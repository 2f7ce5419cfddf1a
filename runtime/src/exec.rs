//! Stage code and its execution: from the graph of a stage to kernels and memory, and their runs, forward and backward.

pub mod compile;
pub mod evaluate;
pub mod executor;
pub mod moving_average;
pub mod sequence;
