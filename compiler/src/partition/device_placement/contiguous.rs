//! The best pipeline of contiguous stages: the dynamic program of Tarnawski et al. (NeurIPS 2020, section 5.1) over closed sets.
//!
//! ```text
//! best(k, I) = min over closed J in I of  max( best(k - 1, J), load(I \ J) )
//! ```
//!
//! | equation   | here              | unit        |
//! | ---        | ---               | ---         |
//! | k          | devices used      |             |
//! | I, J       | sets of `Lattice` |             |
//! | best(k, I) | `Table::at`       | as the file |
//! | load       | `Walk::load`      | as the file |
//!
//! Where we go beyond it: a known plan bounds the search. A stage whose time alone is above the bound is not grown further, and a set
//! after which the rest would not fit on the devices left is not left at all. From one set all larger ones are reached by
//! adding units one by one, which changes the load only by the tensors that touch the unit added.

use crate::partition::device_placement::units::Units;
use crate::partition::search::downset_lattice::Lattice;

/// What a search is bound by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Devices there are.
    pub devices: usize,
    /// Bytes on each.
    pub bytes: f64,
    /// A load that is known to be reached: only lower ones are of interest.
    pub below: f64,
}

/// The stages of the best pipeline, as units, and its largest load. `None` if nothing fits below the bound.
pub fn contiguous(units: &Units, lattice: &Lattice, limits: Limits) -> Option<(f64, Vec<Vec<u32>>)> {
    let (sets, devices) = (lattice.len(), limits.devices.min(units.len()));
    let all = sets - 1;
    let total = lattice.time[all];
    let mut table = Table { devices, best: vec![(f64::INFINITY, 0); (devices + 1) * sets] };
    table.best[0] = (0.0, 0);
    let mut walk = Walk::new(units, lattice);
    for from in 0..all {
        // Of what is left, the devices left can take no more than the bound each.
        let below = limits.below.min(table.least(all));
        let leaves = |used: usize| total - lattice.time[from] <= (devices - used) as f64 * below * (1.0 + 1e-12);
        let useful: Vec<usize> = (0..devices).filter(|&used| table.at(used, from).0 < below && leaves(used)).collect();
        if useful.is_empty() {
            continue;
        }
        walk.from(from, limits.bytes, below);
        for &to in &walk.reached {
            let load = walk.load[to as usize];
            if load >= below {
                continue;
            }
            for &used in &useful {
                let value = table.at(used, from).0.max(load);
                let entry = &mut table.best[(used + 1) * sets + to as usize];
                if value < entry.0 {
                    *entry = (value, from as u32);
                }
            }
        }
    }
    let used = (1..=devices).min_by(|&a, &b| table.at(a, all).0.total_cmp(&table.at(b, all).0))?;
    let value = table.at(used, all).0;
    if value >= limits.below {
        return None;
    }
    let mut stages = Vec::with_capacity(used);
    let mut set = all;
    for used in (1..=used).rev() {
        let from = table.at(used, set).1 as usize;
        stages.push((0..units.len() as u32).filter(|&u| lattice.holds(set, u) && !lattice.holds(from, u)).collect());
        set = from;
    }
    stages.reverse();
    Some((value, stages))
}

struct Table {
    devices: usize,
    best: Vec<(f64, u32)>,
}

impl Table {
    fn at(&self, used: usize, set: usize) -> (f64, u32) {
        let sets = self.best.len() / (self.devices + 1);
        self.best[used * sets + set]
    }

    fn least(&self, set: usize) -> f64 {
        (1..=self.devices).map(|used| self.at(used, set).0).fold(f64::INFINITY, f64::min)
    }
}

/// A walk from one closed set to the larger ones.
struct Walk<'a> {
    units: &'a Units,
    lattice: &'a Lattice,
    /// The sets reached, the nearest first.
    reached: Vec<u32>,
    /// For each set reached: load, time and bytes of what was added.
    load: Vec<f64>,
    time: Vec<f64>,
    bytes: Vec<f64>,
    seen: Vec<u32>,
    turn: u32,
}

impl Walk<'_> {
    fn new<'a>(units: &'a Units, lattice: &'a Lattice) -> Walk<'a> {
        let empty = vec![0.0; lattice.len()];
        Walk {
            units,
            lattice,
            reached: Vec::new(),
            load: empty.clone(),
            time: empty.clone(),
            bytes: empty,
            seen: vec![0; lattice.len()],
            turn: 0,
        }
    }

    fn from(&mut self, start: usize, bytes: f64, below: f64) {
        let (units, lattice) = (self.units, self.lattice);
        self.turn += 1;
        self.reached.clear();
        (self.load[start], self.time[start], self.bytes[start]) = (0.0, 0.0, 0.0);
        let mut at = start;
        let mut next = 0;
        loop {
            for &(unit, to) in &lattice.grows[at] {
                let (set, added) = (to as usize, unit as usize);
                if self.seen[set] == self.turn {
                    continue;
                }
                let time = self.time[at] + units.time[added];
                let held = self.bytes[at] + units.bytes[added];
                if time >= below || held > bytes {
                    continue;
                }
                self.seen[set] = self.turn;
                let before = |u: u32| lattice.holds(at, u) && !lattice.holds(start, u);
                let after = |u: u32| lattice.holds(set, u) && !lattice.holds(start, u);
                let moved: f64 = units.touching[added]
                    .iter()
                    .map(|&tensor| units.charge(tensor, after) - units.charge(tensor, before))
                    .sum();
                (self.time[set], self.bytes[set]) = (time, held);
                self.load[set] = self.load[at] + units.time[added] + moved;
                self.reached.push(to);
            }
            let Some(&set) = self.reached.get(next) else { return };
            at = set as usize;
            next += 1;
        }
    }
}
