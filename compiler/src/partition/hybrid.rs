//! Searches for stages with replicas, tensor parallelism and choices (`profile/hybrid.rs` defines what they spend and hold).
//!
//! `layers` is the instance as the search walks it, `choose` picks the choices of one stage, `search` asks whether a pipeline
//! under a time per sample exists, `solve` is the door that halves that time and makes a plan.

pub mod choose;
pub mod layers;
pub mod search;
pub mod solve;
