//! Independent checks of a plan: costs, memory, constraints and derived values are recomputed from the graph.

pub mod consistency;
pub mod cost;
mod ends;
pub mod error;
pub mod figures;
mod held_in_flight;
pub mod labels;
pub mod published_costs;
mod recompute;
mod shares;
pub mod traffic;
pub mod verify;
