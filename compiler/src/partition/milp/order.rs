//! Who precedes whom in a graph, and how much work that is.

use crate::plan::cost_estimate::FlowQuery;
use crate::plan::problem::{CostModel, Problem};
use crate::profile::cost_graph::OpCost;

/// Who precedes whom.
pub struct Order {
    /// Microseconds of each op for one item, without recomputation.
    pub times: Vec<f64>,
    /// Of all that precede an op and itself.
    pub head: Vec<f64>,
    /// Of all that follow it and itself.
    pub tail: Vec<f64>,
    /// For each op a bit for all that precede it, itself included.
    above: Vec<Vec<u64>>,
    /// Pairs of an op and one that reads it, but for those that follow from others.
    pub edges: Vec<(usize, usize)>,
    /// The ops that read each op, as in `edges`.
    pub next: Vec<Vec<usize>>,
    /// All ops that read each op.
    pub readers: Vec<Vec<usize>>,
}

impl Order {
    /// The order of a problem's graph.
    pub fn of(problem: &Problem, asked: &FlowQuery) -> Order {
        let ops = problem.graph.ops.len();
        let mut readers = vec![Vec::new(); ops];
        let mut reads = vec![Vec::new(); ops];
        for (from, to) in problem.graph.edges() {
            readers[from.index()].push(to.index());
            reads[to.index()].push(from.index());
        }
        let mut above: Vec<Vec<u64>> = Vec::with_capacity(ops);
        let mut edges = Vec::new();
        for (op, reads) in reads.iter().enumerate() {
            let mut set = vec![0u64; ops.div_ceil(64)];
            for &from in reads {
                above[from].iter().zip(&mut set).for_each(|(word, set)| *set |= word);
            }
            let follows = |from: &&usize| reads.iter().any(|other| other != *from && has(&above[*other], **from));
            edges.extend(reads.iter().filter(|from| !follows(from)).map(|&from| (from, op)));
            set[op / 64] |= 1 << (op % 64);
            above.push(set);
        }
        let mut next = vec![Vec::new(); ops];
        edges.iter().for_each(|&(from, to)| next[from].push(to));
        let trains = problem.cost != CostModel::Pipec || asked.trains();
        let time = |op: &OpCost| op.fwd_us + if trains { op.bwd_us } else { 0.0 };
        let times: Vec<f64> = problem.graph.ops.iter().map(time).collect();
        let sum = |of: &dyn Fn(usize) -> bool| (0..ops).filter(|&op| of(op)).map(|op| times[op]).sum::<f64>();
        let head = (0..ops).map(|op| sum(&|other| has(&above[op], other))).collect();
        let tail = (0..ops).map(|op| sum(&|other| has(&above[other], op))).collect();
        Order { times, head, tail, above, edges, next, readers }
    }

    /// Whether `later` follows `op`, or is it.
    pub fn precedes(&self, op: usize, later: usize) -> bool {
        has(&self.above[later], op)
    }

    /// Those of `ops` that none of the others follows.
    pub fn last(&self, ops: &[usize]) -> Vec<usize> {
        let is_last = |op: &&usize| !ops.iter().any(|other| other != *op && self.precedes(**op, *other));
        ops.iter().filter(is_last).copied().collect()
    }
}

fn has(set: &[u64], op: usize) -> bool {
    set[op / 64] >> (op % 64) & 1 == 1
}
