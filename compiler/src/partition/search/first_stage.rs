//! Enumerates possible first stages, for searches that start at the last stage.
//!
//! With vertical sync, weight versions in all stages depend on the replicas and in-flight micro-batches of the first
//! stage. Without flushes, pending gradient sums of tied weights do too. A backward search does not know the first
//! stage, so it runs once for each.

use crate::plan::in_flight::StageInFlight;
use crate::plan::problem::Problem;
use crate::plan::schedule::VersionRule;

pub fn matters(problem: &Problem) -> bool {
    match problem.schedule.versions() {
        VersionRule::Synchronised => true,
        VersionRule::Stashed => problem.graph.params.iter().any(|param| param.users.len() > 1),
        _ => false,
    }
}

/// All combinations of replica count and in-flight count that the problem allows for the first stage.
pub fn each(problem: &Problem) -> impl Iterator<Item = StageInFlight> + use<> {
    let (devices, room) = (problem.cluster.devices(), problem.room);
    let given = problem.in_flight.given().and_then(|caps| caps.first().copied());
    (1..=devices).flat_map(move |replicas| {
        // The published rule gives ceil(workers / replicas): at least 1, at most all devices divided by the replicas.
        let published = 1u32.saturating_add(room)..=devices.div_ceil(replicas).saturating_add(room);
        given.map_or(published, |cap| cap..=cap).map(move |in_flight| StageInFlight { replicas, in_flight })
    })
}

pub fn caps(problem: &Problem) -> Vec<u32> {
    let mut caps: Vec<u32> = each(problem).map(|first| first.in_flight).collect();
    caps.sort_unstable();
    caps.dedup();
    caps
}
