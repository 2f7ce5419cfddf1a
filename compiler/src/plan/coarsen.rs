//! Coarsened cost graphs: runs of ops are fused so that a search is fast.
//!
//! Fused ops share a stage in every plan. A plan of the coarse graph is therefore a plan of the full graph, with exact
//! times and bytes; only the set of possible cuts is smaller. Ops already fused with an op stay fused with its run.

use crate::plan::Plan;
use crate::profile::cost_graph::{CostGraph, OpId};
use crate::tensor_parallel::segments;
use std::collections::BTreeMap;

/// Fuses consecutive ops into about `parts` runs of equal load. Load is the op's fraction of total time plus its
/// fraction of total memory.
pub fn runs(graph: &CostGraph, parts: usize) -> CostGraph {
    let free: Vec<usize> = (0..graph.ops.len()).filter(|&op| graph.ops[op].joins.is_none()).collect();
    if free.len() <= parts.max(1) {
        return graph.clone();
    }
    let us = |op: usize| graph.ops[op].fwd_us + graph.ops[op].bwd_us;
    let bytes = |op: usize| graph.ops[op].param_bytes as f64 + graph.ops[op].saved_bytes as f64;
    let all = |of: &dyn Fn(usize) -> f64| free.iter().map(|&op| of(op)).sum::<f64>().max(f64::MIN_POSITIVE);
    let (all_us, all_bytes) = (all(&us), all(&bytes));
    let most = 2.0 / parts.max(1) as f64;
    let mut head: Vec<usize> = (0..graph.ops.len()).collect();
    let (mut first, mut held) = (free[0], 0.0);
    for op in free {
        let load = us(op) / all_us + bytes(op) / all_bytes;
        if op != first && held + load > most {
            (first, held) = (op, 0.0);
        }
        held += load;
        head[op] = first;
    }
    with_heads(graph, &head)
}

/// Fuses ops into pieces that end where few tensors cross, as in tensor parallelism: about two for each layer of a
/// transformer.
pub fn pieces(graph: &CostGraph) -> CostGraph {
    let mut head: Vec<usize> = (0..graph.ops.len()).collect();
    for piece in segments::pieces(graph) {
        let first = piece.iter().copied().find(|op| graph.ops[*op as usize].joins.is_none());
        if let Some(first) = first {
            piece.into_iter().for_each(|op| head[op as usize] = first as usize);
        }
    }
    with_heads(graph, &head)
}

/// Fuses the ops of each stage of a plan. `None` if the stages are not in the order of their first ops.
pub fn stages(graph: &CostGraph, plan: &Plan) -> Option<CostGraph> {
    let mut head: Vec<usize> = (0..graph.ops.len()).collect();
    for stage in &plan.stages {
        let load: Vec<usize> = stage.op_ids().map(|op| op as usize).collect();
        let first = load.iter().copied().find(|&op| graph.ops.get(op).is_some_and(|op| op.joins.is_none()))?;
        load.into_iter().for_each(|op| head[op] = first);
    }
    let coarser = with_heads(graph, &head);
    coarser.check().is_ok().then_some(coarser)
}

/// Fuses every op that is not yet fused with its head, unless it is the head. Ops with different
/// [`RecomputeScope`](crate::profile::recompute_scope::RecomputeScope)s stay apart.
fn with_heads(graph: &CostGraph, head: &[usize]) -> CostGraph {
    let mut coarser = graph.clone();
    let mut own = head.to_vec();
    let mut newest: BTreeMap<usize, usize> = BTreeMap::new();
    for at in (0..own.len()).filter(|&at| graph.ops[at].joins.is_none()) {
        let newest = newest.entry(head[at]).or_insert(head[at]);
        if graph.ops[*newest].recompute != graph.ops[at].recompute {
            *newest = at;
        }
        own[at] = *newest;
    }
    for (at, op) in coarser.ops.iter_mut().enumerate() {
        let first = op.joins.map_or(own[at], |leader| own[leader.index()]);
        op.joins = (first != at).then_some(OpId(first as u32));
    }
    coarser
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::cost_graph::{OpCost, TensorCost};

    #[test]
    fn runs_are_even_and_keep_what_joined() {
        let op = |id: u32, joins: Option<u32>| OpCost { id, fwd_us: 1.0, joins: joins.map(OpId), ..OpCost::default() };
        // Op 2 is a weight transform used only by op 3.
        let ops = (0..8).map(|id| op(id, (id == 2).then_some(3))).collect();
        let tensor = |from: u32, to: u32| TensorCost {
            name: String::new(),
            producer: OpId(from),
            bytes: 1,
            consumers: vec![OpId(to)],
        };
        let follow = [(0, 1), (1, 3), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)];
        let tensors = follow.map(|(from, to)| tensor(from, to)).to_vec();
        let graph = CostGraph { ops, tensors, ..CostGraph::default() };
        let coarser = runs(&graph, 4);
        coarser.check().unwrap();
        let joins: Vec<Option<u32>> = coarser.ops.iter().map(|op| op.joins.map(|to| to.0)).collect();
        assert_eq!(joins, [None, Some(0), Some(0), Some(0), None, Some(4), Some(4), None]);
        assert_eq!(runs(&graph, 7), graph);
    }
}
