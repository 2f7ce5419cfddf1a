//! The question that the search in `pipec` answers: ranges of ops to place on devices, and the rules they obey.

use crate::cluster::Level;
use crate::partition::heterogeneous::device_ranges::DeviceRanges;
use crate::partition::search::build_plan;
use crate::partition::search::range_costs::{RangeCosts, Run};
use crate::plan::cost_estimate::FlowQuery;
use crate::plan::in_flight::{First, Position, ScheduleFlow, StageInFlight};
use crate::plan::memory::MemoryMultipliers;
use crate::plan::problem::{Problem, Recomputation};
use std::cell::Cell;
use std::ops::RangeInclusive;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rules {
    pub stages: Option<usize>,
    pub most_stages: Option<usize>,
    /// Replicas of each stage; requires `stages`.
    pub replicas: Option<Vec<u32>>,
    /// Replica count common to all stages.
    pub equal: Option<u32>,
    /// In-flight limits of each stage; requires `stages`.
    pub caps: Option<Vec<u32>>,
    /// Ops with the stage they are pinned to; requires `stages`.
    pub pins: Vec<(u32, usize)>,
    pub recompute: Recomputation,
}

#[derive(Clone, Debug)]
pub struct PlacementQuery<'a> {
    pub problem: &'a Problem,
    pub places: &'a RangeCosts<'a>,
    pub levels: &'a [Level],
    pub fleet: &'a DeviceRanges,
    pub devices: u32,
    pub asked: FlowQuery,
    pub flow: ScheduleFlow,
    /// Assumed first stage, if memory depends on it: its replicas, and an upper bound on its in-flight count.
    pub first: First,
    /// Bytes per device.
    pub memory_limit: Option<u64>,
    /// Exact number of devices, from the first device of the first stage to the last device; `None` allows any number.
    pub exactly: Option<u32>,
    pub rules: &'a Rules,
    /// Step limit of the forward search; 0 uses the tables only.
    pub steps: u64,
    /// True once a stage did not fit without recomputation.
    pub is_pressed: Cell<bool>,
}

/// Devices whose memory is minimised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryScope {
    /// All devices, ignoring their own memory.
    All,
    /// All devices, each within its own memory.
    Within,
    /// Devices of one class, ignoring their own memory; the others stay within theirs.
    Class(u32),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StagePlacement {
    /// Index of the down-set before it.
    pub from: usize,
    /// Index of the down-set that includes it.
    pub to: usize,
    pub first: u32,
    pub replicas: u32,
    pub recompute: bool,
}

impl PlacementQuery<'_> {
    /// Number of devices that may stay unused after the last stage. Homogeneous devices can be left unused before the
    /// first stage instead; with heterogeneous devices the position matters.
    pub fn unused_after(&self) -> u32 {
        match self.levels {
            [inner, _, ..] if !self.fleet.is_alike() => inner.count.saturating_sub(1).min(self.devices - 1),
            _ => 0,
        }
    }

    pub fn layers(&self) -> Option<usize> {
        self.rules.stages.or(self.rules.most_stages).map(|most| most.min(self.places.space.len() - 1))
    }

    /// Possible stage counts of a whole partition, as table layers; none if there are too few places for them.
    pub fn finals(&self) -> RangeInclusive<usize> {
        match self.layers() {
            Some(most) => self.rules.stages.unwrap_or(1)..=most,
            None => 0..=0,
        }
    }

    /// Possible device counts of a whole partition.
    pub fn widths(&self) -> RangeInclusive<u32> {
        self.exactly.map_or(1..=self.devices, |exactly| exactly..=exactly)
    }

    /// Possible replica counts of a stage.
    pub fn replicas(&self, stage: Option<usize>) -> RangeInclusive<u32> {
        match (&self.rules.replicas, self.rules.equal, stage) {
            (Some(list), _, Some(stage)) => list[stage]..=list[stage],
            (_, Some(equal), _) => equal..=equal,
            _ => 1..=self.devices,
        }
    }

    /// Number of devices after a stage, if all replicas are given and no device stays unused in between.
    pub fn rest(&self, stage: usize) -> Option<u32> {
        let given = self.rules.replicas.as_ref().filter(|_| self.levels.len() == 1 || self.uses_all_devices())?;
        Some(sum_of(given.get(stage + 1..)?))
    }

    /// True if the given replicas take all devices.
    pub fn uses_all_devices(&self) -> bool {
        self.rules.replicas.as_ref().is_some_and(|given| sum_of(given) == self.devices)
    }

    /// Index of the stage at a table layer (layers count from the end), if the number of stages is fixed.
    pub fn stage(&self, layer: usize) -> Option<usize> {
        self.rules.stages.and_then(|stages| stages.checked_sub(layer))
    }

    pub fn is_allowed(&self, from: usize, to: usize, stage: Option<usize>) -> bool {
        let Some(stage) = stage else { return true };
        let inside = |op: u32| self.places.has(to, op as usize) && !self.places.has(from, op as usize);
        self.rules.pins.iter().all(|&(op, wanted)| inside(op) == (wanted == stage))
    }

    pub fn pace(&self, first: u32, replicas: u32) -> f64 {
        self.fleet.pace(first, replicas)
    }

    /// Lower bound on the compute of a range for one micro-batch: on the fastest device.
    pub fn least_us(&self, from: usize, to: usize) -> f64 {
        self.places.compute_us(from, to, self.asked.trains()) / self.fleet.fastest()
    }

    /// Memory limit of these devices in bytes; `None` if there is none.
    pub fn limit(&self, first: u32, replicas: u32) -> Option<u64> {
        self.fleet.memory(first, replicas).into_iter().chain(self.memory_limit).min()
    }

    /// Returns whether a stage must be recomputed; `None` if it does not fit either way.
    pub fn recomputes(&self, run: &Run, replicas: u32, rest: u32, stage: Option<usize>) -> Option<bool> {
        let first = self.devices - rest - replicas;
        let choices = self.rules.recompute.choices();
        let Some(limit) = self.limit(first, replicas) else { return Some(choices[0]) };
        let choice = choices.iter().copied().find(|&again| self.bytes(run, replicas, rest, again, stage) <= limit);
        if choice != Some(choices[0]) {
            self.is_pressed.set(true);
        }
        choice
    }

    /// As [`PlacementQuery::recomputes`], for the stage at index `at`.
    pub fn chosen(&self, from: usize, to: usize, replicas: u32, rest: u32, at: usize) -> Option<bool> {
        let stage = self.rules.stages.map(|_| at);
        self.recomputes(&self.places.run(from, to), replicas, rest, stage)
    }

    /// In-flight limit of a stage, by the schedule's rule or as given.
    pub fn in_flight(&self, replicas: u32, rest: u32, stage: Option<usize>) -> u32 {
        let given = self.rules.caps.as_ref().zip(stage).and_then(|(caps, stage)| caps.get(stage).copied());
        given.unwrap_or_else(|| self.flow.in_flight(Position { replicas, workers_after: rest }))
    }

    pub fn bytes(&self, run: &Run, replicas: u32, rest: u32, recompute: bool, stage: Option<usize>) -> u64 {
        let position = Position { replicas, workers_after: rest };
        let in_flight = self.in_flight(replicas, rest, stage);
        let own = First::Known(StageInFlight { replicas, in_flight });
        let first = if run.is_first { own } else { self.first };
        // The query assumes a first stage; a different first stage is not allowed.
        let is_another = match self.first {
            First::Known(first) => in_flight > first.in_flight || replicas != first.replicas,
            First::Capped(cap) => in_flight > cap,
            First::Unknown => false,
        };
        if run.is_first && is_another {
            return u64::MAX;
        }
        let multiples = build_plan::multiples_at(self.problem, &self.flow, position, in_flight, first);
        let multiples = MemoryMultipliers { recompute, ..multiples };
        run.holdings.held(&multiples).total
    }
}

pub fn sum_of(replicas: &[u32]) -> u32 {
    replicas.iter().fold(0, |sum, &replicas| sum.saturating_add(replicas))
}
