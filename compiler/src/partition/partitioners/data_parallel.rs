//! Data parallelism: the whole model on every device.

use crate::cluster::Cluster;
use crate::partition::dp::nested_partition::{Group, Shape, StageBody};

pub fn data_parallel(ops: usize, cluster: &Cluster) -> Shape {
    let mut counts = cluster.levels.iter().map(|level| level.count);
    let innermost = counts.next().unwrap_or(1);
    let mut group = Group { replicas: innermost, body: StageBody::Ops((0..ops as u32).collect()) };
    for replicas in counts {
        group = Group { replicas, body: StageBody::Groups(vec![group]) };
    }
    Shape { groups: vec![group], is_flat: false }
}
