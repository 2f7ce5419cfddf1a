//! Partitioners: from a `Problem` to a `Plan`.
//!
//! `planner` is the door: it calls a partitioner by name, fills in what every plan states, and lets `plan::check` judge the
//! result. A partitioner finds a `shape`: which ops form which group, nested by the levels of the cluster.

pub mod baselines;
pub mod bounds;
pub mod device_placement;
pub mod dp;
pub mod explain;
pub mod heterogeneous;
pub mod hybrid;
pub mod milp;
pub mod planner;
pub mod search;
