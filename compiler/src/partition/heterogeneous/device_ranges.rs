//! Speed and memory of device ranges in constant time.
//!
//! `cluster::class` computes the same by scanning the classes. The search needs it in its innermost loop, so a sparse
//! table stores the minimum of every range of 2^k devices; any range is the union of two of them. The memory of one
//! class can be overridden, to find out how much it would need.

use crate::cluster::{DeviceClass, class};

/// The devices in order. Without classes all devices have speed 1, and only the problem limits their memory.
#[derive(Clone, Debug)]
pub struct DeviceRanges {
    /// The class of each device, as the index of the first class with the same figures.
    class: Vec<u32>,
    paces: SparseMinTable<f64>,
    memories: SparseMinTable<u64>,
    fastest: f64,
    /// Distinct classes with their memory in bytes.
    classes: Vec<(u32, u64)>,
    /// If one class alone counts: the number of its devices before each device.
    counted: Vec<u32>,
}

pub static ALIKE: DeviceRanges = DeviceRanges {
    class: Vec::new(),
    paces: SparseMinTable { rows: Vec::new() },
    memories: SparseMinTable { rows: Vec::new() },
    fastest: 1.0,
    classes: Vec::new(),
    counted: Vec::new(),
};

impl DeviceRanges {
    pub fn of(classes: &[DeviceClass]) -> DeviceRanges {
        if classes.is_empty() {
            return ALIKE.clone();
        }
        let firsts: Vec<u32> = classes.iter().map(|own| first_alike(classes, own)).collect();
        let each = |at: usize| std::iter::repeat_n(at, classes[at].count as usize);
        let devices: Vec<usize> = (0..classes.len()).flat_map(each).collect();
        let mut once: Vec<u32> = firsts.clone();
        once.sort_unstable();
        once.dedup();
        DeviceRanges {
            class: devices.iter().map(|&at| firsts[at]).collect(),
            paces: SparseMinTable::of(devices.iter().map(|&at| classes[at].speed.unwrap_or(1.0)).collect()),
            memories: SparseMinTable::of(devices.iter().map(|&at| classes[at].device.memory.0).collect()),
            fastest: class::fastest(classes),
            classes: once.into_iter().map(|at| (at, classes[at as usize].device.memory.0)).collect(),
            counted: Vec::new(),
        }
    }

    pub fn is_alike(&self) -> bool {
        self.class.is_empty()
    }

    pub fn without_memory(self) -> DeviceRanges {
        DeviceRanges { memories: SparseMinTable { rows: Vec::new() }, ..self }
    }

    pub fn is_boundless(&self) -> bool {
        self.memories.rows.is_empty()
    }

    /// Distinct classes, largest memory first.
    pub fn largest(&self) -> Vec<u32> {
        let mut classes = self.classes.clone();
        classes.sort_by_key(|&(class, memory)| (std::cmp::Reverse(memory), class));
        classes.into_iter().map(|(class, _)| class).collect()
    }

    pub fn pace(&self, first: u32, count: u32) -> f64 {
        self.paces.of_range(first, count).unwrap_or(1.0)
    }

    /// The distinct speeds of ranges.
    pub fn speeds(&self) -> Vec<f64> {
        let mut speeds = self.paces.rows.first().cloned().unwrap_or_else(|| vec![1.0]);
        speeds.sort_by(f64::total_cmp);
        speeds.dedup();
        speeds
    }

    pub fn fastest(&self) -> f64 {
        self.fastest
    }

    /// Smallest device memory of a range in bytes; `None` if only the problem limits it.
    pub fn memory(&self, first: u32, count: u32) -> Option<u64> {
        self.memories.of_range(first, count)
    }

    /// The same devices with `memory` bytes in one class; only the memory of that class counts.
    pub fn with(&self, class: u32, memory: u64) -> DeviceRanges {
        let own = self.memories.rows.first().into_iter().flatten();
        let held = self.class.iter().zip(own).map(|(&own_class, &own)| if own_class == class { memory } else { own });
        let mut counted = vec![0];
        for &own_class in &self.class {
            counted.push(counted[counted.len() - 1] + u32::from(own_class == class));
        }
        DeviceRanges { memories: SparseMinTable::of(held.collect()), counted, ..self.clone() }
    }

    /// Returns whether the memory of a stage on these devices counts.
    pub fn counts(&self, first: u32, count: u32) -> bool {
        self.counted.is_empty() || self.counted[first as usize] < self.counted[(first + count) as usize]
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

/// Sparse table; row k, index i: the minimum of the 2^k values from i.
#[derive(Clone, Debug)]
struct SparseMinTable<T> {
    rows: Vec<Vec<T>>,
}

impl<T: Copy + PartialOrd> SparseMinTable<T> {
    fn of(values: Vec<T>) -> SparseMinTable<T> {
        let mut rows = vec![values];
        let mut half = 1;
        while rows[rows.len() - 1].len() > half {
            let below = &rows[rows.len() - 1];
            rows.push((0..below.len() - half).map(|at| lesser(below[at], below[at + half])).collect());
            half *= 2;
        }
        SparseMinTable { rows }
    }

    fn of_range(&self, first: u32, count: u32) -> Option<T> {
        let (first, row) = (first as usize, count.max(1).ilog2() as usize);
        let row_of = self.rows.get(row)?;
        Some(lesser(row_of[first], row_of[first + count as usize - (1 << row)]))
    }
}

fn lesser<T: PartialOrd>(left: T, right: T) -> T {
    if right < left { right } else { left }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Bytes;
    use crate::cluster::device::find;

    #[test]
    fn ranges_are_as_the_classes_tell_them() {
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
        for first in 0..9 {
            for count in 1..=9 - first {
                let range = first..first + count;
                assert_eq!(fleet.pace(first, count), class::slowest(&classes, range.clone()), "{range:?}");
                assert_eq!(fleet.memory(first, count), class::smallest(&classes, range.clone()), "{range:?}");
            }
        }
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
