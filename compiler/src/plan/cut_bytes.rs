//! Bytes that a cost model charges for a cut.
//!
//! A cut follows a down-set of ops. Its frontier is the set of ops in the down-set that have no reader in it.
//!
//! - `paper`: each tensor that crosses the cut, once.
//! - `pipedream`: all outputs of the frontier ops, so a model output is charged at every later cut. Also all outputs of
//!   each predecessor of a frontier op that has a reader which does not precede that op. The reader is either beyond
//!   the cut (a skip connection, charged at every cut it crosses) or on another branch inside the down-set. In the
//!   second case nothing is sent; it is charged because PipeDream's released optimizer does so, and its objectives are
//!   reproduced only this way.

use crate::plan::problem::CostModel;
use crate::profile::cost_graph::CostGraph;

/// Limit on ops times frontier ops for the exact `pipedream` charge. The released optimizer handles far fewer; time and
/// memory grow with the square of the graph.
const MOST_PAIRS: usize = 1 << 26;

#[derive(Clone, Debug)]
pub struct CutBytes<'a> {
    model: CostModel,
    graph: &'a CostGraph,
    /// Readers of op i are `readers[first[i]..first[i + 1]]`.
    readers: Vec<u32>,
    first: Vec<usize>,
}

impl<'a> CutBytes<'a> {
    pub fn new(model: CostModel, graph: &'a CostGraph) -> CutBytes<'a> {
        let edges = graph.edges();
        let mut first = vec![0; graph.ops.len() + 1];
        edges.iter().for_each(|(from, _)| first[from.index() + 1] += 1);
        for at in 1..first.len() {
            first[at] += first[at - 1];
        }
        CutBytes { model, graph, readers: edges.into_iter().map(|(_, to)| to.0).collect(), first }
    }

    /// Bytes at the cut after the ops for which `inside` is true.
    pub fn at(&self, inside: impl Fn(usize) -> bool) -> f64 {
        match self.model {
            CostModel::Paper | CostModel::Pipec | CostModel::Load | CostModel::Hybrid => {
                let tensors = self.graph.tensors.iter().filter(|tensor| inside(tensor.producer.index()));
                let crossing = tensors.filter(|tensor| tensor.consumers.iter().any(|to| !inside(to.index())));
                crossing.map(|tensor| tensor.bytes as f64).sum()
            }
            CostModel::Pipedream => self.charged(inside),
        }
    }

    fn charged(&self, inside: impl Fn(usize) -> bool) -> f64 {
        if let Some(bytes) = self.charged_narrow(&inside) {
            return bytes;
        }
        let ops = self.graph.ops.len();
        let readers = |op: usize| &self.readers[self.first[op]..self.first[op + 1]];
        let is_frontier = |op: usize| inside(op) && !readers(op).iter().any(|&to| inside(to as usize));
        let frontier = (0..ops).filter(|&op| is_frontier(op)).count();
        if ops.saturating_mul(frontier) > MOST_PAIRS {
            return self.open(inside);
        }
        // For each op, a bit set of the frontier ops that it precedes. Ops are in topological order, so the reverse
        // order visits readers first.
        let words = frontier.div_ceil(64);
        let mut frontier_sets = vec![0u64; ops * words];
        let (mut next, mut bytes) = (0, 0.0);
        for op in (0..ops).rev().filter(|&op| inside(op)) {
            let (own, later) = frontier_sets[op * words..].split_at_mut(words);
            let mut inner = readers(op).iter().map(|&to| to as usize).filter(|&to| inside(to)).peekable();
            let is_charged = if inner.peek().is_none() {
                own[next / 64] |= 1 << (next % 64);
                next += 1;
                true
            } else {
                let leads_of = |to: usize| &later[(to - op - 1) * words..(to - op) * words];
                for to in inner.clone() {
                    own.iter_mut().zip(leads_of(to)).for_each(|(own, frontier_sets)| *own |= frontier_sets);
                }
                readers(op).iter().any(|&to| !inside(to as usize)) || inner.any(|to| *leads_of(to) != *own)
            };
            if is_charged {
                bytes += self.graph.ops[op].out_bytes as f64;
            }
        }
        bytes
    }

    /// [`CutBytes::charged`] for frontiers of up to 64 ops, the common case; searches evaluate very many cuts.
    fn charged_narrow(&self, inside: impl Fn(usize) -> bool) -> Option<f64> {
        let ops = self.graph.ops.len();
        let mut frontier_sets = vec![0u64; ops];
        let (mut next, mut bytes) = (0, 0.0);
        for op in (0..ops).rev().filter(|&op| inside(op)) {
            // Union and intersection of the frontier ops that the inside readers precede. A frontier op has an empty
            // union.
            let (mut together, mut common, mut is_read_beyond) = (0u64, u64::MAX, false);
            for &to in &self.readers[self.first[op]..self.first[op + 1]] {
                if inside(to as usize) {
                    together |= frontier_sets[to as usize];
                    common &= frontier_sets[to as usize];
                } else {
                    is_read_beyond = true;
                }
            }
            if together == 0 {
                if next == u64::BITS {
                    return None;
                }
                (together, next, is_read_beyond) = (1 << next, next + 1, true);
            } else {
                is_read_beyond |= common != together;
            }
            frontier_sets[op] = together;
            if is_read_beyond {
                bytes += self.graph.ops[op].out_bytes as f64;
            }
        }
        Some(bytes)
    }

    /// The `pipedream` charge without branches that rejoin inside: all outputs of ops with no reader inside or with one
    /// beyond.
    fn open(&self, inside: impl Fn(usize) -> bool) -> f64 {
        let mut bytes = 0.0;
        for op in (0..self.graph.ops.len()).filter(|&op| inside(op)) {
            let readers = &self.readers[self.first[op]..self.first[op + 1]];
            if readers.is_empty() || readers.iter().any(|&to| !inside(to as usize)) {
                bytes += self.graph.ops[op].out_bytes as f64;
            }
        }
        bytes
    }

    /// Approximates [`CutBytes::at`] for every prefix of `order` (topological) in one pass: entry i is the cut after i
    /// ops. Branches that rejoin inside are not charged. Use it to choose between cuts, not to cost them.
    pub fn estimates(&self, order: &[u32]) -> Vec<f64> {
        let mut place = vec![0usize; order.len()];
        order.iter().enumerate().for_each(|(at, &op)| place[op as usize] = at);
        // Difference array: each op is charged from its position until its last reader is inside.
        let mut change = vec![0.0; order.len() + 1];
        for (op, costs) in self.graph.ops.iter().enumerate() {
            let last = self.readers[self.first[op]..self.first[op + 1]].iter().map(|&to| place[to as usize]).max();
            change[place[op] + 1] += costs.out_bytes as f64;
            if let Some(last) = last {
                change[last + 1] -= costs.out_bytes as f64;
            }
        }
        let mut sum = 0.0;
        let mut running = |change: &f64| {
            sum += change;
            sum
        };
        change.iter().map(&mut running).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::cost_graph::{OpCost, TensorCost};

    fn diamond() -> CostGraph {
        let op = |id: u32| OpCost { id, out_bytes: 10 << id, ..OpCost::default() };
        let tensor = |producer: u32, readers: &[u32]| TensorCost::new(producer, 10 << producer, readers);
        // A diamond: 0 feeds 1 and 2, both feed 3; 4 follows.
        let tensors = vec![tensor(0, &[1, 2]), tensor(1, &[3]), tensor(2, &[3]), tensor(3, &[4]), tensor(4, &[])];
        CostGraph { ops: (0..5).map(op).collect(), tensors, ..CostGraph::default() }
    }

    #[test]
    fn paper_charges_what_is_read_beyond() {
        let graph = diamond();
        let bytes = CutBytes::new(CostModel::Paper, &graph);
        let prefix = |ops: usize| bytes.at(|op| op < ops);
        assert_eq!([0, 1, 2, 3, 4, 5].map(prefix), [0.0, 10.0, 30.0, 60.0, 80.0, 0.0]);
        assert_eq!(bytes.estimates(&[0, 1, 2, 3, 4])[..5], [0.0, 10.0, 30.0, 60.0, 80.0]);
    }

    #[test]
    fn pipedream_charges_an_op_whose_branches_are_both_open() {
        let graph = diamond();
        let bytes = CutBytes::new(CostModel::Pipedream, &graph);
        let prefix = |ops: usize| bytes.at(|op| op < ops);
        assert_eq!([0, 1, 2, 3, 4, 5].map(prefix), [0.0, 10.0, 30.0, 70.0, 80.0, 160.0]);
    }
}
