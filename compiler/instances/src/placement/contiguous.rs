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
//! With hosts, k counts accelerators and hosts separately, and the last stage is on either; the load of a host is its
//! time alone.
//!
//! In addition, a known plan prunes the search: stages slower than the bound are not extended, and sets are skipped if
//! the rest cannot fit on the remaining devices. From each set, supersets are reached by adding units one by one; the
//! load changes only by the tensors of the added unit.

use crate::placement::units::Units;
use compiler::partition::search::downset_lattice::Lattice;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    pub devices: usize,
    pub hosts: usize,
    /// Bytes per accelerator.
    pub bytes: f64,
    /// A load that is known to be feasible; only smaller loads are of interest.
    pub below: f64,
}

/// The units of one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Part {
    pub units: Vec<u32>,
    pub is_host: bool,
}

/// The largest load and the stages of the best pipeline; `None` if nothing is below the bound. The times of the lattice
/// are the work of the units.
pub fn contiguous(units: &Units, lattice: &Lattice, limits: Limits) -> Option<(f64, Vec<Part>)> {
    let (sets, devices, hosts) = (lattice.len(), limits.devices.min(units.len()), limits.hosts.min(units.len()));
    let full_set = sets - 1;
    let total = lattice.time[full_set];
    let mut table = Table { devices, sets, best: vec![Entry::default(); (devices + 1) * (hosts + 1) * sets] };
    table.best[0].value = 0.0;
    let mut walk = Walk::new(units, lattice);
    for from in 0..full_set {
        // Each remaining device can take at most `below` of the remaining time.
        let below = limits.below.min(table.least(full_set));
        let can_finish = |used: Used| {
            let remaining = (devices - used.devices) as f64 + (hosts - used.hosts) as f64 * units.host_rate;
            below.is_infinite() || total - lattice.time[from] <= remaining * below * (1.0 + 1e-12)
        };
        let is_full = |used: &Used| used.devices == devices && used.hosts == hosts;
        let is_useful = |used: &Used| table.at(*used, from).value < below && !is_full(used) && can_finish(*used);
        let useful: Vec<Used> = Used::up_to(devices, hosts).filter(is_useful).collect();
        if useful.is_empty() {
            continue;
        }
        walk.from(from, limits, below);
        for &to in &walk.reached {
            let to = to as usize;
            let on_accelerator = if walk.is_on_accelerator[to] { walk.load[to] } else { f64::INFINITY };
            let on_host = if hosts > 0 { walk.host_time[to] } else { f64::INFINITY };
            for (load, is_host) in [(on_accelerator, false), (on_host, true)] {
                if load >= below {
                    continue;
                }
                let has_free = |used: &&Used| if is_host { used.hosts < hosts } else { used.devices < devices };
                for &used in useful.iter().filter(has_free) {
                    let value = table.at(used, from).value.max(load);
                    let next = table.index(used.with(is_host), to);
                    let entry = &mut table.best[next];
                    if value < entry.value {
                        *entry = Entry { value, from: from as u32, is_host };
                    }
                }
            }
        }
    }
    let counts = Used::up_to(devices, hosts).filter(|used| used.devices + used.hosts > 0);
    let mut used = counts.min_by(|&a, &b| table.at(a, full_set).value.total_cmp(&table.at(b, full_set).value))?;
    let value = table.at(used, full_set).value;
    if value >= limits.below {
        return None;
    }
    let mut stages = Vec::with_capacity(used.devices + used.hosts);
    let mut set = full_set;
    while set > 0 {
        let Entry { from, is_host, .. } = table.at(used, set);
        let from = from as usize;
        let is_added = |&unit: &u32| lattice.holds(set, unit) && !lattice.holds(from, unit);
        stages.push(Part { units: (0..units.len() as u32).filter(is_added).collect(), is_host });
        (set, used) = (from, used.without(is_host));
    }
    stages.reverse();
    Some((value, stages))
}

/// Numbers of devices.
#[derive(Clone, Copy, Debug)]
struct Used {
    devices: usize,
    hosts: usize,
}

impl Used {
    /// All numbers up to these, fewest hosts first.
    fn up_to(devices: usize, hosts: usize) -> impl Iterator<Item = Used> {
        (0..=hosts).flat_map(move |hosts| (0..=devices).map(move |devices| Used { devices, hosts }))
    }

    fn with(self, is_host: bool) -> Used {
        match is_host {
            true => Used { hosts: self.hosts + 1, ..self },
            false => Used { devices: self.devices + 1, ..self },
        }
    }

    fn without(self, is_host: bool) -> Used {
        match is_host {
            true => Used { hosts: self.hosts - 1, ..self },
            false => Used { devices: self.devices - 1, ..self },
        }
    }
}

/// The best pipeline of one set: its largest load, and its last stage as the set before it and the kind of its device.
#[derive(Clone, Copy, Debug)]
struct Entry {
    value: f64,
    from: u32,
    is_host: bool,
}

impl Default for Entry {
    fn default() -> Entry {
        Entry { value: f64::INFINITY, from: 0, is_host: false }
    }
}

struct Table {
    devices: usize,
    sets: usize,
    best: Vec<Entry>,
}

impl Table {
    fn index(&self, used: Used, set: usize) -> usize {
        (used.hosts * (self.devices + 1) + used.devices) * self.sets + set
    }

    fn at(&self, used: Used, set: usize) -> Entry {
        self.best[self.index(used, set)]
    }

    fn least(&self, set: usize) -> f64 {
        let values = self.best.iter().skip(set).step_by(self.sets).map(|entry| entry.value);
        values.fold(f64::INFINITY, f64::min)
    }
}

/// Enumerates the supersets of a down-set.
struct Walk<'a> {
    units: &'a Units,
    lattice: &'a Lattice,
    /// The supersets reached, nearest first.
    reached: Vec<u32>,
    /// For each superset: load, time and bytes of the added units on an accelerator, and their time on a host.
    load: Vec<f64>,
    time: Vec<f64>,
    bytes: Vec<f64>,
    host_time: Vec<f64>,
    /// Whether an accelerator can hold the added units in less than the bound.
    is_on_accelerator: Vec<bool>,
    visited: Vec<u32>,
    visit: u32,
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
            bytes: empty.clone(),
            host_time: empty,
            is_on_accelerator: vec![false; lattice.len()],
            visited: vec![0; lattice.len()],
            visit: 0,
        }
    }

    fn from(&mut self, start: usize, limits: Limits, below: f64) {
        let (units, lattice) = (self.units, self.lattice);
        self.visit += 1;
        self.reached.clear();
        (self.load[start], self.time[start], self.bytes[start], self.host_time[start]) = (0.0, 0.0, 0.0, 0.0);
        let mut at = start;
        let mut next = 0;
        loop {
            for &(unit, to) in &lattice.grows[at] {
                let (set, index) = (to as usize, unit as usize);
                if self.visited[set] == self.visit {
                    continue;
                }
                let time = self.time[at] + units.time[index];
                let memory = self.bytes[at] + units.bytes[index];
                let host_time = self.host_time[at] + units.host_time[index];
                let is_on_accelerator = time < below && memory <= limits.bytes;
                if !is_on_accelerator && (limits.hosts == 0 || host_time >= below) {
                    continue;
                }
                self.visited[set] = self.visit;
                let before = |u: u32| lattice.holds(at, u) && !lattice.holds(start, u);
                let after = |u: u32| lattice.holds(set, u) && !lattice.holds(start, u);
                let transfer: f64 = units.touching[index]
                    .iter()
                    .map(|&tensor| units.charge(tensor, after) - units.charge(tensor, before))
                    .sum();
                (self.time[set], self.bytes[set], self.host_time[set]) = (time, memory, host_time);
                self.is_on_accelerator[set] = is_on_accelerator;
                self.load[set] = self.load[at] + units.time[index] + transfer;
                self.reached.push(to);
            }
            let Some(&set) = self.reached.get(next) else { return };
            at = set as usize;
            next += 1;
        }
    }
}
