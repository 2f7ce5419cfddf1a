//! What schedules and the simulator need of a plan.
//!
//! An item is what the profile measured, one micro-batch, so a stage's times are taken as they stand. A transfer takes the slowest
//! link between any replica of the one stage and any of the other; an all-reduce is a ring over the slowest link between
//! replicas. Others who share a link are not seen here, and a plan does not say how long an optimizer step takes: it is 0.

use crate::cluster::Level;
use crate::plan::{Edge as PlannedEdge, Plan, ScheduleKind, Stage};
use crate::schedule::link::Link;
use crate::schedule::{Edge, Pipeline, Schedule, ScheduleError, StageShape};

/// The pipeline of a plan, with the plan's in-flight caps. Fails if the plan contradicts itself, or asks for what no
/// program does yet.
pub fn pipeline(plan: &Plan) -> Result<Pipeline, ScheduleError> {
    if plan.stages.iter().any(|stage| stage.recompute) {
        return Err(ScheduleError::NoGenerator { schedule: "with recompute" });
    }
    if plan.schedule.chunks > 1 {
        return Err(ScheduleError::NoGenerator { schedule: "with several chunks a worker" });
    }
    pipeline_of(&plan.cluster.levels, &plan.stages, &plan.edges, &plan.schedule.in_flight)
}

/// The pipeline of stages on devices that these levels join, innermost first, with these in-flight caps.
pub fn pipeline_of(
    levels: &[Level],
    planned: &[Stage],
    planned_edges: &[PlannedEdge],
    caps: &[u32],
) -> Result<Pipeline, ScheduleError> {
    if caps.len() != planned.len() {
        return Err(ScheduleError::CapsForOtherStages { stages: planned.len(), caps: caps.len() });
    }
    let shape = |(stage, &cap): (&Stage, &u32)| {
        let weights = stage.memory.weights;
        StageShape {
            cap,
            all_reduce: slowest(levels, [&stage.devices[..], &[]]).all_reduce(stage.replicas, weights),
            param_bytes: weights,
            saved_bytes: stage.memory.activations / u64::from(cap.max(1)),
            ..StageShape::new(stage.replicas, stage.fwd_us, stage.bwd_us)
        }
    };
    let stages: Vec<StageShape> = planned.iter().zip(caps).map(shape).collect();
    let mut edges = Vec::with_capacity(planned_edges.len());
    for edge in planned_edges {
        let (Some(from), Some(to)) = (planned.get(edge.from.index()), planned.get(edge.to.index())) else {
            return Err(ScheduleError::BadEdge { from: edge.from.0, to: edge.to.0 });
        };
        let time = slowest(levels, [&from.devices, &to.devices]).time(edge.bytes);
        edges.push(Edge {
            forward_bytes: edge.bytes,
            backward_bytes: edge.bytes,
            forward_us: time,
            backward_us: time,
            ..Edge::new(edge.from.0, edge.to.0)
        });
    }
    let pipeline = Pipeline { stages, edges };
    pipeline.validate()?;
    Ok(pipeline)
}

/// The schedule that a plan names, if it can be generated.
pub fn schedule_of(kind: ScheduleKind) -> Result<Schedule, ScheduleError> {
    match kind {
        ScheduleKind::Gpipe => Ok(Schedule::Gpipe),
        ScheduleKind::OneFOneB => Ok(Schedule::OneFOneB),
        ScheduleKind::RoundRobin => Ok(Schedule::OneFOneBRr),
        ScheduleKind::RoundRobinVsync => Ok(Schedule::OneFOneBRrVsync),
        ScheduleKind::TwoBw => Ok(Schedule::TwoBw),
        ScheduleKind::Inference => Ok(Schedule::Inference),
        ScheduleKind::Interleaved
        | ScheduleKind::Bfs
        | ScheduleKind::ZbH1
        | ScheduleKind::ZbH2
        | ScheduleKind::Zbv
        | ScheduleKind::DualPipeV
        | ScheduleKind::Csv => Err(ScheduleError::NoGenerator { schedule: kind.name() }),
    }
}

/// The slowest link between devices of the two sets. Groups nest, so it is that of the innermost level with all of both sets in
/// one group: if that level's groups below split a set, each device of the other is away from some device of this one.
fn slowest(levels: &[Level], devices: [&[u32]; 2]) -> Link {
    let mut link = Link::INSTANT;
    let mut group = 1u64;
    for level in levels {
        let mut groups = devices.iter().flat_map(|set| set.iter()).map(|&device| u64::from(device) / group);
        let first = groups.next();
        if groups.all(|other| Some(other) == first) {
            break;
        }
        link.latency = link.latency.max(level.latency.0 * 1e6);
        link.bandwidth = link.bandwidth.min(level.bandwidth.0 / 1e6);
        group = group.saturating_mul(u64::from(level.count.max(1)));
    }
    link
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels as read_levels;

    #[test]
    fn the_slowest_level_between_two_stages_counts() {
        let cluster = read_levels("4:10GB/s,4:1.25GB/s").unwrap();
        let levels = &cluster.levels;
        let time = |a: &[u32], b: &[u32]| slowest(levels, [a, b]).time(10_000);
        assert_eq!(time(&[0], &[3]), 1.0);
        assert_eq!(time(&[0, 1], &[4]), 8.0);
        assert_eq!(time(&[2], &[2]), 0.0);
        assert_eq!(slowest(levels, [&[0, 1, 2, 3], &[]]).all_reduce(4, 10_000), 1.5);
        assert_eq!(slowest(levels, [&[0], &[]]).all_reduce(1, 10_000), 0.0);
    }
}
