//! Dynamic program over all device orders of a heterogeneous cluster with a single level.
//!
//! On one level all links are equal. A stage depends on the order only through its number of devices per class and the
//! number of devices after it. The classes give its speed and memory limit. So one table over the devices left per
//! class replaces the tables of `suffix_dp` for each order:
//!
//! ```text
//! B(i, n) = min over j, r of  max( busiest(i..j, r),  B(j, n - r) )
//! S(i, n) = min over j, r of   latency(i..j, r)     + S(j, n - r)      if latency is part of the objective
//! ```
//!
//! i is a down-set; n and r are vectors with one count per class. The smallest value is a bound for every order. Its
//! partition defines an order: unused devices first, then the devices of each stage. With bytes instead of time, the
//! table yields the memory that is needed if nothing fits.

use crate::cluster::DeviceClass;
use crate::partition::heterogeneous::device_orders::Sequence;
use crate::partition::heterogeneous::device_ranges::first_alike;
use crate::partition::search::placement::{MemoryScope, PlacementQuery};
use crate::partition::search::range_costs::Run;
use crate::partition::search::suffix_dp::Measure;
use std::collections::BTreeMap;

/// Limits: pairs of a stage's devices and the remaining devices; and table entries.
const MOST_PAIRS: f64 = 4e5;
const MOST_ENTRIES: usize = 8_000_000;

struct ClassDevices {
    class: u32,
    count: u32,
    pace: f64,
    memory: u64,
}

/// A set of devices for one stage.
struct Take {
    /// Number of devices per class, and in total.
    held: Vec<u32>,
    devices: u32,
    /// Difference in the state index.
    index: usize,
    pace: f64,
    /// Index of `pace` among the distinct speeds.
    which: usize,
    /// Possible remaining devices, as a range of `rests`.
    rests: (usize, usize),
}

/// The device classes and all device sets that a stage may take.
pub struct ClassDp {
    kinds: Vec<ClassDevices>,
    takes: Vec<Take>,
    /// States with their number of devices.
    rests: Vec<(u32, u32)>,
    states: usize,
    paces: usize,
    devices: u32,
}

#[derive(Clone, Copy)]
struct Entry {
    value: f64,
    to: u32,
    take: u32,
}

/// Entry `(layer · sets + from) · states + n`.
struct Table {
    entries: Vec<Entry>,
    sets: usize,
}

pub struct Solved {
    /// Lower bound for all orders; infinite if nothing fits.
    pub bound_us: f64,
    /// Device orders of the partitions found.
    pub orders: Vec<Sequence>,
}

impl ClassDp {
    /// Prepares the table; `None` if there are too many device sets.
    pub fn of(classes: &[DeviceClass]) -> Option<ClassDp> {
        let mut kinds: BTreeMap<u32, ClassDevices> = BTreeMap::new();
        for own in classes {
            let class = first_alike(classes, own);
            let (pace, memory) = (own.speed.unwrap_or(1.0), own.device.memory.0);
            kinds.entry(class).or_insert(ClassDevices { class, count: 0, pace, memory }).count += own.count;
        }
        let kinds: Vec<ClassDevices> = kinds.into_values().collect();
        let ways = |kind: &ClassDevices| (f64::from(kind.count) + 1.0) * (f64::from(kind.count) + 2.0) / 2.0;
        if kinds.iter().map(ways).product::<f64>() > MOST_PAIRS {
            return None;
        }
        let boxed = |limits: &[u32]| {
            let mut all: Vec<Vec<u32>> = vec![Vec::new()];
            for &limit in limits {
                let longer = |held: Vec<u32>| (0..=limit).map(move |count| [&held[..], &[count]].concat());
                all = all.into_iter().flat_map(longer).collect();
            }
            all
        };
        let index = |held: &[u32]| {
            held.iter().zip(&kinds).fold(0, |at, (&one, kind)| at * (kind.count as usize + 1) + one as usize)
        };
        let all: Vec<u32> = kinds.iter().map(|kind| kind.count).collect();
        let mut paces: Vec<f64> = kinds.iter().map(|kind| kind.pace).collect();
        paces.sort_by(f64::total_cmp);
        paces.dedup();
        let (mut takes, mut rests) = (Vec::new(), Vec::new());
        for held in boxed(&all).into_iter().skip(1) {
            let start = rests.len();
            let left: Vec<u32> = all.iter().zip(&held).map(|(all, held)| all - held).collect();
            rests.extend(boxed(&left).iter().map(|rest| (index(rest) as u32, rest.iter().sum::<u32>())));
            let taken = kinds.iter().zip(&held).filter(|(_, held)| **held > 0);
            let pace = taken.map(|(kind, _)| kind.pace).fold(f64::INFINITY, f64::min);
            let which = paces.iter().position(|other| *other == pace).unwrap_or_default();
            let (index, devices) = (index(&held), held.iter().sum());
            takes.push(Take { held, devices, index, pace, which, rests: (start, rests.len()) });
        }
        let states = all.iter().map(|count| *count as usize + 1).product();
        Some(ClassDp { kinds, takes, rests, states, paces: paces.len(), devices: all.iter().sum() })
    }

    /// Steps of a table over this many sets; infinite if the table would be too large.
    pub fn effort(&self, sets: usize, layers: usize) -> f64 {
        let is_large = sets.saturating_mul(self.states).saturating_mul(layers + 1) > MOST_ENTRIES;
        let steps = (sets * sets) as f64 / 2.0 * self.rests.len() as f64 * layers as f64;
        if is_large { f64::INFINITY } else { steps }
    }

    /// Searches for the smallest time below `known_us` over all orders; returns the bound and the orders that reach it.
    pub fn solve(&self, placing: &PlacementQuery<'_>, known_us: f64) -> Solved {
        let known = known_us * (1.0 + 1e-9);
        let adds = placing.asked.adds();
        let mut orders = Vec::new();
        let mut offer = |table: &Table| {
            let order = self.read(placing, table);
            orders.extend(order.filter(|order| !orders.contains(order)).into_iter().collect::<Vec<_>>());
        };
        let table = |measure, limit| self.table(placing, measure, limit, MemoryScope::Within);
        let way = adds.then(|| table(Measure::Way, f64::INFINITY));
        let least_way = way.as_ref().map_or(0.0, |way| self.least(placing, way).0);
        if !least_way.is_finite() {
            return Solved { bound_us: f64::INFINITY, orders };
        }
        let busiest = table(Measure::Busiest, known - least_way);
        let (least_busiest, _) = self.least(placing, &busiest);
        if !least_busiest.is_finite() {
            return Solved { bound_us: known_us, orders };
        }
        match &way {
            Some(way) => {
                let mut limit = least_busiest * (1.0 + 1e-9);
                for _ in 0..3 {
                    offer(&table(Measure::Way, limit));
                    limit = limit * 1.5 + f64::MIN_POSITIVE;
                }
                offer(way);
            }
            None => offer(&table(Measure::Stages, least_busiest * (1.0 + 1e-12))),
        }
        offer(&busiest);
        Solved { bound_us: least_busiest + least_way, orders }
    }

    pub fn least_memory(&self, placing: &PlacementQuery<'_>, counted: MemoryScope) -> Option<Sequence> {
        self.read(placing, &self.table(placing, Measure::Bytes, f64::INFINITY, counted))
    }

    fn table(&self, placing: &PlacementQuery<'_>, measure: Measure, limit: f64, counted: MemoryScope) -> Table {
        let sets = placing.places.space.len();
        let (whole, layers) = (sets - 1, placing.layers());
        let is_layered = usize::from(layers.is_some());
        let none = Entry { value: f64::INFINITY, to: 0, take: 0 };
        let count = layers.map_or(1, |layers| layers + 1);
        let mut table = Table { entries: vec![none; count * sets * self.states], sets };
        table.entries[whole * self.states].value = 0.0;
        let capped = if measure == Measure::Bytes { f64::INFINITY } else { limit };
        let mut costs = Costs::of(self, placing, measure, counted);
        for layer in 1..=layers.unwrap_or(1) {
            let stage = placing.stage(layer);
            let starts = if stage == Some(0) { 0..1 } else { 0..whole };
            for from in starts.rev() {
                for to in from + 1..=whole {
                    let compute = placing.least_us(from, to);
                    if placing.asked.trains() && placing.asked.weight(self.devices) * compute > capped * (1.0 + 1e-9) {
                        break;
                    }
                    if !placing.places.nested(from, to) || !placing.is_allowed(from, to, stage) {
                        continue;
                    }
                    let others = u32::from(from > 0) + u32::from(to < whole);
                    let tails = ((layer - is_layered) * is_layered * sets + to) * self.states;
                    let heads = (layer * is_layered * sets + from) * self.states;
                    let replicas = placing.replicas(stage);
                    costs.begin(from, to, stage);
                    for (at, take) in self.takes.iter().enumerate() {
                        if take.devices + others > self.devices || !replicas.contains(&take.devices) {
                            continue;
                        }
                        let weighed = placing.asked.weight(take.devices) * compute;
                        if placing.asked.trains() && weighed > capped * (1.0 + 1e-9) {
                            continue;
                        }
                        let rests = &self.rests[take.rests.0..take.rests.1];
                        for &(rest, after) in if to == whole { &rests[..1] } else { rests } {
                            let tail = table.entries[tails + rest as usize].value;
                            let entry = &table.entries[heads + rest as usize + take.index];
                            let is_late =
                                if measure == Measure::Way { tail > entry.value } else { tail >= entry.value };
                            if is_late || tail.is_infinite() {
                                continue;
                            }
                            let Some([busiest_us, way_us, bytes]) = costs.part(at, after) else { continue };
                            let value = match measure {
                                Measure::Bytes => bytes.max(tail),
                                _ if busiest_us > capped * (1.0 + 1e-12) => continue,
                                Measure::Busiest | Measure::Estimate => busiest_us.max(tail),
                                Measure::Stages => 1.0 + tail,
                                Measure::Way => way_us + tail,
                            };
                            let entry = &mut table.entries[heads + rest as usize + take.index];
                            if value < entry.value {
                                *entry = Entry { value, to: to as u32, take: at as u32 };
                            }
                        }
                    }
                }
            }
        }
        table
    }

    /// The smallest value of a whole partition, with its layer and state.
    fn least(&self, placing: &PlacementQuery<'_>, table: &Table) -> (f64, (usize, usize)) {
        let mut best = (f64::INFINITY, (0, 0));
        let widths = placing.widths();
        for layer in placing.finals() {
            for take in self.takes.iter().filter(|take| widths.contains(&take.devices)) {
                let value = table.entries[layer * table.sets * self.states + take.index].value;
                if value < best.0 * (1.0 - 1e-12) || (best.0.is_infinite() && value.is_finite()) {
                    best = (value, (layer, take.index));
                }
            }
        }
        best
    }

    /// Reconstructs the device order of a table's best value.
    fn read(&self, placing: &PlacementQuery<'_>, table: &Table) -> Option<Sequence> {
        let (value, (mut layer, mut state)) = self.least(placing, table);
        if !value.is_finite() {
            return None;
        }
        let mut left: Vec<u32> = self.kinds.iter().map(|kind| kind.count).collect();
        let mut stages = Vec::new();
        let mut from = 0;
        while from + 1 < table.sets {
            let Entry { to, take, .. } = table.entries[(layer * table.sets + from) * self.states + state];
            let take = &self.takes[take as usize];
            left.iter_mut().zip(&take.held).for_each(|(left, held)| *left -= held);
            stages.push(&take.held);
            (from, state, layer) = (to as usize, state - take.index, layer.saturating_sub(1));
        }
        let classes = |held: &Vec<u32>| {
            let repeated = |(kind, &count): (&ClassDevices, &u32)| std::iter::repeat_n(kind.class, count as usize);
            self.kinds.iter().zip(held).flat_map(repeated).collect::<Vec<u32>>()
        };
        Some(std::iter::once(&left).chain(stages).flat_map(classes).collect())
    }
}

struct Costs<'a> {
    counts: &'a ClassDp,
    placing: &'a PlacementQuery<'a>,
    measure: Measure,
    /// The current range, and a counter of ranges that marks valid cache entries.
    from: usize,
    to: usize,
    stage: Option<usize>,
    run: Run,
    begun: u32,
    /// By devices and speed, without and with recomputation: busiest time and latency.
    shares: Vec<(u32, [[f64; 2]; 2])>,
    /// By devices and devices after them: bytes, without and with recomputation.
    bytes: Vec<(u32, [u64; 2])>,
    /// For each device set: its memory limit, and whether its memory is minimised.
    limits: Vec<(u64, bool)>,
}

impl<'a> Costs<'a> {
    fn of(counts: &'a ClassDp, placing: &'a PlacementQuery<'a>, measure: Measure, counted: MemoryScope) -> Costs<'a> {
        let (devices, is_limited) = (counts.devices as usize + 1, !placing.fleet.is_boundless());
        let limit = |take: &Take| {
            let held = || counts.kinds.iter().zip(&take.held).filter(|(_, held)| **held > 0).map(|(kind, _)| kind);
            let own = held().filter(|kind| match counted {
                MemoryScope::All => false,
                MemoryScope::Within => is_limited,
                MemoryScope::Class(class) => kind.class != class,
            });
            let is_time = measure != Measure::Bytes;
            let limit = own.map(|kind| kind.memory).chain(placing.memory_limit.filter(|_| is_time)).min();
            let is_counted = match counted {
                MemoryScope::Class(class) => held().any(|kind| kind.class == class),
                MemoryScope::All | MemoryScope::Within => true,
            };
            (limit.unwrap_or(u64::MAX), is_counted)
        };
        Costs {
            limits: counts.takes.iter().map(limit).collect(),
            shares: vec![(0, [[0.0; 2]; 2]); devices * counts.paces],
            bytes: vec![(0, [0; 2]); devices * devices],
            counts,
            placing,
            measure,
            from: 0,
            to: 0,
            stage: None,
            run: Run::default(),
            begun: 0,
        }
    }

    fn begin(&mut self, from: usize, to: usize, stage: Option<usize>) {
        (self.from, self.to, self.stage) = (from, to, stage);
        self.run = self.placing.places.run(from, to);
        self.begun += 1;
    }

    /// Busiest time and latency in microseconds, and bytes; `None` if the range does not fit.
    #[inline]
    fn part(&mut self, at: usize, after: u32) -> Option<[f64; 3]> {
        let take = &self.counts.takes[at];
        let (limit, is_counted) = self.limits[at];
        let choices = self.placing.rules.recompute.choices();
        let mut recompute = choices[0];
        if self.measure == Measure::Bytes {
            let held = self.held(take.devices, after);
            let bytes = choices.iter().map(|&again| held[usize::from(again)]).min().unwrap_or(u64::MAX);
            return (bytes <= limit).then_some([0.0, 0.0, if is_counted { bytes as f64 } else { 0.0 }]);
        }
        if limit < u64::MAX {
            let held = self.held(take.devices, after);
            recompute = choices.iter().copied().find(|&again| held[usize::from(again)] <= limit)?;
        }
        let key = take.devices as usize * self.counts.paces + take.which;
        if self.shares[key].0 != self.begun {
            let rest = u32::from(self.to + 1 < self.placing.places.space.len());
            let share = |recompute| {
                let range = (self.from, self.to);
                let share =
                    self.placing.share(self.measure, &self.run, range, take.devices, rest, recompute, take.pace);
                [share.busiest_us, share.way_us]
            };
            self.shares[key] = (self.begun, [share(false), share(true)]);
        }
        let [busiest_us, way_us] = self.shares[key].1[usize::from(recompute)];
        Some([busiest_us, way_us, 0.0])
    }

    fn held(&mut self, devices: u32, after: u32) -> [u64; 2] {
        let key = devices as usize * (self.counts.devices as usize + 1) + after as usize;
        if self.bytes[key].0 != self.begun {
            let held = |recompute| self.placing.bytes(&self.run, devices, after, recompute, self.stage);
            self.bytes[key] = (self.begun, [held(false), held(true)]);
        }
        self.bytes[key].1
    }
}
