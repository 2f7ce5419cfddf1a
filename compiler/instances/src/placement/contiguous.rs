//! The best pipeline of contiguous stages: dynamic program over down-sets (Tarnawski et al., NeurIPS 2020, section
//! 5.1).
//!
//! ```text
//! best(k, I) = min over down-sets J in I of  max( best(k - 1, J), load(I \ J) )
//! ```
//!
//! | equation   | here              | unit                 |
//! | ---        | ---               | ---                  |
//! | k          | devices used      |                      |
//! | I, J       | sets of `Lattice` |                      |
//! | best(k, I) | `Table::at`       | as in the input file |
//! | load       | `Walk::load`      | as in the input file |
//!
//! In addition, a known plan prunes the search: stages slower than the bound are not extended, and sets are skipped if
//! the rest cannot fit on the remaining devices. From each set, supersets are reached by adding units one by one; the
//! load changes only by the tensors of the added unit.

use crate::placement::units::Units;
use compiler::partition::search::downset_lattice::Lattice;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    pub devices: usize,
    pub bytes: f64,
    /// A load that is known to be feasible; only smaller loads are of interest.
    pub below: f64,
}

/// The largest load and the stages (as units) of the best pipeline; `None` if nothing is below the bound.
pub fn contiguous(units: &Units, lattice: &Lattice, limits: Limits) -> Option<(f64, Vec<Vec<u32>>)> {
    let (sets, devices) = (lattice.len(), limits.devices.min(units.len()));
    let all = sets - 1;
    let total = lattice.time[all];
    let mut table = Table { devices, best: vec![(f64::INFINITY, 0); (devices + 1) * sets] };
    table.best[0] = (0.0, 0);
    let mut walk = Walk::new(units, lattice);
    for from in 0..all {
        // Each remaining device can take at most `below` of the remaining time.
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

/// Enumerates the supersets of a down-set.
struct Walk<'a> {
    units: &'a Units,
    lattice: &'a Lattice,
    /// The supersets reached, nearest first.
    reached: Vec<u32>,
    /// For each superset: load, time and bytes of the added units.
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
