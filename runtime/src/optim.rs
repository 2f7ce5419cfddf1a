//! Optimizers: update rules, learning rates, gradient norms, and when a worker steps.

pub mod grad_norm;
pub mod lr_schedule;
pub mod optimizer;
pub mod policy;
pub mod update;
