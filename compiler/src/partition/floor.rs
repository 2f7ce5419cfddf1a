//! What every partition needs of memory: where a device has less, nothing fits, and nothing has to be walked through to say so.
//!
//! The search for least bytes over all closed sets, of `tables`, with each choice taken at its best: every stage by itself recomputed
//! or not, constraints left out but for replicas that are refused. It is the truth where a schedule tells a stage's items in flight
//! from the devices after it. Where they follow from the workers of the whole pipeline, or with vertical sync from the first stage, each
//! number is asked about by itself.

use crate::partition::build;
use crate::partition::fleet;
use crate::partition::placed::{Placing, Rules};
use crate::partition::places::Places;
use crate::partition::search::largest;
use crate::partition::states::{Growth, Space};
use crate::partition::tables::{Measure, Table};
use crate::plan::ScheduleKind;
use crate::plan::problem::{CostModel, InFlight, Problem};

/// The most closed sets, and steps of about ten nanoseconds.
const MOST_SETS: usize = 4000;
const STEPS: f64 = 2e7;

/// Whether it is shown that no partition fits. That one was not found shows nothing.
pub fn proves_none(problem: &Problem) -> bool {
    let most = problem.memory_limit.map_or(u64::MAX, |limit| limit.0);
    let own = problem.cluster.classes.iter().map(|class| class.device.memory.0.min(most)).max();
    let most = own.unwrap_or(most);
    most < u64::MAX && least_bytes(problem).is_some_and(|least| least > most)
}

/// Bytes that the fullest stage of every partition holds at least; `None` where there are too many closed sets to tell.
fn least_bytes(problem: &Problem) -> Option<u64> {
    if problem.chunks > 1 || matches!(problem.in_flight, InFlight::Given(_)) {
        return None;
    }
    let devices = problem.cluster.devices();
    let is_of_the_whole = matches!(problem.schedule, ScheduleKind::ZbH1 | ScheduleKind::ZbH2);
    // With vertical sync the first stage says how many versions all hold.
    let is_of_the_first = problem.schedule == ScheduleKind::RoundRobinVsync;
    let pipelines = if is_of_the_whole || is_of_the_first { f64::from(devices) } else { 1.0 };
    let choices = if problem.constraints.no_replication { 1.0 } else { f64::from(devices) / 2.0 };
    let steps = |sets: usize| pipelines * (sets * sets) as f64 / 2.0 * f64::from(devices) * choices;
    let most = largest(MOST_SETS, |sets| steps(sets) <= STEPS);
    let space = Space::grow(&problem.graph, CostModel::Paper, Growth::All, most)?;
    let places = Places::new(&problem.graph, &space);
    let rules = Rules {
        equal: problem.constraints.no_replication.then_some(1),
        recompute: problem.recompute && problem.cost == CostModel::Pipec && problem.schedule != ScheduleKind::Inference,
        ..Rules::default()
    };
    let table = |devices: u32, workers: u32| {
        let placing = Placing {
            places: &places,
            // What a stage holds does not follow from where it stands.
            levels: &problem.cluster.levels[..1],
            fleet: &fleet::ALIKE,
            devices,
            exactly: None,
            asked: build::asked(problem),
            flow: build::flow(problem, workers),
            optimizer_state: problem.optimizer_state,
            memory_limit: None,
            rules: &rules,
            steps: 0,
        };
        placing.table(Measure::Bytes, f64::INFINITY)
    };
    let least = match is_of_the_whole {
        true => (1..=devices).map(|workers| table(workers, workers).value(0, 0, workers as usize)).reduce(f64::min),
        false => {
            let firsts = if is_of_the_first { devices } else { 1 };
            let tables = (1..=firsts).map(|first| table(devices, first));
            let values = |table: Table| (1..=devices).map(move |used| table.value(0, 0, used as usize));
            tables.flat_map(values).reduce(f64::min)
        }
    };
    // Sizes beyond 2^53 are rounded here; what is lost is left to the limit.
    least.filter(|least| least.is_finite()).map(|least| (least * (1.0 - 1e-15)) as u64)
}
