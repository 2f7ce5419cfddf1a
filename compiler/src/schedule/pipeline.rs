//! What schedules and the simulator need of a plan.
//!
//! An item is what the profile measured, one micro-batch, so a stage's times are taken as they stand. A transfer takes the slowest
//! link between any replica of the one stage and any of the other, an all-reduce a ring at each level: the times of cost model
//! `pipec`, see `plan::links`. Others who share a link are not seen here, and a plan does not say how long an optimizer step takes:
//! it is 0. A recomputed stage runs its forward again in its backward time.

use crate::cluster::Level;
use crate::plan::links::{self, Wire};
use crate::plan::{Edge as PlannedEdge, Plan, ScheduleKind, Stage};
use crate::schedule::{Edge, Pipeline, Schedule, ScheduleError, StageShape};

/// The pipeline of a plan, with the plan's in-flight caps. Fails if the plan contradicts itself, or asks for what no
/// program does yet.
pub fn pipeline(plan: &Plan) -> Result<Pipeline, ScheduleError> {
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
            all_reduce: links::all_reduce_us(&links::rings(levels, &stage.devices, weights as f64)),
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
        let devices = from.devices.iter().chain(&to.devices).copied();
        let time = Wire::between(levels, devices).map_or(0.0, |wire| wire.time(edge.bytes as f64));
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
