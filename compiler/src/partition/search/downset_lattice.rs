//! A lattice of down-sets of units, with edges that add one unit.
//!
//! A down-set contains all predecessors of its members. A pipeline of contiguous stages is a chain of down-sets, and a
//! stage is the difference of two. A search over all down-sets is exact; if there are too many, only those along some
//! linear orders are used.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Down-sets in order of size, from the empty set to the set of all units.
#[derive(Clone, Debug)]
pub struct Lattice {
    words: usize,
    bits: Vec<u64>,
    /// For each set: the units that can be added, and the resulting set.
    pub grows: Vec<Vec<(u32, u32)>>,
    pub time: Vec<f64>,
    pub is_whole: bool,
}

impl Lattice {
    /// All down-sets, or `None` if there are more than `budget`. `before` lists the predecessors of each unit.
    pub fn whole(before: &[Vec<u32>], time: &[f64], budget: usize) -> Option<Lattice> {
        let mut lattice = Lattice::empty(before.len());
        lattice.is_whole = true;
        let mut known: HashMap<Box<[u64]>, u32> = HashMap::new();
        known.insert(vec![0; lattice.words].into(), 0);
        // Breadth-first by size, so that ids are in order of size.
        let mut at = 0;
        while at < lattice.len() {
            for unit in 0..before.len() as u32 {
                if lattice.holds(at, unit) || !before[unit as usize].iter().all(|&before| lattice.holds(at, before)) {
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
                        lattice.time.push(lattice.time[at] + time[unit as usize]);
                        fresh
                    }
                };
                lattice.grows[at].push((unit, set));
            }
            at += 1;
        }
        Some(lattice)
    }

    pub fn along(time: &[f64], order: &[u32]) -> Lattice {
        let mut lattice = Lattice::empty(order.len());
        for (at, &unit) in order.iter().enumerate() {
            let start = at * lattice.words;
            lattice.bits.extend_from_within(start..start + lattice.words);
            let bits = lattice.bits.len() - lattice.words;
            lattice.bits[bits + unit as usize / 64] |= 1 << (unit % 64);
            lattice.grows[at].push((unit, at as u32 + 1));
            lattice.grows.push(Vec::new());
            lattice.time.push(lattice.time[at] + time[unit as usize]);
        }
        lattice
    }

    fn empty(units: usize) -> Lattice {
        let words = units.div_ceil(64).max(1);
        Lattice { words, bits: vec![0; words], grows: vec![Vec::new()], time: vec![0.0], is_whole: false }
    }

    pub fn len(&self) -> usize {
        self.grows.len()
    }

    pub fn is_empty(&self) -> bool {
        self.grows.is_empty()
    }

    pub fn holds(&self, set: usize, unit: u32) -> bool {
        self.bits[set * self.words + unit as usize / 64] >> (unit % 64) & 1 == 1
    }
}

/// Some topological orders: first ready first, last ready first, and longest remaining path first. Units must be
/// numbered in a topological order.
pub fn orders(before: &[Vec<u32>], after: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let mut distance = vec![0u32; after.len()];
    for unit in (0..after.len()).rev() {
        distance[unit] = after[unit].iter().map(|&after| distance[after as usize] + 1).max().unwrap_or(0);
    }
    let pick_first = |_: &[u32]| 0;
    let pick_last = |ready: &[u32]| ready.len() - 1;
    let pick_far = |ready: &[u32]| {
        let farthest = (0..ready.len()).max_by_key(|&at| (distance[ready[at] as usize], std::cmp::Reverse(at)));
        farthest.unwrap_or(0)
    };
    let picks: [&Pick<'_>; 3] = [&pick_first, &pick_last, &pick_far];
    let mut orders: Vec<Vec<u32>> = picks.into_iter().map(|pick: &Pick<'_>| order(before, after, pick)).collect();
    orders.dedup();
    orders
}

type Pick<'a> = dyn Fn(&[u32]) -> usize + 'a;

fn order(before: &[Vec<u32>], after: &[Vec<u32>], pick: &Pick<'_>) -> Vec<u32> {
    let mut missing: Vec<usize> = before.iter().map(Vec::len).collect();
    let mut ready: Vec<u32> = (0..before.len() as u32).filter(|&unit| missing[unit as usize] == 0).collect();
    let mut order = Vec::with_capacity(before.len());
    while !ready.is_empty() {
        let unit = ready.remove(pick(&ready));
        order.push(unit);
        for &after in &after[unit as usize] {
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
        let (mut before, mut after, time) = (vec![vec![]; 4], vec![vec![]; 4], [1.0; 4]);
        for (from, to) in [(0usize, 1usize), (2, 3)] {
            after[from].push(to as u32);
            before[to].push(from as u32);
        }
        let lattice = Lattice::whole(&before, &time, 9).expect("nine are enough");
        assert_eq!((lattice.len(), lattice.time[8]), (9, 4.0));
        assert!(Lattice::whole(&before, &time, 8).is_none());
        for order in orders(&before, &after) {
            let along = Lattice::along(&time, &order);
            assert_eq!((along.len(), along.holds(4, 3)), (5, true));
        }
    }
}
