//! Synthetic planning problems for tests and benches: transformers of any length, long chains, parallel chains.

use compiler::profile::cost_graph::{CostGraph, OpCost, OpId, ParamCost, TensorCost};

/// SplitMix64, so that a seed means the same graph forever.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Adds an op with its inputs, time, output bytes and weight bytes.
pub fn add(graph: &mut CostGraph, name: &str, reads: &[u32], forward_us: f64, out_bytes: u64, weights: u64) -> u32 {
    let id = graph.ops.len() as u32;
    graph.ops.push(OpCost {
        id,
        name: format!("{name}{id}"),
        op: name.into(),
        fwd_us: forward_us,
        bwd_us: 2.0 * forward_us,
        param_bytes: weights,
        saved_bytes: out_bytes,
        out_bytes,
        ..OpCost::default()
    });
    graph.tensors.push(TensorCost {
        name: format!("t{id}"),
        producer: OpId(id),
        bytes: out_bytes,
        consumers: Vec::new(),
    });
    if weights > 0 {
        graph.params.push(ParamCost::new(format!("w{id}"), weights, vec![OpId(id)]));
    }
    reads.iter().for_each(|&from| graph.tensors[from as usize].consumers.push(OpId(id)));
    id
}

/// Up to `max_ops` ops, each of which reads up to two earlier ones.
#[allow(dead_code)] // Not used by all tests.
pub fn random_graph(random: &mut Random, max_ops: u64) -> CostGraph {
    let mut graph = CostGraph::default();
    for id in 0..2 + random.below(max_ops - 1) {
        let mut reads: Vec<u32> = (0..random.below(3).min(id)).map(|_| random.below(id) as u32).collect();
        if reads.is_empty() && id > 0 && random.below(4) > 0 {
            reads.push(id as u32 - 1);
        }
        reads.sort_unstable();
        reads.dedup();
        let weights = if random.below(3) == 0 { random.below(4_000_000) } else { random.below(20_000) };
        add(&mut graph, "op", &reads, random.below(1000) as f64, random.below(400_000), weights);
    }
    graph
}

/// A transformer of at least `ops` ops in equal layers, with 16-bit activations of `tokens` tokens, on devices of 150
/// Tflop/s and 1.5 TB/s.
#[allow(dead_code)] // Not every test that shares these problems plans one.
pub fn transformer(ops: usize, hidden: u64, tokens: u64) -> CostGraph {
    let mut graph = CostGraph::default();
    let act = 2 * tokens * hidden;
    let transfer_us = |bytes: u64| bytes as f64 / 1.5e6;
    let matmul = |graph: &mut CostGraph, name: &str, from: u32, width: u64, out: u64| {
        let us = (2 * tokens * width * out) as f64 / 150e6;
        let product = add(graph, name, &[from], us, 2 * tokens * out, 2 * width * out);
        add(graph, "bias", &[product], transfer_us(4 * tokens * out), 2 * tokens * out, 2 * out)
    };
    let mut x = add(&mut graph, "embedding", &[], transfer_us(3 * act), act, 50_304 * hidden * 2);
    while graph.ops.len() < ops {
        let norm = add(&mut graph, "norm", &[x], transfer_us(3 * act), act, 4 * hidden);
        let heads = ["query", "key", "value"].map(|name| {
            let head = matmul(&mut graph, name, norm, hidden, hidden);
            add(&mut graph, "reshape", &[head], transfer_us(2 * act), act, 0)
        });
        let scores = add(&mut graph, "scores", &heads[..2], (4096 * tokens * hidden) as f64 / 150e6, act, 0);
        let softmax = add(&mut graph, "softmax", &[scores], transfer_us(2 * act), act, 0);
        let weighted = add(&mut graph, "mix", &[heads[2], softmax], (4096 * tokens * hidden) as f64 / 150e6, act, 0);
        let out = matmul(&mut graph, "out", weighted, hidden, hidden);
        let sum = add(&mut graph, "sum", &[x, out], transfer_us(3 * act), act, 0);
        let norm = add(&mut graph, "norm", &[sum], transfer_us(3 * act), act, 4 * hidden);
        let up = matmul(&mut graph, "up", norm, hidden, 4 * hidden);
        let gelu = add(&mut graph, "gelu", &[up], transfer_us(8 * act), 4 * act, 0);
        let down = matmul(&mut graph, "down", gelu, 4 * hidden, hidden);
        x = add(&mut graph, "sum", &[sum, down], transfer_us(3 * act), act, 0);
    }
    matmul(&mut graph, "logits", x, hidden, 50_304);
    graph
}

#[allow(dead_code)] // Not every test that shares these problems plans one.
pub fn chain(ops: usize) -> CostGraph {
    let mut graph = CostGraph::default();
    for at in 0..ops as u64 {
        let reads: Vec<u32> = at.checked_sub(1).map(|previous| previous as u32).into_iter().collect();
        add(&mut graph, "op", &reads, 10.0 + (at * 7 % 11) as f64, 1_000_000 * (1 + at % 3), 1_000_000);
    }
    graph
}

/// `chains` chains of `length` ops between a first and a last op: (length + 1)^chains closed sets.
#[allow(dead_code)] // Not every test that shares these problems plans one.
pub fn parallel(chains: usize, length: usize) -> CostGraph {
    let mut graph = CostGraph::default();
    let first = add(&mut graph, "first", &[], 10.0, 1_000_000, 100_000);
    let mut ends = Vec::new();
    for chain in 0..chains {
        let mut at = first;
        for op in 0..length {
            at = add(&mut graph, "op", &[at], 10.0 + ((chain * 31 + op * 17) % 23) as f64, 1_000_000, 1_000_000);
        }
        ends.push(at);
    }
    add(&mut graph, "last", &ends, 10.0, 1_000_000, 100_000);
    graph
}
