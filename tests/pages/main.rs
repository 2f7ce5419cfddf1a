//! Pages of commands and their output.

mod golden;
mod guide;
mod mistakes;

#[path = "../support/mod.rs"]
mod support;
