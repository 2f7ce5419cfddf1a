//! The scratch memory of this CPU's kernels, which needs no measuring: a kernel knows it when it is made.

use compiler::graph::Graph;
use compiler::op::NodeId;
use compiler::pass::attribution::Attribution;
use compiler::tensor::fact::Fact;
use runtime::device::cpu::Kernel;

/// For every op the bytes of workspace of the kernel that needs most, forward or backward.
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
    both.map(|(forward, backward)| {
        most(Some(&attribution.forward), forward).max(most(attribution.backward.as_ref(), backward))
    })
    .collect()
}
