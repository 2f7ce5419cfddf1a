//! Analytic kernel times for devices that cannot be measured.
//!
//! The roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009) takes the longer of arithmetic and memory
//! traffic at a fraction of the device's peak. A launch overhead is added per kernel. All forward and backward kernels
//! count; views are free. The weight-gradient part of a backward consists of the kernels that no other op waits for.
//!
//! On GPUs, matrix products depend on their shape ([`matmul`]), and elementwise ops are fused ([`fusion`]). The model
//! ignores caches. It ranks ops well; their sum is approximate.

use super::attribution::Attribution;
use super::costs::{cost_graph, dtype};
use crate::cluster::Device;
use crate::graph::Graph;
use crate::op::table::rule;
use crate::op::{Cost, NodeId, Op, Value};
use crate::pass::analytic::fusion::{Traffic, is_free, traffic};
use crate::pass::analytic::matmul::Product;
use crate::pass::batched_weight_grad::{batched_grads, joined};
use crate::profile::cost_graph::MOMENTUM_PASSES;
use crate::profile::{Method, OpProfile, Profile, ProfiledDevice, ProfiledModel, SCHEMA, Settings};
use crate::tensor::DType;
use crate::tensor::fact::Fact;
use std::collections::{HashMap, HashSet};

pub mod fusion;
pub mod matmul;

/// Fraction of peak arithmetic of large matrix products, for devices that give no `matmul_efficiency`.
const CONTRACTION: f64 = 0.6;

/// Rate of attention, as a share of that of large matrix products: FlashAttention-2 reaches 0.5 to 0.73 of the A100's
/// peak (Dao, 2023, section 4.1).
pub const ATTENTION: f64 = 0.75;

/// Fraction of peak arithmetic of elementwise kernels.
const ELEMENTWISE: f64 = 0.5;

/// Fraction of peak memory bandwidth of streaming kernels.
pub const STREAMING: f64 = 0.8;

#[derive(Clone, Debug, PartialEq)]
pub struct Subject {
    /// The model's file and fingerprint; `ops` is filled in.
    pub model: ProfiledModel,
    /// Samples per micro-batch, the batch size that the graph was bound to.
    pub micro_batch: u64,
    /// Name of the loss that the attribution adds.
    pub loss: Option<String>,
}

/// The profile of a graph of fixed sizes, from the device's data sheet. Deterministic.
pub fn profile(graph: &Graph, attribution: &Attribution, device: &Device, subject: &Subject) -> Profile {
    let costs = cost_graph(graph, attribution);
    let forward = Run::new(device, &attribution.forward, &attribution.saved);
    let backward = attribution.backward.as_ref().map(|graph| Run::new(device, graph, &HashSet::new()));
    let sum = |run: Option<&Run<'_>>, nodes: &[NodeId]| -> (f64, f64) {
        let runs = nodes.iter().filter_map(|id| run.map(|run| (run, *id)));
        runs.fold((0.0, 0.0), |(time, flops), (run, id)| {
            let cost = node_cost(run.graph, id);
            (time + run.node_us(id, cost), flops + cost.flops)
        })
    };
    // Steps work on gradient sums, which may be wider than the weights.
    let mut step_bytes = vec![0u64; costs.ops.len()];
    for param in &costs.params {
        if let Some(first) = param.users.first() {
            step_bytes[first.index()] += param.sum_bytes;
        }
    }
    let ops = costs.ops.into_iter().enumerate().map(|(i, op)| {
        let (fwd_us, flops) = sum(Some(&forward), &attribution.forward_nodes[i]);
        let nodes = &attribution.backward_nodes[i];
        let (bwd_us, _) = sum(backward.as_ref(), nodes);
        let weight_grad_nodes: Vec<NodeId> =
            nodes.iter().copied().filter(|id| attribution.second.contains(id)).collect();
        let (weight_grad_us, _) = sum(backward.as_ref(), &weight_grad_nodes);
        let batched = backward
            .as_ref()
            .map_or(0, |run| weight_grad_nodes.iter().filter_map(|id| batched_grad_bytes(run.graph, *id)).sum());
        OpProfile {
            id: op.id,
            name: op.name,
            module: op.module,
            op: op.op,
            fwd_us: picoseconds(fwd_us),
            bwd_us: picoseconds(bwd_us),
            weight_grad_us: Some(picoseconds(weight_grad_us)),
            update_us: (step_bytes[i] > 0).then(|| picoseconds(update_us(device, step_bytes[i]))),
            spread: 0.0,
            param_bytes: op.param_bytes,
            saved_bytes: op.saved_bytes,
            out_bytes: op.out_bytes,
            workspace_bytes: 0,
            batched_grad_bytes: batched,
            batched_grad_workspace_bytes: 0,
            flops: flops as u64,
            source: "roofline".to_string(),
        }
    });
    let ops: Vec<OpProfile> = ops.collect();
    Profile {
        schema: SCHEMA.to_string(),
        model: ProfiledModel { ops: ops.len() as u64, ..subject.model.clone() },
        device: ProfiledDevice { name: device.kind.clone(), driver: String::new(), memory_bytes: device.memory.0 },
        settings: Settings {
            dtype: dtype(graph).name().to_string(),
            micro_batch: subject.micro_batch,
            warmup: 0,
            runs: 0,
            seed: 0,
            workers: 1,
            loss: subject.loss.clone(),
        },
        method: Method::Analytic,
        ops,
        whole: None,
    }
}

/// Time of an SGD step with momentum, as one kernel.
fn update_us(device: &Device, bytes: u64) -> f64 {
    (MOMENTUM_PASSES * bytes as f64 / (STREAMING * device.memory_bandwidth.0) + device.launch.0) * 1e6
}

/// Bytes that a weight gradient buffers if it is computed for several micro-batches at once, `None` if it never is. GPUs
/// do not accumulate those of convolutions.
fn batched_grad_bytes(graph: &Graph, id: NodeId) -> Option<u64> {
    let node = graph.node(id);
    if !matches!(node.op, Op::MatMul(_)) {
        return None;
    }
    let inputs: Vec<Fact> = graph.inputs(id).into_iter().map(|value| graph.fact(value).clone()).collect();
    joined(&node.op, &inputs, node.facts.first()?)?;
    batched_grads(&inputs)
}

/// Rounds microseconds to whole picoseconds, so that the decimal form in a file is exact.
fn picoseconds(us: f64) -> f64 {
    (us * 1e6).round() / 1e6
}

pub fn node_cost(graph: &Graph, id: NodeId) -> Cost {
    let inputs: Vec<&Fact> = graph.inputs(id).into_iter().map(|v| graph.fact(v)).collect();
    let node = graph.node(id);
    rule(&node.op).cost(&inputs, &node.facts)
}

/// A graph on a device.
struct Run<'a> {
    device: &'a Device,
    graph: &'a Graph,
    /// The traffic of fused kernels; `None` for a device that runs every op by itself.
    fused: Option<HashMap<NodeId, Traffic>>,
}

impl Run<'_> {
    fn new<'a>(device: &'a Device, graph: &'a Graph, saved: &HashSet<Value>) -> Run<'a> {
        let fused = device.multiprocessors.map(|_| traffic(graph, saved));
        Run { device, graph, fused }
    }

    fn node_us(&self, id: NodeId, cost: Cost) -> f64 {
        let inputs: Vec<&Fact> = self.graph.inputs(id).into_iter().map(|v| self.graph.fact(v)).collect();
        let node = self.graph.node(id);
        let Some(fused) = &self.fused else { return kernel_us(self.device, &node.op, &inputs, &node.facts, cost) };
        let Some(traffic) = fused.get(&id) else { return 0.0 };
        let cost = Cost { bytes: traffic.bytes, ..cost };
        let launch = if traffic.launches { self.device.launch.0 * 1e6 } else { 0.0 };
        execution_us(self.device, &node.op, &inputs, &node.facts, cost) + launch
    }
}

/// Kernel time in microseconds of an op with the given cost, if it is not fused with others.
pub fn kernel_us(device: &Device, op: &Op, inputs: &[&Fact], outputs: &[Fact], cost: Cost) -> f64 {
    if device.multiprocessors.is_some() && is_free(op) {
        return 0.0;
    }
    execution_us(device, op, inputs, outputs, cost) + device.launch.0 * 1e6
}

/// The longer of arithmetic and memory traffic, in microseconds.
fn execution_us(device: &Device, op: &Op, inputs: &[&Fact], outputs: &[Fact], cost: Cost) -> f64 {
    let facts = inputs.iter().copied().chain(outputs);
    let dtype = facts.map(|fact| fact.dtype).find(|d| d.is_float()).unwrap_or(DType::F32);
    let memory = cost.bytes / (STREAMING * device.memory_bandwidth.0);
    if !is_contraction(op) {
        // Matrix units only do contractions; other arithmetic on narrower types runs in f32.
        let peak = if dtype == DType::F64 { device.peak_flops.f64 } else { device.peak_flops.f32 };
        return (cost.flops / (ELEMENTWISE * peak)).max(memory) * 1e6;
    }
    let share = if matches!(op, Op::Attention(_) | Op::AttentionGrad(_)) { ATTENTION } else { 1.0 };
    let rate = share * device.matmul_efficiency.unwrap_or(CONTRACTION) * matmul::peak(device, dtype);
    let product = device.multiprocessors.zip(Product::of(op, inputs, outputs, cost.flops));
    let seconds = match product {
        Some((multiprocessors, product)) => product.seconds(device, multiprocessors, rate, cost.bytes),
        None => (cost.flops / rate).max(memory),
    };
    seconds * 1e6
}

/// Ops whose arithmetic is mostly matrix products.
fn is_contraction(op: &Op) -> bool {
    matches!(
        op,
        Op::MatMul(_)
            | Op::GroupedMatMul(_)
            | Op::GroupedMatMulGrad(_)
            | Op::Conv(_)
            | Op::ConvInputGrad(_)
            | Op::ConvWeightGrad(_)
            | Op::Attention(_)
            | Op::AttentionGrad(_)
            | Op::Lstm(_)
            | Op::LstmGrad(_)
            | Op::Gru(_)
            | Op::GruGrad(_)
            | Op::Rnn(_)
            | Op::RnnGrad(_)
    )
}
