//! Searches for placements: devices that neither replicate nor overlap (`profile/placement.rs` defines their load).
//!
//! `units` joins what must stand together, `contiguous` is the dynamic program over the closed sets of `partition/lattice.rs`,
//! `anywhere` the local search without the rule of contiguity, `solve` the door that makes a plan.

pub mod anywhere;
pub mod contiguous;
pub mod solve;
pub mod units;
