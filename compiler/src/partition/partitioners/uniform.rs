//! A straight pipeline: one stage per device, cut along the order of the ops into parts of about equal compute.

use crate::cluster::Cluster;
use crate::partition::dp::nested_partition::{Group, Shape, StageBody};
use crate::profile::cost_graph::CostGraph;

/// As many stages as devices (or ops, if fewer), each on one device.
pub fn uniform(graph: &CostGraph, cluster: &Cluster) -> Shape {
    let stages = graph.ops.len().min(cluster.devices() as usize).max(1);
    let total = graph.total_us();
    let mut groups = Vec::with_capacity(stages);
    let (mut start, mut done) = (0, 0.0);
    for stage in 0..stages {
        let target = total * (stage + 1) as f64 / stages as f64;
        let latest = graph.ops.len() - (stages - 1 - stage);
        let mut end = start;
        while end < latest {
            let op = &graph.ops[end];
            let next = done + op.fwd_us + op.bwd_us;
            // At least one op; then until the next op would move the cut away from its target. The last stage takes the
            // rest.
            if end > start && stage + 1 < stages && (next - target).abs() > (done - target).abs() {
                break;
            }
            done = next;
            end += 1;
        }
        groups.push(Group { replicas: 1, body: StageBody::Ops((start as u32..end as u32).collect()) });
        start = end;
    }
    for level in cluster.levels.split_last().map_or(&[][..], |(_, inner)| inner) {
        let mut outer = Vec::new();
        while !groups.is_empty() {
            let rest = groups.split_off(groups.len().min(level.count as usize));
            outer.push(Group { replicas: 1, body: StageBody::Groups(groups) });
            groups = rest;
        }
        groups = outer;
    }
    Shape { groups, is_flat: false }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;
    use crate::profile::cost_graph::OpCost;

    #[test]
    fn shares_are_even_and_every_stage_has_an_op() {
        let op = |(id, &fwd_us): (usize, &f64)| OpCost { id: id as u32, fwd_us, ..OpCost::default() };
        let graph =
            |times: &[f64]| CostGraph { ops: times.iter().enumerate().map(op).collect(), ..CostGraph::default() };
        let stages = |times: &[f64], spec: &str| {
            let shape = uniform(&graph(times), &levels(spec).unwrap());
            shape.leaves().iter().map(|leaf| leaf.ops.len()).collect::<Vec<_>>()
        };
        assert_eq!(stages(&[1.0; 8], "4:1GB/s"), [2, 2, 2, 2]);
        assert_eq!(stages(&[1.0; 8], "2:1GB/s,2:1GB/s"), [2, 2, 2, 2]);
        assert_eq!(stages(&[100.0, 1.0, 1.0, 1.0], "4:1GB/s"), [1, 1, 1, 1]);
        assert_eq!(stages(&[1.0, 1.0, 1.0, 100.0], "2:1GB/s"), [3, 1]);
        assert_eq!(stages(&[1.0, 1.0], "4:1GB/s"), [1, 1]);
        assert_eq!(stages(&[0.0, 0.0, 0.0], "2:1GB/s"), [2, 1]);
    }
}
