//! What a search returns: candidates with their time and memory, and how complete the search was.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::search::build_plan;
use crate::partition::search::numbers::same;
use crate::plan::problem::Objective;
use crate::plan::{Baselines, Fits, StageMemory};
use std::cmp::Ordering;
use std::collections::BTreeMap;

#[derive(Clone, Debug)]
pub struct PlanCandidate {
    pub name: &'static str,
    pub shape: Shape,
    pub minibatch_us: f64,
    /// In-flight limits, published or given.
    pub caps: Vec<u32>,
    /// Pending weight gradients per stage; empty if backwards are not split.
    pub pending_weight_grads: Vec<u32>,
    pub spots: Vec<build_plan::StagePosition>,
    pub memory: Vec<StageMemory>,
    pub fits: bool,
}

impl PlanCandidate {
    pub fn peak(&self) -> u64 {
        fullest(&self.spots, &self.memory)
    }

    /// Number of distinct devices; interleaved chunks of one rank share devices.
    pub fn devices(&self) -> u32 {
        let ranks: BTreeMap<u32, u32> =
            self.spots.iter().zip(self.shape.replicas()).map(|(spot, replicas)| (spot.first, replicas)).collect();
        ranks.into_values().fold(0, u32::saturating_add)
    }
}

/// Peak memory of any device, in bytes; interleaved chunks of one rank add up.
pub fn fullest(spots: &[build_plan::StagePosition], memory: &[StageMemory]) -> u64 {
    let mut held: BTreeMap<u32, u64> = BTreeMap::new();
    for (spot, memory) in spots.iter().zip(memory) {
        let sum = held.entry(spot.first).or_default();
        *sum = sum.saturating_add(memory.total);
    }
    held.into_values().max().unwrap_or(0)
}

#[derive(Default)]
pub struct SearchResult {
    pub candidates: Vec<PlanCandidate>,
    pub states: u64,
    pub fallback: Option<String>,
    /// The optimum, if a complete search proved it.
    pub proven_us: Option<f64>,
    /// Lower bound on the time of every partition; 0 if none was computed.
    pub bound_us: f64,
    /// True if a possible stage did not fit without recomputation.
    pub is_pressed: bool,
}

impl SearchResult {
    /// Takes the best candidate that fits. The others stay, in order.
    pub fn take_best(&mut self, objective: Objective) -> Option<PlanCandidate> {
        self.candidates.sort_by(|left, right| order(objective, left, right));
        let at = self.candidates.iter().position(|candidate| candidate.fits)?;
        Some(self.candidates.remove(at))
    }

    /// The time of the fastest candidate that fits; infinite if none does.
    pub fn fastest_us(&self) -> f64 {
        let fitting = self.candidates.iter().filter(|candidate| candidate.fits);
        fitting.map(|candidate| candidate.minibatch_us).fold(f64::INFINITY, f64::min)
    }

    pub fn of(candidate: PlanCandidate) -> SearchResult {
        SearchResult { candidates: vec![candidate], states: 1, ..SearchResult::default() }
    }
}

/// Orders candidates: by the objective, then fewer stages, then fewer devices.
pub fn order(objective: Objective, left: &PlanCandidate, right: &PlanCandidate) -> Ordering {
    let stages = |candidate: &PlanCandidate| candidate.memory.len();
    let devices = |candidate: &PlanCandidate| candidate.shape.replicas().iter().sum::<u32>();
    let time = if same(left.minibatch_us, right.minibatch_us) {
        Ordering::Equal
    } else {
        left.minibatch_us.total_cmp(&right.minibatch_us)
    };
    let memory = left.peak().cmp(&right.peak());
    let first = match objective {
        Objective::Throughput | Objective::Latency => time,
        Objective::Memory => memory.then(time),
    };
    first.then(stages(left).cmp(&stages(right))).then(devices(left).cmp(&devices(right)))
}

/// The times of the single device, of data parallelism and of the uniform pipeline.
pub fn baseline_times([single, data_parallel, uniform]: &[PlanCandidate; 3]) -> Baselines {
    Baselines {
        single: single.minibatch_us,
        data_parallel: data_parallel.minibatch_us,
        uniform: uniform.minibatch_us,
        fits: Fits { single: single.fits, data_parallel: data_parallel.fits, uniform: uniform.fits },
    }
}
