//! Searches for placements: devices that neither replicate nor overlap (`profile/placement.rs` defines their load).
//!
//! `units` joins what must stand together, `lattice` holds the closed sets of units, `contiguous` is the dynamic program over
//! them, `anywhere` the local search without the rule of contiguity, `solve` the door that makes a plan.

pub mod anywhere;
pub mod contiguous;
pub mod lattice;
pub mod solve;
pub mod units;
