//! The devices that run kernels.

pub mod cpu;
