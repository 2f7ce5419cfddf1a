//! Speed and memory of device ranges.
//!
//! The memory of one class can be overridden, to find out how much it would need.

use crate::cluster::{Bytes, DeviceClass, class};
use std::cmp::Reverse;

/// The devices in order. Without classes all devices have speed 1, and only the problem limits their memory.
#[derive(Clone, Debug)]
pub struct DeviceRanges {
    classes: Vec<DeviceClass>,
    /// For each class, the index of the first class with the same figures.
    alike: Vec<u32>,
    is_boundless: bool,
    /// If one class alone counts.
    counted: Option<u32>,
}

pub static ALIKE: DeviceRanges =
    DeviceRanges { classes: Vec::new(), alike: Vec::new(), is_boundless: true, counted: None };

impl DeviceRanges {
    pub fn of(classes: &[DeviceClass]) -> DeviceRanges {
        let alike = classes.iter().map(|own| first_alike(classes, own)).collect();
        DeviceRanges { classes: classes.to_vec(), alike, is_boundless: classes.is_empty(), counted: None }
    }

    pub fn is_alike(&self) -> bool {
        self.classes.is_empty()
    }

    pub fn without_memory(self) -> DeviceRanges {
        DeviceRanges { is_boundless: true, ..self }
    }

    pub fn is_boundless(&self) -> bool {
        self.is_boundless
    }

    /// Distinct classes, largest memory first.
    pub fn largest(&self) -> Vec<u32> {
        let mut classes = self.alike.clone();
        classes.sort_by_key(|&class| (Reverse(self.classes[class as usize].device.memory.0), class));
        classes.dedup();
        classes
    }

    pub fn pace(&self, first: u32, count: u32) -> f64 {
        class::slowest(&self.classes, first..first + count.max(1))
    }

    /// The distinct speeds of ranges.
    pub fn speeds(&self) -> Vec<f64> {
        let mut speeds: Vec<f64> = self.classes.iter().map(|class| class.speed.unwrap_or(1.0)).collect();
        speeds.extend(self.is_alike().then_some(1.0));
        speeds.sort_by(f64::total_cmp);
        speeds.dedup();
        speeds
    }

    pub fn fastest(&self) -> f64 {
        class::fastest(&self.classes)
    }

    /// Smallest device memory of a range in bytes; `None` if only the problem limits it.
    pub fn memory(&self, first: u32, count: u32) -> Option<u64> {
        if self.is_boundless { None } else { class::smallest(&self.classes, first..first + count.max(1)) }
    }

    /// The same devices with `memory` bytes in one class; only the memory of that class counts.
    pub fn with(&self, class: u32, memory: u64) -> DeviceRanges {
        let mut devices = DeviceRanges { counted: Some(class), ..self.clone() };
        let own = devices.classes.iter_mut().zip(&devices.alike).filter(|(_, alike)| **alike == class);
        own.for_each(|(own, _)| own.device.memory = Bytes(memory));
        devices
    }

    /// Returns whether the memory of a stage on these devices counts.
    pub fn counts(&self, first: u32, count: u32) -> bool {
        let Some(class) = self.counted else { return true };
        let mut end = 0;
        self.classes.iter().zip(&self.alike).any(|(own, alike)| {
            let start = end;
            end += own.count;
            *alike == class && start < first + count && first < end
        })
    }
}

/// Index of the first class with the same figures.
pub fn first_alike(classes: &[DeviceClass], own: &DeviceClass) -> u32 {
    classes.iter().position(|other| is_same(other, own)).unwrap_or_default() as u32
}

/// True if two classes differ at most in their numbers of devices.
pub fn is_same(left: &DeviceClass, right: &DeviceClass) -> bool {
    left.device == right.device && left.speed == right.speed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::device::find;

    #[test]
    fn one_class_counts_alone() {
        let class_of = |count: u32, speed: f64, memory: u64| {
            let mut device = find("h100").unwrap().device();
            device.memory = Bytes(memory);
            DeviceClass { device, count, speed: Some(speed) }
        };
        let classes = [
            class_of(2, 2.0, 50),
            class_of(1, 0.5, 90),
            class_of(3, 1.0, 20),
            class_of(1, 2.0, 50),
            class_of(2, 3.0, 70),
        ];
        let fleet = DeviceRanges::of(&classes);
        assert_eq!((fleet.pace(1, 2), fleet.pace(3, 6), fleet.memory(1, 2)), (0.5, 1.0, Some(50)));
        assert_eq!((fleet.fastest(), fleet.largest()), (3.0, vec![1, 4, 0, 2]));
        // The first two devices and the seventh share a class.
        let with = fleet.with(0, 1000);
        assert_eq!((with.memory(0, 2), with.memory(1, 2), with.memory(6, 1)), (Some(1000), Some(90), Some(1000)));
        assert_eq!(
            [(0, 1), (2, 4), (5, 2), (7, 2)].map(|(first, count)| with.counts(first, count)),
            [true, false, true, false]
        );
        assert!(fleet.counts(2, 4) && ALIKE.is_alike() && ALIKE.counts(0, 9));
        assert_eq!((ALIKE.pace(3, 2), ALIKE.memory(3, 2), ALIKE.fastest()), (1.0, None, 1.0));
    }
}
