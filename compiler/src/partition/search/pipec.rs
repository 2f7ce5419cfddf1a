//! The search under cost model `pipec`: stages placed side by side on the devices of a cluster.
//!
//! A backward dynamic program (`suffix_dp`) computes the smallest value for every down-set and number of remaining
//! devices. Going backwards, the devices after a stage are known, and so are its position in the levels, its in-flight
//! cap and its memory. A range that does not fit is recomputed if that makes it fit, and skipped otherwise.
//!
//! These values omit costs that depend on other stages, so they are lower bounds. A forward branch and bound
//! (`branch_and_bound`) uses them to bound the rest and prices every prefix exactly. If it finishes, the result is
//! optimal; if it runs out of steps, the result is the best pipeline found, with the bound of the tables.

use crate::partition::heterogeneous::device_ranges::ALIKE;
use crate::partition::search::branch_and_bound::{BranchAndBound, Prefix};
use crate::partition::search::placement::{MemoryScope, PlacementQuery, StagePlacement};
use crate::partition::search::stage_loads::StageLoads;
use crate::partition::search::suffix_dp::Measure;

/// Limits on the busiest stage under which the shortest latency is searched, and the ratio between them.
const LIMITS: usize = 6;
const RISE: f64 = 1.25;

#[derive(Clone, Debug)]
pub struct PlacedPipeline {
    pub placements: Vec<StagePlacement>,
    pub us: f64,
    /// Lower bound for all partitions into these ranges.
    pub bound_us: f64,
    pub states: u64,
}

impl PlacementQuery<'_> {
    /// Returns the best partition faster than `known_us` (a time that some partition reaches, or infinity). The error
    /// is a lower bound on all partitions; it is infinite if no partition is allowed and fits.
    pub fn solve(&self, known_us: f64) -> Result<PlacedPipeline, f64> {
        let known = known_us * (1.0 + 1e-9);
        let adds = self.asked.adds();
        let mut loads = StageLoads::of(self);
        let way = adds.then(|| self.table(Measure::Way, known, &mut loads));
        let least_way = way.as_ref().map_or(0.0, |way| self.least(way).0);
        if !least_way.is_finite() {
            return Err(known_us);
        }
        let busiest = self.table(Measure::Busiest, known - least_way, &mut loads);
        let (least_busiest, _) = self.least(&busiest);
        if !least_busiest.is_finite() {
            return Err(known_us);
        }
        let bound_us = least_busiest + least_way;
        let mut best: Option<(f64, Vec<StagePlacement>)> = None;
        let mut offer = |placements: Option<Vec<StagePlacement>>| {
            let Some(placements) = placements else { return };
            let Some(us) = self.price(&placements) else { return };
            if best.as_ref().is_none_or(|(known, _)| us < known * (1.0 - 1e-12)) {
                best = Some((us, placements));
            }
        };
        if adds {
            offer(way.as_ref().and_then(|table| self.read(table)));
            // Tries the smallest latency under rising limits on the busiest stage.
            let mut limit = least_busiest * (1.0 + 1e-9);
            for _ in 0..LIMITS {
                offer(self.read(&self.table(Measure::Way, limit, &mut loads)));
                limit = limit * RISE + f64::MIN_POSITIVE;
            }
        } else if self.steps > 0 {
            let fewest = self.table(Measure::Stages, least_busiest * (1.0 + 1e-12), &mut loads);
            offer(self.read(&fewest));
        }
        offer(self.read(&busiest));
        if self.levels.len() > 1 {
            offer(self.read(&self.table(Measure::Estimate, known - least_way, &mut StageLoads::of_newest(self))));
        }
        let mut states = self.places.space.len() as u64;
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
        let Some((us, placements)) = best else {
            return Err(if is_complete { known_us } else { bound_us.min(known_us) });
        };
        let bound_us = if is_complete { us } else { bound_us.min(us) };
        Ok(PlacedPipeline { placements: self.shifted(placements), us, bound_us, states })
    }

    /// The partition with the smallest peak memory on the devices in `counted`, and that peak in bytes.
    pub fn least_memory(&self, counted: MemoryScope) -> Option<(u64, Vec<StagePlacement>)> {
        let fleet_of = |memory: u64| match counted {
            MemoryScope::All => ALIKE.clone(),
            MemoryScope::Within => self.fleet.clone(),
            MemoryScope::Class(class) => self.fleet.with(class, memory),
        };
        let fleet = fleet_of(u64::MAX);
        let free = PlacementQuery { memory_limit: None, fleet: &fleet, ..self.clone() };
        let table = free.table(Measure::Bytes, f64::INFINITY, &mut StageLoads::of_newest(&free));
        let (bytes, _) = free.least(&table);
        let mut placements = free.read(&table)?;
        let fleet = fleet_of(bytes as u64);
        let memory_limit = (!matches!(counted, MemoryScope::Class(_))).then_some(bytes as u64);
        let marked = PlacementQuery { memory_limit, fleet: &fleet, ..self.clone() };
        let mut after = self.devices;
        for (at, placement) in placements.iter_mut().enumerate() {
            after = after.min(self.devices - placement.first - placement.replicas);
            placement.recompute = marked.chosen(placement.from, placement.to, placement.replicas, after, at)?;
        }
        Some((bytes as u64, self.shifted(placements)))
    }

    /// Moves a pipeline that leaves whole outermost units unused to the first unit.
    fn shifted(&self, mut placements: Vec<StagePlacement>) -> Vec<StagePlacement> {
        if !self.fleet.is_alike() {
            return placements;
        }
        let unit: u64 = match self.levels.split_last() {
            Some((_, inner)) => inner.iter().map(|level| u64::from(level.count.max(1))).product(),
            None => 1,
        };
        let first = placements.first().map_or(0, |placement| u64::from(placement.first));
        let free = (first / unit.max(1) * unit) as u32;
        placements.iter_mut().for_each(|placement| placement.first -= free);
        placements
    }

    /// The exact objective of a whole partition; `None` if it is not finite.
    fn price(&self, placements: &[StagePlacement]) -> Option<f64> {
        let mut prefix = Prefix::default();
        placements.iter().for_each(|placement| prefix.push(self, *placement));
        let us = prefix.us(self);
        us.is_finite().then_some(us)
    }
}
