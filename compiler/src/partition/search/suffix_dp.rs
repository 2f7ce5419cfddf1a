//! Least values of everything that a pipeline can end with, worked out backwards: the tables of `placed`.
//!
//! ```text
//! B(i, w) = min over j, r of  max( busiest(i..j, r, w),  B(j, w - r) )
//! S(i, w) = min over j, r of       way(i..j, r, w)     + S(j, w - r)         where a sum is part of the objective
//! ```
//!
//! i is a set, w the devices from the run's first to the last of all. What a stage cannot know by itself is left out of these
//! values, so that they are never above the truth: that two later stages may read the same tensor, how far a neighbour reaches
//! beyond a level, who else sends over a shared port.

use crate::partition::search::pipec::{PlacementQuery, StagePlacement};
use crate::partition::search::range_costs::Run;
use crate::plan::cost_estimate::{Message, PlacedStage, StageLoad};
use crate::plan::links::Wire;
use std::collections::HashMap;

/// Paces of which the shares of one run are kept.
const MOST_PACES: usize = 8;

/// What a run takes at some paces, not recomputed and recomputed, as far as it was asked.
type Paced = Vec<(f64, [Option<StageLoad>; 2])>;

/// What the tables hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Measure {
    /// The busiest stage.
    Busiest,
    /// One item's way.
    Way,
    /// Bytes of the fullest stage.
    Bytes,
    /// Stages, none busier than the limit.
    Stages,
    /// As `Busiest`, with links as they are most likely to be. No bound.
    Likely,
}

/// One entry of a table.
#[derive(Clone, Copy)]
pub struct Entry {
    value: f64,
    to: u32,
    /// Replicas; 0 where devices up to the next unit stay unused.
    replicas: u32,
}

/// Entry `(layer · sets + from) · (devices + 1) + w`. With layers, layer t is of exactly t stages.
pub struct Table {
    entries: Vec<Entry>,
    sets: usize,
    width: usize,
    /// Whether it has layers.
    pub layered: bool,
}

impl Table {
    fn at(&self, layer: usize, set: usize, w: usize) -> usize {
        (if self.layered { layer * self.sets + set } else { set }) * self.width + w
    }

    /// The least value of the run from a set to the end on so many devices.
    pub fn value(&self, layer: usize, set: usize, w: usize) -> f64 {
        self.entries[self.at(layer, set, w)].value
    }
}

impl PlacementQuery<'_> {
    /// Works out a table. What is busier than the limit is left out.
    pub fn table(&self, measure: Measure, limit: f64) -> Table {
        let (sets, devices) = (self.places.len(), self.devices as usize);
        let (whole, width) = (sets - 1, devices + 1);
        let layers = self.layers();
        let none = Entry { value: f64::INFINITY, to: 0, replicas: 0 };
        let count = layers.map_or(1, |layers| layers + 1);
        let mut table = Table { entries: vec![none; count * sets * width], sets, width, layered: layers.is_some() };
        for unused in 0..=self.unused_after() {
            let at = table.at(0, whole, unused as usize);
            table.entries[at].value = 0.0;
        }
        let trains = self.asked.trains();
        let bounded = matches!(measure, Measure::Busiest | Measure::Likely | Measure::Stages);
        let mut known: Paced = Vec::with_capacity(MOST_PACES);
        // Where replicas are given and all devices are on one level, a run costs in every layer what it costs in one.
        let keeps = table.layered && self.levels.len() == 1 && self.rules.replicas.is_some();
        let mut runs: HashMap<(usize, usize), Run> = HashMap::new();
        let mut shares: HashMap<(usize, usize, u32), Paced> = HashMap::new();
        let capped = if measure == Measure::Bytes { f64::INFINITY } else { limit };
        for layer in 1..=layers.unwrap_or(1) {
            let stage = self.stage(layer);
            let starts = if stage == Some(0) { 0..1 } else { stage.unwrap_or(0)..whole };
            let given = stage.and_then(|stage| self.rest(stage));
            let weight = self.asked.weight(*self.replicas(stage).end());
            for from in starts.rev() {
                let before = self.needs(self.least_us(0, from), capped).max(u32::from(from > 0));
                // Every stage that comes needs a set of its own.
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
                    let mut run = None;
                    for replicas in self.replicas(stage) {
                        if replicas < least {
                            continue;
                        }
                        if before + replicas + after > self.devices {
                            break;
                        }
                        known.clear();
                        if keeps && let Some(before) = shares.get_mut(&(from, to, replicas)) {
                            known.append(before);
                        }
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
                            let run = *run.get_or_insert_with(|| match keeps {
                                true => *runs.entry((from, to)).or_insert_with(|| self.places.run(from, to)),
                                false => self.places.run(from, to),
                            });
                            let part = self.part(measure, &run, from, to, replicas, rest, stage, &mut known);
                            let Some(part) = part else { continue };
                            let value = match measure {
                                Measure::Busiest | Measure::Likely if part.busiest_us > capped * (1.0 + 1e-9) => {
                                    continue;
                                }
                                Measure::Busiest | Measure::Likely => part.busiest_us.max(tail),
                                Measure::Bytes => part.bytes as f64,
                                _ if part.busiest_us > capped * (1.0 + 1e-12) => continue,
                                Measure::Stages => 1.0 + tail,
                                Measure::Way => part.way_us + tail,
                            };
                            let value = if measure == Measure::Bytes { value.max(tail) } else { value };
                            if value < so_far {
                                table.entries[at] = Entry { value, to: to as u32, replicas };
                            }
                        }
                        if keeps && !known.is_empty() {
                            shares.entry((from, to, replicas)).or_default().append(&mut known);
                        }
                    }
                }
                self.leave_units_free(&mut table, layer, from);
            }
        }
        table
    }

    /// A run may begin at the border of a unit, with the last devices of the unit before it unused.
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

    /// The least value of a whole partition, and the layer and the devices at which it stands.
    pub fn least(&self, table: &Table) -> (f64, (usize, usize)) {
        let mut best = (f64::INFINITY, (0, 0));
        for layer in self.finals() {
            for w in self.widths().map(|w| w as usize) {
                let value = if self.layers().is_some_and(|most| layer > most) {
                    f64::INFINITY
                } else {
                    table.value(layer, 0, w)
                };
                if value < best.0 * (1.0 - 1e-12) || (best.0.is_infinite() && value.is_finite()) {
                    best = (value, (layer, w));
                }
            }
        }
        best
    }

    /// The stages that a table's best value stands for.
    pub fn read(&self, table: &Table) -> Option<Vec<StagePlacement>> {
        let (value, (mut layer, mut w)) = self.least(table);
        if !value.is_finite() {
            return None;
        }
        let whole = self.places.len() - 1;
        let mut seats = Vec::new();
        let mut at = 0;
        while at < whole {
            let Entry { to, replicas, .. } = table.entries[table.at(layer, at, w)];
            if replicas == 0 {
                w = to as usize;
                continue;
            }
            let (to, rest) = (to as usize, w as u32 - replicas);
            let first = self.devices - rest - replicas;
            let recompute = self.chosen(at, to, replicas, rest, seats.len()).unwrap_or(false);
            seats.push(StagePlacement { from: at, to, first, replicas, recompute });
            (at, w) = (to, rest as usize);
            layer -= usize::from(table.layered);
        }
        Some(seats)
    }

    /// Devices that the compute of a run needs if none may be busier than the limit.
    fn needs(&self, compute_us: f64, limit: f64) -> u32 {
        if self.asked.latency || !self.asked.schedule.is_continuous() || !limit.is_finite() {
            return 0;
        }
        // Under 2BW the limit is that of all items of a minibatch.
        let need = (compute_us * self.asked.link_weight() / limit * (1.0 - 1e-9)).ceil();
        if need.is_nan() { 0 } else { need as u32 }
    }

    /// What a run costs as a stage of so many replicas before `rest` devices: `None` if it does not fit.
    #[allow(clippy::too_many_arguments)] // The innermost step of the search; a struct for it would be built at every step.
    fn part(
        &self,
        measure: Measure,
        run: &Run,
        from: usize,
        to: usize,
        replicas: u32,
        rest: u32,
        stage: Option<usize>,
        known: &mut Paced,
    ) -> Option<Part> {
        if measure == Measure::Bytes {
            let mut bytes = self.bytes(run, replicas, rest, false, stage);
            if self.rules.recompute {
                bytes = bytes.min(self.bytes(run, replicas, rest, true, stage));
            }
            let first = self.devices - rest - replicas;
            let fits = self.limit(first, replicas).is_none_or(|limit| bytes <= limit);
            let bytes = if self.fleet.counts(first, replicas) { bytes } else { 0 };
            return fits.then_some(Part { busiest_us: 0.0, way_us: 0.0, bytes });
        }
        let recompute = self.recomputes(run, replicas, rest, stage)?;
        let pace = self.pace(self.devices - rest - replicas, replicas);
        let share = || self.share(measure, run, (from, to), replicas, rest, recompute, pace);
        // On one level only the pace of its devices tells one place of a stage from another.
        let share = match self.levels.len() {
            1 => {
                let at = known.iter().position(|known| known.0 == pace).unwrap_or_else(|| {
                    if known.len() == MOST_PACES {
                        known.pop();
                    }
                    known.push((pace, [None; 2]));
                    known.len() - 1
                });
                *known[at].1[usize::from(recompute)].get_or_insert_with(share)
            }
            _ => share(),
        };
        Some(Part { busiest_us: share.busiest_us, way_us: share.way_us, bytes: 0 })
    }

    /// What a run costs as a stage of so many replicas before `rest` devices, the slowest of which goes at this pace.
    #[allow(clippy::too_many_arguments)] // As above.
    pub fn share(
        &self,
        measure: Measure,
        run: &Run,
        (from, to): (usize, usize),
        replicas: u32,
        rest: u32,
        recompute: bool,
        pace: f64,
    ) -> StageLoad {
        let first = self.devices - rest - replicas;
        let last = first + replicas - 1;
        let run = run.at(pace);
        let again = if recompute { run.forward_us } else { 0.0 };
        let stage = PlacedStage {
            forward_us: run.forward_us,
            backward_us: run.backward_us + again,
            weight_bytes: run.holdings.weights as f64,
            first,
            replicas,
        };
        let mut messages: Vec<Message> = Vec::with_capacity(2);
        let near = |neighbour: u32| Wire::between(self.levels, [neighbour, first, last].into_iter());
        let mut message = |neighbour: Option<u32>, bytes: u64, comes_in: bool| {
            if let Some(wire) = neighbour.filter(|_| bytes > 0).and_then(near) {
                messages.push(Message { level: wire.level, us: wire.time(bytes as f64), comes_in });
            }
        };
        if from > 0 {
            message(first.checked_sub(1), run.in_bytes, true);
        }
        if to + 1 < self.places.len() {
            message((last + 1 < self.devices).then_some(last + 1), run.out_bytes, false);
        }
        if self.levels.len() == 1 || measure == Measure::Likely {
            return StageLoad::of(&self.asked, self.levels, &stage, &messages);
        }
        // Which level a message goes over is not certain, so that it may not be added to what else goes over that level.
        let alone = StageLoad::of(&self.asked, self.levels, &stage, &[]);
        let longest = messages.iter().map(|message| message.us).fold(0.0, f64::max);
        let comes_in: f64 = messages.iter().filter(|message| message.comes_in).map(|message| message.us).sum();
        let ways = if self.asked.trains() { 2.0 } else { 1.0 };
        StageLoad {
            busiest_us: alone.busiest_us.max(self.asked.weight(replicas) * longest),
            way_us: alone.way_us + if self.asked.adds() { ways * comes_in } else { 0.0 },
            reduce_us: alone.reduce_us,
        }
    }
}

#[derive(Clone, Copy)]
struct Part {
    busiest_us: f64,
    way_us: f64,
    bytes: u64,
}
