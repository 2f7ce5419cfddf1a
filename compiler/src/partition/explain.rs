//! Explanations: why no plan is feasible.

pub mod infeasible;
