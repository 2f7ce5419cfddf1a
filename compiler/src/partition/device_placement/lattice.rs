//! Closed sets of units, each with the larger sets that one more unit makes.
//!
//! A set is closed when it holds everything that must come before its members. A pipeline of contiguous stages is a chain of closed
//! sets, a stage the difference of two. All of them together are exact; where they are too many, those along some orders.

use crate::partition::device_placement::units::Units;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Some closed sets, from the empty one to that of all units, in order of size.
#[derive(Clone, Debug)]
pub struct Lattice {
    words: usize,
    bits: Vec<u64>,
    /// For each set the units that may be added, with the sets that makes.
    pub grows: Vec<Vec<(u32, u32)>>,
    /// Time of all units in each set.
    pub time: Vec<f64>,
    /// Whether these are all closed sets that there are.
    pub is_whole: bool,
}

impl Lattice {
    /// All closed sets, or `None` where they are more than `budget`.
    pub fn whole(units: &Units, budget: usize) -> Option<Lattice> {
        let mut lattice = Lattice::empty(units);
        lattice.is_whole = true;
        let mut known: HashMap<Box<[u64]>, u32> = HashMap::new();
        known.insert(vec![0; lattice.words].into(), 0);
        // Sets of one size after those of the size before, so that ids are in order of size.
        let mut at = 0;
        while at < lattice.len() {
            for unit in 0..units.len() as u32 {
                if lattice.holds(at, unit)
                    || !units.before[unit as usize].iter().all(|&before| lattice.holds(at, before))
                {
                    continue;
                }
                let mut bits: Box<[u64]> = lattice.bits[at * lattice.words..(at + 1) * lattice.words].into();
                bits[unit as usize / 64] |= 1 << (unit % 64);
                let fresh = lattice.len() as u32;
                let set = match known.entry(bits) {
                    Entry::Occupied(known) => *known.get(),
                    Entry::Vacant(vacant) => {
                        if lattice.len() >= budget {
                            return None;
                        }
                        lattice.bits.extend_from_slice(vacant.key());
                        vacant.insert(fresh);
                        lattice.grows.push(Vec::new());
                        lattice.time.push(lattice.time[at] + units.time[unit as usize]);
                        fresh
                    }
                };
                lattice.grows[at].push((unit, set));
            }
            at += 1;
        }
        Some(lattice)
    }

    /// The closed sets along one order of all units.
    pub fn along(units: &Units, order: &[u32]) -> Lattice {
        let mut lattice = Lattice::empty(units);
        for (at, &unit) in order.iter().enumerate() {
            let start = at * lattice.words;
            lattice.bits.extend_from_within(start..start + lattice.words);
            let bits = lattice.bits.len() - lattice.words;
            lattice.bits[bits + unit as usize / 64] |= 1 << (unit % 64);
            lattice.grows[at].push((unit, at as u32 + 1));
            lattice.grows.push(Vec::new());
            lattice.time.push(lattice.time[at] + units.time[unit as usize]);
        }
        lattice
    }

    fn empty(units: &Units) -> Lattice {
        let words = units.len().div_ceil(64).max(1);
        Lattice { words, bits: vec![0; words], grows: vec![Vec::new()], time: vec![0.0], is_whole: false }
    }

    /// How many sets there are, the empty one among them.
    pub fn len(&self) -> usize {
        self.grows.len()
    }

    /// Whether there are none: never.
    pub fn is_empty(&self) -> bool {
        self.grows.is_empty()
    }

    /// Whether a set holds a unit.
    pub fn holds(&self, set: usize, unit: u32) -> bool {
        self.bits[set * self.words + unit as usize / 64] >> (unit % 64) & 1 == 1
    }
}

/// Some topological orders: by first come, by last come, and by the end that is nearest.
pub fn orders(units: &Units) -> Vec<Vec<u32>> {
    let mut distance = vec![0u32; units.len()];
    for unit in (0..units.len()).rev() {
        distance[unit] = units.after[unit].iter().map(|&after| distance[after as usize] + 1).max().unwrap_or(0);
    }
    let pick_first = |_: &[u32]| 0;
    let pick_last = |ready: &[u32]| ready.len() - 1;
    let pick_far = |ready: &[u32]| {
        let farthest = (0..ready.len()).max_by_key(|&at| (distance[ready[at] as usize], std::cmp::Reverse(at)));
        farthest.unwrap_or(0)
    };
    let picks: [&Pick<'_>; 3] = [&pick_first, &pick_last, &pick_far];
    let mut orders: Vec<Vec<u32>> = picks.into_iter().map(|pick: &Pick<'_>| order(units, pick)).collect();
    orders.dedup();
    orders
}

/// Which of the units that may come next comes next, by its place among them.
type Pick<'a> = dyn Fn(&[u32]) -> usize + 'a;

fn order(units: &Units, pick: &Pick<'_>) -> Vec<u32> {
    let mut missing: Vec<usize> = units.before.iter().map(Vec::len).collect();
    let mut ready: Vec<u32> = (0..units.len() as u32).filter(|&unit| missing[unit as usize] == 0).collect();
    let mut order = Vec::with_capacity(units.len());
    while !ready.is_empty() {
        let unit = ready.remove(pick(&ready));
        order.push(unit);
        for &after in &units.after[unit as usize] {
            missing[after as usize] -= 1;
            if missing[after as usize] == 0 {
                ready.push(after);
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_chains_of_two_have_nine_closed_sets() {
        let mut units =
            Units { time: vec![1.0; 4], before: vec![vec![]; 4], after: vec![vec![]; 4], ..Units::default() };
        for (from, to) in [(0, 1), (2, 3)] {
            units.after[from].push(to as u32);
            units.before[to].push(from as u32);
        }
        let lattice = Lattice::whole(&units, 9).expect("nine are enough");
        assert_eq!((lattice.len(), lattice.time[8]), (9, 4.0));
        assert!(Lattice::whole(&units, 8).is_none());
        for order in orders(&units) {
            let along = Lattice::along(&units, &order);
            assert_eq!((along.len(), along.holds(4, 3)), (5, true));
        }
    }
}
