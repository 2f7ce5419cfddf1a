//! Infeasibility report: which stage lacks memory if no plan fits, and the smallest limit that would be enough.
//!
//! A device holds at most the smaller of the requested limit and its own memory. A candidate that does not fit needs
//! one of the following; the report describes the candidate with the smallest need.
//!
//! ```text
//! Limit   every stage fits in its devices' own memory: the limit must be raised to the peak stage memory
//! Class   some stages exceed the memory of their devices, and more memory in one device class would fix all of them
//! Every   several device classes have too little memory
//! ```

use crate::cluster::DeviceClass;
use crate::partition::error::{Infeasible, PlanError};
use crate::partition::heterogeneous::device_ranges::{DeviceRanges, first_alike};
use crate::partition::search::context::SearchContext;
use crate::partition::search::placement::{MemoryScope, PlacementQuery, StagePlacement};
use crate::partition::search::result::PlanCandidate;
use crate::plan::check::error::PlanFault;
use crate::plan::problem::Problem;
use crate::text::name::short_name;

/// Number of classes, largest memory first, for which the required memory is computed.
pub const MOST_CLASSES: usize = 4;

/// The requirement of an infeasible plan; smaller requirements compare less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Need {
    Limit(u64),
    /// More memory on every device of one class.
    Class {
        missing: u64,
        /// Bytes per device that the class then has.
        bytes: u64,
        /// Index of the first class with the same figures.
        class: u32,
    },
    Every(u64),
}

impl Need {
    pub fn of(problem: &Problem, fleet: &DeviceRanges, candidate: &PlanCandidate) -> Need {
        let peak = candidate.peak();
        let replicas = candidate.shape.replicas();
        let stages = || candidate.spots.iter().zip(&replicas).zip(&candidate.memory);
        let over = |fleet: &DeviceRanges| {
            let lacks = |first: u32, count: u32, total: u64| fleet.memory(first, count).is_some_and(|own| total > own);
            stages().any(|((spot, &count), held)| lacks(spot.first, count, held.total))
        };
        // Interleaved chunks, whose memory adds up on a rank, are not supported with device classes.
        if !over(fleet) {
            return Need::Limit(peak);
        }
        let of_class = |class: u32| {
            let with = fleet.with(class, u64::MAX);
            let counted = stages().filter(|((spot, count), _)| with.counts(spot.first, **count));
            let bytes = counted.map(|(_, held)| held.total).max()?;
            let own = problem.cluster.classes.get(class as usize)?.device.memory.0;
            (!over(&with)).then(|| Need::Class { missing: bytes.saturating_sub(own), bytes, class })
        };
        fleet.largest().into_iter().filter_map(of_class).min().unwrap_or(Need::Every(peak))
    }
}

/// Partitions that need the least memory, one for each kind of need.
pub fn least(placing: &PlacementQuery<'_>) -> Vec<Vec<StagePlacement>> {
    let placements = |counted: MemoryScope| placing.least_memory(counted).map(|(_, placements)| placements);
    if placing.fleet.is_boundless() {
        return placements(MemoryScope::All).into_iter().collect();
    }
    if let Some(within) = placements(MemoryScope::Within) {
        return vec![within];
    }
    let classes = placing.fleet.largest().into_iter().take(MOST_CLASSES);
    let all: Vec<Vec<StagePlacement>> = classes.filter_map(|class| placements(MemoryScope::Class(class))).collect();
    if all.is_empty() { placements(MemoryScope::All).into_iter().collect() } else { all }
}

/// Builds the error from infeasible candidates: it describes the one with the smallest need.
pub fn error(question: &SearchContext<'_>, candidates: &[PlanCandidate]) -> PlanError {
    let problem = question.problem;
    let fleet = DeviceRanges::of(&problem.cluster.classes);
    let needs = candidates.iter().map(|candidate| (Need::of(problem, &fleet, candidate), candidate));
    let Some((need, least)) = needs.min_by_key(|(need, _)| *need) else {
        return PlanError::Unsound(vec![PlanFault::NoStages]);
    };
    let peak = least.peak();
    let replicas = least.shape.replicas();
    let fullest = |class: Option<u32>| {
        let with = class.map(|class| fleet.with(class, 0));
        let counts = |at: usize| with.as_ref().is_none_or(|with| with.counts(least.spots[at].first, replicas[at]));
        let stages = (0..least.memory.len()).filter(|&at| counts(at));
        stages.rev().max_by_key(|&at| least.memory[at].total).unwrap_or(0)
    };
    let stage = fullest(match need {
        Need::Class { class, .. } => Some(class),
        Need::Limit(_) | Need::Every(_) => None,
    });
    let leaves = least.shape.leaves();
    let name = |op: Option<&u32>| {
        op.map_or(String::new(), |&op| op_name(&problem.graph.ops[op as usize].name, question.joined.leader(op)))
    };
    let (first_op, last_op) = (name(leaves[stage].ops.first()), name(leaves[stage].ops.last()));
    let (stages, replicas) = (leaves.len(), leaves[stage].replicas);
    let (class, smallest) = match need {
        Need::Limit(smallest_limit) => {
            let limit = problem.limit_of(0..problem.cluster.devices()).unwrap_or(0);
            let limit = problem.memory_limit.map_or(limit, |limit| limit.0);
            let missing = smallest_limit.saturating_sub(limit);
            return PlanError::Infeasible {
                limit,
                stage,
                stages,
                replicas,
                first_op,
                last_op,
                missing,
                smallest_limit,
            };
        }
        Need::Class { bytes, class, .. } => (Some(class), bytes),
        Need::Every(bytes) => (None, bytes),
    };
    let classes = &problem.cluster.classes;
    let held = match class {
        Some(class) => classes.get(class as usize).map(|class| class.device.memory.0),
        None => classes.iter().map(|class| class.device.memory.0).min(),
    };
    let memory = held.unwrap_or(0);
    PlanError::DeviceMemory(Box::new(Infeasible {
        class,
        kind: class
            .and_then(|class| classes.get(class as usize))
            .map_or(String::new(), |class| short_name(&class.device.kind)),
        memory,
        missing: smallest.saturating_sub(memory),
        smallest,
        limit: problem.memory_limit.filter(|limit| limit.0 < peak).map(|_| peak),
        stage,
        stages,
        replicas,
        first_op,
        last_op,
    }))
}

pub fn is_infeasible(error: &PlanError) -> bool {
    matches!(error, PlanError::Infeasible { .. } | PlanError::DeviceMemory(_))
}

/// Sort key of an error: a smaller need compares less.
pub fn needs(error: &PlanError) -> (u8, u64) {
    match error {
        PlanError::Infeasible { smallest_limit, .. } => (0, *smallest_limit),
        PlanError::DeviceMemory(small) if small.class.is_some() => (1, small.missing),
        PlanError::DeviceMemory(small) => (2, small.smallest),
        PlanError::Problem(_) | PlanError::Unsound(_) => (3, 0),
    }
}

/// Returns the report with the smaller need.
pub fn smaller_need(known: Option<PlanError>, error: PlanError) -> PlanError {
    match known {
        Some(known) if needs(&known) <= needs(&error) => known,
        _ => error,
    }
}

/// Maps the class index of an error from a reordered device list (`of`) back to the cluster's classes (`own`).
pub fn in_cluster_order(error: PlanError, of: &[DeviceClass], own: &[DeviceClass]) -> PlanError {
    match error {
        PlanError::DeviceMemory(small) => {
            let class = small.class.and_then(|class| of.get(class as usize)).map(|class| first_alike(own, class));
            PlanError::DeviceMemory(Box::new(Infeasible { class, ..*small }))
        }
        error => error,
    }
}

fn op_name(name: &str, op: u32) -> String {
    if name.is_empty() { op.to_string() } else { short_name(name) }
}
