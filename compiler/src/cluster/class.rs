//! Speed and memory of device ranges in a cluster with several device classes.
//!
//! Classes are in device order. An empty list means homogeneous devices of speed 1 whose memory is limited by the
//! problem only. Replicas take minibatches round-robin, so a stage is as fast as its slowest replica, and it must fit
//! on the smallest.

use crate::cluster::{Cluster, Device, DeviceClass, Peak};
use std::ops::Range;

fn among(classes: &[DeviceClass], devices: Range<u32>) -> impl Iterator<Item = &DeviceClass> {
    let mut end = 0u32;
    classes.iter().filter(move |class| {
        let start = end;
        end = end.saturating_add(class.count);
        start < devices.end && devices.start < end
    })
}

/// Relative speed of the slowest device of a range.
pub fn slowest(classes: &[DeviceClass], devices: Range<u32>) -> f64 {
    among(classes, devices).map(DeviceClass::pace).reduce(f64::min).unwrap_or(1.0)
}

/// Smallest device memory of a range, in bytes.
pub fn smallest(classes: &[DeviceClass], devices: Range<u32>) -> Option<u64> {
    among(classes, devices).map(|class| class.device.memory.0).min()
}

pub fn fastest(classes: &[DeviceClass]) -> f64 {
    classes.iter().map(DeviceClass::pace).reduce(f64::max).unwrap_or(1.0)
}

/// Sum of the relative speeds of all devices.
pub fn together(cluster: &Cluster) -> f64 {
    match cluster.classes.is_empty() {
        true => f64::from(cluster.devices()),
        false => cluster.classes.iter().map(|class| f64::from(class.count) * class.pace()).sum(),
    }
}

/// Sets missing speeds to the ratio of peak arithmetic throughput for `dtype` to that of the profiled device.
pub fn relate(classes: &mut [DeviceClass], reference: &Device, dtype: &str) {
    for class in classes.iter_mut().filter(|class| class.speed.is_none()) {
        class.speed = Some(peak(&class.device.peak_flops, dtype) / peak(&reference.peak_flops, dtype));
    }
}

fn peak(peak: &Peak, dtype: &str) -> f64 {
    match dtype {
        "f64" => peak.f64,
        "tf32" => peak.tf32,
        "bf16" => peak.bf16,
        "f16" => peak.f16,
        _ => peak.f32,
    }
}

impl DeviceClass {
    fn pace(&self) -> f64 {
        self.speed.unwrap_or(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::device::find;
    use crate::cluster::read::gpus;

    #[test]
    fn a_range_goes_at_the_pace_of_its_slowest() {
        let class = |kind: &str, count: u32, speed: Option<f64>| DeviceClass {
            device: find(kind).unwrap().device(),
            count,
            speed,
        };
        let mut classes = vec![class("h200", 2, None), class("t4", 1, Some(0.25)), class("h100", 3, None)];
        relate(&mut classes, &find("h100").unwrap().device(), "f32");
        assert_eq!(classes.iter().map(|class| class.speed).collect::<Vec<_>>(), [Some(1.0), Some(0.25), Some(1.0)]);
        assert_eq!((slowest(&classes, 0..2), slowest(&classes, 1..3), slowest(&classes, 3..6)), (1.0, 0.25, 1.0));
        assert_eq!((smallest(&classes, 0..2), smallest(&classes, 2..6)), (Some(141_000_000_000), Some(16_000_000_000)));
        let cluster = Cluster { classes, ..gpus(6, None).unwrap() };
        assert_eq!((together(&cluster), fastest(&cluster.classes)), (5.25, 1.0));
        assert_eq!((slowest(&[], 0..4), smallest(&[], 0..4), together(&gpus(4, None).unwrap())), (1.0, None, 4.0));
    }
}
