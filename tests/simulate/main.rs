//! Simulation and traces.

mod simulate;
mod trace;
