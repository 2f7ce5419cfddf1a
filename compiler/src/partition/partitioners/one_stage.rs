//! The whole model in one stage: on a single device, or on every device (data parallelism).

use crate::cluster::Cluster;
use crate::partition::dp::nested_partition::{Group, Shape, StageBody};

pub fn single(ops: usize, cluster: &Cluster) -> Shape {
    one_stage(ops, cluster.levels.iter().map(|_| 1))
}

pub fn data_parallel(ops: usize, cluster: &Cluster) -> Shape {
    one_stage(ops, cluster.levels.iter().map(|level| level.count))
}

/// One stage with these replicas on each level, innermost first.
fn one_stage(ops: usize, mut replicas: impl Iterator<Item = u32>) -> Shape {
    let body = StageBody::Ops((0..ops as u32).collect());
    let mut group = Group { replicas: replicas.next().unwrap_or(1), body };
    for replicas in replicas {
        group = Group { replicas, body: StageBody::Groups(vec![group]) };
    }
    Shape { groups: vec![group], is_flat: false }
}
