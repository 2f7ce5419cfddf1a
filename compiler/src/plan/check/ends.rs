//! Which ops stand at the ends of their stages, where what crosses the cut lies among messages and not in the arena.

use crate::profile::cost_graph::CostGraph;
use std::collections::BTreeSet;

/// For each op 1 if all that comes to it and those that are joined with it comes from other stages, and 2 more if all that goes from them
/// goes to other stages. What only passes through views comes from before them, and goes where it is read after them. Where several read
/// the same, gradients are added up, which is nowhere an end.
pub fn ends(graph: &CostGraph, stage_of: &[usize]) -> Vec<usize> {
    let leader = |op: usize| graph.ops[op].joins.map_or(op, |to| to.index());
    let mut does_something = vec![false; graph.ops.len()];
    for (at, op) in graph.ops.iter().enumerate() {
        does_something[leader(at)] |= !op.is_view;
    }
    let mut readers = vec![Vec::new(); graph.ops.len()];
    for tensor in &graph.tensors {
        let from = leader(tensor.producer.index());
        readers[from].extend(tensor.consumers.iter().map(|to| leader(to.index())).filter(|&to| to != from));
    }
    // Of each joined op, at both sides: whether there is anything, and whether any of it is in the same stage.
    let mut reads = vec![[false; 2]; graph.ops.len()];
    let mut stays = vec![[false; 2]; graph.ops.len()];
    for from in (0..graph.ops.len()).filter(|&op| does_something[op]) {
        let (mut seen, mut found) = (BTreeSet::new(), Vec::new());
        let mut left: Vec<usize> = readers[from].clone();
        while let Some(to) = left.pop() {
            if seen.insert(to) {
                let is_same = stage_of[from] == stage_of[to];
                (reads[to][0], stays[to][0]) = (true, stays[to][0] || is_same);
                if does_something[to] {
                    (reads[from][1], stays[from][1]) = (true, stays[from][1] || is_same);
                    found.push(to);
                } else {
                    left.extend(&readers[to]);
                }
            }
        }
        if found.len() > 1 {
            stays[from][1] = true;
        }
        if found.len() != 1 {
            seen.into_iter().for_each(|to| stays[to][0] = true);
        }
    }
    let is_end = |op: usize, side: usize| reads[leader(op)][side] && !stays[leader(op)][side];
    (0..graph.ops.len()).map(|op| usize::from(is_end(op, 0)) + 2 * usize::from(is_end(op, 1))).collect()
}
