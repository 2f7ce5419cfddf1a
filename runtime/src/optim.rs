//! Optimizers: update rules, learning-rate schedules, gradient norms and training policy.

pub mod grad_norm;
pub mod lr_schedule;
pub mod optimizer;
pub mod policy;
pub mod state;
pub mod update;
