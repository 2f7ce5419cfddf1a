//! Baselines: plain alternatives, and exhaustive search for small graphs.

pub mod data_parallel;
pub mod enumerate;
pub mod exhaustive;
pub mod single;
pub mod uniform;
