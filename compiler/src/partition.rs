//! Partitioners: turn a `Problem` into a `Plan`.
//!
//! `planner` is the entry point. It runs the requested partitioner, completes the plan and verifies it with
//! `plan::check`. A partitioner searches for a `Shape`: groups of ops nested by cluster level, with a replica count for
//! each group.

pub mod bounds;
pub mod dp;
pub mod explain;
pub mod heterogeneous;
pub mod milp;
pub mod partitioners;
pub mod planner;
pub mod search;
