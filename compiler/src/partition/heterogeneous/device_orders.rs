//! Device orders of a heterogeneous cluster along a pipeline.
//!
//! Searches assign stages to devices in order, so with several device classes the order itself is a choice. Units of
//! one group may be swapped at every level without changing any link. An order is therefore given by its sequence of
//! classes. If there are few orders, all are enumerated, which on a single level covers every assignment of devices to
//! stages. Otherwise a local search starts from orders that keep classes together and uses [`Units::moves`].

use crate::cluster::{Cluster, DeviceClass, class};
use crate::partition::heterogeneous::device_ranges::{first_alike, is_same};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Largest number of classes for which every class permutation is a start; with more, only the orders by speed.
const MOST_RANKED: usize = 4;

/// Numbers of block lengths and of target positions tried per run, in addition to the borders.
const MOST_LENGTHS: usize = 8;
const MOST_PLACES: usize = 16;

const MOST_MOVES: usize = 10_000;

#[derive(Clone, Debug, PartialEq)]
pub struct DeviceOrder {
    pub classes: Vec<DeviceClass>,
    /// The device id at each position.
    pub device: Vec<u32>,
}

/// The class index of the device at each position.
pub type Sequence = Vec<u32>;

/// Moves a block of equal units to another position in its group.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    /// Start and size of the group, in devices.
    start: usize,
    group: usize,
    /// Number of devices per unit.
    size: usize,
    /// In units of the group: block start, block length, and target position.
    from: usize,
    length: usize,
    place: usize,
}

impl Move {
    pub fn of(&self, sequence: &[u32]) -> Sequence {
        let mut moved = sequence.to_vec();
        let at = |unit: usize| self.start + unit * self.size;
        let (block, end) = (self.length * self.size, self.from + self.length);
        debug_assert!(at(end.max(self.place)) <= self.start + self.group, "a group keeps its units");
        match self.place < self.from {
            true => moved[at(self.place)..at(end)].rotate_right(block),
            false => moved[at(self.from)..at(self.place)].rotate_left(block),
        }
        moved
    }
}

pub struct Units<'a> {
    cluster: &'a Cluster,
    own: Sequence,
    /// Number of devices per unit at each level, from a single device to the whole cluster.
    sizes: Vec<usize>,
}

impl Units<'_> {
    pub fn of(cluster: &Cluster) -> Units<'_> {
        // Classes with equal figures count as one.
        let repeated =
            |class: &DeviceClass| std::iter::repeat_n(first_alike(&cluster.classes, class), class.count as usize);
        let mut sizes = vec![1];
        for level in &cluster.levels {
            sizes.push(sizes[sizes.len() - 1] * level.count.max(1) as usize);
        }
        Units { cluster, own: cluster.classes.iter().flat_map(repeated).collect(), sizes }
    }

    /// All orders, the original one first; `None` if there are more than `most`.
    pub fn all(&self, most: usize) -> Option<Vec<Sequence>> {
        let mut found = vec![self.own.clone()];
        let mut seen = BTreeSet::from([self.own.clone()]);
        let mut next = 0;
        while next < found.len() {
            let sequence = found[next].clone();
            next += 1;
            for pair in self.sizes.windows(2) {
                let (size, group) = (pair[0], pair[1]);
                for at in (0..sequence.len() - size).step_by(size) {
                    let (left, right) = (at..at + size, at + size..at + 2 * size);
                    if at / group != right.start / group || sequence[left.clone()] == sequence[right] {
                        continue;
                    }
                    let mut other = sequence.clone();
                    other[at..at + 2 * size].rotate_left(size);
                    if seen.insert(other.clone()) {
                        found.push(other);
                    }
                    if found.len() > most {
                        return None;
                    }
                }
            }
        }
        Some(found)
    }

    /// Start orders: the original one, and those that keep classes together at every level, for every class permutation
    /// if there are few classes, otherwise by speed.
    pub fn starts(&self) -> Vec<Sequence> {
        let mut classes = Vec::from_iter(self.own.iter().copied().collect::<BTreeSet<u32>>());
        let mut ranks: Vec<Vec<u32>> = Vec::new();
        if classes.len() <= MOST_RANKED {
            ranks.push(classes.clone());
            while advance(&mut classes) {
                ranks.push(classes.clone());
            }
        } else {
            let speed = |class: u32| self.cluster.classes[class as usize].speed.unwrap_or(1.0);
            classes.sort_by(|&a, &b| speed(b).total_cmp(&speed(a)).then(a.cmp(&b)));
            ranks.push(classes.clone());
            classes.reverse();
            ranks.push(classes);
        }
        let mut starts = vec![self.own.clone()];
        for rank in ranks {
            let place = |class: &u32| rank.iter().position(|other| other == class);
            let mut sequence = self.own.clone();
            self.sort(&mut sequence, self.sizes.len() - 1, &|unit| unit.iter().map(place).collect::<Vec<_>>());
            if !starts.contains(&sequence) {
                starts.push(sequence);
            }
        }
        starts
    }

    /// Sorts the units of every group, from the innermost level up to `level`.
    fn sort<K: Ord>(&self, group: &mut [u32], level: usize, key: &impl Fn(&[u32]) -> K) {
        let Some(below) = level.checked_sub(1) else { return };
        let mut units: Vec<Vec<u32>> = group.chunks(self.sizes[below]).map(<[u32]>::to_vec).collect();
        units.iter_mut().for_each(|unit| self.sort(unit, below, key));
        units.sort_by_key(|unit| key(unit));
        group.iter_mut().zip(units.concat()).for_each(|(place, class)| *place = class);
    }

    /// Moves to neighbouring orders: a block of equal units goes to another position in its group. Positions are run
    /// boundaries, stage ends (`borders`) and, in small groups, all others.
    pub fn moves(&self, sequence: &[u32], borders: &[u32]) -> Vec<Move> {
        let mut found = Vec::new();
        for pair in self.sizes.windows(2).rev() {
            let (size, group) = (pair[0], pair[1]);
            for start in (0..sequence.len()).step_by(group) {
                let units: Vec<&[u32]> = sequence[start..start + group].chunks(size).collect();
                let runs: Vec<(usize, usize)> = runs(&units);
                let mut places: BTreeSet<usize> =
                    (0..=units.len()).step_by(units.len().div_ceil(MOST_PLACES)).collect();
                places.extend(runs.iter().map(|run| run.1).step_by(runs.len().div_ceil(MOST_PLACES)));
                let inside = borders.iter().map(|&border| border as usize).filter(|border| *border > start);
                places.extend(inside.map(|border| (border - start) / size).filter(|border| *border < units.len()));
                for &(from, to) in runs.iter().filter(|_| runs.len() > 1) {
                    let step = (to - from).div_ceil(MOST_LENGTHS);
                    for length in (1..to - from).step_by(step).chain([to - from]) {
                        let elsewhere = places.iter().filter(|place| **place < from || **place > to);
                        found.extend(elsewhere.map(|&place| Move { start, group, size, from, length, place }));
                        if found.len() >= MOST_MOVES {
                            return found;
                        }
                    }
                }
            }
        }
        found
    }

    /// Assigns the cluster's devices to a class sequence; equal units keep their original order.
    pub fn order(&self, sequence: &[u32]) -> DeviceOrder {
        let mut order = DeviceOrder { classes: Vec::new(), device: Vec::with_capacity(sequence.len()) };
        self.place(sequence, self.sizes.len() - 1, 0, &mut order.device);
        for &class in sequence {
            let class = &self.cluster.classes[class as usize];
            match order.classes.last_mut() {
                Some(last) if is_same(last, class) => last.count += 1,
                _ => order.classes.push(DeviceClass { count: 1, ..class.clone() }),
            }
        }
        order
    }

    /// Assigns the devices of the original group that begins at `first` to the positions of a group.
    fn place(&self, group: &[u32], level: usize, first: usize, device: &mut Vec<u32>) {
        let Some(below) = level.checked_sub(1) else { return device.push(first as u32) };
        let size = self.sizes[below];
        let alike = |unit: &[u32]| {
            let mut unit = unit.to_vec();
            self.sort(&mut unit, below, &|unit: &[u32]| unit.to_vec());
            unit
        };
        let mut left: BTreeMap<Vec<u32>, VecDeque<usize>> = BTreeMap::new();
        for start in (first..first + group.len()).step_by(size) {
            left.entry(alike(&self.own[start..start + size])).or_default().push_back(start);
        }
        for unit in group.chunks(size) {
            let start = left.get_mut(&alike(unit)).and_then(VecDeque::pop_front);
            self.place(unit, below, start.expect("reordering keeps the units of a group"), device);
        }
    }
}

fn runs(units: &[&[u32]]) -> Vec<(usize, usize)> {
    let mut end = 0;
    let same = units.chunk_by(|left, right| left == right);
    same.map(|run| {
        let from = end;
        end += run.len();
        (from, end)
    })
    .collect()
}

/// Advances to the next permutation in lexicographic order, if there is one.
fn advance(sequence: &mut [u32]) -> bool {
    let Some(at) = (1..sequence.len()).rev().find(|&at| sequence[at - 1] < sequence[at]) else { return false };
    let larger = (at..sequence.len()).rev().find(|&with| sequence[with] > sequence[at - 1]);
    sequence.swap(at - 1, larger.unwrap_or(at));
    sequence[at..].reverse();
    true
}

/// Returns whether all device orders are equivalent: equal speed and memory.
pub fn is_alike(cluster: &Cluster) -> bool {
    let all = 0..cluster.devices();
    let slowest = class::slowest(&cluster.classes, all);
    slowest == class::fastest(&cluster.classes)
        && cluster.classes.windows(2).all(|pair| pair[0].device.memory == pair[1].device.memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::device::find;
    use crate::cluster::read::levels;

    fn mixed(text: &str, counts: &[(u32, f64)]) -> Cluster {
        let device = find("h100").unwrap().device();
        let class = |&(count, speed): &(u32, f64)| DeviceClass { device: device.clone(), count, speed: Some(speed) };
        Cluster { classes: counts.iter().map(class).collect(), ..levels(text).unwrap() }
    }

    fn speeds(order: &DeviceOrder) -> Vec<u32> {
        let each = |class: &DeviceClass| vec![class.speed.unwrap() as u32; class.count as usize];
        order.classes.iter().flat_map(each).collect()
    }

    #[test]
    fn few_orders_are_all_listed_each_once() {
        let cluster = mixed("4:1GB/s", &[(1, 3.0), (2, 1.0), (1, 2.0)]);
        let units = Units::of(&cluster);
        let found: Vec<DeviceOrder> = units.all(24).unwrap().iter().map(|sequence| units.order(sequence)).collect();
        assert_eq!(found.iter().map(speeds).collect::<BTreeSet<_>>().len(), 12);
        assert_eq!((found.len(), speeds(&found[0]), &found[0].device), (12, vec![3, 1, 1, 2], &vec![0, 1, 2, 3]));
        for order in &found {
            let own = |&device: &u32| [3, 1, 1, 2][device as usize];
            assert_eq!(speeds(order), order.device.iter().map(own).collect::<Vec<u32>>());
        }
        assert!(units.all(11).is_none());
        assert!(!is_alike(&cluster) && is_alike(&mixed("2:1GB/s", &[(1, 2.0), (1, 2.0)])));
    }

    #[test]
    fn units_change_places_within_their_group_and_groups_whole() {
        // Servers of two devices: fast and slow, two slow, two faster. 6 server orders times 2 orders in the first
        // server.
        let cluster = mixed("2:10GB/s,3:1GB/s", &[(1, 2.0), (3, 1.0), (2, 3.0)]);
        let units = Units::of(&cluster);
        let found = units.all(100).unwrap();
        assert_eq!(found.len(), 12);
        for order in found.iter().map(|sequence| units.order(sequence)) {
            assert!(order.device.chunks(2).all(|unit| unit[0] / 2 == unit[1] / 2), "{order:?}");
            let own = |&device: &u32| [2, 1, 1, 1, 3, 3][device as usize];
            assert_eq!(speeds(&order), order.device.iter().map(own).collect::<Vec<u32>>());
        }
        for sequence in &found {
            assert!(units.moves(sequence, &[1, 3]).iter().all(|way| found.contains(&way.of(sequence))));
        }
    }

    #[test]
    fn moves_from_the_starts_lead_to_every_order() {
        for (text, counts) in [("7:1GB/s", &[(3, 2.0), (4, 1.0)][..]), ("3:9GB/s,2:1GB/s", &[(2, 2.0), (4, 1.0)])] {
            let cluster = mixed(text, counts);
            let units = Units::of(&cluster);
            let mut seen: BTreeSet<Sequence> = units.starts().into_iter().collect();
            let mut queue: Vec<Sequence> = seen.iter().cloned().collect();
            while let Some(sequence) = queue.pop() {
                let moved = units.moves(&sequence, &[]).into_iter().map(|way| way.of(&sequence));
                queue.extend(moved.filter(|moved| seen.insert(moved.clone())));
            }
            assert_eq!(seen, units.all(1000).unwrap().into_iter().collect(), "{text}");
        }
    }

    #[test]
    fn searches_begin_where_classes_are_together() {
        let starts = |text: &str, counts: &[(u32, f64)]| Units::of(&mixed(text, counts)).starts();
        assert_eq!(starts("32:1GB/s", &[(8, 2.0), (16, 1.0), (8, 3.0)]).len(), 6);
        let counts: Vec<(u32, f64)> = (1..=8).map(|speed| (2, f64::from(speed))).collect();
        assert_eq!(starts("16:1GB/s", &counts).len(), 2, "up, which the cluster has, and down");
        // One fast device per server: first in both, or last.
        let split = starts("2:9GB/s,2:1GB/s", &[(1, 2.0), (2, 1.0), (1, 2.0)]);
        assert_eq!(split, [vec![0, 1, 1, 0], vec![0, 1, 0, 1], vec![1, 0, 1, 0]]);
    }
}
