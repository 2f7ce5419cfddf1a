//! Lower bound on the peak memory of every partition, to detect infeasibility without a full search.
//!
//! Uses the smallest-memory table of `suffix_dp` over all down-sets with the most favourable choices: free
//! recomputation per stage and no constraints except "no replication". The bound is exact if a stage's in-flight count
//! depends only on the devices after it. If it depends on the workers of the whole pipeline, each worker count is
//! tried. With vertical sync, weight versions depend on the first stage, so each first stage is tried.

use crate::partition::heterogeneous::device_ranges;
use crate::partition::search::build_plan;
use crate::partition::search::downsets::{DownSets, Growth};
use crate::partition::search::first_stage;
use crate::partition::search::numbers::largest;
use crate::partition::search::placement::{PlacementQuery, Rules};
use crate::partition::search::range_costs::RangeCosts;
use crate::partition::search::stage_loads::StageLoads;
use crate::partition::search::suffix_dp::{Measure, Table};
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::in_flight::{First, StageInFlight};
use crate::plan::problem::{CostModel, Problem};
use crate::plan::schedule::PendingWeightGrads;
use std::cell::Cell;

/// Largest number of down-sets, and steps of about ten nanoseconds.
const MOST_SETS: usize = 4000;
const STEPS: f64 = 2e7;

/// Returns true only if it is proven that no partition fits.
pub fn proves_none(problem: &Problem) -> bool {
    let most = problem.memory_limit.map_or(u64::MAX, |limit| limit.0);
    let own = problem.cluster.classes.iter().map(|class| class.device.memory.0.min(most)).max();
    let most = own.unwrap_or(most);
    most < u64::MAX && least_bytes(problem).is_some_and(|least| least > most)
}

/// Lower bound on the peak memory in bytes; `None` if there are too many down-sets.
fn least_bytes(problem: &Problem) -> Option<u64> {
    if problem.chunks > 1 || problem.in_flight.given().is_some() {
        return None;
    }
    let devices = problem.cluster.devices();
    let is_of_the_whole = matches!(problem.schedule.properties().split, Some(PendingWeightGrads::PerEarlierWorker(_)));
    let is_of_the_first = first_stage::matters(problem);
    let firsts: Vec<StageInFlight> = match is_of_the_first {
        true if problem.constraints.no_replication => {
            first_stage::each(problem).filter(|first| first.replicas == 1).collect()
        }
        true => first_stage::each(problem).collect(),
        false => Vec::new(),
    };
    let pipelines = if is_of_the_whole { f64::from(devices) } else { firsts.len().max(1) as f64 };
    let choices = if problem.constraints.no_replication { 1.0 } else { f64::from(devices) / 2.0 };
    let steps = |sets: usize| pipelines * (sets * sets) as f64 / 2.0 * f64::from(devices) * choices;
    let most = largest(MOST_SETS, |sets| steps(sets) <= STEPS);
    let space = DownSets::grow(&problem.graph, CostModel::Paper, Growth::All, most)?;
    let places = RangeCosts::new(&problem.graph, &space, GradientBuffers::of(&problem.cluster));
    let rules = Rules {
        equal: problem.constraints.no_replication.then_some(1),
        recompute: problem.recomputation(),
        ..Rules::default()
    };
    let table = |devices: u32, first: First| {
        let placing = PlacementQuery {
            problem,
            places: &places,
            // Memory does not depend on the position in the levels.
            levels: &problem.cluster.levels[..1],
            fleet: &device_ranges::ALIKE,
            devices,
            exactly: None,
            asked: build_plan::asked(problem),
            flow: build_plan::flow(problem, devices),
            first,
            memory_limit: None,
            rules: &rules,
            steps: 0,
            is_pressed: Cell::new(false),
        };
        placing.table(Measure::Bytes, f64::INFINITY, &mut StageLoads::of_newest(&placing))
    };
    let least = match is_of_the_whole {
        true => {
            let one = |workers: u32| table(workers, First::Unknown).value(0, 0, workers as usize);
            (1..=devices).map(one).reduce(f64::min)
        }
        false => {
            let firsts = firsts.into_iter().map(First::Known);
            let firsts = if is_of_the_first { firsts.collect() } else { vec![First::Unknown] };
            let tables = firsts.into_iter().map(|first| table(devices, first));
            let values = |table: Table| (1..=devices).map(move |used| table.value(0, 0, used as usize));
            tables.flat_map(values).reduce(f64::min)
        }
    };
    // Bytes above 2^53 are rounded; the bound is lowered accordingly.
    least.filter(|least| least.is_finite()).map(|least| (least * (1.0 - 1e-15)) as u64)
}
