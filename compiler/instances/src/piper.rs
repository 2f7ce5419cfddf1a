//! Plans with replicas, tensor parallelism and per-layer choices (`model.rs` defines their time and memory).
//!
//! `layers` prepares the instance, `choose` picks the choices of one stage, and `search` decides whether a pipeline
//! within a given time per sample exists. `solve` is the entry point: it bisects that time and returns a plan.

pub mod check;
pub mod choose;
pub mod layers;
pub mod model;
pub mod read;
pub mod search;
pub mod solve;
