//! The whole model on a single device.

use crate::cluster::Cluster;
use crate::partition::dp::nested_partition::{Group, Shape, StageBody};

pub fn single(ops: usize, cluster: &Cluster) -> Shape {
    let mut group = Group { replicas: 1, body: StageBody::Ops((0..ops as u32).collect()) };
    for _ in 1..cluster.levels.len() {
        group = Group { replicas: 1, body: StageBody::Groups(vec![group]) };
    }
    Shape { groups: vec![group], is_flat: false }
}
