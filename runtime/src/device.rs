//! Devices and their kernels. The CPU is always available.

pub mod buffer;
pub mod cpu;
pub mod cuda;
pub mod host_memory;
pub mod layout;
