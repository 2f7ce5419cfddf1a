//! Devices: memory, kernels and streams behind the traits of [`api`]. The CPU is always available.

pub mod api;
pub mod buffer;
pub mod chain;
pub mod context;
pub mod cpu;
pub mod cuda;
pub mod host_memory;
pub mod layout;
pub mod open;
pub mod optimizer;
pub mod region;
pub mod sanitizer;
