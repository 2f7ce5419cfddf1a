//! How many bytes a cost model charges at a cut.
//!
//! A cut follows a set of ops that is closed under predecessors. Its frontier are the ops of the set that no op of the set reads.
//!
//! - `paper`: every tensor that is read on the other side, once.
//! - `pipedream`: all outputs of the frontier, so a model output is charged at every cut after it; and all outputs of each op that
//!   precedes a frontier op and has a reader that does not. Such a reader lies beyond the cut (a skip is charged at every cut
//!   it crosses), or on another branch inside it. The second kind sends nothing in truth. The released optimizer charges it, and
//!   its objectives come out only so.

use crate::plan::problem::CostModel;
use crate::profile::cost_graph::CostGraph;

/// Ops times frontier ops up to which `pipedream` follows branches inside a set. The released optimizer handles far
/// fewer; beyond it, time and memory would grow with the square of the graph.
const MOST_PAIRS: usize = 1 << 26;

/// The rule of one cost model over one graph.
#[derive(Clone, Debug)]
pub struct CutBytes<'a> {
    model: CostModel,
    graph: &'a CostGraph,
    /// Readers of op i are `readers[first[i]..first[i + 1]]`.
    readers: Vec<u32>,
    first: Vec<usize>,
}

impl<'a> CutBytes<'a> {
    /// Prepares the rule of `model` for `graph`.
    pub fn new(model: CostModel, graph: &'a CostGraph) -> CutBytes<'a> {
        let edges = graph.edges();
        let mut first = vec![0; graph.ops.len() + 1];
        edges.iter().for_each(|(from, _)| first[from.index() + 1] += 1);
        for at in 1..first.len() {
            first[at] += first[at - 1];
        }
        CutBytes { model, graph, readers: edges.into_iter().map(|(_, to)| to.0).collect(), first }
    }

    /// Bytes at the cut after the ops of which `inside` is true.
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
        // For each op the frontier ops that it leads to, as bits; ops are in topological order, so readers come first.
        let words = frontier.div_ceil(64);
        let mut leads = vec![0u64; ops * words];
        let (mut next, mut bytes) = (0, 0.0);
        for op in (0..ops).rev().filter(|&op| inside(op)) {
            let (own, later) = leads[op * words..].split_at_mut(words);
            let mut inner = readers(op).iter().map(|&to| to as usize).filter(|&to| inside(to)).peekable();
            let is_charged = if inner.peek().is_none() {
                own[next / 64] |= 1 << (next % 64);
                next += 1;
                true
            } else {
                let leads_of = |to: usize| &later[(to - op - 1) * words..(to - op) * words];
                for to in inner.clone() {
                    own.iter_mut().zip(leads_of(to)).for_each(|(own, leads)| *own |= leads);
                }
                readers(op).iter().any(|&to| !inside(to as usize)) || inner.any(|to| *leads_of(to) != *own)
            };
            if is_charged {
                bytes += self.graph.ops[op].out_bytes as f64;
            }
        }
        bytes
    }

    /// The same where the frontier is no wider than a word, as almost all are: searches ask for very many cuts.
    fn charged_narrow(&self, inside: impl Fn(usize) -> bool) -> Option<f64> {
        let ops = self.graph.ops.len();
        let mut leads = vec![0u64; ops];
        let (mut next, mut bytes) = (0, 0.0);
        for op in (0..ops).rev().filter(|&op| inside(op)) {
            // Which frontier ops the readers inside lead to, together and in common; none leads to nothing.
            let (mut together, mut common, mut is_read_beyond) = (0u64, u64::MAX, false);
            for &to in &self.readers[self.first[op]..self.first[op + 1]] {
                if inside(to as usize) {
                    together |= leads[to as usize];
                    common &= leads[to as usize];
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
            leads[op] = together;
            if is_read_beyond {
                bytes += self.graph.ops[op].out_bytes as f64;
            }
        }
        Some(bytes)
    }

    /// What is charged but for branches that meet inside: all outputs of every op without a reader inside, or with one
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

    /// About what [`CutBytes::at`] gives for every prefix of `order`, which is topological, in one pass: entry i is the cut after
    /// i ops. Branches that meet inside are not charged. Good enough to choose between cuts, not to price them.
    pub fn estimates(&self, order: &[u32]) -> Vec<f64> {
        let mut place = vec![0usize; order.len()];
        order.iter().enumerate().for_each(|(at, &op)| place[op as usize] = at);
        // Each op is charged from its own place until its last reader is inside, as differences.
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
    use crate::profile::cost_graph::{OpCost, OpId, TensorCost};

    fn diamond() -> CostGraph {
        let op = |id: u32| OpCost { id, out_bytes: 10 << id, ..OpCost::default() };
        let tensor = |producer: u32, readers: &[u32]| TensorCost {
            name: String::new(),
            producer: OpId(producer),
            bytes: 10 << producer,
            consumers: readers.iter().map(|&to| OpId(to)).collect(),
        };
        // 0 goes to 1 and 2, which meet in 3; 4 follows.
        let tensors = vec![tensor(0, &[1, 2]), tensor(1, &[3]), tensor(2, &[3]), tensor(3, &[4]), tensor(4, &[])];
        CostGraph { ops: (0..5).map(op).collect(), tensors, params: vec![] }
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
