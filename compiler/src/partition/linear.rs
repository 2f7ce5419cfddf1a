//! Linear orders of a model, for searches that cut one order instead of a graph.
//!
//! Cutting a line is fast at any size, and every cut of a topological order is a legal cut of the graph. What is lost are stages
//! that take a part of one branch and a part of another in a proportion that the order does not offer.

use crate::partition::states::Space;
use crate::plan::cut_bytes::CutBytes;
use crate::plan::problem::CostModel;
use crate::profile::cost_graph::CostGraph;

/// Orders to try: as the file has them, and one that finishes a branch before it begins the next.
pub fn orders(graph: &CostGraph) -> Vec<Vec<u32>> {
    let canonical: Vec<u32> = (0..graph.ops.len() as u32).collect();
    let branches = depth_first(graph);
    if branches == canonical { vec![canonical] } else { vec![canonical, branches] }
}

/// A space of prefixes of `order` with at most `limit` cuts. Where the model has more ops, consecutive ones are grouped: runs of
/// about equal weight, each ending where the least crosses.
pub fn space(graph: &CostGraph, model: CostModel, order: Vec<u32>, limit: usize) -> Space {
    let ops = order.len();
    let ends = if ops <= limit.max(1) { (0..=ops).collect() } else { grouped(graph, model, &order, limit.max(1)) };
    Space::chain(graph, model, order, ends)
}

fn grouped(graph: &CostGraph, model: CostModel, order: &[u32], limit: usize) -> Vec<usize> {
    let total_us = graph.total_us().max(f64::MIN_POSITIVE);
    let total_bytes: f64 = graph.ops.iter().map(|op| op.param_bytes as f64).sum::<f64>().max(1.0);
    let weight = |op: u32| {
        let op = &graph.ops[op as usize];
        (op.fwd_us + op.bwd_us) / total_us + op.param_bytes as f64 / total_bytes + 1.0 / order.len() as f64
    };
    let total: f64 = order.iter().map(|&op| weight(op)).sum();
    let cuts = CutBytes::new(model, graph).estimates(order);
    // One cut for each of `limit` slices of equal weight: the cheapest position inside the slice.
    let mut best: Vec<Option<usize>> = vec![None; limit];
    let mut sum = 0.0;
    for (at, &op) in order.iter().enumerate().take(order.len() - 1) {
        sum += weight(op);
        let slice = ((sum / total * limit as f64) as usize).min(limit - 1);
        let end = at + 1;
        if best[slice].is_none_or(|other| cuts[end] < cuts[other]) {
            best[slice] = Some(end);
        }
    }
    let mut ends = vec![0];
    ends.extend(best.into_iter().flatten());
    ends.push(order.len());
    ends
}

// Kahn's algorithm with a stack: what became ready last goes first.
fn depth_first(graph: &CostGraph) -> Vec<u32> {
    let ops = graph.ops.len();
    let mut waits = vec![0u32; ops];
    let mut after: Vec<Vec<u32>> = vec![Vec::new(); ops];
    for (from, to) in graph.edges() {
        waits[to.index()] += 1;
        after[from.index()].push(to.0);
    }
    let mut stack: Vec<u32> = (0..ops as u32).rev().filter(|&op| waits[op as usize] == 0).collect();
    let mut order = Vec::with_capacity(ops);
    while let Some(op) = stack.pop() {
        order.push(op);
        for &to in after[op as usize].iter().rev() {
            waits[to as usize] -= 1;
            if waits[to as usize] == 0 {
                stack.push(to);
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::cost_graph::{OpCost, OpId, TensorCost};

    fn chain(ops: u32) -> CostGraph {
        let op = |id| OpCost {
            id,
            fwd_us: 1.0,
            bwd_us: 2.0,
            out_bytes: if id % 5 == 4 { 1 } else { 8 },
            ..OpCost::default()
        };
        let tensor =
            |at| TensorCost { name: String::new(), producer: OpId(at), bytes: 8, consumers: vec![OpId(at + 1)] };
        CostGraph { ops: (0..ops).map(op).collect(), tensors: (0..ops - 1).map(tensor).collect(), params: vec![] }
    }

    #[test]
    fn branches_stay_together() {
        let mut graph = chain(5);
        let tensor = |from, to: &[u32]| TensorCost {
            name: String::new(),
            producer: OpId(from),
            bytes: 1,
            consumers: to.iter().map(|&to| OpId(to)).collect(),
        };
        // 0 -> 1 -> 3 -> 4 and 0 -> 2 -> 4
        graph.tensors = vec![tensor(0, &[1, 2]), tensor(1, &[3]), tensor(3, &[4]), tensor(2, &[4])];
        assert_eq!(orders(&graph), [vec![0, 1, 2, 3, 4], vec![0, 1, 3, 2, 4]]);
    }

    #[test]
    fn grouping_cuts_where_little_crosses() {
        let graph = chain(100);
        let order: Vec<u32> = (0..100).collect();
        let ends = grouped(&graph, CostModel::Paper, &order, 10);
        assert_eq!((ends[0], ends[ends.len() - 1]), (0, 100));
        assert!(ends.len() <= 12 && ends.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(ends[1..ends.len() - 1].iter().all(|end| end % 5 == 0), "{ends:?}");
    }
}
