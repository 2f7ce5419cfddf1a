//! Core operators and their kernels.

mod dropout;
mod gathers;
mod narrow;
mod operators;
mod ops;

#[path = "../support/mod.rs"]
mod support;
