//! Topological orders for searches that cut a linear order instead of a graph.
//!
//! Cutting an order is fast at any size, and every cut of a topological order is legal. It misses stages that combine
//! parts of several branches in a way that the order does not offer.

use crate::partition::search::op_sets::neighbours;
use crate::profile::cost_graph::CostGraph;
use std::collections::BTreeSet;

/// Three orders: by depth, by longest remaining path, and depth-first (one branch after the other). Ties are broken by
/// name, so that the op order in the file does not matter.
pub fn orders(graph: &CostGraph) -> Vec<Vec<u32>> {
    let edges = Edges::of(graph);
    let mut tried: Vec<Vec<u32>> = Vec::new();
    for order in [edges.by(&edges.depths()), edges.by(&edges.ways(graph)), edges.depth_first()] {
        if !tried.contains(&order) {
            tried.push(order);
        }
    }
    tried
}

struct Edges {
    before: Vec<Vec<usize>>,
    /// In order of rank.
    after: Vec<Vec<usize>>,
    /// The place of each op in the order of names.
    rank: Vec<usize>,
}

impl Edges {
    fn of(graph: &CostGraph) -> Edges {
        let mut by_name: Vec<usize> = (0..graph.ops.len()).collect();
        by_name.sort_by_key(|&op| (graph.ops[op].name.as_str(), op));
        let mut rank = vec![0; graph.ops.len()];
        by_name.into_iter().enumerate().for_each(|(place, op)| rank[op] = place);
        let [before, mut after] = neighbours(graph);
        after.iter_mut().for_each(|readers| readers.sort_by_key(|&op| rank[op]));
        Edges { before, after, rank }
    }

    /// Length of the longest path from a source to each op, in ops.
    fn depths(&self) -> Vec<f64> {
        let mut depths = vec![0.0f64; self.after.len()];
        for (to, before) in self.before.iter().enumerate() {
            depths[to] = before.iter().map(|&from| depths[from] + 1.0).fold(0.0, f64::max);
        }
        depths
    }

    /// Negated compute of the longest path from each op to a sink.
    fn ways(&self, graph: &CostGraph) -> Vec<f64> {
        let mut ways: Vec<f64> = graph.ops.iter().map(|op| -(op.fwd_us + op.bwd_us)).collect();
        for (from, after) in self.after.iter().enumerate().rev() {
            let us = graph.ops[from].fwd_us + graph.ops[from].bwd_us;
            ways[from] = after.iter().map(|&to| ways[to] - us).fold(ways[from], f64::min);
        }
        ways
    }

    /// The number of producers that each op waits for.
    fn waits(&self) -> Vec<usize> {
        self.before.iter().map(Vec::len).collect()
    }

    /// Kahn's algorithm, smallest value first.
    fn by(&self, values: &[f64]) -> Vec<u32> {
        let mut sorted: Vec<usize> = (0..values.len()).collect();
        sorted.sort_by(|&left, &right| {
            values[left].total_cmp(&values[right]).then(self.rank[left].cmp(&self.rank[right]))
        });
        let mut place = vec![0; sorted.len()];
        sorted.iter().enumerate().for_each(|(at, &op)| place[op] = at);
        let mut waits = self.waits();
        let mut ready: BTreeSet<usize> = (0..waits.len()).filter(|&op| waits[op] == 0).map(|op| place[op]).collect();
        let mut order = Vec::with_capacity(waits.len());
        while let Some(first) = ready.pop_first() {
            let op = sorted[first];
            order.push(op as u32);
            for &to in &self.after[op] {
                waits[to] -= 1;
                if waits[to] == 0 {
                    ready.insert(place[to]);
                }
            }
        }
        order
    }

    /// Kahn's algorithm with a stack: the op that became ready last goes first.
    fn depth_first(&self) -> Vec<u32> {
        let mut waits = self.waits();
        let mut stack: Vec<usize> = (0..waits.len()).filter(|&op| waits[op] == 0).collect();
        stack.sort_by_key(|&op| std::cmp::Reverse(self.rank[op]));
        let mut order = Vec::with_capacity(waits.len());
        while let Some(op) = stack.pop() {
            order.push(op as u32);
            for &to in self.after[op].iter().rev() {
                waits[to] -= 1;
                if waits[to] == 0 {
                    stack.push(to);
                }
            }
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::cost_graph::{OpCost, TensorCost};

    #[test]
    fn branches_stay_together() {
        let tensor = |from, to: &[u32]| TensorCost::new(from, 1, to);
        // 0 -> 1 -> 3 -> 4 and 0 -> 2 -> 4
        let tensors = vec![tensor(0, &[1, 2]), tensor(1, &[3]), tensor(3, &[4]), tensor(2, &[4])];
        let ops = (0..5).map(|id| OpCost { id, ..OpCost::default() }).collect();
        let graph = CostGraph { ops, tensors, ..CostGraph::default() };
        assert_eq!(orders(&graph), [vec![0, 1, 2, 3, 4], vec![0, 1, 3, 2, 4]]);
    }
}
