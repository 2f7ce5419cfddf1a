//! Schedules and custom schedules.

mod own;
mod schedule;
