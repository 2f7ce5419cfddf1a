//! Recomputes no more ops than a device needs to fit.
//!
//! The searches recompute whole stages. Once the partition is chosen, each recomputed stage is given the fewest first
//! ops with which its device still fits, like `--recompute-method block` of Megatron-LM. Layers that are recomputed one
//! by one stay whole. The number is found by bisection between one that does not fit and one that does.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::search::build_plan::{self, HeldTerms, Recompute, StagePosition};
use crate::plan::memory::{MemoryMultipliers, MemoryTerms};
use crate::plan::problem::Problem;
use crate::profile::recompute_scope::{RecomputeCosts, RecomputeScope, RecomputeTerms};
use std::collections::BTreeMap;

/// The positions of stages that recompute as little as possible under these in-flight limits and pending weight
/// gradients; `None` if nothing changes.
pub fn reduced(
    problem: &Problem,
    shape: &Shape,
    spots: &[StagePosition],
    (caps, pending_weight_grads): (&[u32], &[u32]),
) -> Option<Vec<StagePosition>> {
    if !spots.iter().any(|spot| spot.recompute.is_any()) {
        return None;
    }
    let (holdings, replicas) = (build_plan::holdings(problem, shape), shape.replicas());
    let multiples = build_plan::multiples(problem, &shape.replicas(), caps, pending_weight_grads);
    let terms = terms_of_first(problem, shape);
    let held = |at: usize, choice: Recompute| -> HeldTerms {
        let recompute = match choice {
            Recompute::First(ops) => terms[at][ops as usize],
            Recompute::None | Recompute::All => holdings[at].recompute,
        };
        let multiples = MemoryMultipliers { recompute: choice.is_any(), ..multiples[at] };
        (MemoryTerms { recompute, ..holdings[at] }, multiples)
    };
    let mut fewer = spots.to_vec();
    let bytes = |at: usize, choice: Recompute| {
        let (terms, multiples) = held(at, choice);
        terms.held(&multiples).total
    };
    let sharing = build_plan::sharing(problem, spots, spots.len());
    for at in least_worth_first(problem, shape, spots, &bytes) {
        let (first, leaf) = (spots[at].first, &shape.leaves()[at]);
        let limit = problem.limit_of(first..first.saturating_add(leaf.replicas)).unwrap_or(u64::MAX);
        // Chunks of one rank share its devices.
        let is_beside = |own: &&Vec<usize>| (spots[own[0]].first, replicas[own[0]]) == (first, leaf.replicas);
        let beside: Vec<&Vec<usize>> = sharing.iter().filter(is_beside).collect();
        let fits = |fewer: &[StagePosition], choice: Recompute| {
            let choice_of = |other: usize| if other == at { choice } else { fewer[other].recompute };
            let of_device = |own: &&Vec<usize>| -> u64 {
                let terms: Vec<HeldTerms> = own.iter().map(|other| held(*other, choice_of(*other))).collect();
                let memory = build_plan::of_device(problem, own[0], spots.len(), &terms);
                memory.iter().fold(0, |sum, memory| sum.saturating_add(memory.total))
            };
            beside.iter().map(of_device).fold(0, u64::saturating_add) <= limit
        };
        if fits(&fewer, Recompute::None) {
            fewer[at].recompute = Recompute::None;
            continue;
        }
        let counts = counts(problem, leaf.ops);
        let (mut least, mut most) = (0, counts.len());
        let mut best = spots[at].recompute;
        while least < most {
            let middle = least + (most - least) / 2;
            let choice = Recompute::First(counts[middle]);
            if fits(&fewer, choice) {
                (best, most) = (choice, middle);
            } else {
                least = middle + 1;
            }
        }
        fewer[at].recompute = best;
    }
    (fewer != spots).then_some(fewer)
}

/// The numbers of first ops that may be recomputed without the others: those that end a layer if layers are recomputed
/// one by one.
pub fn counts(problem: &Problem, ops: &[u32]) -> Vec<u32> {
    let scope = |at: usize| problem.graph.ops[ops[at] as usize].recompute;
    let last: BTreeMap<RecomputeScope, usize> = (0..ops.len()).map(|at| (scope(at), at)).collect();
    // Layers that are not contiguous end together.
    let (mut open, mut ends) = (0, Vec::new());
    for at in 0..ops.len().saturating_sub(1) {
        match scope(at) {
            RecomputeScope::Stage => ends.push(at as u32 + 1),
            RecomputeScope::Never => {}
            scope => {
                open = open.max(last[&scope]);
                if open == at {
                    ends.push(at as u32 + 1);
                }
            }
        }
    }
    ends
}

/// For each stage, what recomputing its first ops frees and keeps, by their number.
fn terms_of_first(problem: &Problem, shape: &Shape) -> Vec<Vec<RecomputeTerms>> {
    let costs = RecomputeCosts::of(&problem.graph);
    let stage_of = build_plan::stage_of(problem, shape);
    let produced = produced(problem);
    let of_stage = |(at, ops): (usize, &[u32])| {
        let is_inside = |op: usize| stage_of[op] as usize == at;
        terms_of(problem, &costs, &produced, ops, &is_inside)
    };
    shape.leaves().iter().map(|leaf| leaf.ops).enumerate().map(of_stage).collect()
}

/// The tensors that each op produces.
pub fn produced(problem: &Problem) -> Vec<Vec<usize>> {
    let graph = &problem.graph;
    let mut produced: Vec<Vec<usize>> = vec![Vec::new(); graph.ops.len()];
    graph.tensors.iter().enumerate().for_each(|(at, tensor)| produced[tensor.producer.index()].push(at));
    produced
}

/// What recomputing the first ops of a stage frees and keeps, by their number.
pub fn terms_of(
    problem: &Problem,
    costs: &RecomputeCosts,
    produced: &[Vec<usize>],
    ops: &[u32],
    is_inside: &dyn Fn(usize) -> bool,
) -> Vec<RecomputeTerms> {
    let mut terms = RecomputeTerms::default();
    let one = |&op: &u32| {
        terms.add(costs, op as usize);
        for &at in &produced[op as usize] {
            let tensor = &problem.graph.tensors[at];
            if !tensor.consumers.iter().all(|reader| is_inside(reader.index())) {
                terms.add_sent(costs, at, tensor.bytes);
            }
        }
        terms
    };
    std::iter::once(RecomputeTerms::default()).chain(ops.iter().map(one)).collect()
}

/// The recomputed stages by the bytes that their recomputation frees per forward time: those worth least come first, so
/// that others stay recomputed in their place.
fn least_worth_first(
    problem: &Problem,
    shape: &Shape,
    spots: &[StagePosition],
    bytes: &dyn Fn(usize, Recompute) -> u64,
) -> Vec<usize> {
    let leaves = shape.leaves();
    let worth = |at: usize| {
        let us: f64 = leaves[at].ops.iter().map(|&op| problem.graph.ops[op as usize].recompute_us()).sum();
        bytes(at, Recompute::None).saturating_sub(bytes(at, spots[at].recompute)) as f64 / us.max(f64::MIN_POSITIVE)
    };
    let recomputed = (0..spots.len()).filter(|at| spots[*at].recompute.is_any());
    let mut recomputed: Vec<(f64, usize)> = recomputed.map(|at| (worth(at), at)).collect();
    recomputed.sort_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
    recomputed.into_iter().map(|(_, at)| at).collect()
}
