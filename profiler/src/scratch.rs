//! Scratch memory of kernels and fused chains. Kernels know it when they are created, so nothing is
//! measured.

use compiler::graph::Graph;
use compiler::op::NodeId;
use compiler::pass::attribution::{Attribution, owner};
use compiler::pass::batched_weight_grad::batched_grads;
use compiler::tensor::fact::Fact;
use runtime::device::api::Device;
use runtime::device::cpu::Kernel;
use runtime::device::cpu::device::cpu;
use runtime::exec::sequence::{batched_kernel, chain_workspace};

/// For each op, the largest workspace of its kernels and chains on this CPU, forward or backward, in bytes.
pub fn scratch(attribution: &Attribution) -> Vec<u64> {
    let workspace = |graph: &Graph, id: &NodeId| {
        let node = graph.node(*id);
        let inputs: Vec<Fact> = graph.inputs(*id).iter().map(|value| graph.fact(*value).clone()).collect();
        Kernel::new(&node.op, &inputs, &node.facts).workspace() as u64
    };
    let largest = |graph: Option<&Graph>, nodes: &[NodeId]| {
        graph.map_or(0, |graph| nodes.iter().map(|id| workspace(graph, id)).max().unwrap_or(0))
    };
    let (forward, backward) = (&attribution.forward_nodes, &attribution.backward_nodes);
    let both = forward.iter().zip(backward);
    let kernels = both.map(|(forward, backward)| {
        largest(Some(&attribution.forward), forward).max(largest(attribution.backward.as_ref(), backward))
    });
    kernels.zip(chain_workspaces(attribution, &*cpu())).map(|(kernels, chains)| kernels.max(chains)).collect()
}

/// For each op, the largest workspace of its fused chains on a device, in bytes.
pub fn chain_workspaces(attribution: &Attribution, device: &dyn Device) -> Vec<u64> {
    let mut largest = vec![0; attribution.ops.len()];
    let graphs = [Some(&attribution.forward), attribution.backward.as_ref()];
    for (graph, chains) in graphs.into_iter().zip(&attribution.chains) {
        let Some(graph) = graph else { continue };
        for &last in chains.by_last.keys() {
            let bytes = chain_workspace(device, graph, last, chains) as u64;
            if let Some(largest) = owner(graph.node(last)).and_then(|op| largest.get_mut(op)) {
                *largest = bytes.max(*largest);
            }
        }
    }
    largest
}

/// For each op, buffer bytes and scratch bytes of batched weight gradients on a device: see
/// [`batched_weight_grad`](compiler::pass::batched_weight_grad).
pub fn batched_gradients(attribution: &Attribution, device: &dyn Device) -> Vec<[u64; 2]> {
    let batched_bytes = |graph: &Graph, id: &NodeId| -> Option<[u64; 2]> {
        let inputs: Vec<Fact> = graph.inputs(*id).iter().map(|value| graph.fact(*value).clone()).collect();
        let kernel = batched_kernel(device, &graph.node(*id).op, &inputs, &graph.node(*id).facts).ok()??;
        Some([batched_grads(&inputs)?, kernel.workspace() as u64])
    };
    let op_bytes = |nodes: &Vec<NodeId>| {
        let graph = attribution.backward.iter();
        let sizes = graph.flat_map(|graph| {
            nodes.iter().filter(|id| attribution.second.contains(id)).map(move |id| batched_bytes(graph, id))
        });
        sizes.flatten().fold([0; 2], |[total, largest], [bytes, scratch]| [total + bytes, largest.max(scratch)])
    };
    attribution.backward_nodes.iter().map(op_bytes).collect()
}
