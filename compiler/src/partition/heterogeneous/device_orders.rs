//! The orders of unlike devices along a pipeline.
//!
//! Searches put stages on devices from the first to the last, so on a cluster of several classes the order of the devices is a choice of
//! its own. At every level units of one group may change places: every link stays what it is. So an order is told by the classes
//! that follow each other, and there are as many as those changes give. Where these are few all of them are listed, which on one
//! level covers every assignment of devices to stages. Else a search begins at orders that keep the classes together and goes from one to
//! the next by [`Units::moves`].

use crate::cluster::{Cluster, DeviceClass, class};
use crate::partition::heterogeneous::device_ranges::first_alike;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Classes of which every rank is a start; of more, only by speed.
const MOST_RANKED: usize = 4;

/// Lengths of blocks that are moved, and places that they are moved to, beside the borders.
const MOST_LENGTHS: usize = 8;
const MOST_PLACES: usize = 16;

/// Moves that are listed of one order.
const MOST_MOVES: usize = 10_000;

/// One order of devices.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceOrder {
    /// The classes in this order.
    pub classes: Vec<DeviceClass>,
    /// For each place in this order the device that stands there.
    pub device: Vec<u32>,
}

/// The class of the device at each place, by its number in the cluster.
pub type Sequence = Vec<u32>;

/// A block of equal units of one group that goes elsewhere in the group.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    /// Where the group begins, and its devices.
    start: usize,
    group: usize,
    /// Devices of a unit.
    size: usize,
    /// Units of the group: where the block begins, how many it has, and before which of the others it goes.
    from: usize,
    length: usize,
    place: usize,
}

impl Move {
    /// The order that it leads to.
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

/// The units of a cluster's levels.
pub struct Units<'a> {
    cluster: &'a Cluster,
    /// The cluster's own order.
    own: Sequence,
    /// Devices of one unit of each level, a device being the first, and of all.
    sizes: Vec<usize>,
}

impl Units<'_> {
    /// Those of a cluster.
    pub fn of(cluster: &Cluster) -> Units<'_> {
        // Classes of equal figures are one, wherever the cluster names them.
        let repeated =
            |class: &DeviceClass| std::iter::repeat_n(first_alike(&cluster.classes, class), class.count as usize);
        let mut sizes = vec![1];
        for level in &cluster.levels {
            sizes.push(sizes[sizes.len() - 1] * level.count.max(1) as usize);
        }
        Units { cluster, own: cluster.classes.iter().flat_map(repeated).collect(), sizes }
    }

    /// All orders, that of the cluster first; `None` if there are more than `most`.
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

    /// Orders to begin with: the cluster's, and those that keep classes together at every level, in every rank of the classes
    /// where these are few and otherwise by speed.
    pub fn starts(&self) -> Vec<Sequence> {
        let mut classes: Vec<u32> = self.own.clone();
        classes.sort_unstable();
        classes.dedup();
        let mut ranks: Vec<Vec<u32>> = Vec::new();
        if classes.len() <= MOST_RANKED {
            let mut next = classes;
            loop {
                ranks.push(next.clone());
                if !advance(&mut next) {
                    break;
                }
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

    /// Sorts the units of every group, from the innermost level to that of `level`.
    fn sort<K: Ord>(&self, group: &mut [u32], level: usize, key: &impl Fn(&[u32]) -> K) {
        let Some(below) = level.checked_sub(1) else { return };
        let mut units: Vec<Vec<u32>> = group.chunks(self.sizes[below]).map(<[u32]>::to_vec).collect();
        units.iter_mut().for_each(|unit| self.sort(unit, below, key));
        units.sort_by_key(|unit| key(unit));
        group.iter_mut().zip(units.concat()).for_each(|(place, class)| *place = class);
    }

    /// Ways from one order to those near it: a block of equal units of a group stands elsewhere in the group. It goes to where other
    /// units begin or end, or to one of `borders`, places where a stage ends; in small groups to any place.
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

    /// The devices in the order of a sequence that this cluster has; of units that are alike those first that are first in the cluster.
    pub fn order(&self, sequence: &[u32]) -> DeviceOrder {
        let mut order = DeviceOrder { classes: Vec::new(), device: Vec::with_capacity(sequence.len()) };
        self.place(sequence, self.sizes.len() - 1, 0, &mut order.device);
        for &class in sequence {
            let class = &self.cluster.classes[class as usize];
            match order.classes.last_mut() {
                Some(last) if same(last, class) => last.count += 1,
                _ => order.classes.push(DeviceClass { count: 1, ..class.clone() }),
            }
        }
        order
    }

    /// Gives the places of a group the devices of the cluster's group that begins at device `first`.
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
            self.place(unit, below, start.expect("changes of places keep the units of a group"), device);
        }
    }
}

/// The runs of equal units, from one to before another.
fn runs(units: &[&[u32]]) -> Vec<(usize, usize)> {
    let mut runs = Vec::new();
    let mut from = 0;
    for to in 1..=units.len() {
        if to == units.len() || units[to] != units[from] {
            runs.push((from, to));
            from = to;
        }
    }
    runs
}

fn same(left: &DeviceClass, right: &DeviceClass) -> bool {
    left.device == right.device && left.speed == right.speed
}

/// The next arrangement in lexicographic order, if there is one.
fn advance(sequence: &mut [u32]) -> bool {
    let Some(at) = (1..sequence.len()).rev().find(|&at| sequence[at - 1] < sequence[at]) else { return false };
    let larger = (at..sequence.len()).rev().find(|&with| sequence[with] > sequence[at - 1]);
    sequence.swap(at - 1, larger.unwrap_or(at));
    sequence[at..].reverse();
    true
}

/// Whether every order of the cluster's devices is as good as any other.
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
        // Servers of two: fast and slow, two slow, two faster. Six orders of the servers, two of the first one's devices.
        let cluster = mixed("2:10GB/s,3:1GB/s", &[(1, 2.0), (3, 1.0), (2, 3.0)]);
        let units = Units::of(&cluster);
        let found = units.all(100).unwrap();
        assert_eq!(found.len(), 12);
        for order in found.iter().map(|sequence| units.order(sequence)) {
            assert!(order.device.chunks(2).all(|unit| unit[0] / 2 == unit[1] / 2), "{order:?}");
            let own = |&device: &u32| [2, 1, 1, 1, 3, 3][device as usize];
            assert_eq!(speeds(&order), order.device.iter().map(own).collect::<Vec<u32>>());
        }
        // Every move leads to an order that the cluster has.
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
        // A fast device in each server: first in both, or last.
        let split = starts("2:9GB/s,2:1GB/s", &[(1, 2.0), (2, 1.0), (1, 2.0)]);
        assert_eq!(split, [vec![0, 1, 1, 0], vec![0, 1, 0, 1], vec![1, 0, 1, 0]]);
    }
}
