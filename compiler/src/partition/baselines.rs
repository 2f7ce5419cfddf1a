//! Baseline plans, and exhaustive enumeration for small graphs.

pub mod data_parallel;
pub mod enumerate;
pub mod exhaustive;
pub mod single;
pub mod uniform;
