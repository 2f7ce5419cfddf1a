//! The prediction interval of the time per minibatch.

use crate::cluster::device::{CPU, find};
use crate::plan::Plan;
use crate::plan::problem::CostModel;
use std::collections::BTreeSet;

/// Shortest step with a prediction interval, in microseconds. The time to wake threads dominates shorter ones.
const SHORTEST_US: f64 = 1e3;

impl Plan {
    /// Number of workers. A device with several stages is one.
    pub fn workers(&self) -> u32 {
        self.stages.iter().flat_map(|stage| &stage.devices).collect::<BTreeSet<_>>().len() as u32
    }

    /// The plan's workers, if they share one host and its cores suffice.
    pub fn workers_of_one_host(&self) -> Option<u32> {
        let [level] = &self.cluster.levels[..] else { return None };
        let is_in_memory = find(CPU).is_some_and(|kind| kind.link().0 == level.name);
        (is_in_memory && self.workers() <= self.cluster.device.cores?).then_some(self.workers())
    }

    /// Prediction interval of a step in microseconds. `None` for steps under 1 ms, for cost models other than `pipec`,
    /// and unless the profile has an interval and was measured with the plan's number of workers, on one CPU with a core
    /// for each.
    pub fn expected_step_us(&self) -> Option<[f64; 2]> {
        let is_long = self.predicted.step_us >= SHORTEST_US;
        let interval = self.profile.interval.filter(|_| is_long && self.cost == CostModel::Pipec)?;
        (self.workers_of_one_host() == Some(self.profile.workers))
            .then(|| interval.map(|ratio| ratio * self.predicted.step_us))
    }
    /// The prediction interval, and whether a measured step, in microseconds, is `below`, `within` or `above` it.
    pub fn compared(&self, step_us: f64) -> Option<(&'static str, [f64; 2])> {
        let [low, high] = self.expected_step_us()?;
        let place = if step_us < low {
            "below"
        } else if step_us > high {
            "above"
        } else {
            "within"
        };
        Some((place, [low, high]))
    }
}
