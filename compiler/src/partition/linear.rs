//! Linear orders of a model, for searches that cut one order instead of a graph.
//!
//! Cutting a line is fast at any size, and every cut of a topological order is a legal cut of the graph. What is lost are stages
//! that take a part of one branch and a part of another in a proportion that the order does not offer.

use crate::profile::cost_graph::CostGraph;

/// Orders to try: as the file has them, and one that finishes a branch before it begins the next.
pub fn orders(graph: &CostGraph) -> Vec<Vec<u32>> {
    let canonical: Vec<u32> = (0..graph.ops.len() as u32).collect();
    let branches = depth_first(graph);
    if branches == canonical { vec![canonical] } else { vec![canonical, branches] }
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

    #[test]
    fn branches_stay_together() {
        let tensor = |from, to: &[u32]| TensorCost {
            name: String::new(),
            producer: OpId(from),
            bytes: 1,
            consumers: to.iter().map(|&to| OpId(to)).collect(),
        };
        // 0 -> 1 -> 3 -> 4 and 0 -> 2 -> 4
        let tensors = vec![tensor(0, &[1, 2]), tensor(1, &[3]), tensor(3, &[4]), tensor(2, &[4])];
        let ops = (0..5).map(|id| OpCost { id, ..OpCost::default() }).collect();
        let graph = CostGraph { ops, tensors, params: vec![] };
        assert_eq!(orders(&graph), [vec![0, 1, 2, 3, 4], vec![0, 1, 3, 2, 4]]);
    }
}
