//! A plan as the simulator sees it: the pipeline with the plan's times, and the links of its cluster.
//!
//! A transfer uses the innermost level that joins all devices of both its stages, an all-reduce the level that joins all
//! replicas of its stage.

use crate::cluster::{BytesPerSecond, Level};
use crate::plan::{Plan, ScheduleKind};
use crate::schedule::{Edge, Pipeline, Schedule, StageShape};
use crate::simulate::network::{Link, Network};
use crate::simulate::run::Machine;

/// The pipeline of a plan that `plan::sound` has passed, with caps, sizes and times; transfer and reduce times are those of
/// [`machine`].
pub fn pipeline(plan: &Plan) -> Pipeline {
    let shape = |(at, stage): (usize, &crate::plan::Stage)| StageShape {
        cap: plan.schedule.in_flight.get(at).copied().unwrap_or(1),
        param_bytes: stage.memory.weights,
        saved_bytes: stage.memory.activations / u64::from(plan.schedule.in_flight.get(at).copied().unwrap_or(1).max(1)),
        ..StageShape::new(stage.replicas, stage.fwd_us, stage.bwd_us)
    };
    let edge = |edge: &crate::plan::Edge| Edge {
        forward_bytes: edge.bytes,
        backward_bytes: edge.bytes,
        ..Edge::new(edge.from.0, edge.to.0)
    };
    let mut pipeline = Pipeline {
        stages: plan.stages.iter().enumerate().map(shape).collect(),
        edges: plan.edges.iter().map(edge).collect(),
    };
    network(plan, &pipeline).apply(&mut pipeline);
    pipeline
}

/// The machine of a plan: its links, and the cores that the workers share where devices are shares of a CPU.
pub fn machine(plan: &Plan, pipeline: &Pipeline) -> Machine {
    Machine { network: network(plan, pipeline), cores: plan.cluster.device.cores.filter(|cores| *cores > 1) }
}

/// The schedule of that kind, if programs can be made for it.
pub fn schedule(kind: ScheduleKind) -> Option<Schedule> {
    kind.name().parse().ok()
}

fn network(plan: &Plan, pipeline: &Pipeline) -> Network {
    let devices = |stages: &[usize]| -> Vec<u32> {
        stages.iter().flat_map(|&stage| plan.stages[stage].devices.iter().copied()).collect()
    };
    Network::new(
        pipeline,
        |edge| link(&plan.cluster.levels, &devices(&[edge.from.index(), edge.to.index()])),
        |stage| link(&plan.cluster.levels, &devices(&[stage])),
    )
}

/// The innermost level under which all of `devices` stand.
fn link(levels: &[Level], devices: &[u32]) -> Link {
    let mut below = 1u64;
    for (at, level) in levels.iter().enumerate() {
        below = below.saturating_mul(u64::from(level.count));
        let mut groups = devices.iter().map(|&device| u64::from(device) / below);
        let first = groups.next();
        if groups.all(|group| Some(group) == first) || at + 1 == levels.len() {
            let BytesPerSecond(rate) = level.bandwidth;
            return Link { latency: level.latency.0 * 1e6, bandwidth: rate / 1e6 };
        }
    }
    Link::INSTANT
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read;

    #[test]
    fn the_innermost_level_that_joins_them() {
        let levels = read::levels("4:10GB/s,2:1GB/s").unwrap().levels;
        assert_eq!(link(&levels, &[0, 3]).bandwidth, 10_000.0);
        assert_eq!(link(&levels, &[3, 4]).bandwidth, 1_000.0);
        assert_eq!(link(&levels, &[5, 6, 7]).bandwidth, 10_000.0);
    }
}
