//! Partitioners: turn a `Problem` into a `Plan`.
//!
//! `planner` is the entry point. It runs the requested partitioner, completes the plan and verifies it with
//! `plan::check`. A partitioner searches for a `Shape`: groups of ops nested by cluster level, with a replica count for
//! each group.

pub mod answer;
pub mod bounds;
pub mod dp;
pub mod error;
pub mod heterogeneous;
pub mod infeasible;
pub mod milp;
pub mod options;
pub mod partitioners;
pub mod planned;
pub mod planner;
pub mod search;
pub mod single_degree;
