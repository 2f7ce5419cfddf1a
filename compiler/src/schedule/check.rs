//! Checks of a program: every operand exists, messages match, and memory stays within its bounds.

pub mod error;
pub mod state;
pub mod verify;
