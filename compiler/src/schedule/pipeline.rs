//! Converts a plan to the [`Pipeline`] that schedulers and the simulator use.
//!
//! Times are those of cost model `pipec` (see `plan::links`) per item, that is per profiled micro-batch. A transfer
//! uses the slowest link between replicas of its stages. An all-reduce is one ring per level. Under ZeRO 2 a backward
//! takes at least as long as the reduce-scatter of its gradients. Under ZeRO 3 the all-gather of the weights is added
//! to forward and backward. The optimizer step is part of the backward if the plan has it;
//! the step of the program exchanges the gradients of tied parameters. A recomputed stage's
//! backward time includes the forward of the recomputed ops. Without a stated weight-gradient time, half of the backward
//! counts, recomputation excluded.

use crate::cluster::Level;
use crate::plan::groups;
use crate::plan::links::{self, Ring, Wire};
use crate::plan::ports::Ports;
use crate::plan::schedule::Schedule;
use crate::plan::{Edge as PlannedEdge, Plan, Stage};
use crate::schedule::{Bucket, Edge, Pipeline, RankId, ScheduleError, StageSpec};
use std::collections::BTreeMap;

/// The pipeline of a plan, with its in-flight limits. Fails if the plan is inconsistent.
pub fn pipeline(plan: &Plan) -> Result<Pipeline, ScheduleError> {
    let pipeline = pipeline_of(&plan.cluster.levels, &plan.stages, &plan.edges, &plan.schedule.in_flight)?;
    if pipeline.chunks() != plan.schedule.chunks {
        let (found, chunks) = (pipeline.chunks(), plan.schedule.chunks);
        let what = format!("the plan states {chunks} stages per device, its devices have {found}");
        return Err(ScheduleError::BadRanks { what });
    }
    Ok(pipeline)
}

/// The pipeline of stages on devices connected by `levels`, innermost first. Stages on the same devices share a rank.
pub fn pipeline_of(
    levels: &[Level],
    planned: &[Stage],
    planned_edges: &[PlannedEdge],
    caps: &[u32],
) -> Result<Pipeline, ScheduleError> {
    if caps.len() != planned.len() {
        return Err(ScheduleError::CapsForOtherStages { stages: planned.len(), caps: caps.len() });
    }
    // One device represents each tensor-parallel group.
    if let Some((levels, stages)) = groups::led(levels, planned) {
        return pipeline_of(&levels, &stages, planned_edges, caps);
    }
    let rings = planned.iter().map(|stage| links::rings(levels, &stage.devices, stage.reduced_bytes() as f64));
    let rings: Vec<Vec<Ring>> = rings.collect();
    let shape = |((stage, &cap), rings): ((&Stage, &u32), &Vec<Ring>)| {
        // Published cost models count all time as forward, so there may be no backward to subtract from.
        let recompute = stage.recompute.then(|| stage.recompute_us().min(stage.bwd_us));
        let (all_reduce, buckets) = all_reduce(levels, stage, rings);
        // Under ZeRO 2 the reduce-scatter overlaps with the backward and may be longer. Under ZeRO 3 the gathers
        // precede each op and do not overlap.
        // Groups of replicas shard, and all-reduce their shards once per round.
        let shards = stage.devices.chunks(stage.shards().max(1) as usize);
        let gathered = |bytes: u64| {
            let each = shards.clone().map(|devices| links::all_reduce_us(&links::rings(levels, devices, bytes as f64)));
            each.fold(0.0, f64::max) / 2.0
        };
        let gather = if stage.zero >= 3 { gathered(stage.all_weights()) } else { 0.0 };
        // The all-gather, and the reduce-scatter of a micro-batch.
        let within_group = match stage.shard_degree {
            0 => all_reduce / 2.0,
            _ => gathered(stage.reduced_bytes()).min(all_reduce / 2.0),
        };
        let scatter = if stage.zero >= 2 { within_group } else { 0.0 };
        let weight = stage.weight_grad_us.unwrap_or((stage.bwd_us - recompute.unwrap_or(0.0)) / 2.0);
        let more = (scatter - (stage.bwd_us - recompute.unwrap_or(0.0)).max(0.0)).max(0.0);
        let part = if stage.fwd_us > 0.0 { (stage.recompute_us() / stage.fwd_us).min(1.0) } else { 1.0 };
        let again = if recompute.is_some() { gather * part } else { 0.0 };
        let recompute = recompute.map(|us| us + again);
        StageSpec {
            cap,
            step: stage.tied_us,
            weight: weight + more,
            recompute,
            recomputed_ops: stage.recomputed.map(|recomputed| recomputed.ops),
            recomputes_parts: stage.memory.by_part,
            all_reduce,
            buckets,
            zero: stage.zero,
            shard_degree: stage.shard_degree,
            scattered: if stage.shard_degree > 0 && all_reduce > 0.0 { 1.0 - within_group / all_reduce } else { 0.5 },
            param_bytes: stage.memory.weights,
            saved_bytes: stage.memory.activations / u64::from(cap.max(1)),
            ..StageSpec::new(stage.replicas, stage.fwd_us + gather, stage.bwd_us + more + gather + again)
        }
    };
    let stages: Vec<StageSpec> = planned.iter().zip(caps).zip(&rings).map(shape).collect();
    let ranks = ranks(planned);
    let mut edges = Vec::with_capacity(planned_edges.len());
    let mut joined_at = Vec::with_capacity(planned_edges.len());
    for edge in planned_edges {
        let (Some(from), Some(to)) = (planned.get(edge.from.index()), planned.get(edge.to.index())) else {
            return Err(ScheduleError::BadEdge { from: edge.from.0, to: edge.to.0 });
        };
        let stays = ranks[edge.from.index()] == ranks[edge.to.index()];
        let devices = from.devices.iter().chain(&to.devices).copied();
        let wire = if stays { None } else { Wire::between(levels, devices) };
        joined_at.push(wire.map(|wire| wire.level));
        let time = wire.map_or(0.0, |wire| wire.time(edge.bytes as f64));
        edges.push(Edge {
            forward_bytes: edge.bytes,
            backward_bytes: edge.bytes,
            forward_us: time,
            backward_us: time,
            ..Edge::new(edge.from.0, edge.to.0)
        });
    }
    let mut pipeline = Pipeline { stages, ranks, edges, ports: Ports::default() };
    pipeline.validate()?;
    let of_stage = pipeline.ranks.iter().map(|rank| rank.index());
    pipeline.ports = Ports::new(levels, planned, of_stage, joined_at, &rings);
    Ok(pipeline)
}

/// All-reduce time of a stage, and the fraction of each bucket. Every bucket pays the full latency.
fn all_reduce(levels: &[Level], stage: &Stage, rings: &[Ring]) -> (f64, Vec<Bucket>) {
    let us = |bytes: u64| links::all_reduce_us(&links::rings(levels, &stage.devices, bytes as f64));
    let parts: Vec<f64> = stage.buckets.iter().map(|bucket| us(bucket.bytes)).collect();
    let whole: f64 = parts.iter().sum();
    let share = |us: f64| if whole > 0.0 { us / whole } else { 0.0 };
    let buckets = stage
        .buckets
        .iter()
        .zip(&parts)
        .map(|(bucket, &us)| Bucket { ready: bucket.ready.clamp(0.0, 1.0), share: share(us) });
    let buckets: Vec<Bucket> = buckets.collect();
    if buckets.is_empty() { (links::all_reduce_us(rings), buckets) } else { (whole, buckets) }
}

fn ranks(planned: &[Stage]) -> Vec<RankId> {
    let mut known: BTreeMap<&[u32], RankId> = BTreeMap::new();
    let mut next = 0;
    let mut ranks = Vec::with_capacity(planned.len());
    for stage in planned {
        let rank = *known.entry(&stage.devices).or_insert(RankId(next));
        next = next.max(rank.0 + 1);
        ranks.push(rank);
    }
    ranks
}

/// The schedule, unless its order comes from a table or a program.
pub fn generated(schedule: Schedule) -> Result<Schedule, ScheduleError> {
    if schedule.is_custom() { Err(ScheduleError::NoTable) } else { Ok(schedule) }
}
