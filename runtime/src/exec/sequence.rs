//! The sequence of a pass: kernel tasks in order, each with the addresses of its inputs and outputs. A task is the kernel of one op,
//! or a fused chain of elementwise ops.

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

/// Where a kernel finds one of its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// In the worker's arena, at this offset.
    Arena(usize),
    /// In the item's block that is kept for its backward run.
    Kept(usize),
    /// In the item's buffer that is sent to other stages.
    Own(usize),
    /// In the item's buffer that came from another stage.
    Received(usize),
    /// In the item's data, by place in `StageCode::feeds`.
    Feed(usize),
    /// A parameter at the item's version, by place in `StageCode::parameters`.
    Parameter(usize),
    /// A state, by place in `StageCode::states`.
    State(usize),
    /// A constant of this sequence.
    Constant(usize),
    /// In the item's block that is kept from the first part of its backward run to the second.
    Between(usize),
    /// A gradient term that came from a later stage, by place in `StageCode::gradients_in`.
    GradientIn(usize),
    /// A gradient term that is sent to an earlier stage, by place in `StageCode::gradients_out`.
    GradientOut(usize),
    /// Nowhere but in a sum of gradients, to which its maker adds it; by place in `StageCode::gradient_terms`.
    Sum(usize),
    /// A term of a parameter's gradient: in its sum where it is the first, else in the worker's arena until it has been added.
    Gradient {
        /// By place in `StageCode::gradient_terms`.
        term: usize,
        /// Its offset in the arena.
        offset: usize,
    },
}

/// A tensor in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorAddress {
    /// Where it begins.
    pub slot: Slot,
    /// How long it is.
    pub bytes: usize,
}

/// What a step runs.
pub enum KernelTask {
    /// One op.
    Op(Kernel),
    /// Elementwise ops together.
    Chain(Chain),
}

impl KernelTask {
    /// Runs it on the bytes of its tensors.
    pub fn run(&self, inputs: &[&[u8]], outputs: &mut [&mut [u8]], workspace: &mut [u8]) -> Result<(), KernelError> {
        match self {
            KernelTask::Op(kernel) => kernel.run(inputs, outputs, workspace),
            KernelTask::Chain(chain) => chain.run(inputs, outputs, workspace),
        }
    }

    /// Runs, and adds the result to what the output holds; only where it [`adds`](Task::adds).
    pub fn run_adding(
        &self,
        inputs: &[&[u8]],
        outputs: &mut [&mut [u8]],
        workspace: &mut [u8],
    ) -> Result<(), KernelError> {
        match self {
            KernelTask::Op(kernel) => kernel.run_adding(inputs, outputs, workspace),
            KernelTask::Chain(_) => unreachable!("chains do not add"),
        }
    }

    /// What devices that share a stage do together, and this device's tensor.
    pub fn together(&self, inputs: &[&[u8]]) -> Option<(&Op, Tensor)> {
        match self {
            KernelTask::Op(kernel) => kernel.together(inputs),
            KernelTask::Chain(_) => None,
        }
    }

    /// Whether it can add to what its output holds.
    pub fn adds(&self) -> bool {
        match self {
            KernelTask::Op(kernel) => kernel.adds(),
            KernelTask::Chain(_) => false,
        }
    }

    /// Bytes of scratch that it needs.
    pub fn workspace(&self) -> usize {
        match self {
            KernelTask::Op(kernel) => kernel.workspace(),
            KernelTask::Chain(chain) => chain.workspace(),
        }
    }

    /// How many ops it is.
    pub fn ops(&self) -> usize {
        match self {
            KernelTask::Op(_) => 1,
            KernelTask::Chain(chain) => chain.ops(),
        }
    }

    /// The op that runs its reference rule, for want of a fast kernel.
    pub fn reference_op(&self) -> Option<&'static str> {
        match self {
            KernelTask::Op(kernel) if kernel.is_reference() => Some(kernel.name()),
            _ => None,
        }
    }
}

/// The same work for [`ITEMS`] items of a round at once: see [`joined`].
pub struct Joint {
    /// The kernel. It uses the step's workspace.
    pub kernel: Kernel,
    /// Where the items' inputs are put by, one behind the other.
    pub inputs: Vec<TensorAddress>,
}

/// One task with its tensors.
pub struct Step {
    /// What it runs.
    pub task: KernelTask,
    /// What it reads.
    pub inputs: Vec<TensorAddress>,
    /// What it writes.
    pub outputs: Vec<TensorAddress>,
    /// Its workspace in the arena.
    pub workspace: TensorAddress,
    /// The terms of parameters' gradients to whose sums it adds what it makes, once for each; it has no output then. By place in
    /// `StageCode::gradient_terms`.
    pub adds_to: Vec<usize>,
    /// The terms that are added to their sums when it has run.
    pub terms: Vec<usize>,
    /// How it adds for several items at once, where it does.
    pub joint: Option<Joint>,
    /// Its nodes, in the words of the source model: one, or those of a chain in their order.
    pub nodes: Vec<String>,
}

impl Step {
    /// The node that it stands for in messages.
    pub fn told(&self) -> &str {
        self.nodes.last().map_or("", String::as_str)
    }
}

/// Steps in order.
#[derive(Default)]
pub struct Sequence {
    /// The steps.
    pub steps: Vec<Step>,
    /// The constants they read.
    pub constants: Vec<Buffer>,
}

/// A task of a graph, whose tensors have no places yet.
pub struct Planned {
    /// The op, or the last of a chain.
    pub node: NodeId,
    /// The op, or all of a chain.
    nodes: Vec<NodeId>,
    task: KernelTask,
    /// What runs for several items at once.
    joint: Option<Kernel>,
    inputs: Vec<Value>,
    outputs: Vec<Value>,
}

impl Planned {
    /// What it writes.
    pub fn outputs(&self) -> &[Value] {
        &self.outputs
    }

    /// Whether it can add to what its output holds.
    pub fn adds(&self) -> bool {
        self.task.adds()
    }

    fn workspace(&self) -> usize {
        self.task.workspace().max(self.joint.as_ref().map_or(0, Kernel::workspace))
    }

    /// The step, where the graph is laid out. What it puts by lies behind `arena`, which grows by it.
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
        let mut put_by = |input: &TensorAddress| {
            let bytes = input.bytes * ITEMS as usize;
            *arena = memory::aligned(*arena) + memory::aligned(bytes);
            TensorAddress { slot: Slot::Arena(*arena - memory::aligned(bytes)), bytes }
        };
        let joint = self.joint.map(|kernel| Joint { kernel, inputs: inputs.iter().map(&mut put_by).collect() });
        Step {
            inputs,
            outputs: self.outputs.iter().map(&place).collect(),
            workspace,
            adds_to: Vec::new(),
            terms: Vec::new(),
            joint,
            nodes: self.nodes.iter().map(|node| graph.node(*node).told().to_string()).collect(),
            task: self.task,
        }
    }
}

/// The tasks of a graph that is run in `order`, and where its tensors lie. Of ops that could run together, those stay apart that have no
/// fast kernels; of the values that may be added to sums as they are made, those have places whose tasks cannot add. Where it `joins`, the
/// others are made of several items at once where that is worth while.
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

/// The kernel that makes an op's gradient of several items at once, where that is worth while.
pub fn joint(op: &Op, inputs: &[Fact], outputs: &[Fact]) -> Option<Kernel> {
    let kernel = Kernel::new(op, &joined(op, inputs, outputs.first()?)?, outputs);
    kernel.adds().then_some(kernel)
}

/// Bytes of scratch that the chain needs which ends with this op; none where its ops run one by one.
pub fn chain_workspace(graph: &Graph, last: NodeId, chains: &Chains) -> usize {
    chain(graph, last, chains).map_or(0, |planned| planned.task.workspace())
}

/// A chain as one task, where all of its ops have fast kernels.
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
