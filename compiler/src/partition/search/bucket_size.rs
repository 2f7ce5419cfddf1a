//! Chooses the size of the gradient buckets for all-reduce.
//!
//! Small buckets start early, but each pays the link latency. The best size depends on the order of gradients in the
//! backward pass and on competing traffic. So the plan's schedule is simulated for every power of two. Ties go to the
//! default size, then to the largest, which gives the fewest buckets.

use crate::cluster::Bytes;
use crate::partition::error::PlanError;
use crate::partition::planned::Planned;
use crate::plan::buckets::buckets;
use crate::plan::groups;
use crate::plan::problem::Problem;
use crate::plan::{GradientBucket, Plan, Stage};
use crate::profile::cost_graph::CostGraph;
use crate::schedule::pipeline::{generated, pipeline_of};
use crate::simulate::step_time;
use serde_json::json;

const SIZES: std::ops::RangeInclusive<u32> = 12..=30;

/// The size tried first; close to PyTorch's default of 25 MB.
pub const FIRST: u64 = 1 << 25;

/// A size must be faster than another by this factor to be preferred.
const CLEARLY: f64 = 1.0 - 1e-6;

pub fn best(problem: &Problem, ask: &dyn Fn(&Problem) -> Result<Planned, PlanError>) -> Result<Planned, PlanError> {
    let at = |size: u64| ask(&Problem { bucket: Bytes(size), ..problem.clone() });
    let mut planned = at(FIRST)?;
    let mut size = FIRST;
    if let Some(other) = fastest(problem, &planned.plan).filter(|other| *other != FIRST)
        && let Ok(next) = at(other)
        && next.plan.predicted.minibatch_us <= planned.plan.predicted.minibatch_us
    {
        (planned, size) = (next, other);
    }
    planned.plan.options.insert("bucket_bytes".to_string(), json!(size));
    Ok(planned)
}

/// The size with the fastest simulated step; `None` if no stage is replicated or the schedule cannot be simulated.
pub fn fastest(problem: &Problem, plan: &Plan) -> Option<u64> {
    let degree = plan.stages.first().map_or(1, Stage::degree);
    let of_groups = groups::costs(&problem.shared, plan).map(|costs| &costs.graph);
    let graph = if degree > 1 { of_groups? } else { &problem.graph };
    let kind = generated(plan.schedule.kind).ok().filter(|kind| kind.trains())?;
    if plan.stages.iter().all(|stage| stage.replicas < 2) {
        return None;
    }
    let mut known: Option<(Vec<Stage>, f64)> = None;
    let mut best: Option<(u64, f64)> = None;
    let others = SIZES.rev().map(|power| 1u64 << power).filter(|size| *size != FIRST);
    for size in std::iter::once(FIRST).chain(others) {
        let stages: Vec<Stage> = plan.stages.iter().map(|stage| cut(graph, stage, size)).collect();
        let us = match &known {
            Some((before, us)) if *before == stages => *us,
            _ => {
                let pipeline =
                    pipeline_of(&plan.cluster.levels, &stages, &plan.edges, &plan.schedule.in_flight).ok()?;
                step_time::step_us(kind, &pipeline, plan.schedule.microbatches).ok()??
            }
        };
        if best.is_none_or(|(_, least)| us < least * CLEARLY) {
            best = Some((size, us));
        }
        known = Some((stages, us));
    }
    best.map(|(size, _)| size)
}

fn cut(graph: &CostGraph, stage: &Stage, size: u64) -> Stage {
    let ops: Vec<u32> = stage.op_ids().collect();
    let buckets: Vec<GradientBucket> = if stage.replicas > 1 { buckets(graph, &ops, size) } else { Vec::new() };
    Stage { buckets, ..stage.clone() }
}
