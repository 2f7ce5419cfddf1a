//! What ranges of ops cost as stages, computed once for all tables of a search.

use crate::partition::search::placement::PlacementQuery;
use crate::partition::search::range_costs::Run;
use crate::partition::search::suffix_dp::Measure;
use crate::plan::cost_estimate::{Message, PlacedStage, StageLoad};
use crate::plan::links::Wire;

/// Memory for the loads of one search, in bytes. Larger searches keep those of one range with one number of replicas.
const MOST_BYTES: usize = 64 << 20;

/// Whether a stage fits, and recomputes.
#[derive(Clone, Copy, PartialEq)]
enum Choice {
    Unknown,
    TooLarge,
    Fits { recomputes: bool },
}

/// A range with one number of replicas: the choice by the number of devices after it, and loads.
struct Row {
    choices: Box<[Choice]>,
    loads: Box<[Option<StageLoad>]>,
}

/// The loads of a query's ranges, for all measures but [`Measure::Estimate`] or for that one alone.
pub struct StageLoads<'a> {
    query: &'a PlacementQuery<'a>,
    /// On a single level, a load depends on the devices only through their speed.
    paces: Option<Vec<f64>>,
    runs: Vec<Option<Run>>,
    rows: Vec<Option<Row>>,
    /// Number of loads of a row.
    slots: usize,
    is_kept: bool,
    /// The newest range, if only its loads are kept.
    newest: (usize, usize),
}

impl<'a> StageLoads<'a> {
    /// Keeps all loads for several tables, if there is memory for that.
    pub fn of(query: &'a PlacementQuery<'a>) -> StageLoads<'a> {
        StageLoads::within(query, MOST_BYTES)
    }

    /// Keeps only those of the newest range, for a single table.
    pub fn of_newest(query: &'a PlacementQuery<'a>) -> StageLoads<'a> {
        StageLoads::within(query, 0)
    }

    fn within(query: &'a PlacementQuery<'a>, most_bytes: usize) -> StageLoads<'a> {
        let (sets, devices) = (query.places.space.len(), query.devices as usize);
        let paces = (query.levels.len() == 1).then(|| query.fleet.speeds());
        let slots = paces.as_ref().map_or(devices + 1, |paces| 2 * paces.len());
        let row = size_of::<Option<Row>>() + devices + 1 + slots * size_of::<Option<StageLoad>>();
        let bytes = (row * devices + size_of::<Option<Run>>()).saturating_mul(sets * sets / 2);
        // Given limits on items in flight differ between the stages.
        let is_kept = bytes <= most_bytes && query.rules.caps.is_none();
        let ranges = if is_kept { sets * sets.saturating_sub(1) / 2 } else { 1 };
        let rows = if is_kept { ranges * devices } else { 1 };
        StageLoads {
            query,
            paces,
            runs: vec![None; ranges],
            rows: (0..rows).map(|_| None).collect(),
            slots,
            is_kept,
            newest: (0, 0),
        }
    }

    /// The loads of the range between two sets with these replicas, in the pipeline position `stage` if it is known.
    pub fn range(&mut self, (from, to): (usize, usize), replicas: u32, stage: Option<usize>) -> RangeLoads<'_, 'a> {
        let range = if self.is_kept { to * (to - 1) / 2 + from } else { 0 };
        let at = if self.is_kept { range * self.query.devices as usize + replicas as usize - 1 } else { 0 };
        let StageLoads { query, paces, runs, rows, slots, is_kept, newest } = self;
        if !*is_kept {
            rows[0] = None;
            if std::mem::replace(newest, (from, to)) != (from, to) {
                runs[0] = None;
            }
        }
        RangeLoads {
            query,
            paces: paces.as_deref(),
            slots: *slots,
            run: &mut runs[range],
            row: &mut rows[at],
            at: (from, to),
            replicas,
            stage,
        }
    }
}

/// The loads of one range with one number of replicas.
pub struct RangeLoads<'l, 'a> {
    query: &'a PlacementQuery<'a>,
    paces: Option<&'l [f64]>,
    slots: usize,
    run: &'l mut Option<Run>,
    row: &'l mut Option<Row>,
    at: (usize, usize),
    replicas: u32,
    stage: Option<usize>,
}

impl RangeLoads<'_, '_> {
    pub fn run(&mut self) -> &Run {
        self.run.get_or_insert_with(|| self.query.places.run(self.at.0, self.at.1))
    }

    /// The load with `rest` devices after it; `None` if it does not fit.
    pub fn load(&mut self, measure: Measure, rest: u32) -> Option<StageLoad> {
        let (query, at, replicas) = (self.query, self.at, self.replicas);
        let run = *self.run();
        let row = self.row.get_or_insert_with(|| Row {
            choices: vec![Choice::Unknown; query.devices as usize + 1].into(),
            loads: vec![None; self.slots].into(),
        });
        let choice = &mut row.choices[rest as usize];
        if *choice == Choice::Unknown {
            let found = query.recomputes(&run, replicas, rest, self.stage);
            *choice = found.map_or(Choice::TooLarge, |recomputes| Choice::Fits { recomputes });
        }
        let Choice::Fits { recomputes } = *choice else { return None };
        let pace = query.pace(query.devices - rest - replicas, replicas);
        let slot = match self.paces {
            Some(paces) => 2 * paces.iter().position(|known| *known == pace)? + usize::from(recomputes),
            None => rest as usize,
        };
        let share = || query.share(measure, &run, at, replicas, rest, recomputes, pace);
        Some(*row.loads[slot].get_or_insert_with(share))
    }
}

impl PlacementQuery<'_> {
    /// Load of a range as a stage with these replicas and `rest` devices after it, at relative speed `pace`.
    #[allow(clippy::too_many_arguments)] // Innermost loop; a struct would be built at every step.
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
        let again = if recompute { run.recompute_us } else { 0.0 };
        let stage = PlacedStage {
            forward_us: run.forward_us,
            backward_us: run.backward_us + again,
            gradient_bytes: run.holdings.summed as f64,
            first,
            replicas,
            in_flight: 1,
            tied_us: 0.0,
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
        if to + 1 < self.places.space.len() {
            message((last + 1 < self.devices).then_some(last + 1), run.out_bytes, false);
        }
        if self.levels.len() == 1 || measure == Measure::Estimate {
            return StageLoad::of(&self.asked, self.levels, &stage, &messages);
        }
        // The link level of a message is uncertain, so it is not added to other traffic of that level.
        let alone = StageLoad::of(&self.asked, self.levels, &stage, &[]);
        let longest = messages.iter().map(|message| message.us).fold(0.0, f64::max);
        let comes_in: f64 = messages.iter().filter(|message| message.comes_in).map(|message| message.us).sum();
        let ways = if self.asked.trains() { 2.0 } else { 1.0 };
        StageLoad {
            busiest_us: alone.busiest_us.max(self.asked.weight(replicas) * longest),
            way_us: alone.way_us + if self.asked.adds() { ways * comes_in } else { 0.0 },
            in_us: if self.asked.adds() { ways * comes_in } else { 0.0 },
            reduce_us: alone.reduce_us,
        }
    }
}
