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
use runtime::exec::sequence::{chain_workspace, joint};

/// For each op, the largest workspace of its kernels and chains on this CPU, forward or backward, in bytes.
pub fn scratch(attribution: &Attribution) -> Vec<u64> {
    let of = |graph: &Graph, id: &NodeId| {
        let node = graph.node(*id);
        let inputs: Vec<Fact> = graph.inputs(*id).iter().map(|value| graph.fact(*value).clone()).collect();
        Kernel::new(&node.op, &inputs, &node.facts).workspace() as u64
    };
    let most = |graph: Option<&Graph>, nodes: &[NodeId]| {
        graph.map_or(0, |graph| nodes.iter().map(|id| of(graph, id)).max().unwrap_or(0))
    };
    let (forward, backward) = (&attribution.forward_nodes, &attribution.backward_nodes);
    let both = forward.iter().zip(backward);
    let kernels = both.map(|(forward, backward)| {
        most(Some(&attribution.forward), forward).max(most(attribution.backward.as_ref(), backward))
    });
    kernels.zip(of_chains(attribution, &*cpu())).map(|(kernels, chains)| kernels.max(chains)).collect()
}

/// For each op, the largest workspace of its fused chains on a device, in bytes.
pub fn of_chains(attribution: &Attribution, device: &dyn Device) -> Vec<u64> {
    let mut most = vec![0; attribution.ops.len()];
    let graphs = [Some(&attribution.forward), attribution.backward.as_ref()];
    for (graph, chains) in graphs.into_iter().zip(&attribution.chains) {
        let Some(graph) = graph else { continue };
        for &last in chains.by_last.keys() {
            let bytes = chain_workspace(device, graph, last, chains) as u64;
            if let Some(most) = owner(graph.node(last)).and_then(|op| most.get_mut(op)) {
                *most = bytes.max(*most);
            }
        }
    }
    most
}

/// For each op, buffer bytes and scratch bytes of batched weight gradients on a device: see
/// [`batched_weight_grad`](compiler::pass::batched_weight_grad).
pub fn of_joint(attribution: &Attribution, device: &dyn Device) -> Vec<[u64; 2]> {
    let of = |graph: &Graph, id: &NodeId| -> Option<[u64; 2]> {
        let inputs: Vec<Fact> = graph.inputs(*id).iter().map(|value| graph.fact(*value).clone()).collect();
        let kernel = joint(device, &graph.node(*id).op, &inputs, &graph.node(*id).facts).ok()??;
        Some([batched_grads(&inputs)?, kernel.workspace() as u64])
    };
    let of_op = |nodes: &Vec<NodeId>| {
        let graph = attribution.backward.iter();
        let made = graph
            .flat_map(|graph| nodes.iter().filter(|id| attribution.second.contains(id)).map(move |id| of(graph, id)));
        made.flatten().fold([0; 2], |[all, most], [bytes, scratch]| [all + bytes, most.max(scratch)])
    };
    attribution.backward_nodes.iter().map(of_op).collect()
}
