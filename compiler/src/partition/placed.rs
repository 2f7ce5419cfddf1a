//! The search under cost model `pipec`: stages in a row on the devices of a cluster, each in its own place.
//!
//! Backwards from the end of the model everything that a stage costs by itself is known: the devices after it, and with them its
//! place in the levels, its caps and its memory. So least values are worked out for every set i and w devices from the end:
//!
//! ```text
//! B(i, w) = min over j, r of  max( busiest(i..j, r, w),  B(j, w - r) )
//! S(i, w) = min over j, r of       way(i..j, r, w)     + S(j, w - r)         where a sum is part of the objective
//! ```
//!
//! A run that does not fit in memory is recomputed in backward if that makes it fit, and left out if not. What a stage cannot
//! know by itself is left out of these values, so that they are never above the truth: that two later stages may read the same
//! tensor, how far a neighbour reaches beyond a level, who else sends over a shared port. Hence a second search, forward from the
//! first stage, branch and bound with B and S as bounds on the rest: it prices every prefix exactly. Where it runs to its end the best
//! is proven; where its steps do not suffice, the answer is the best that was met, and the bound is that of the tables.

use crate::cluster::{DeviceClass, Level, class};
use crate::partition::forward::{Prefix, Walk};
use crate::partition::places::{Places, Run};
use crate::plan::caps::{Flow, Position};
use crate::plan::links::Wire;
use crate::plan::memory::Multiples;
use crate::plan::outlook::{Asked, Message, PlacedStage, Share};
use std::ops::RangeInclusive;

/// What stages are allowed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rules {
    /// Exactly so many stages.
    pub stages: Option<usize>,
    /// At most so many.
    pub most_stages: Option<usize>,
    /// Replicas of each stage; with `stages`.
    pub replicas: Option<Vec<u32>>,
    /// Replicas that all stages have.
    pub equal: Option<u32>,
    /// In-flight caps of each stage; with `stages`.
    pub caps: Option<Vec<u32>>,
    /// Ops and the stages that they stand in; with `stages`.
    pub pins: Vec<(u32, usize)>,
    /// Whether a stage may be recomputed.
    pub recompute: bool,
}

/// A question to the search.
#[derive(Clone, Debug)]
pub struct Placing<'a> {
    /// Where it may cut.
    pub places: &'a Places<'a>,
    /// Levels of the cluster, innermost first.
    pub levels: &'a [Level],
    /// Classes of devices in device order, none where all are alike.
    pub classes: &'a [DeviceClass],
    /// Devices.
    pub devices: u32,
    /// What is asked of time.
    pub asked: Asked,
    /// What decides how much is in flight.
    pub flow: Flow,
    /// Bytes of optimizer state for each byte of weights.
    pub optimizer_state: f64,
    /// Bytes on one device.
    pub memory_limit: Option<u64>,
    /// What is allowed.
    pub rules: &'a Rules,
    /// Steps that the forward search may take.
    pub steps: u64,
}

/// A stage that was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seat {
    /// The set before it.
    pub from: usize,
    /// The set with it.
    pub to: usize,
    /// Its first device.
    pub first: u32,
    /// Its replicas.
    pub replicas: u32,
    /// Whether it is recomputed.
    pub recompute: bool,
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Seated {
    /// The stages, first to last.
    pub seats: Vec<Seat>,
    /// The objective, exactly.
    pub us: f64,
    /// No partition of these places is faster.
    pub bound_us: f64,
    /// Whether the search ran to its end.
    pub is_complete: bool,
    /// Sets and steps looked at.
    pub states: u64,
}

/// What the tables hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Measure {
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

impl Placing<'_> {
    /// The best partition, or `None` if none is allowed and fits. `known_us` is a value that some partition reaches, or
    /// infinity.
    pub fn solve(&self, known_us: f64) -> Option<Seated> {
        let known = known_us * (1.0 + 1e-9);
        let adds = self.asked.adds();
        let way = adds.then(|| self.table(Measure::Way, f64::INFINITY));
        let least_way = way.as_ref().map_or(0.0, |way| self.least(way).0);
        if !least_way.is_finite() {
            return None;
        }
        let busiest = self.table(Measure::Busiest, known - least_way);
        let (least_busiest, _) = self.least(&busiest);
        if !least_busiest.is_finite() {
            return None;
        }
        let bound_us = least_busiest + least_way;
        let mut best: Option<(f64, Vec<Seat>)> = None;
        let mut offer = |seats: Option<Vec<Seat>>| {
            let Some(seats) = seats else { return };
            let Some(us) = self.price(&seats) else { return };
            if best.as_ref().is_none_or(|(known, _)| us < known * (1.0 - 1e-12)) {
                best = Some((us, seats));
            }
        };
        if adds {
            offer(way.as_ref().and_then(|table| self.read(table)));
            // The shortest ways among partitions whose busiest stage takes at most so much, the least of it first.
            let mut limit = least_busiest * (1.0 + 1e-9);
            for _ in 0..3 {
                offer(self.read(&self.table(Measure::Way, limit)));
                limit = limit * 1.5 + f64::MIN_POSITIVE;
            }
        } else {
            let fewest = self.table(Measure::Stages, least_busiest * (1.0 + 1e-12));
            offer(self.read(&fewest));
        }
        offer(self.read(&busiest));
        if self.levels.len() > 1 {
            offer(self.read(&self.table(Measure::Likely, known - least_way)));
        }
        let mut states = self.places.len() as u64;
        let met = |us: f64| us <= bound_us * (1.0 + 1e-9);
        let mut is_complete = best.as_ref().is_some_and(|(us, _)| met(*us));
        if !is_complete {
            let best_us = best.as_ref().map_or(known, |(us, _)| us.min(known));
            let mut walk = Walk { placing: self, busiest: &busiest, way: way.as_ref(), best, best_us, steps: 0 };
            is_complete = walk.run();
            states += walk.steps;
            best = walk.best;
        }
        let (us, seats) = best?;
        let bound_us = if is_complete { us } else { bound_us.min(us) };
        Some(Seated { seats: self.shifted(seats), us, bound_us, is_complete, states })
    }

    /// The partition whose fullest stage takes the fewest bytes, whatever the limit; and that number.
    pub fn least_memory(&self) -> Option<(u64, Vec<Seat>)> {
        let free = Placing { memory_limit: None, classes: &[], ..self.clone() };
        let table = free.table(Measure::Bytes, f64::INFINITY);
        let (bytes, _) = free.least(&table);
        let mut seats = free.read(&table)?;
        let marked = Placing { memory_limit: Some(bytes as u64), classes: &[], ..self.clone() };
        let mut after = self.devices;
        for (at, seat) in seats.iter_mut().enumerate() {
            after = after.min(self.devices - seat.first - seat.replicas);
            seat.recompute = marked.chosen(seat.from, seat.to, seat.replicas, after, at)?;
        }
        Some((bytes as u64, self.shifted(seats)))
    }

    /// A pipeline that leaves whole outermost units free begins at the first of the others.
    fn shifted(&self, mut seats: Vec<Seat>) -> Vec<Seat> {
        if !self.classes.is_empty() {
            return seats;
        }
        let unit: u64 = match self.levels.split_last() {
            Some((_, inner)) => inner.iter().map(|level| u64::from(level.count.max(1))).product(),
            None => 1,
        };
        let first = seats.first().map_or(0, |seat| u64::from(seat.first));
        let free = (first / unit.max(1) * unit) as u32;
        seats.iter_mut().for_each(|seat| seat.first -= free);
        seats
    }

    /// The most stages, where they are limited.
    pub fn layers(&self) -> Option<usize> {
        self.rules.stages.or(self.rules.most_stages).map(|most| most.min(self.places.len() - 1))
    }

    /// How many stages a whole partition may have, as layers of a table.
    pub fn finals(&self) -> RangeInclusive<usize> {
        match (self.rules.stages, self.layers()) {
            (Some(exactly), _) => exactly..=exactly,
            (None, Some(most)) => 1..=most,
            (None, None) => 0..=0,
        }
    }

    fn least(&self, table: &Table) -> (f64, (usize, usize)) {
        let mut best = (f64::INFINITY, (0, 0));
        for layer in self.finals() {
            for w in 1..table.width {
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

    /// The replicas that a stage may have.
    pub fn replicas(&self, stage: Option<usize>) -> RangeInclusive<u32> {
        match (&self.rules.replicas, self.rules.equal, stage) {
            (Some(list), _, Some(stage)) => list[stage]..=list[stage],
            (_, Some(equal), _) => equal..=equal,
            _ => 1..=self.devices,
        }
    }

    /// The place of a stage that has so many stages after it, where the number of stages is fixed.
    pub fn stage(&self, layer: usize) -> Option<usize> {
        self.rules.stages.and_then(|stages| stages.checked_sub(layer))
    }

    /// Whether all pins let a run be this stage.
    pub fn is_allowed(&self, from: usize, to: usize, stage: Option<usize>) -> bool {
        let Some(stage) = stage else { return true };
        let inside = |op: u32| self.places.has(to, op as usize) && !self.places.has(from, op as usize);
        self.rules.pins.iter().all(|&(op, wanted)| inside(op) == (wanted == stage))
    }

    /// How fast the slowest of some devices is.
    pub fn pace(&self, first: u32, replicas: u32) -> f64 {
        class::slowest(self.classes, first..first + replicas)
    }

    /// What a run computes at the least for one item: on the fastest devices.
    pub fn least_us(&self, from: usize, to: usize) -> f64 {
        self.places.compute_us(from, to, self.asked.trains()) / class::fastest(self.classes)
    }

    /// Devices that the compute of a run needs if none may be busier than the limit.
    fn needs(&self, compute_us: f64, limit: f64) -> u32 {
        if self.asked.latency || !self.asked.schedule.is_continuous() || !limit.is_finite() {
            return 0;
        }
        let need = (compute_us / limit * (1.0 - 1e-9)).ceil();
        if need.is_nan() { 0 } else { need as u32 }
    }

    fn table(&self, measure: Measure, limit: f64) -> Table {
        let (sets, devices) = (self.places.len(), self.devices as usize);
        let (whole, width) = (sets - 1, devices + 1);
        let layers = self.layers();
        let none = Entry { value: f64::INFINITY, to: 0, replicas: 0 };
        let count = layers.map_or(1, |layers| layers + 1);
        let mut table = Table { entries: vec![none; count * sets * width], sets, width, layered: layers.is_some() };
        let at = table.at(0, whole, 0);
        table.entries[at].value = 0.0;
        let trains = self.asked.trains();
        let bounded = matches!(measure, Measure::Busiest | Measure::Likely | Measure::Stages);
        let capped = if measure == Measure::Bytes { f64::INFINITY } else { limit };
        for layer in 1..=layers.unwrap_or(1) {
            let stage = self.stage(layer);
            let starts = if stage == Some(0) { 0..1 } else { 0..whole };
            for from in starts.rev() {
                let before = self.needs(self.least_us(0, from), capped).max(u32::from(from > 0));
                for to in from + 1..=whole {
                    let compute = self.least_us(from, to);
                    if trains && self.asked.weight(self.devices) * compute > capped * (1.0 + 1e-9) {
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
                        let mut known = None;
                        for rest in after..=self.devices - replicas - before {
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
                            let run = *run.get_or_insert_with(|| self.places.run(from, to));
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
        known: &mut Option<(f64, [Share; 2])>,
    ) -> Option<Part> {
        let (recompute, bytes) = if measure == Measure::Bytes {
            let [plain, recomputed] = [false, true].map(|recompute| self.bytes(run, replicas, rest, recompute, stage));
            (
                self.rules.recompute && recomputed < plain,
                if self.rules.recompute { plain.min(recomputed) } else { plain },
            )
        } else {
            (self.recomputes(run, replicas, rest, stage)?, 0)
        };
        if measure == Measure::Bytes {
            return Some(Part { busiest_us: 0.0, way_us: 0.0, bytes });
        }
        let shares = || [false, true].map(|recompute| self.share(measure, run, (from, to), replicas, rest, recompute));
        // On one level only the pace of its devices tells one place of a stage from another.
        let shares = if self.levels.len() == 1 {
            let pace = self.pace(self.devices - rest - replicas, replicas);
            match *known {
                Some((known, shares)) if known == pace => shares,
                _ => known.insert((pace, shares())).1,
            }
        } else {
            shares()
        };
        let share = shares[usize::from(recompute)];
        Some(Part { busiest_us: share.busiest_us, way_us: share.way_us, bytes })
    }

    /// Whether a run is recomputed as such a stage; `None` if it does not fit either way.
    fn recomputes(&self, run: &Run, replicas: u32, rest: u32, stage: Option<usize>) -> Option<bool> {
        let first = self.devices - rest - replicas;
        let own = class::smallest(self.classes, first..first + replicas);
        let Some(limit) = own.into_iter().chain(self.memory_limit).min() else { return Some(false) };
        if self.bytes(run, replicas, rest, false, stage) <= limit {
            return Some(false);
        }
        (self.rules.recompute && self.bytes(run, replicas, rest, true, stage) <= limit).then_some(true)
    }

    /// Whether the run is recomputed as the stage at place `at`; `None` if it does not fit.
    pub fn chosen(&self, from: usize, to: usize, replicas: u32, rest: u32, at: usize) -> Option<bool> {
        let stage = self.rules.stages.map(|_| at);
        self.recomputes(&self.places.run(from, to), replicas, rest, stage)
    }

    fn bytes(&self, run: &Run, replicas: u32, rest: u32, recompute: bool, stage: Option<usize>) -> u64 {
        let rule = || self.flow.in_flight(Position { replicas, workers_after: rest });
        let given = self.rules.caps.as_ref().zip(stage);
        let in_flight = given.map_or_else(rule, |(caps, stage)| caps[stage]);
        let first = self.rules.caps.as_ref().map_or(self.flow.workers, |caps| caps[0]);
        let versions = self.flow.versions(in_flight, first);
        let (optimizer_state, schedule) = (self.optimizer_state, self.flow.schedule);
        let multiples = Multiples { in_flight, versions, replicas, recompute, optimizer_state, schedule };
        run.holdings.held(&multiples).total
    }

    fn share(
        &self,
        measure: Measure,
        run: &Run,
        (from, to): (usize, usize),
        replicas: u32,
        rest: u32,
        recompute: bool,
    ) -> Share {
        let first = self.devices - rest - replicas;
        let last = first + replicas - 1;
        let run = run.at(self.pace(first, replicas));
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
            return Share::of(&self.asked, self.levels, &stage, &messages);
        }
        // Which level a message goes over is not certain, so that it may not be added to what else goes over that level.
        let alone = Share::of(&self.asked, self.levels, &stage, &[]);
        let longest = messages.iter().map(|message| message.us).fold(0.0, f64::max);
        let comes_in: f64 = messages.iter().filter(|message| message.comes_in).map(|message| message.us).sum();
        let ways = if self.asked.trains() { 2.0 } else { 1.0 };
        Share {
            busiest_us: alone.busiest_us.max(self.asked.weight(replicas) * longest),
            way_us: alone.way_us + if self.asked.adds() { ways * comes_in } else { 0.0 },
            reduce_us: alone.reduce_us,
        }
    }

    /// The stages that a table's best value stands for.
    fn read(&self, table: &Table) -> Option<Vec<Seat>> {
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
            seats.push(Seat { from: at, to, first, replicas, recompute });
            (at, w) = (to, rest as usize);
            layer -= usize::from(table.layered);
        }
        Some(seats)
    }

    /// The objective of a whole partition, exactly.
    fn price(&self, seats: &[Seat]) -> Option<f64> {
        let mut prefix = Prefix::default();
        seats.iter().for_each(|seat| prefix.push(self, *seat));
        let us = prefix.us(self);
        us.is_finite().then_some(us)
    }
}

#[derive(Clone, Copy)]
struct Part {
    busiest_us: f64,
    way_us: f64,
    bytes: u64,
}
