//! The kernel sequence of a pass: ordered steps with the addresses of their inputs and outputs. A step runs the kernel
//! of one op, or of a fused chain of elementwise ops.

use crate::device::api::{Device, Kernel};
use crate::device::chain::{Link, Operand};
use crate::device::error::DeviceError;
use crate::device::layout::TensorLayout;
use compiler::graph::Graph;
use compiler::op::collective::is_meeting;
use compiler::op::{NodeId, Op, Value};
use compiler::pass::attribution::runs;
use compiler::pass::batched_weight_grad::{ITEMS, joined};
use compiler::pass::fuse::{Chains, ends};
use compiler::pass::memory::{self, Needs};
use compiler::tensor::Tensor;
use compiler::tensor::fact::Fact;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// The storage of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// Offset in the worker's arena.
    Arena(usize),
    /// Offset in the micro-batch's block of saved activations.
    Saved(usize),
    /// A send buffer of the micro-batch.
    Own(usize),
    /// A buffer received from another stage.
    Received(usize),
    /// Index into `StageCode::feeds`.
    Feed(usize),
    /// A parameter at the micro-batch's weight version, by index into `StageCode::parameters`.
    Parameter(usize),
    /// Index into `StageCode::states`.
    State(usize),
    Constant(usize),
    /// Offset in the block kept from the input-gradient pass to the weight-gradient pass.
    SplitBackward(usize),
    /// A gradient term received from a later stage, by index into `StageCode::gradients_in`.
    GradientIn(usize),
    /// A gradient term sent to an earlier stage, by index into `StageCode::gradients_out`.
    GradientOut(usize),
    /// Only a gradient sum, which the producing kernel accumulates into; by index into `StageCode::gradient_terms`.
    Sum(usize),
    /// A parameter gradient term: the first term of a sum is written there, later ones to the arena until they are
    /// accumulated.
    Gradient {
        /// Index into `StageCode::gradient_terms`.
        term: usize,
        /// Offset in the arena.
        offset: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorAddress {
    pub slot: Slot,
    pub bytes: usize,
}

/// An op in which the devices of a tensor-parallel group take part together.
#[derive(Clone, Debug)]
pub struct Collective {
    pub op: Op,
    /// Layout of this device's operand.
    pub operand: TensorLayout,
}

impl Collective {
    fn of(op: &Op, operands: &[Fact]) -> Option<Collective> {
        let is_collective = is_meeting(op) || matches!(op, Op::Shard(_));
        let operand = operands.first().filter(|_| is_collective)?;
        Some(Collective { op: op.clone(), operand: TensorLayout::of(operand) })
    }
}

/// The same kernel for [`ITEMS`] micro-batches of a round at once: see [`joined`].
pub struct Joint {
    /// Uses the step's workspace.
    pub kernel: Arc<dyn Kernel>,
    /// Arena buffers that collect the micro-batches' inputs, consecutively.
    pub inputs: Vec<TensorAddress>,
}

pub struct Step {
    pub kernel: Arc<dyn Kernel>,
    /// Set if the op is a collective. Devices of a group run it together instead of the kernel.
    pub collective: Option<Collective>,
    pub inputs: Vec<TensorAddress>,
    pub outputs: Vec<TensorAddress>,
    pub workspace: TensorAddress,
    /// Gradient terms whose sums the task accumulates into, once for each; the step then has no outputs. Indices into
    /// `StageCode::gradient_terms`.
    pub adds_to: Vec<usize>,
    /// Gradient terms to accumulate into their sums after the task.
    pub terms: Vec<usize>,
    /// The batched kernel over several micro-batches, if there is one.
    pub joint: Option<Joint>,
    /// Node names in the source model: one, or those of a chain in order.
    pub nodes: Vec<String>,
}

impl Step {
    /// The node named in error messages.
    pub fn label(&self) -> &str {
        self.nodes.last().map_or("", String::as_str)
    }

    /// The op name if the step runs the reference implementation because the device has no fast kernel.
    pub fn reference_op(&self) -> Option<&'static str> {
        self.kernel.is_reference().then(|| self.kernel.name())
    }
}

#[derive(Default)]
pub struct Sequence {
    pub steps: Vec<Step>,
    /// Tensors of [`Slot::Constant`], which every executor uploads to its device.
    pub constants: Vec<Tensor>,
}

/// A task of a graph before tensors have addresses.
pub struct Planned {
    /// The op, or the last op of a chain.
    pub node: NodeId,
    nodes: Vec<NodeId>,
    kernel: Arc<dyn Kernel>,
    collective: Option<Collective>,
    joint: Option<Arc<dyn Kernel>>,
    inputs: Vec<Value>,
    outputs: Vec<Value>,
}

impl Planned {
    pub fn outputs(&self) -> &[Value] {
        &self.outputs
    }

    pub fn can_accumulate(&self) -> bool {
        self.kernel.can_accumulate()
    }

    fn workspace(&self) -> usize {
        self.kernel.workspace().max(self.joint.as_ref().map_or(0, |kernel| kernel.workspace()))
    }

    /// Resolves addresses after memory planning. Buffers for batched operands are appended to `arena_bytes`, which grows.
    pub fn step(
        self,
        graph: &Graph,
        layout: &memory::Layout,
        arena_bytes: &mut usize,
        address_of: impl Fn(&Value) -> TensorAddress,
    ) -> Step {
        let scratch = layout.workspace.get(&self.node).copied().unwrap_or(0);
        let workspace = TensorAddress { slot: Slot::Arena(scratch), bytes: self.workspace() };
        let inputs: Vec<TensorAddress> = self.inputs.iter().map(&address_of).collect();
        let mut batch_buffer = |input: &TensorAddress| {
            let bytes = input.bytes * ITEMS as usize;
            *arena_bytes = memory::aligned(*arena_bytes) + memory::aligned(bytes);
            TensorAddress { slot: Slot::Arena(*arena_bytes - memory::aligned(bytes)), bytes }
        };
        let joint = self.joint.map(|kernel| Joint { kernel, inputs: inputs.iter().map(&mut batch_buffer).collect() });
        Step {
            inputs,
            outputs: self.outputs.iter().map(&address_of).collect(),
            workspace,
            adds_to: Vec::new(),
            terms: Vec::new(),
            joint,
            nodes: self.nodes.iter().map(|node| graph.node(*node).label().to_string()).collect(),
            kernel: self.kernel,
            collective: self.collective,
        }
    }
}

/// Builds the tasks of a graph in `order` and its memory layout. A fused chain whose ops lack fast kernels is
/// dissolved. A gradient term gets memory of its own if its kernel cannot accumulate. With `joins`, accumulating
/// kernels are batched over several micro-batches where that pays off. All kernels are loaded.
pub fn plan_tasks(
    device: &dyn Device,
    graph: &Graph,
    order: &[NodeId],
    mut chains: Chains,
    needs: &Needs<'_>,
    joins: bool,
) -> Result<(Vec<Planned>, memory::Layout), DeviceError> {
    let mut fused_chains: BTreeMap<NodeId, Planned> = BTreeMap::new();
    for last in chains.by_last.keys().copied().collect::<Vec<_>>() {
        let mut planned = plan_chain(device, graph, last, &chains);
        if planned.is_none() && device.starts_chain(&graph.node(chains.by_last[&last][0]).op) {
            // The other ops may suit without the first.
            chains.without_first(last);
            planned = chains.by_last.get(&last).and_then(|_| plan_chain(device, graph, last, &chains));
        }
        match planned {
            Some(planned) => drop(fused_chains.insert(last, planned)),
            None => chains.dissolve(last),
        }
    }
    if device.load(&fused_chains.values().map(|planned| &*planned.kernel).collect::<Vec<_>>()).is_err() {
        // A failure to compile is reported for the ops one by one.
        fused_chains.retain(|last, planned| {
            let is_loaded = device.load(&[&*planned.kernel]).is_ok();
            if !is_loaded {
                chains.dissolve(*last);
            }
            is_loaded
        });
    }
    let in_chains: HashSet<NodeId> = chains.by_last.values().flatten().copied().collect();
    let mut planned: Vec<Planned> = Vec::new();
    for id in order {
        if let Some(chain) = fused_chains.remove(id) {
            planned.push(chain);
            continue;
        }
        let node = graph.node(*id);
        if in_chains.contains(id) || !runs(&node.op) {
            continue;
        }
        let facts: Vec<Fact> = graph.inputs(*id).iter().map(|v| graph.fact(*v).clone()).collect();
        let kernel = device.kernel(&node.op, &facts, &node.facts)?;
        let (inputs, outputs) = (graph.inputs(*id), graph.values(*id));
        let is_added = joins
            && kernel.can_accumulate()
            && outputs.first().is_some_and(|output| needs.accumulated.contains(output));
        let joint = if is_added { batched_kernel(device, &node.op, &facts, &node.facts)? } else { None };
        let collective = Collective::of(&node.op, &facts);
        planned.push(Planned { node: *id, nodes: vec![*id], kernel, collective, joint, inputs, outputs });
    }
    let kernels = planned.iter().flat_map(|planned| planned.joint.iter().chain([&planned.kernel]));
    device.load(&kernels.map(|kernel| &**kernel).collect::<Vec<_>>())?;
    let workspace: HashMap<NodeId, usize> = planned.iter().map(|p| (p.node, p.workspace())).collect();
    let accumulating =
        planned.iter().filter(|planned| planned.can_accumulate()).filter_map(|planned| planned.outputs.first());
    let added: HashSet<Value> = accumulating.filter(|value| needs.accumulated.contains(value)).copied().collect();
    let is_term = |planned: &&Planned| planned.outputs.first().is_some_and(|output| added.contains(output));
    let term_kernels = planned.iter().filter(is_term).flat_map(|planned| planned.joint.iter().chain([&planned.kernel]));
    device.load_terms(&term_kernels.map(|kernel| &**kernel).collect::<Vec<_>>())?;
    let layout =
        memory::plan(graph, order, &Needs { accumulated: &added, workspace: &workspace, chains: &chains, ..*needs });
    Ok((planned, layout))
}

/// The kernel that computes an op's gradient for several micro-batches at once, where that pays off.
pub fn batched_kernel(
    device: &dyn Device,
    op: &Op,
    inputs: &[Fact],
    outputs: &[Fact],
) -> Result<Option<Arc<dyn Kernel>>, DeviceError> {
    let Some(inputs) = outputs.first().and_then(|output| joined(op, inputs, output)) else { return Ok(None) };
    let kernel = device.kernel(op, &inputs, outputs)?;
    Ok(kernel.can_accumulate().then_some(kernel))
}

/// Scratch bytes of the fused chain ending with this op; 0 if its ops run one by one.
pub fn chain_workspace(device: &dyn Device, graph: &Graph, last: NodeId, chains: &Chains) -> usize {
    plan_chain(device, graph, last, chains).map_or(0, |planned| planned.kernel.workspace())
}

/// Builds a chain as one task if all its ops have fast kernels.
fn plan_chain(device: &dyn Device, graph: &Graph, last: NodeId, chains: &Chains) -> Option<Planned> {
    let ops = &chains.by_last[&last];
    let (inputs, outputs) = ends(graph, ops, &chains.inner);
    let operand = |value: Value| match ops.iter().position(|op| *op == value.node) {
        Some(index) => Some(Operand::Result(index)),
        None => inputs.iter().position(|input| *input == value).map(Operand::Input),
    };
    let link = |op: &NodeId| {
        let value = Value { node: *op, output: 0 };
        Some(Link {
            op: graph.node(*op).op.clone(),
            operands: graph.inputs(*op).into_iter().map(operand).collect::<Option<_>>()?,
            result: TensorLayout::of(graph.fact(value)),
            is_written: !chains.inner.contains(&value),
            further_results: graph.node(*op).facts.iter().skip(1).map(TensorLayout::of).collect(),
        })
    };
    let links: Vec<Link> = ops.iter().map(link).collect::<Option<_>>()?;
    let layouts: Vec<TensorLayout> = inputs.iter().map(|value| TensorLayout::of(graph.fact(*value))).collect();
    let kernel = device.chain(&links, &layouts)?;
    Some(Planned { node: last, nodes: ops.clone(), kernel, collective: None, joint: None, inputs, outputs })
}
