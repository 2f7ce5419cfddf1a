//! Planning: search, bounds, constraints, published results.

mod batch;
mod bounds;
mod buckets;
mod chunks;
mod combinations;
mod device_placement;
mod groups;
mod holdings;
mod hybrid;
mod joins;
mod joint;
mod limits;
mod milp;
mod orders;
mod plan;
mod published;
mod questions;
mod recompute;
mod searched;

#[path = "../support/mod.rs"]
mod support;
