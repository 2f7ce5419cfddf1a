//! Devices: where kernels run. The CPU is always there.

pub mod buffer;
pub mod cpu;
pub mod cuda;
pub mod host_memory;
pub mod layout;
