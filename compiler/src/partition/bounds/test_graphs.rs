//! Graphs for tests.

use crate::partition::bounds::random::Random;
use crate::profile::cost_graph::{CostGraph, OpCost, OpId, ParamCost, TensorCost};

/// Branches, skip connections, several inputs and outputs, light ops, tied parameters, and messages of all sizes.
pub fn graph(random: &mut Random) -> CostGraph {
    let ops = 2 + random.below(7) as u32;
    let branches = 1 + random.below(4);
    let mut graph = CostGraph::default();
    for id in 0..ops {
        let fwd_us = [0.01, 10.0, 100.0, 500.0, 1000.0][random.below(5) as usize] + random.below(10) as f64;
        let param_bytes = [0, 10_000, 400_000, 3_000_000][random.below(4) as usize];
        let out_bytes = [0, 1_000, 100_000, 1_000_000][random.below(4) as usize];
        let name = format!("op{id}");
        let bwd_us = 2.0 * fwd_us;
        graph.ops.push(OpCost { id, name, fwd_us, bwd_us, param_bytes, out_bytes, ..OpCost::default() });
        let (producer, consumers) = (OpId(id), Vec::new());
        graph.tensors.push(TensorCost { name: format!("t{id}"), producer, bytes: out_bytes, consumers });
        let is_tied = random.below(5) == 0 && id + 1 < ops;
        let users = if is_tied { vec![OpId(id), OpId(ops - 1)] } else { vec![OpId(id)] };
        graph.params.push(ParamCost::new(format!("p{id}"), param_bytes, users));
        if id == 0 || random.below(12) == 0 {
            continue;
        }
        let mut reads = vec![id - 1 - random.below(branches.min(u64::from(id))) as u32];
        reads.extend((random.below(3) == 0).then(|| random.below(u64::from(id)) as u32));
        reads.sort_unstable();
        reads.dedup();
        reads.iter().for_each(|&from| graph.tensors[from as usize].consumers.push(OpId(id)));
    }
    graph
}

/// A graph with these edges, whose ops take 100 µs and make a tensor of these bytes.
pub fn of_edges(edges: &[(u32, u32)], bytes: &[u64]) -> CostGraph {
    let mut graph = CostGraph::default();
    for (id, &bytes) in (0..).zip(bytes) {
        graph.ops.push(OpCost { id, fwd_us: 100.0, out_bytes: bytes, ..OpCost::default() });
        let readers: Vec<u32> = edges.iter().filter(|(from, _)| *from == id).map(|(_, to)| *to).collect();
        graph.tensors.push(TensorCost::new(id, bytes, &readers));
    }
    graph
}
