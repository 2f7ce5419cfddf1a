//! Independent checks of a plan: its costs, memory, constraints and figures are computed again from the graph.

pub mod consistency;
pub mod cost;
mod ends;
pub mod error;
pub mod figures;
pub mod published_costs;
mod shares;
pub mod traffic;
pub mod verify;
