//! Recomputes no more ops than a device needs to fit.
//!
//! The searches recompute whole stages. Once the partition is chosen, each recomputed stage is given the fewest first
//! ops with which its device still fits, like `--recompute-method block` of Megatron-LM. The number is found by
//! bisection between one that does not fit and one that does.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::search::build_plan;
use crate::partition::search::build_plan::{Recompute, StagePosition};
use crate::plan::problem::Problem;

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
    // Only the stage in question is partly recomputed here, because each such stage takes a pass over the graph.
    let bytes = |at: usize, recompute: Recompute| {
        let mut alone: Vec<StagePosition> =
            spots.iter().map(|spot| StagePosition { recompute: Recompute::None, ..*spot }).collect();
        alone[at].recompute = recompute;
        build_plan::memory(problem, shape, &alone, &holdings, caps, pending_weight_grads)[at].total
    };
    let mut fewer = spots.to_vec();
    let mut totals: Vec<u64> = (0..spots.len()).map(|at| bytes(at, spots[at].recompute)).collect();
    for at in least_worth_first(problem, shape, spots, &totals, &bytes) {
        let (first, leaf) = (spots[at].first, &shape.leaves()[at]);
        // Interleaved chunks of one rank share its devices.
        let is_beside =
            |other: &usize| *other != at && (spots[*other].first, replicas[*other]) == (first, leaf.replicas);
        let others = (0..spots.len()).filter(is_beside).fold(0u64, |sum, other| sum.saturating_add(totals[other]));
        let limit = problem.limit_of(first..first.saturating_add(leaf.replicas)).unwrap_or(u64::MAX);
        let fits = |bytes: u64| others.saturating_add(bytes) <= limit;
        let mut best = (spots[at].recompute, totals[at]);
        let none = bytes(at, Recompute::None);
        let (mut least, mut most) = (0, leaf.ops.len() as u32);
        if fits(none) {
            (best, most) = ((Recompute::None, none), 0);
        }
        while most - least > 1 {
            let middle = least + (most - least) / 2;
            let held = bytes(at, Recompute::First(middle));
            if fits(held) {
                (best, most) = ((Recompute::First(middle), held), middle);
            } else {
                least = middle;
            }
        }
        (fewer[at].recompute, totals[at]) = best;
    }
    (fewer != spots).then_some(fewer)
}

/// The recomputed stages by the bytes that their recomputation frees per forward time: those worth least come first, so
/// that others stay recomputed in their place.
fn least_worth_first(
    problem: &Problem,
    shape: &Shape,
    spots: &[StagePosition],
    totals: &[u64],
    bytes: &dyn Fn(usize, Recompute) -> u64,
) -> Vec<usize> {
    let leaves = shape.leaves();
    let worth = |at: usize| {
        let us: f64 = leaves[at].ops.iter().map(|&op| problem.graph.ops[op as usize].fwd_us).sum();
        bytes(at, Recompute::None).saturating_sub(totals[at]) as f64 / us.max(f64::MIN_POSITIVE)
    };
    let recomputed = (0..spots.len()).filter(|at| spots[*at].recompute.is_any());
    let mut recomputed: Vec<(f64, usize)> = recomputed.map(|at| (worth(at), at)).collect();
    recomputed.sort_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
    recomputed.into_iter().map(|(_, at)| at).collect()
}
