//! Checks of a program: operands exist, messages match, memory stays within its limits.

pub mod error;
pub mod state;
pub mod verify;
