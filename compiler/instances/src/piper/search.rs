//! Decides whether a pipeline with a limited time per sample exists, and constructs it: a dynamic program over
//! down-sets, from the last stage to the first.
//!
//! ```text
//! needs(I) = smallest  needs(J) + (d, d t)  over down-sets J in I, over d and t with  time(I \ J; d, t, y) <= limit
//!                                                                                and memory(I \ J; d, t, y) <= M
//! ```
//!
//! | equation   | here                                                                      |
//! | ---        | ---                                                                       |
//! | I, J       | sets of `Lattice`, closed under "is read by"                              |
//! | needs(I)   | `Need`: total replicas and devices; all Pareto-optimal pairs              |
//! | d, t       | replicas and tensor-parallel degree of the stage                          |
//! | y          | replicas of J plus d, divided by d, rounded up: micro-batches in flight    |
//! | time(..)   | `Search::stage`                                                           |
//!
//! Piper's program (section 4) minimises time for every number of devices and replicas. Minimising devices and replicas
//! for a given time needs fewer entries per set, and the limit prunes: stages that are too slow at the largest replica
//! count are not extended, and stages that leave too little for the rest are dropped. At fixed d and t, more replicas
//! in later stages never reduce the memory of a stage, so fewer are never worse.

use crate::piper::choose::{Chosen, Menu, Offer, Verdict, choose};
use crate::piper::layers::Layers;
use crate::piper::model::Choice;
use compiler::partition::search::downset_lattice::Lattice;
use std::collections::HashMap;

/// Rounding tolerance for sums of bytes.
const ROUNDING: f64 = 1.0 + 1e-12;

/// Largest number of options in all menus that are kept.
const MOST_OFFERS: usize = 1 << 22;

/// A stage of the resulting pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    pub units: Vec<u32>,
    pub degree: u32,
    pub replicas: u32,
    /// Micro-batches in flight per replica.
    pub in_flight: u32,
    /// Index of each unit's option at this degree.
    pub picks: Vec<u16>,
}

/// Total replicas and devices of the stages in a set, with a back pointer.
#[derive(Clone, Copy, Debug)]
struct Need {
    replicas: u32,
    devices: u32,
    /// The previous set, and the index of the need in its list.
    from: (u32, u32),
    degree: u32,
    count: u32,
}

/// Sums over the units of a stage at one degree.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Number of units without an option for this degree.
    lacking: u32,
    /// Sums of the smallest value of each unit, independently.
    least_time: f64,
    least_weights: f64,
    least_in_flight: f64,
    least_standing: f64,
    /// Sums for the fastest options.
    time: f64,
    weights: f64,
    in_flight: f64,
    standing: f64,
}

/// Values of a stage under construction that do not depend on its degree.
#[derive(Clone, Copy, Debug, Default)]
struct Grown {
    /// Smallest time, and smallest product of time and devices, over all degrees.
    time: f64,
    device_time: f64,
    /// Bytes of the links that leave the stage.
    crossing_bytes: f64,
    units: u32,
}

pub struct Search<'a> {
    layers: &'a Layers<'a>,
    lattice: &'a Lattice,
    counts: Vec<u32>,
    bytes: f64,
    of_unit: Vec<Sums>,
    /// The options of all units by index of the degree, replicas and micro-batches in flight.
    menus: HashMap<(usize, u32, u32), Menu>,
    /// Remaining work after each set: smallest time, and smallest product of time and devices.
    remaining: Vec<(f64, f64)>,
    needs: Vec<Vec<Need>>,
    grown: Vec<Grown>,
    sums: Vec<Sums>,
    visited: Vec<u32>,
    visit: u32,
    reached: Vec<u32>,
    pub steps: u64,
    pub most_steps: u64,
    /// True if the options of some stage were not all examined, so that infeasibility is not proven.
    pub is_unsure: bool,
}

impl<'a> Search<'a> {
    pub fn new(layers: &'a Layers<'a>, lattice: &'a Lattice, bytes: f64, most_steps: u64) -> Search<'a> {
        let (sets, degrees) = (lattice.len(), layers.degrees.len());
        let mut of_unit = Vec::with_capacity(layers.len() * degrees);
        for unit in 0..layers.len() as u32 {
            of_unit.extend(layers.degrees.iter().map(|&degree| Sums::of(layers.choices(unit, degree))));
        }
        let all_time = layers.time.iter().sum::<f64>();
        let all_devices = layers.device_time.iter().sum::<f64>();
        let remaining_after = |set: usize| {
            let units_held = (0..layers.len()).filter(|&unit| lattice.holds(set, unit as u32));
            let (time, devices) =
                units_held.fold((0.0, 0.0), |sum, unit| (sum.0 + layers.time[unit], sum.1 + layers.device_time[unit]));
            (all_time - time, all_devices - devices)
        };
        Search {
            layers,
            lattice,
            counts: layers.hybrid.replica_counts(),
            bytes: bytes * ROUNDING,
            of_unit,
            menus: HashMap::new(),
            remaining: (0..sets).map(remaining_after).collect(),
            needs: Vec::new(),
            grown: vec![Grown::default(); sets],
            sums: vec![Sums::default(); sets * degrees],
            visited: vec![0; sets],
            visit: 0,
            reached: Vec::new(),
            steps: 0,
            most_steps,
            is_unsure: false,
        }
    }

    pub fn is_exhausted(&self) -> bool {
        self.steps >= self.most_steps
    }

    /// The stages of a pipeline with at most `limit` per sample, first stage first.
    pub fn find_spans(&mut self, limit: f64) -> Option<Vec<Span>> {
        let hybrid = self.layers.hybrid;
        let all = self.lattice.len() - 1;
        self.needs = vec![Vec::new(); self.lattice.len()];
        self.needs[0].push(Need { replicas: 0, devices: 0, from: (0, 0), degree: 0, count: 0 });
        for from in 0..all {
            let (max_replicas, devices) = (hybrid.most_replicas(), hybrid.devices);
            let min_replicas = self.needs[from]
                .iter()
                .map(|need| need.replicas)
                .min()
                .filter(|&min_replicas| min_replicas < max_replicas);
            let min_devices =
                self.needs[from].iter().map(|need| need.devices).min().filter(|&min_devices| min_devices < devices);
            let (Some(min_replicas), Some(min_devices)) = (min_replicas, min_devices) else { continue };
            self.walk(
                from,
                limit * f64::from(max_replicas - min_replicas) * ROUNDING,
                limit * f64::from(devices - min_devices) * ROUNDING,
            );
            for at in 0..self.reached.len() {
                self.stages(from, self.reached[at] as usize, limit);
            }
            if self.is_exhausted() {
                return None;
            }
            if !self.needs[all].is_empty() {
                break;
            }
        }
        self.spans(limit)
    }

    /// Enumerates the supersets of `start` whose added units need at most these times, smallest first.
    fn walk(&mut self, start: usize, time: f64, device_time: f64) {
        let (layers, lattice, degrees) = (self.layers, self.lattice, self.layers.degrees.len());
        self.visit += 1;
        self.reached.clear();
        self.grown[start] = Grown::default();
        self.sums[start * degrees..(start + 1) * degrees].fill(Sums::default());
        let (mut at, mut next) = (start, 0);
        loop {
            for &(unit, to) in &lattice.grows[at] {
                let (set, index) = (to as usize, unit as usize);
                let grown = self.grown[at];
                let work = (grown.time + layers.time[index], grown.device_time + layers.device_time[index]);
                if self.visited[set] == self.visit || work.0 > time || work.1 > device_time {
                    continue;
                }
                self.steps += layers.links[index].len() as u64 / 8;
                let inside = |other: u32| lattice.holds(at, other) && !lattice.holds(start, other);
                let crossing_bytes: f64 =
                    layers.links[index].iter().map(|&(other, bytes)| if inside(other) { -bytes } else { bytes }).sum();
                let mut is_feasible = false;
                for degree in 0..degrees {
                    let sums = self.sums[at * degrees + degree].plus(&self.of_unit[index * degrees + degree]);
                    self.sums[set * degrees + degree] = sums;
                    is_feasible |= sums.lacking == 0 && sums.least_in_flight + sums.least_standing <= self.bytes;
                }
                // More units cannot need fewer bytes or offer more degrees.
                if !is_feasible {
                    continue;
                }
                self.visited[set] = self.visit;
                let (time, device_time) = work;
                let units = grown.units + 1;
                self.grown[set] = Grown {
                    time,
                    device_time,
                    crossing_bytes: (grown.crossing_bytes + crossing_bytes).max(0.0),
                    units,
                };
                self.reached.push(to);
            }
            let Some(&set) = self.reached.get(next) else { return };
            at = set as usize;
            next += 1;
        }
    }

    /// Tries the stage between two sets at every degree, for every need of the first set.
    fn stages(&mut self, from: usize, to: usize, limit: f64) {
        let hybrid = self.layers.hybrid;
        for index in 0..self.layers.degrees.len() {
            let degree = self.layers.degrees[index];
            self.steps += 1;
            if self.sums[to * self.layers.degrees.len() + index].lacking > 0 {
                continue;
            }
            for before in 0..self.needs[from].len() {
                let need = self.needs[from][before];
                for at in 0..self.counts.len() {
                    let count = self.counts[at];
                    let replicas = need.replicas + count;
                    let devices = u64::from(need.devices) + u64::from(count) * u64::from(degree);
                    if !self.can_finish(to, replicas, devices, limit) {
                        break;
                    }
                    if self.stage(from, to, index, (count, replicas.div_ceil(count)), limit) {
                        let devices = devices.min(u64::from(hybrid.devices)) as u32;
                        let from = (from as u32, before as u32);
                        self.add_need(to, Need { replicas, devices, from, degree, count });
                        // More replicas are never better.
                        break;
                    }
                }
            }
        }
    }

    /// Returns whether the remaining replicas and devices suffice for the remaining work.
    fn can_finish(&self, to: usize, replicas: u32, devices: u64, limit: f64) -> bool {
        let (max_replicas, max_devices) = (self.layers.hybrid.most_replicas(), u64::from(self.layers.hybrid.devices));
        if replicas > max_replicas || devices > max_devices {
            return false;
        }
        let (time, device_time) = self.remaining[to];
        let fits = |work: f64, left: f64| {
            work * (1.0 - 1e-9) <= left * limit || (left == 0.0 && to == self.remaining.len() - 1)
        };
        fits(time, f64::from(max_replicas - replicas)) && fits(device_time, (max_devices - devices) as f64)
    }

    /// Returns whether a stage satisfies the limits on time and memory. In most cases the sums decide this without
    /// choosing options.
    fn stage(&mut self, from: usize, to: usize, index: usize, (count, in_flight): (u32, u32), limit: f64) -> bool {
        let sums = &self.sums[to * self.layers.degrees.len() + index];
        let crossing_bytes = self.grown[to].crossing_bytes;
        let price = Price::of(self.layers, count);
        let y = f64::from(in_flight);
        if price.stage(sums.least_time, crossing_bytes, sums.least_weights) > limit
            || sums.least_in_flight * y + sums.least_standing > self.bytes
        {
            return false;
        }
        if !self.layers.syncs
            && price.stage(sums.time, crossing_bytes, sums.weights) <= limit
            && sums.in_flight * y + sums.standing <= self.bytes
        {
            return true;
        }
        let degree = self.layers.degrees[index];
        if !self.layers.syncs {
            let key = (index, count, in_flight);
            if !self.menus.contains_key(&key) {
                let made = menu(self.layers, degree, (count, in_flight));
                self.steps += made.size() as u64;
                if (self.menus.len() + 1).saturating_mul(made.size()) > MOST_OFFERS {
                    self.menus.clear();
                }
                self.menus.insert(key, made);
            }
            let menu = &self.menus[&key];
            let lattice = self.lattice;
            let holds = |unit: usize| lattice.holds(to, unit as u32) && !lattice.holds(from, unit as u32);
            self.steps += 1 + menu.size() as u64 / 16;
            match menu.judge(holds, self.bytes, limit - price.stage(0.0, crossing_bytes, 0.0)) {
                Verdict::After(_) => return true,
                Verdict::No => return false,
                Verdict::Unclear => (),
            }
        }
        self.steps += u64::from(self.grown[to].units);
        let units = self.units_between(from, to);
        let mut combinations = 0;
        let chosen = picks(self.layers, &units, degree, (count, in_flight), (self.bytes, limit), &mut combinations);
        self.steps += combinations;
        match chosen {
            Chosen::Picks(_) => true,
            Chosen::No => false,
            Chosen::Unknown => {
                self.is_unsure = true;
                false
            }
        }
    }

    fn units_between(&self, from: usize, to: usize) -> Vec<u32> {
        let is_added = |&unit: &u32| self.lattice.holds(to, unit) && !self.lattice.holds(from, unit);
        (0..self.layers.len() as u32).filter(is_added).collect()
    }

    /// Adds a need unless it is dominated.
    fn add_need(&mut self, to: usize, need: Need) {
        let needs = &mut self.needs[to];
        if needs.iter().any(|existing| existing.replicas <= need.replicas && existing.devices <= need.devices) {
            return;
        }
        needs.retain(|existing| existing.replicas < need.replicas || existing.devices < need.devices);
        needs.push(need);
    }

    fn spans(&mut self, limit: f64) -> Option<Vec<Span>> {
        let mut set = self.lattice.len() - 1;
        let mut need = *self.needs[set].first()?;
        let mut spans = Vec::new();
        while need.count > 0 {
            let from = need.from.0 as usize;
            let units = self.units_between(from, set);
            let in_flight = need.replicas.div_ceil(need.count);
            let counts = (need.count, in_flight);
            // The options were found before; only rounding of the sums can prevent finding them again.
            let limits = (self.bytes, limit * ROUNDING);
            let Chosen::Picks(picks) = picks(self.layers, &units, need.degree, counts, limits, &mut self.steps) else {
                self.is_unsure = true;
                return None;
            };
            spans.push(Span { units, degree: need.degree, replicas: need.count, in_flight, picks });
            need = self.needs[from][need.from.1 as usize];
            set = from;
        }
        Some(spans)
    }
}

/// The options of all units, without their transfers.
fn menu(layers: &Layers<'_>, degree: u32, (count, in_flight): (u32, u32)) -> Menu {
    let price = Price::of(layers, count);
    let offer = |choice: &Choice| price.offer(choice, 0.0, in_flight);
    let of_unit = |unit: u32| layers.choices(unit, degree).iter().map(offer).collect();
    Menu::of(&(0..layers.len() as u32).map(of_unit).collect::<Vec<Vec<Offer>>>())
}

/// Chooses one option for each unit of a stage, within limits on bytes and time. Adds the number of listed sums to
/// `combinations`.
pub fn picks(
    layers: &Layers<'_>,
    units: &[u32],
    degree: u32,
    (count, in_flight): (u32, u32),
    (bytes, limit): (f64, f64),
    combinations: &mut u64,
) -> Chosen {
    let price = Price::of(layers, count);
    let contains = |unit: u32| units.binary_search(&unit).is_ok();
    let mut offers: Vec<Vec<Offer>> = Vec::with_capacity(units.len());
    for &unit in units {
        let crossing_bytes: f64 =
            layers.links[unit as usize].iter().filter(|(other, _)| !contains(*other)).map(|(_, bytes)| bytes).sum();
        let offer = |choice: &Choice| {
            let transfer_bytes =
                crossing_bytes + if layers.syncs { layers.sync_bytes(unit, choice, &contains) } else { 0.0 };
            price.offer(choice, transfer_bytes, in_flight)
        };
        let unit_offers: Vec<Offer> = layers.choices(unit, degree).iter().map(offer).collect();
        if unit_offers.is_empty() {
            return Chosen::No;
        }
        offers.push(unit_offers);
    }
    choose(&offers, bytes, limit, combinations)
}

/// Coefficients of the time of a stage with a certain number of replicas.
#[derive(Clone, Copy, Debug)]
pub struct Price {
    share: f64,
    per_byte: f64,
    per_weight: f64,
}

impl Price {
    pub fn of(layers: &Layers<'_>, count: u32) -> Price {
        let (hybrid, count) = (layers.hybrid, f64::from(count));
        let per_weight = 4.0 * (count - 1.0) / count / f64::from(hybrid.microbatches) / hybrid.bandwidth;
        Price { share: 1.0 / count, per_byte: 2.0 / count / hybrid.bandwidth, per_weight }
    }

    /// Time and memory of an option.
    fn offer(&self, choice: &Choice, transfer_bytes: f64, in_flight: u32) -> Offer {
        let memory = choice.bytes_in_flight * f64::from(in_flight) + choice.bytes_standing;
        (self.stage(choice.time, transfer_bytes, choice.weight_bytes), memory)
    }

    /// Time per sample: compute, transfers and weight all-reduce.
    pub fn stage(&self, time: f64, crossing_bytes: f64, weights: f64) -> f64 {
        time * self.share + crossing_bytes * self.per_byte + weights * self.per_weight
    }
}

impl Sums {
    fn of(choices: &[Choice]) -> Sums {
        let key = |choice: &Choice| [choice.time, choice.weight_bytes, choice.bytes_standing + choice.bytes_in_flight];
        let order = |a: &&Choice, b: &&Choice| {
            key(a)
                .iter()
                .zip(key(b))
                .map(|(a, b)| a.total_cmp(&b))
                .fold(std::cmp::Ordering::Equal, |all, next| all.then(next))
        };
        let Some(fastest) = choices.iter().min_by(order) else { return Sums { lacking: 1, ..Sums::default() } };
        let minimum = |part: fn(&Choice) -> f64| choices.iter().map(part).fold(f64::INFINITY, f64::min);
        Sums {
            lacking: 0,
            least_time: minimum(|choice| choice.time),
            least_weights: minimum(|choice| choice.weight_bytes),
            least_in_flight: minimum(|choice| choice.bytes_in_flight),
            least_standing: minimum(|choice| choice.bytes_standing),
            time: fastest.time,
            weights: fastest.weight_bytes,
            in_flight: fastest.bytes_in_flight,
            standing: fastest.bytes_standing,
        }
    }

    fn plus(&self, other: &Sums) -> Sums {
        Sums {
            lacking: self.lacking + other.lacking,
            least_time: self.least_time + other.least_time,
            least_weights: self.least_weights + other.least_weights,
            least_in_flight: self.least_in_flight + other.least_in_flight,
            least_standing: self.least_standing + other.least_standing,
            time: self.time + other.time,
            weights: self.weights + other.weights,
            in_flight: self.in_flight + other.in_flight,
            standing: self.standing + other.standing,
        }
    }
}
