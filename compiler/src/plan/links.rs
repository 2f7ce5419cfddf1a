//! Transfer times between stages and ring all-reduce times within a stage.
//!
//! A unit of level k is a device at level 0, else a group of the level below. Each device has its own port at every
//! level; at a shared level the devices of a unit share one port. A message between two devices uses the level that
//! joins them, at the lowest bandwidth and the highest latency up to there.
//!
//! An all-reduce is one ring per level: reduce-scatter from the innermost level outwards, all-gather back. A sum within
//! a unit is sharded over its members, and the shards use the next level at the same time.
//!
//! ```text
//! t(e)  = l_k + e / B_k
//! ρ_k   = 2 (m_k - 1) l_k + 2 (m_k - 1) / m_k · w / B_k / (q_k, or 1 where the level is shared)
//! R     = Σ ρ_k
//! ```
//!
//! | symbol | here | |
//! | --- | --- | --- |
//! | e, w | `bytes` | bytes of a message, of the gradient sums |
//! | l_k, B_k | [`Wire`] | latency and bandwidth up to level k |
//! | m_k | `Ring::units` | the largest number of units of level k in one unit above |
//! | q_k | `shards` | number of shards of the sum below level k |

use crate::cluster::Level;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wire {
    /// The outermost level it crosses; 0 is the innermost.
    pub level: usize,
    /// Latency until the first byte arrives.
    pub latency_us: f64,
    pub bytes_per_us: f64,
}

impl Wire {
    /// The path over one level of a cluster.
    pub fn of(levels: &[Level], level: usize) -> Wire {
        let up_to = &levels[..=level];
        Wire {
            level,
            latency_us: up_to.iter().map(|level| level.latency.0 * 1e6).fold(0.0, f64::max),
            bytes_per_us: up_to.iter().map(|level| level.bandwidth.0 / 1e6).fold(f64::INFINITY, f64::min),
        }
    }

    /// The slowest path between any two of these devices; `None` for fewer than two distinct devices.
    pub fn between(levels: &[Level], devices: impl Iterator<Item = u32> + Clone) -> Option<Wire> {
        let mut slowest = None;
        let mut unit = 1u64;
        for (at, level) in levels.iter().enumerate() {
            let mut units = devices.clone().map(|device| u64::from(device) / unit);
            let first = units.next();
            if units.all(|other| Some(other) == first) {
                break;
            }
            slowest = Some(Wire::of(levels, at));
            unit = unit.saturating_mul(u64::from(level.count.max(1)));
        }
        slowest
    }

    pub fn time(&self, bytes: f64) -> f64 {
        self.latency_us + bytes / self.bytes_per_us
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ring {
    pub level: usize,
    /// Members of the largest ring.
    pub units: u32,
    pub us: f64,
}

/// The rings of an all-reduce among the devices, innermost first; empty for one device.
pub fn rings(levels: &[Level], devices: &[u32], bytes: f64) -> Vec<Ring> {
    let mut units: Vec<u64> = devices.iter().map(|&device| u64::from(device)).collect();
    let members = |count: u64, units: &mut Vec<u64>| {
        units.sort_unstable();
        units.dedup();
        let sizes: Vec<u32> =
            units.chunk_by(|a, b| a / count == b / count).map(|siblings| siblings.len() as u32).collect();
        units.iter_mut().for_each(|unit| *unit /= count);
        (sizes.iter().copied().max().unwrap_or(0), sizes.iter().copied().min().unwrap_or(0))
    };
    let each = levels.iter().map(|level| members(u64::from(level.count.max(1)), &mut units));
    let sizes: Vec<(u32, u32)> = each.collect();
    rings_of(levels, sizes.into_iter(), bytes)
}

/// [`rings`] for the devices `first`, `first + 1` … `first + count - 1`.
pub fn rings_of_range(levels: &[Level], first: u32, count: u32, bytes: f64) -> Vec<Ring> {
    let (mut low, mut high) = (u64::from(first), u64::from(first) + u64::from(count.max(1)) - 1);
    let each = levels.iter().map(|level| {
        let count = u64::from(level.count.max(1));
        let (left, right) = (low / count, high / count);
        let sizes = if left == right {
            (high - low + 1, high - low + 1)
        } else {
            let (head, tail) = ((left + 1) * count - low, high - right * count + 1);
            let between = (right - left > 1).then_some(count);
            (head.max(tail).max(between.unwrap_or(0)), head.min(tail).min(between.unwrap_or(u64::MAX)))
        };
        (low, high) = (left, right);
        (sizes.0 as u32, sizes.1 as u32)
    });
    let sizes: Vec<(u32, u32)> = each.collect();
    rings_of(levels, sizes.into_iter(), bytes)
}

/// `sizes`: for each level, the most and the least units in one unit above.
fn rings_of(levels: &[Level], sizes: impl Iterator<Item = (u32, u32)>, bytes: f64) -> Vec<Ring> {
    let mut rings = Vec::new();
    let mut shards = 1.0;
    for (level, (most, least)) in sizes.enumerate() {
        if most > 1 {
            let wire = Wire::of(levels, level);
            let units = f64::from(most);
            let shard = if levels[level].shared { bytes } else { bytes / shards };
            let us = 2.0 * (units - 1.0) * wire.latency_us + 2.0 * (units - 1.0) / units * shard / wire.bytes_per_us;
            rings.push(Ring { level, units: most, us });
        }
        shards *= f64::from(least.max(1));
    }
    rings
}

pub fn all_reduce_us(rings: &[Ring]) -> f64 {
    rings.iter().map(|ring| ring.us).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;

    #[test]
    fn the_slowest_level_between_devices_counts() {
        let levels = levels("4:10GB/s,4:1.25GB/s").unwrap().levels;
        let us = |devices: &[u32]| Wire::between(&levels, devices.iter().copied()).map(|wire| wire.time(10_000.0));
        assert_eq!(us(&[0, 3]), Some(1.0));
        assert_eq!(us(&[0, 1, 4]), Some(8.0));
        assert_eq!(us(&[2, 2]), None);
    }

    #[test]
    fn a_ring_at_each_level() {
        let mut levels = levels("8:40GB/s,2:4GB/s").unwrap().levels;
        let us = |levels: &[Level], devices: &[u32]| all_reduce_us(&rings(levels, devices, 16e6));
        assert_eq!(us(&levels, &[3]), 0.0);
        assert_eq!(us(&levels, &[0, 1, 2, 3]), 2.0 * 0.75 * 16e6 / 40e3);
        // 15 devices: inner rings of 8 and 7, then at least 7 shards between the two.
        let all: Vec<u32> = (0..15).collect();
        assert_eq!(us(&levels, &all), 2.0 * 7.0 / 8.0 * 16e6 / 40e3 + 16e6 / 7.0 / 4e3);
        levels[1].shared = true;
        assert_eq!(us(&levels, &all), 2.0 * 7.0 / 8.0 * 16e6 / 40e3 + 16e6 / 4e3);
    }

    #[test]
    fn ranges_are_lists() {
        for spec in ["7:1GB/s", "3:2GB/s,4:1GB/s", "2:4GB/s,3:2GB/s,2:1GB/s"] {
            let cluster = levels(spec).unwrap();
            let all = cluster.devices();
            for first in 0..all {
                for count in 1..=all - first {
                    let list: Vec<u32> = (first..first + count).collect();
                    let (left, right) =
                        (rings(&cluster.levels, &list, 1e6), rings_of_range(&cluster.levels, first, count, 1e6));
                    assert_eq!(left, right, "{spec}: {first} + {count}");
                }
            }
        }
    }
}
