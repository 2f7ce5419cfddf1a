//! Choosing in-flight caps: more minibatches in flight keep workers busy, and cost stash memory and staleness.
//!
//! Starting from the published rule, one cap at a time is raised: the one that brings the most efficiency, and of equals the one
//! that costs the least memory. Where no single step helps, all that still fit are raised together once. It ends when the
//! efficiency reaches [`ENOUGH`], or when nothing more fits or helps.

use crate::partition::build::{self, Spot};
use crate::partition::shape::Shape;
use crate::plan::problem::Problem;
use crate::plan::{Edge, ScheduleKind, Stage};

/// The fraction of the ideal throughput at which raising stops.
pub const ENOUGH: f64 = 0.98;

/// No cap is raised by more than this over the published rule; by measurement three suffice for every known plan.
const MOST: u32 = 6;

/// The fraction of the ideal throughput that stages, with these transfers between them, reach under caps: 0 to 1.
pub type Efficiency<'a> = dyn Fn(&[Stage], &[Edge], &[u32]) -> f64 + 'a;

/// Whether items of several minibatches are in flight, so that caps bound the throughput.
pub fn matters(problem: &Problem) -> bool {
    matches!(problem.schedule, ScheduleKind::RoundRobin | ScheduleKind::RoundRobinVsync)
}

/// The efficiency that `shape` reaches under given caps.
pub fn reached(problem: &Problem, shape: &Shape, spots: &[Spot], caps: &[u32], efficiency: &Efficiency<'_>) -> f64 {
    let memory = build::memory(problem, shape, spots, &build::holdings(problem, shape), caps);
    let stages = build::stages(problem, shape, spots, &memory);
    efficiency(&stages, &build::edges(problem, shape), caps)
}

/// Caps for `shape`, and the efficiency they reach.
pub fn choose(problem: &Problem, shape: &Shape, spots: &[Spot], efficiency: &Efficiency<'_>) -> (Vec<u32>, f64) {
    let published = build::published_caps(problem, shape);
    if !matters(problem) {
        return (published, 1.0);
    }
    let holdings = build::holdings(problem, shape);
    let memory = |caps: &[u32]| build::memory(problem, shape, spots, &holdings, caps);
    let stages = build::stages(problem, shape, spots, &memory(&published));
    let edges = build::edges(problem, shape);
    let efficiency = |caps: &[u32]| efficiency(&stages, &edges, caps);
    let fits = |caps: &[u32]| build::fits(problem, shape, spots, &memory(caps));
    let sum = |caps: &[u32]| memory(caps).iter().map(|held| u128::from(held.total)).sum::<u128>();
    let mut caps = published.clone();
    let mut reached = efficiency(&caps);
    while reached < ENOUGH {
        let raised = |which: &dyn Fn(usize) -> bool| -> Vec<u32> {
            let one = |(at, &cap): (usize, &u32)| cap + u32::from(which(at) && cap < published[at] + MOST);
            caps.iter().enumerate().map(one).collect()
        };
        let mut best: Option<(f64, u128, Vec<u32>)> = None;
        for at in 0..caps.len() {
            let candidate = raised(&|stage| stage == at);
            if candidate == caps || !fits(&candidate) {
                continue;
            }
            let (gained, cost) = (efficiency(&candidate), sum(&candidate));
            let better = best.as_ref().is_none_or(|(other, bytes, _)| (gained, *bytes) > (*other, cost));
            if gained > reached + 1e-6 && better {
                best = Some((gained, cost, candidate));
            }
        }
        let next = best.map(|(gained, _, candidate)| (gained, candidate)).or_else(|| {
            let together = raised(&|_| true);
            let gained = efficiency(&together);
            (together != caps && fits(&together) && gained > reached + 1e-6).then_some((gained, together))
        });
        let Some((gained, candidate)) = next else { break };
        (caps, reached) = (candidate, gained);
    }
    (caps, reached)
}
