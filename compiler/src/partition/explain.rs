//! Infeasibility reports.

pub mod infeasible;
