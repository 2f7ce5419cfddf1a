//! Plans over unequal devices: which kinds of devices run which stages.

pub mod class_dp;
pub mod device_orders;
pub mod device_ranges;
pub mod plan;
