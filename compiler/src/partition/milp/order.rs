//! Precedence of the ops in a graph, with the work before and after each op.

use crate::partition::search::op_sets::{closures, has, neighbours};
use crate::plan::cost_estimate::FlowQuery;
use crate::plan::problem::{CostModel, Problem};
use crate::profile::cost_graph::OpCost;

pub struct Order {
    /// Microseconds of each op per micro-batch, without recomputation.
    pub times: Vec<f64>,
    /// Time of each op and all its predecessors.
    pub head: Vec<f64>,
    /// Time of each op and all its successors.
    pub tail: Vec<f64>,
    /// For each op a bit set of its predecessors and itself.
    above: Vec<Vec<u64>>,
    /// Edges from op to reader, without those implied by others (transitive reduction).
    pub edges: Vec<(usize, usize)>,
    /// Readers of each op, as in `edges`.
    pub next: Vec<Vec<usize>>,
    pub readers: Vec<Vec<usize>>,
}

impl Order {
    pub fn of(problem: &Problem, asked: &FlowQuery) -> Order {
        let ops = problem.graph.ops.len();
        let [reads, readers] = neighbours(&problem.graph);
        let above = closures(&reads, 0..ops);
        let mut edges = Vec::new();
        for (op, reads) in reads.iter().enumerate() {
            let follows = |from: &&usize| reads.iter().any(|other| other != *from && has(&above[*other], **from));
            edges.extend(reads.iter().filter(|from| !follows(from)).map(|&from| (from, op)));
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

    /// Returns whether `later` is `op` or a successor of it.
    pub fn precedes(&self, op: usize, later: usize) -> bool {
        has(&self.above[later], op)
    }

    /// Those of `ops` that precede none of the others.
    pub fn last(&self, ops: &[usize]) -> Vec<usize> {
        let is_last = |op: &&usize| !ops.iter().any(|other| other != *op && self.precedes(**op, *other));
        ops.iter().filter(is_last).copied().collect()
    }
}
