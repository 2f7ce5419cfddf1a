//! Devices and their kernels, and the workers that run a program on them.

pub mod device;
