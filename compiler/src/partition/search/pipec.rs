//! The search under cost model `pipec`: stages in a row on the devices of a cluster, each in its own place.
//!
//! Backwards from the end of the model everything that a stage costs by itself is known: the devices after it, and with them its
//! place in the levels, its caps and its memory. So least values are worked out for every set and every number of devices from
//! the end; `tables` does that. A run that does not fit in memory is recomputed in backward if that makes it fit, and left out if not.
//!
//! These values leave out what a stage cannot know by itself. Hence a second search, forward from the first stage, branch and
//! bound with the tables as bounds on the rest: it prices every prefix exactly. Where it runs to its end the best is proven; where
//! its steps do not suffice, the answer is the best that was met, and the bound is that of the tables.

use crate::cluster::Level;
use crate::partition::heterogeneous::device_ranges::{ALIKE, DeviceRanges};
use crate::partition::search::branch_and_bound::{BranchAndBound, Prefix};
use crate::partition::search::range_costs::{RangeCosts, Run};
use crate::partition::search::suffix_dp::Measure;
use crate::plan::cost_estimate::FlowQuery;
use crate::plan::in_flight::{First, Lanes, Position, ScheduleFlow};
use crate::plan::memory::MemoryMultipliers;
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
pub struct PlacementQuery<'a> {
    /// Where it may cut.
    pub places: &'a RangeCosts<'a>,
    /// Levels of the cluster, innermost first.
    pub levels: &'a [Level],
    /// The devices, and what any of them do together.
    pub fleet: &'a DeviceRanges,
    /// Devices.
    pub devices: u32,
    /// What is asked of time.
    pub asked: FlowQuery,
    /// What decides how much is in flight.
    pub flow: ScheduleFlow,
    /// With vertical sync, the first stage: one of so many replicas, with so much in flight at the most.
    pub first: First,
    /// Bytes of optimizer state for each byte of weights.
    pub optimizer_state: f64,
    /// The level of ZeRO of stages with replicas.
    pub zero: u32,
    /// Bytes on one device.
    pub memory_limit: Option<u64>,
    /// Exactly so many devices, counted from a stage's first to the last of all; absent means any number.
    pub exactly: Option<u32>,
    /// What is allowed.
    pub rules: &'a Rules,
    /// Steps that the forward search may take; 0 for the tables alone.
    pub steps: u64,
}

/// Whose bytes are made least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryScope {
    /// Those of every device, whatever it holds.
    All,
    /// Those of every device, none being given more than it holds.
    Within,
    /// Those of the devices of one class, whatever these hold; the others are given no more than they hold.
    Class(u32),
}

/// A stage that was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StagePlacement {
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
pub struct PlacedPipeline {
    /// The stages, first to last.
    pub seats: Vec<StagePlacement>,
    /// The objective, exactly.
    pub us: f64,
    /// No partition of these places is faster.
    pub bound_us: f64,
    /// Whether the search ran to its end.
    pub is_complete: bool,
    /// Sets and steps looked at.
    pub states: u64,
}

impl PlacementQuery<'_> {
    /// The best partition that is faster than `known_us`, which some partition reaches, or infinity; or a time that none beats. It
    /// is infinite where it is shown that none is allowed and fits.
    pub fn solve(&self, known_us: f64) -> Result<PlacedPipeline, f64> {
        let known = known_us * (1.0 + 1e-9);
        let adds = self.asked.adds();
        // What is busier than all that is known takes is in no partition that is better.
        let way = adds.then(|| self.table(Measure::Way, known));
        let least_way = way.as_ref().map_or(0.0, |way| self.least(way).0);
        if !least_way.is_finite() {
            return Err(known_us);
        }
        let busiest = self.table(Measure::Busiest, known - least_way);
        let (least_busiest, _) = self.least(&busiest);
        if !least_busiest.is_finite() {
            return Err(known_us);
        }
        let bound_us = least_busiest + least_way;
        let mut best: Option<(f64, Vec<StagePlacement>)> = None;
        let mut offer = |seats: Option<Vec<StagePlacement>>| {
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
        } else if self.steps > 0 {
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
        if !is_complete && self.steps > 0 {
            let best_us = best.as_ref().map_or(known, |(us, _)| us.min(known));
            let mut walk =
                BranchAndBound { placing: self, busiest: &busiest, way: way.as_ref(), best, best_us, steps: 0 };
            is_complete = walk.run();
            states += walk.steps;
            best = walk.best;
        }
        let Some((us, seats)) = best else { return Err(if is_complete { known_us } else { bound_us.min(known_us) }) };
        let bound_us = if is_complete { us } else { bound_us.min(us) };
        Ok(PlacedPipeline { seats: self.shifted(seats), us, bound_us, is_complete, states })
    }

    /// The partition whose fullest stage takes the fewest bytes, of those that count; and that number.
    pub fn least_memory(&self, counted: MemoryScope) -> Option<(u64, Vec<StagePlacement>)> {
        let fleet_of = |memory: u64| match counted {
            MemoryScope::All => ALIKE.clone(),
            MemoryScope::Within => self.fleet.clone(),
            MemoryScope::Class(class) => self.fleet.with(class, memory),
        };
        let fleet = fleet_of(u64::MAX);
        let free = PlacementQuery { memory_limit: None, fleet: &fleet, ..self.clone() };
        let table = free.table(Measure::Bytes, f64::INFINITY);
        let (bytes, _) = free.least(&table);
        let mut seats = free.read(&table)?;
        let fleet = fleet_of(bytes as u64);
        let memory_limit = (!matches!(counted, MemoryScope::Class(_))).then_some(bytes as u64);
        let marked = PlacementQuery { memory_limit, fleet: &fleet, ..self.clone() };
        let mut after = self.devices;
        for (at, seat) in seats.iter_mut().enumerate() {
            after = after.min(self.devices - seat.first - seat.replicas);
            seat.recompute = marked.chosen(seat.from, seat.to, seat.replicas, after, at)?;
        }
        Some((bytes as u64, self.shifted(seats)))
    }

    /// A pipeline that leaves whole outermost units free begins at the first of the others.
    fn shifted(&self, mut seats: Vec<StagePlacement>) -> Vec<StagePlacement> {
        if !self.fleet.is_alike() {
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

    /// Devices that the last stage may leave unused after it. Where devices are alike they stand before the first as well; where they
    /// differ a stage may want the last of one unit and the first of the next.
    pub fn unused_after(&self) -> u32 {
        match self.levels {
            [inner, _, ..] if !self.fleet.is_alike() => inner.count.saturating_sub(1).min(self.devices - 1),
            _ => 0,
        }
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

    /// The devices that a whole partition may take.
    pub fn widths(&self) -> RangeInclusive<u32> {
        self.exactly.map_or(1..=self.devices, |exactly| exactly..=exactly)
    }

    /// The replicas that a stage may have.
    pub fn replicas(&self, stage: Option<usize>) -> RangeInclusive<u32> {
        match (&self.rules.replicas, self.rules.equal, stage) {
            (Some(list), _, Some(stage)) => list[stage]..=list[stage],
            (_, Some(equal), _) => equal..=equal,
            _ => 1..=self.devices,
        }
    }

    /// The devices after a stage, where the replicas of all stages are given and none stays unused between them.
    pub fn rest(&self, stage: usize) -> Option<u32> {
        let later = self.rules.replicas.as_ref().filter(|_| self.levels.len() == 1)?.get(stage + 1..)?;
        Some(later.iter().fold(0u32, |sum, &replicas| sum.saturating_add(replicas)))
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
        self.fleet.pace(first, replicas)
    }

    /// What a run computes at the least for one item: on the fastest devices.
    pub fn least_us(&self, from: usize, to: usize) -> f64 {
        self.places.compute_us(from, to, self.asked.trains()) / self.fleet.fastest()
    }

    /// The bytes that each of some devices may hold; none where that is not limited.
    pub fn limit(&self, first: u32, replicas: u32) -> Option<u64> {
        self.fleet.memory(first, replicas).into_iter().chain(self.memory_limit).min()
    }

    /// Whether a run is recomputed as such a stage; `None` if it does not fit either way.
    pub fn recomputes(&self, run: &Run, replicas: u32, rest: u32, stage: Option<usize>) -> Option<bool> {
        let first = self.devices - rest - replicas;
        let Some(limit) = self.limit(first, replicas) else { return Some(false) };
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

    /// What one replica of such a stage holds.
    pub fn bytes(&self, run: &Run, replicas: u32, rest: u32, recompute: bool, stage: Option<usize>) -> u64 {
        let position = Position { replicas, workers_after: rest };
        let rule = || self.flow.in_flight(position);
        let given = self.rules.caps.as_ref().zip(stage);
        let in_flight = given.map_or_else(rule, |(caps, stage)| caps[stage]);
        let own = Lanes { replicas, in_flight };
        let first = if run.is_first { First::Known(own) } else { self.first };
        // A question is about some first stages; others are no answer to it.
        let is_another = match self.first {
            First::Known(first) => in_flight > first.in_flight || replicas != first.replicas,
            First::Capped(cap) => in_flight > cap,
            First::Unknown => false,
        };
        if run.is_first && is_another {
            return u64::MAX;
        }
        let (versions, late) = (self.flow.versions(own, first), self.flow.late(own, first));
        let (zero, optimizer_state) = (self.zero, self.optimizer_state);
        let ScheduleFlow { schedule, microbatches, .. } = self.flow;
        let apart = self.flow.apart(position, in_flight);
        let multiples = MemoryMultipliers {
            in_flight,
            apart,
            versions,
            late,
            replicas,
            recompute,
            zero,
            optimizer_state,
            schedule,
            microbatches,
        };
        run.holdings.held(&multiples).total
    }

    /// The objective of a whole partition, exactly.
    fn price(&self, seats: &[StagePlacement]) -> Option<f64> {
        let mut prefix = Prefix::default();
        seats.iter().for_each(|seat| prefix.push(self, *seat));
        let us = prefix.us(self);
        us.is_finite().then_some(us)
    }
}
