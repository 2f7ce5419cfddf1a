//! The kernel sequence of a pass: ordered steps with the addresses of their inputs and outputs. A step runs the kernel
//! of one op, or a fused chain of elementwise ops.

use crate::device::buffer::Buffer;
use crate::device::cpu::chain::{Chain, Link, Operand};
use crate::device::cpu::{Kernel, TensorLayout};
use compiler::graph::Graph;
use compiler::op::{KernelError, NodeId, Op, Value};
use compiler::pass::attribution::runs;
use compiler::pass::batched_weight_grad::{ITEMS, joined};
use compiler::pass::fuse::{Chains, ends};
use compiler::pass::memory::{self, Needs};
use compiler::tensor::Tensor;
use compiler::tensor::fact::Fact;
use std::collections::{BTreeMap, HashMap, HashSet};

/// The storage of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// Offset in the worker's arena.
    Arena(usize),
    /// Offset in the micro-batch's block of saved activations.
    WriterConfig(usize),
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

pub enum KernelTask {
    Op(Kernel),
    Chain(Chain),
}

impl KernelTask {
    pub fn run(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]], workspace: &mut [u8]) -> Result<(), KernelError> {
        match self {
            KernelTask::Op(kernel) => kernel.run(inputs, outputs, workspace),
            KernelTask::Chain(chain) => chain.run(inputs, outputs, workspace),
        }
    }

    /// Runs and accumulates into the output. Requires [`adds`](KernelTask::adds).
    pub fn run_adding(
        &self,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        workspace: &mut [u8],
    ) -> Result<(), KernelError> {
        match self {
            KernelTask::Op(kernel) => kernel.run_adding(inputs, outputs, workspace),
            KernelTask::Chain(_) => unreachable!("chains do not accumulate"),
        }
    }

    /// The collective that this task is, and this rank's input to it; none for compute tasks.
    pub fn together(&self, inputs: &[&[u8]]) -> Option<(&Op, Tensor)> {
        match self {
            KernelTask::Op(kernel) => kernel.together(inputs),
            KernelTask::Chain(_) => None,
        }
    }

    /// True if the kernel can accumulate into its output.
    pub fn adds(&self) -> bool {
        match self {
            KernelTask::Op(kernel) => kernel.adds(),
            KernelTask::Chain(_) => false,
        }
    }

    /// Scratch bytes.
    pub fn workspace(&self) -> usize {
        match self {
            KernelTask::Op(kernel) => kernel.workspace(),
            KernelTask::Chain(chain) => chain.workspace(),
        }
    }

    pub fn ops(&self) -> usize {
        match self {
            KernelTask::Op(_) => 1,
            KernelTask::Chain(chain) => chain.ops(),
        }
    }

    /// The op name if the task runs the reference kernel because no fast one exists.
    pub fn reference_op(&self) -> Option<&'static str> {
        match self {
            KernelTask::Op(kernel) if kernel.is_reference() => Some(kernel.name()),
            _ => None,
        }
    }
}

/// The same kernel for [`ITEMS`] micro-batches of a round at once: see [`joined`].
pub struct Joint {
    /// Uses the step's workspace.
    pub kernel: Kernel,
    /// Arena buffers that collect the micro-batches' inputs, consecutively.
    pub inputs: Vec<TensorAddress>,
}

pub struct Step {
    pub task: KernelTask,
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
}

#[derive(Default)]
pub struct Sequence {
    pub steps: Vec<Step>,
    pub constants: Vec<Buffer>,
}

/// A task of a graph before tensors have addresses.
pub struct Planned {
    /// The op, or the last op of a chain.
    pub node: NodeId,
    nodes: Vec<NodeId>,
    task: KernelTask,
    joint: Option<Kernel>,
    inputs: Vec<Value>,
    outputs: Vec<Value>,
}

impl Planned {
    pub fn outputs(&self) -> &[Value] {
        &self.outputs
    }

    pub fn adds(&self) -> bool {
        self.task.adds()
    }

    fn workspace(&self) -> usize {
        self.task.workspace().max(self.joint.as_ref().map_or(0, Kernel::workspace))
    }

    /// Resolves addresses after memory planning. Buffers for batched operands are appended to `arena`, which grows.
    pub fn step(
        self,
        graph: &Graph,
        layout: &memory::Layout,
        arena: &mut usize,
        place: impl Fn(&Value) -> TensorAddress,
    ) -> Step {
        let scratch = layout.workspace.get(&self.node).copied().unwrap_or(0);
        let workspace = TensorAddress { slot: Slot::Arena(scratch), bytes: self.workspace() };
        let inputs: Vec<TensorAddress> = self.inputs.iter().map(&place).collect();
        let mut batch_buffer = |input: &TensorAddress| {
            let bytes = input.bytes * ITEMS as usize;
            *arena = memory::aligned(*arena) + memory::aligned(bytes);
            TensorAddress { slot: Slot::Arena(*arena - memory::aligned(bytes)), bytes }
        };
        let joint = self.joint.map(|kernel| Joint { kernel, inputs: inputs.iter().map(&mut batch_buffer).collect() });
        Step {
            inputs,
            outputs: self.outputs.iter().map(&place).collect(),
            workspace,
            adds_to: Vec::new(),
            terms: Vec::new(),
            joint,
            nodes: self.nodes.iter().map(|node| graph.node(*node).label().to_string()).collect(),
            task: self.task,
        }
    }
}

/// Builds the tasks of a graph in `order` and its memory layout. A fused chain whose ops lack fast kernels is
/// dissolved. A gradient term gets memory of its own if its kernel cannot accumulate. With `joins`, accumulating
/// kernels are batched over several micro-batches where that pays off.
pub fn tasks(
    graph: &Graph,
    order: &[NodeId],
    mut chains: Chains,
    needs: &Needs<'_>,
    joins: bool,
) -> (Vec<Planned>, memory::Layout) {
    let mut made: BTreeMap<NodeId, Planned> = BTreeMap::new();
    for last in chains.by_last.keys().copied().collect::<Vec<_>>() {
        match chain(graph, last, &chains) {
            Some(planned) => drop(made.insert(last, planned)),
            None => chains.dissolve(last),
        }
    }
    let in_chains: HashSet<NodeId> = chains.by_last.values().flatten().copied().collect();
    let one = |id: &NodeId| match made.remove(id) {
        Some(planned) => Some(planned),
        None if in_chains.contains(id) || !runs(&graph.node(*id).op) => None,
        None => {
            let facts: Vec<Fact> = graph.inputs(*id).iter().map(|v| graph.fact(*v).clone()).collect();
            let kernel = Kernel::new(&graph.node(*id).op, &facts, &graph.node(*id).facts);
            let (inputs, outputs) = (graph.inputs(*id), graph.values(*id));
            let is_added = joins && kernel.adds() && outputs.first().is_some_and(|made| needs.added.contains(made));
            let joint = if is_added { joint(&graph.node(*id).op, &facts, &graph.node(*id).facts) } else { None };
            Some(Planned { node: *id, nodes: vec![*id], task: KernelTask::Op(kernel), joint, inputs, outputs })
        }
    };
    let planned: Vec<Planned> = order.iter().filter_map(one).collect();
    let workspace: HashMap<NodeId, usize> = planned.iter().map(|p| (p.node, p.workspace())).collect();
    let adding = planned.iter().filter(|planned| planned.task.adds()).filter_map(|planned| planned.outputs.first());
    let added: HashSet<Value> = adding.filter(|value| needs.added.contains(value)).copied().collect();
    let layout = memory::plan(graph, order, &Needs { added: &added, workspace: &workspace, chains: &chains, ..*needs });
    (planned, layout)
}

/// The kernel that computes an op's gradient for several micro-batches at once, where that pays off.
pub fn joint(op: &Op, inputs: &[Fact], outputs: &[Fact]) -> Option<Kernel> {
    let kernel = Kernel::new(op, &joined(op, inputs, outputs.first()?)?, outputs);
    kernel.adds().then_some(kernel)
}

/// Scratch bytes of the fused chain ending with this op; 0 if its ops run one by one.
pub fn chain_workspace(graph: &Graph, last: NodeId, chains: &Chains) -> usize {
    chain(graph, last, chains).map_or(0, |planned| planned.task.workspace())
}

/// Builds a chain as one task if all its ops have fast kernels.
fn chain(graph: &Graph, last: NodeId, chains: &Chains) -> Option<Planned> {
    let ops = &chains.by_last[&last];
    let (inputs, outputs) = ends(graph, ops, &chains.inner);
    let operand = |value: Value| match ops.iter().position(|op| *op == value.node) {
        Some(made) => Some(Operand::Made(made)),
        None => inputs.iter().position(|input| *input == value).map(Operand::Given),
    };
    let link = |op: &NodeId| {
        let value = Value { node: *op, output: 0 };
        Some(Link {
            op: graph.node(*op).op.clone(),
            operands: graph.inputs(*op).into_iter().map(operand).collect::<Option<_>>()?,
            result: TensorLayout::of(graph.fact(value)),
            is_written: !chains.inner.contains(&value),
        })
    };
    let links: Vec<Link> = ops.iter().map(link).collect::<Option<_>>()?;
    let given: Vec<TensorLayout> = inputs.iter().map(|value| TensorLayout::of(graph.fact(*value))).collect();
    let task = KernelTask::Chain(Chain::new(&links, &given)?);
    Some(Planned { node: last, nodes: ops.clone(), task, joint: None, inputs, outputs })
}
