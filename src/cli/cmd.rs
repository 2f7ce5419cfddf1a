//! The commands, one file each: arguments, one library call, and how its result is printed.

pub mod cluster;
pub mod completions;
pub mod diff;
pub mod doctor;
pub mod eval;
pub mod export;
pub mod inspect;
pub mod partition;
pub mod plan;
pub mod profile;
pub mod quickstart;
pub mod report;
pub mod schema;
pub mod simulate;
pub mod sweep;
pub mod train;
pub mod zoo;
