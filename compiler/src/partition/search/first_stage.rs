//! The first stages that a pipeline may have. With vertical sync every stage holds weight versions as the first one's replicas and
//! items in flight say, and where nothing is flushed sums of the parameters that stages share wait as long, which a search that begins at
//! the end does not know: so it asks about each by itself.

use crate::plan::ScheduleKind;
use crate::plan::in_flight::Lanes;
use crate::plan::problem::{InFlight, Problem};

/// Whether what a stage holds depends on the first.
pub fn matters(problem: &Problem) -> bool {
    match problem.schedule {
        ScheduleKind::RoundRobinVsync => true,
        ScheduleKind::RoundRobin => problem.graph.params.iter().any(|param| param.users.len() > 1),
        _ => false,
    }
}

/// Every number of replicas, with every number of items in flight that the problem gives it.
pub fn each(problem: &Problem) -> impl Iterator<Item = Lanes> + use<> {
    let (devices, room) = (problem.cluster.devices(), problem.room);
    let given = match &problem.in_flight {
        InFlight::Given(caps) => caps.first().copied(),
        _ => None,
    };
    (1..=devices).flat_map(move |replicas| {
        // By the rule as many as all workers make of a replica's share: one at least, and all devices' at the most.
        let published = 1u32.saturating_add(room)..=devices.div_ceil(replicas).saturating_add(room);
        given.map_or(published, |cap| cap..=cap).map(move |in_flight| Lanes { replicas, in_flight })
    })
}

/// Every number of items in flight by itself.
pub fn caps(problem: &Problem) -> Vec<u32> {
    let mut caps: Vec<u32> = each(problem).map(|first| first.in_flight).collect();
    caps.sort_unstable();
    caps.dedup();
    caps
}
