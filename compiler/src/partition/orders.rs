//! The orders of unlike devices along a pipeline.
//!
//! Searches put stages on devices from the first to the last, so on a cluster of several classes the order of the devices is a choice of
//! its own. Units of the outermost level, single devices where there is one level, may change places: every link stays what it is.
//! Units of the same classes are alike, so there are as many orders as ways to write down their kinds. Where these are few all
//! of them are asked about, which on one level covers every assignment of devices to stages. Else the kinds stay together: every order of
//! kinds where those are few, and otherwise by speed, up and down, and as the cluster has them.

use crate::cluster::{Cluster, DeviceClass, class};

/// The most orders that are asked about one by one, and the most kinds of which all orders are.
pub const MOST_ORDERS: usize = 24;
const MOST_KINDS: usize = 6;

/// Devices up to which more than four kinds have all their orders.
const FEW_DEVICES: u32 = 64;

/// One order of devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    /// The classes in this order.
    pub classes: Vec<DeviceClass>,
    /// For each place in this order the device that stands there.
    pub device: Vec<u32>,
}

/// The orders to ask about, that of the cluster first; and whether they are all that there are.
pub fn orders(cluster: &Cluster, most: usize) -> (Vec<Order>, bool) {
    let units = Units::of(cluster);
    if units.orders_within(most).is_some() {
        let mut sequences = vec![units.kind.clone()];
        let mut next = units.kind.clone();
        next.sort_unstable();
        loop {
            if next != units.kind {
                sequences.push(next.clone());
            }
            if !advance(&mut next) {
                break;
            }
        }
        return (sequences.iter().map(|kinds| units.order(cluster, kinds)).collect(), true);
    }
    let kinds = units.kinds.len();
    let few = if cluster.devices() <= FEW_DEVICES { MOST_KINDS } else { 4 };
    let mut orders_of_kinds: Vec<Vec<usize>> = Vec::new();
    if kinds <= few {
        let mut next: Vec<usize> = (0..kinds).collect();
        loop {
            orders_of_kinds.push(next.clone());
            if !advance(&mut next) {
                break;
            }
        }
    } else {
        let mut by_speed: Vec<usize> = (0..kinds).collect();
        let speed = |kind: usize| {
            let classes = units.kinds[kind].iter().map(|&class| &cluster.classes[class]);
            classes.map(|class| class.speed.unwrap_or(1.0)).fold(f64::INFINITY, f64::min)
        };
        by_speed.sort_by(|&a, &b| speed(b).total_cmp(&speed(a)).then(a.cmp(&b)));
        orders_of_kinds.push(by_speed.clone());
        by_speed.reverse();
        orders_of_kinds.push(by_speed);
    }
    let mut sequences = vec![units.kind.clone()];
    for kinds in orders_of_kinds {
        let run = |kind: usize| units.kind.iter().copied().filter(move |&other| other == kind);
        let sequence: Vec<usize> = kinds.into_iter().flat_map(run).collect();
        if !sequences.contains(&sequence) {
            sequences.push(sequence);
        }
    }
    (sequences.iter().map(|kinds| units.order(cluster, kinds)).collect(), false)
}

/// Units of the outermost level by their kinds.
struct Units {
    /// Devices of one.
    size: u32,
    /// The classes of the devices of each kind.
    kinds: Vec<Vec<usize>>,
    /// The kind of each unit, in the cluster's order.
    kind: Vec<usize>,
}

impl Units {
    fn of(cluster: &Cluster) -> Units {
        let outermost = cluster.levels.last().map_or(1, |level| level.count.max(1));
        let size = (cluster.devices() / outermost).max(1);
        let classes: Vec<usize> = (0..cluster.classes.len())
            .flat_map(|class| std::iter::repeat_n(class, cluster.classes[class].count as usize))
            .collect();
        let mut kinds: Vec<Vec<usize>> = Vec::new();
        let mut kind = Vec::with_capacity(outermost as usize);
        for unit in classes.chunks(size as usize) {
            // Classes of equal figures are one, wherever the cluster names them.
            let first_alike = |&class: &usize| {
                let alike = |other: &DeviceClass| same(other, &cluster.classes[class]);
                cluster.classes.iter().position(alike).unwrap_or(class)
            };
            let unit: Vec<usize> = unit.iter().map(first_alike).collect();
            let known = kinds.iter().position(|known| *known == unit);
            kind.push(known.unwrap_or(kinds.len()));
            if known.is_none() {
                kinds.push(unit);
            }
        }
        Units { size, kinds, kind }
    }

    /// How many orders there are, unless there are more than `most`.
    fn orders_within(&self, most: usize) -> Option<usize> {
        let mut orders: u128 = 1;
        let mut placed: u128 = 0;
        for kind in 0..self.kinds.len() {
            let mut chosen: u128 = 0;
            for _ in self.kind.iter().filter(|&&other| other == kind) {
                (placed, chosen) = (placed + 1, chosen + 1);
                // A binomial built up factor by factor stays whole.
                orders = orders.checked_mul(placed)? / chosen;
                // The product only grows from kind to kind, and within one too.
                if orders > most as u128 {
                    return None;
                }
            }
        }
        Some(orders as usize)
    }

    /// The order in which units of these kinds follow each other; of one kind those first that are first in the cluster.
    fn order(&self, cluster: &Cluster, kinds: &[usize]) -> Order {
        let mut left: Vec<Vec<u32>> = vec![Vec::new(); self.kinds.len()];
        for (unit, &kind) in self.kind.iter().enumerate().rev() {
            left[kind].push(unit as u32);
        }
        let mut order = Order { classes: Vec::new(), device: Vec::with_capacity(cluster.devices() as usize) };
        for &kind in kinds {
            let unit = left[kind].pop().unwrap_or_default();
            order.device.extend(unit * self.size..(unit + 1) * self.size);
            for &class in &self.kinds[kind] {
                let class = &cluster.classes[class];
                match order.classes.last_mut() {
                    Some(last) if same(last, class) => last.count += 1,
                    _ => order.classes.push(DeviceClass { count: 1, ..class.clone() }),
                }
            }
        }
        order
    }
}

fn same(left: &DeviceClass, right: &DeviceClass) -> bool {
    left.device == right.device && left.speed == right.speed
}

/// The next arrangement in lexicographic order, if there is one.
fn advance(sequence: &mut [usize]) -> bool {
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
    use std::collections::BTreeSet;

    fn mixed(text: &str, counts: &[(u32, f64)]) -> Cluster {
        let device = find("h100").unwrap().device();
        let class = |&(count, speed): &(u32, f64)| DeviceClass { device: device.clone(), count, speed: Some(speed) };
        Cluster { classes: counts.iter().map(class).collect(), ..levels(text).unwrap() }
    }

    fn speeds(order: &Order) -> Vec<u32> {
        let each = |class: &DeviceClass| vec![class.speed.unwrap() as u32; class.count as usize];
        order.classes.iter().flat_map(each).collect()
    }

    #[test]
    fn few_orders_are_all_asked_about_each_once() {
        let cluster = mixed("4:1GB/s", &[(1, 3.0), (2, 1.0), (1, 2.0)]);
        let (found, is_all) = orders(&cluster, MOST_ORDERS);
        assert_eq!((found.len(), is_all), (12, true));
        assert_eq!(found.iter().map(speeds).collect::<BTreeSet<_>>().len(), 12);
        assert_eq!((speeds(&found[0]), &found[0].device), (vec![3, 1, 1, 2], &vec![0, 1, 2, 3]));
        for order in &found {
            let own = |&device: &u32| [3, 1, 1, 2][device as usize];
            assert_eq!(speeds(order), order.device.iter().map(own).collect::<Vec<u32>>());
        }
        assert!(!is_alike(&cluster) && is_alike(&mixed("2:1GB/s", &[(1, 2.0), (1, 2.0)])));
    }

    #[test]
    fn units_of_the_outermost_level_change_places_whole() {
        let cluster = mixed("2:10GB/s,3:1GB/s", &[(1, 2.0), (3, 1.0), (2, 3.0)]);
        let (found, is_all) = orders(&cluster, MOST_ORDERS);
        assert_eq!((found.len(), is_all), (6, true));
        assert!(
            found.iter().all(|order| order.device.chunks(2).all(|unit| unit[0] % 2 == 0 && unit[1] == unit[0] + 1))
        );
    }

    #[test]
    fn of_many_orders_those_are_taken_that_keep_kinds_together() {
        let (found, is_all) = orders(&mixed("32:1GB/s", &[(8, 2.0), (16, 1.0), (8, 3.0)]), MOST_ORDERS);
        assert_eq!((found.len(), is_all), (6, false));
        assert!(found.iter().all(|order| order.classes.len() == 3));
        let counts: Vec<(u32, f64)> = (1..=8).map(|speed| (2, f64::from(speed))).collect();
        let (found, _) = orders(&mixed("16:1GB/s", &counts), MOST_ORDERS);
        assert_eq!(found.len(), 2, "up, which the cluster has, and down");
    }
}
