//! Placement without replication: each device holds its own set of nodes (`model.rs` defines the load).
//!
//! `units` merges nodes that must share a device. `contiguous` is the dynamic program over down-sets, `anywhere` the
//! local search for non-contiguous placements. `solve` is the entry point that returns a plan.

pub mod anywhere;
pub mod check;
pub mod contiguous;
pub mod model;
pub mod read;
pub mod solve;
pub mod units;
