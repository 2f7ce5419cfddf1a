//! Analytic kernel times for devices that cannot be measured.
//!
//! The roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009) takes the longer of arithmetic and memory
//! traffic at a fraction of the device's peak. A launch overhead is added per kernel. All forward and backward kernels
//! count; views are free. The weight-gradient part of a backward consists of the kernels that no other op waits for.
//! The model ignores caches, fusion and partially filled devices. It ranks ops well; their sum is approximate.

use super::attribution::Attribution;
use super::costs::{cost_graph, dtype};
use crate::cluster::{Device, Peak};
use crate::graph::Graph;
use crate::op::table::rule;
use crate::op::{Cost, NodeId, Op};
use crate::profile::cost_graph::MOMENTUM_PASSES;
use crate::profile::{Method, OpProfile, Profile, ProfiledDevice, ProfiledModel, SCHEMA, Settings};
use crate::tensor::DType;
use crate::tensor::fact::Fact;

/// Fraction of peak arithmetic of large matrix products and convolutions. Vendor libraries reach 0.6 to 0.8 of the data
/// sheet on shapes that fill the device. Megatron-LM reports 0.45 to 0.55 for whole models (Narayanan et al., SC 2021).
const CONTRACTION: f64 = 0.6;

/// Fraction of peak arithmetic of elementwise kernels.
const ELEMENTWISE: f64 = 0.5;

/// Fraction of peak memory bandwidth of streaming kernels.
const STREAMING: f64 = 0.8;

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
    let sum = |graph: Option<&Graph>, nodes: &[NodeId]| -> (f64, f64) {
        let each = nodes.iter().filter_map(|id| graph.map(|g| (g, *id)));
        each.fold((0.0, 0.0), |(time, flops), (graph, id)| {
            let cost = node_cost(graph, id);
            (time + node_us(device, graph, id, cost), flops + cost.flops)
        })
    };
    let ops = costs.ops.into_iter().enumerate().map(|(i, op)| {
        let (fwd_us, flops) = sum(Some(&attribution.forward), &attribution.forward_nodes[i]);
        let backward = &attribution.backward_nodes[i];
        let (bwd_us, _) = sum(attribution.backward.as_ref(), backward);
        let second: Vec<NodeId> = backward.iter().copied().filter(|id| attribution.second.contains(id)).collect();
        let (weight_grad_us, _) = sum(attribution.backward.as_ref(), &second);
        OpProfile {
            id: op.id,
            name: op.name,
            module: op.module,
            op: op.op,
            fwd_us: picoseconds(fwd_us),
            bwd_us: picoseconds(bwd_us),
            weight_grad_us: Some(picoseconds(weight_grad_us)),
            update_us: (op.param_bytes > 0).then(|| picoseconds(update_us(device, op.param_bytes))),
            spread: 0.0,
            param_bytes: op.param_bytes,
            saved_bytes: op.saved_bytes,
            out_bytes: op.out_bytes,
            workspace_bytes: 0,
            batched_grad_bytes: 0,
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

/// Rounds microseconds to whole picoseconds, so that the decimal form in a file is exact.
fn picoseconds(us: f64) -> f64 {
    (us * 1e6).round() / 1e6
}

pub fn node_cost(graph: &Graph, id: NodeId) -> Cost {
    let inputs: Vec<&Fact> = graph.inputs(id).into_iter().map(|v| graph.fact(v)).collect();
    let node = graph.node(id);
    rule(&node.op).cost(&inputs, &node.facts)
}

fn node_us(device: &Device, graph: &Graph, id: NodeId, cost: Cost) -> f64 {
    let inputs: Vec<&Fact> = graph.inputs(id).into_iter().map(|v| graph.fact(v)).collect();
    let node = graph.node(id);
    kernel_us(device, &node.op, &inputs, &node.facts, cost)
}

/// Kernel time in microseconds of an op with the given cost.
pub fn kernel_us(device: &Device, op: &Op, inputs: &[&Fact], outputs: &[Fact], cost: Cost) -> f64 {
    let facts = inputs.iter().copied().chain(outputs);
    let dtype = facts.map(|fact| fact.dtype).find(|d| d.is_float()).unwrap_or(DType::F32);
    let contracts = matches!(
        op,
        Op::MatMul(_)
            | Op::Conv(_)
            | Op::ConvInputGrad(_)
            | Op::ConvWeightGrad(_)
            | Op::Attention(_)
            | Op::AttentionGrad(_)
    );
    let rate = match contracts {
        true => CONTRACTION * contraction_peak(&device.peak_flops, dtype),
        // Matrix units only do contractions; other arithmetic on narrower types runs in f32.
        false if dtype == DType::F64 => ELEMENTWISE * device.peak_flops.f64,
        false => ELEMENTWISE * device.peak_flops.f32,
    };
    let arithmetic = cost.flops / rate;
    let memory = cost.bytes / (STREAMING * device.memory_bandwidth.0);
    (arithmetic.max(memory) + device.launch.0) * 1e6
}

/// f32 uses the f32 peak: frameworks do not use TF32 for matrix products by default.
fn contraction_peak(peak: &Peak, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => peak.f64,
        DType::Bf16 => peak.bf16,
        DType::F16 => peak.f16,
        _ => peak.f32,
    }
}
