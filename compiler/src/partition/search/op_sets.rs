//! The neighbours of ops in a graph, and sets of ops as bits, in words of 64.

use crate::profile::cost_graph::CostGraph;

/// The producers that each op reads, and the readers of each, ascending.
pub fn neighbours(graph: &CostGraph) -> [Vec<Vec<usize>>; 2] {
    let [mut before, mut after] = [(); 2].map(|()| vec![Vec::new(); graph.ops.len()]);
    for (from, to) in graph.edges() {
        before[to.index()].push(from.index());
        after[from.index()].push(to.index());
    }
    [before, after]
}

pub fn has(set: &[u64], op: usize) -> bool {
    set[op / 64] >> (op % 64) & 1 == 1
}

pub fn insert(set: &mut [u64], op: usize) {
    set[op / 64] |= 1 << (op % 64);
}

/// Adds the members of another set.
pub fn unite(set: &mut [u64], other: &[u64]) {
    set.iter_mut().zip(other).for_each(|(word, other)| *word |= other);
}

/// Each op with all that its neighbours lead to; `order` visits neighbours first.
pub fn closures(neighbours: &[Vec<usize>], order: impl Iterator<Item = usize>) -> Vec<Vec<u64>> {
    let mut sets = vec![vec![0; neighbours.len().div_ceil(64)]; neighbours.len()];
    for op in order {
        let mut set = std::mem::take(&mut sets[op]);
        insert(&mut set, op);
        neighbours[op].iter().for_each(|&other| unite(&mut set, &sets[other]));
        sets[op] = set;
    }
    sets
}
