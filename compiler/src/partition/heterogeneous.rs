//! Planning for heterogeneous devices: which device classes run which stages.

pub mod class_dp;
pub mod device_orders;
pub mod device_ranges;
pub mod plan;
