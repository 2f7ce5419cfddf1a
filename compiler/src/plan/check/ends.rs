//! Finds ops at stage boundaries, whose inputs or outputs are messages and not part of the arena.

use crate::profile::cost_graph::CostGraph;
use std::collections::BTreeSet;

/// For each op, a bit mask over it and the ops fused with it. Bit 0: all inputs come from other stages. Bit 1: all
/// outputs go to other stages.
///
/// Views are transparent: their input counts as coming from the op before, their output as going to the readers after.
/// An op with several readers never has bit 1, because their gradients are summed.
/// An op with several readers never has bit 1, because their gradients are summed.
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
    // For each fused op, on the input and on the output side: any tensor at all, and any within the stage.
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
