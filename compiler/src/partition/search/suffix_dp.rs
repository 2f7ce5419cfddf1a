//! Backward dynamic program for the search in `pipec`: smallest values over all pipeline suffixes.
//!
//! ```text
//! B(i, w) = min over j, r of  max( busiest(i..j, r, w),  B(j, w - r) )
//! S(i, w) = min over j, r of   latency(i..j, r, w)     + S(j, w - r)      if latency is part of the objective
//! ```
//!
//! i is a down-set, w the number of devices from the first of the range to the last of the cluster. Values are lower
//! bounds, because they omit costs that depend on other stages: a tensor read by two later stages, the interconnect
//! level of a neighbour, other traffic on a shared port.

use crate::partition::search::placement::{PlacementQuery, StagePlacement, sum_of};
use crate::partition::search::range_costs::Run;
use crate::partition::search::stage_loads::StageLoads;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Measure {
    Busiest,
    /// Latency of one micro-batch.
    Way,
    Bytes,
    /// Number of stages, none busier than the limit.
    Stages,
    /// Like `Busiest`, with the most likely link levels; not a lower bound.
    Estimate,
}

#[derive(Clone, Copy)]
pub struct Entry {
    value: f64,
    to: u32,
    /// Replicas; 0 if the devices up to the next unit boundary stay unused, which is then in `to`.
    replicas: u32,
}

/// Entry `(layer · sets + from) · (devices + 1) + w`. In a layered table, layer t has exactly t stages.
pub struct Table {
    entries: Vec<Entry>,
    sets: usize,
    width: usize,
    /// True if there is one layer per number of stages.
    pub layered: bool,
    /// The only number of devices of each layer, if the stages use all devices in given numbers.
    only: Option<Vec<u32>>,
}

impl Table {
    fn at(&self, layer: usize, set: usize, w: usize) -> usize {
        let w = if self.only.is_some() { 0 } else { w };
        (if self.layered { layer * self.sets + set } else { set }) * self.width + w
    }

    /// The smallest value from a set to the end on `w` devices.
    pub fn value(&self, layer: usize, set: usize, w: usize) -> f64 {
        match &self.only {
            Some(only) if only[layer] as usize != w => f64::INFINITY,
            _ => self.entries[self.at(layer, set, w)].value,
        }
    }
}

impl PlacementQuery<'_> {
    /// Fills a table; omits stages busier than `limit`. `loads` are those of this query, for the measure.
    pub fn table(&self, measure: Measure, limit: f64, loads: &mut StageLoads<'_>) -> Table {
        let (sets, devices) = (self.places.space.len(), self.devices as usize);
        let layers = self.layers();
        let given = self.rules.replicas.as_ref().filter(|_| self.uses_all_devices());
        let only = given.map(|given| (0..=given.len()).rev().map(|stage| sum_of(&given[stage..])).collect::<Vec<_>>());
        let (whole, width) = (sets - 1, if only.is_some() { 1 } else { devices + 1 });
        let none = Entry { value: f64::INFINITY, to: 0, replicas: 0 };
        let count = layers.map_or(1, |layers| layers + 1);
        let entries = vec![none; count * sets * width];
        let mut table = Table { entries, sets, width, layered: layers.is_some(), only };
        for unused in 0..=self.unused_after() {
            let at = table.at(0, whole, unused as usize);
            table.entries[at].value = 0.0;
        }
        let trains = self.asked.trains();
        let bounded = matches!(measure, Measure::Busiest | Measure::Estimate | Measure::Stages);
        let capped = if measure == Measure::Bytes { f64::INFINITY } else { limit };
        for layer in 1..=layers.unwrap_or(1) {
            let stage = self.stage(layer);
            let starts = if stage == Some(0) { 0..1 } else { stage.unwrap_or(0)..whole };
            let given = stage.and_then(|stage| self.rest(stage));
            let weight = self.asked.weight(*self.replicas(stage).end());
            for from in starts.rev() {
                let before = self.needs(self.least_us(0, from), capped).max(u32::from(from > 0));
                // Each later stage needs at least one more set.
                let last = if table.layered { whole.saturating_sub(layer - 1) } else { whole };
                for to in from + 1..=last {
                    let compute = self.least_us(from, to);
                    if trains && weight * compute > capped * (1.0 + 1e-9) {
                        break;
                    }
                    if !self.places.nested(from, to) || !self.is_allowed(from, to, stage) {
                        continue;
                    }
                    let after = self.needs(self.least_us(to, whole), capped);
                    let least = self.needs(compute, capped).max(1);
                    for replicas in self.replicas(stage) {
                        if replicas < least {
                            continue;
                        }
                        if before + replicas + after > self.devices {
                            break;
                        }
                        let mut range = loads.range((from, to), replicas, stage);
                        let rests = after..=self.devices - replicas - before;
                        let rests = match given {
                            Some(rest) if rests.contains(&rest) => rest..=rest,
                            Some(_) => continue,
                            None => rests,
                        };
                        for rest in rests {
                            let tail = table.value(layer - usize::from(table.layered), to, rest as usize);
                            let at = table.at(layer, from, (rest + replicas) as usize);
                            let so_far = table.entries[at].value;
                            if tail.is_infinite()
                                || (bounded && tail > capped * (1.0 + 1e-9) && measure != Measure::Stages)
                            {
                                continue;
                            }
                            if (measure != Measure::Way && tail >= so_far) || (measure == Measure::Way && tail > so_far)
                            {
                                continue;
                            }
                            if measure == Measure::Bytes {
                                let Some(bytes) = self.least_bytes(range.run(), replicas, rest, stage) else {
                                    continue;
                                };
                                let value = (bytes as f64).max(tail);
                                if value < so_far {
                                    table.entries[at] = Entry { value, to: to as u32, replicas };
                                }
                                continue;
                            }
                            let Some(load) = range.load(measure, rest) else { continue };
                            let slack =
                                if matches!(measure, Measure::Busiest | Measure::Estimate) { 1e-9 } else { 1e-12 };
                            if load.busiest_us > capped * (1.0 + slack) {
                                continue;
                            }
                            let value = match measure {
                                Measure::Busiest | Measure::Estimate | Measure::Bytes => load.busiest_us.max(tail),
                                Measure::Stages => 1.0 + tail,
                                Measure::Way => {
                                    let way_us = load.way_us - load.in_us + tail;
                                    let in_flight = self.in_flight(replicas, rest, stage);
                                    if !self.asked.comes_back(replicas, in_flight, way_us, capped * (1.0 + 1e-9)) {
                                        continue;
                                    }
                                    load.way_us + tail
                                }
                            };
                            if value < so_far {
                                table.entries[at] = Entry { value, to: to as u32, replicas };
                            }
                        }
                    }
                }
                self.leave_units_free(&mut table, layer, from);
            }
        }
        table
    }

    /// Allows a range to begin at a unit boundary and leave the last devices of the unit before it unused.
    fn leave_units_free(&self, table: &mut Table, layer: usize, set: usize) {
        let [inner, _, ..] = self.levels else { return };
        let unit = inner.count.max(1) as usize;
        for w in (unit..table.width).filter(|w| w % unit != 0) {
            let border = w - w % unit;
            let value = table.value(layer, set, border);
            let at = table.at(layer, set, w);
            if value < table.entries[at].value {
                table.entries[at] = Entry { value, to: border as u32, replicas: 0 };
            }
        }
    }

    /// The smallest value of a whole partition, with its layer and number of devices.
    pub fn least(&self, table: &Table) -> (f64, (usize, usize)) {
        let mut best = (f64::INFINITY, (0, 0));
        for layer in self.finals() {
            for w in self.widths().map(|w| w as usize) {
                let value = table.value(layer, 0, w);
                if value < best.0 * (1.0 - 1e-12) || (best.0.is_infinite() && value.is_finite()) {
                    best = (value, (layer, w));
                }
            }
        }
        best
    }

    /// Reconstructs the stages of a table's best value.
    pub fn read(&self, table: &Table) -> Option<Vec<StagePlacement>> {
        let (value, (mut layer, mut w)) = self.least(table);
        if !value.is_finite() {
            return None;
        }
        let whole = self.places.space.len() - 1;
        let mut placements = Vec::new();
        let mut at = 0;
        while at < whole {
            let Entry { to, replicas, .. } = table.entries[table.at(layer, at, w)];
            if replicas == 0 {
                w = to as usize;
                continue;
            }
            let (to, rest) = (to as usize, w as u32 - replicas);
            let first = self.devices - rest - replicas;
            let recompute = self.chosen(at, to, replicas, rest, placements.len()).unwrap_or(false);
            placements.push(StagePlacement { from: at, to, first, replicas, recompute });
            (at, w) = (to, rest as usize);
            layer -= usize::from(table.layered);
        }
        Some(placements)
    }

    /// Smallest number of devices for a range if no device may be busier than `limit`.
    fn needs(&self, compute_us: f64, limit: f64) -> u32 {
        if self.asked.latency || !self.asked.schedule.is_continuous() || !limit.is_finite() {
            return 0;
        }
        // Under 2BW the limit covers all micro-batches of a minibatch.
        let need = (compute_us * self.asked.link_weight() / limit * (1.0 - 1e-9)).ceil();
        if need.is_nan() { 0 } else { need as u32 }
    }

    /// Memory of a range as a stage with these replicas and `rest` devices after it, recomputed if that is allowed and
    /// takes less; `None` if it does not fit.
    fn least_bytes(&self, run: &Run, replicas: u32, rest: u32, stage: Option<usize>) -> Option<u64> {
        let choices = self.rules.recompute.choices().iter();
        let bytes = choices.map(|&again| self.bytes(run, replicas, rest, again, stage)).min().unwrap_or(u64::MAX);
        let first = self.devices - rest - replicas;
        let fits = self.limit(first, replicas).is_none_or(|limit| bytes <= limit);
        fits.then_some(if self.fleet.counts(first, replicas) { bytes } else { 0 })
    }
}
