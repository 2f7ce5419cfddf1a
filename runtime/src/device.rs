//! Devices: where kernels run. The CPU is always there.

pub mod cpu;
pub mod cuda;
pub mod layout;
