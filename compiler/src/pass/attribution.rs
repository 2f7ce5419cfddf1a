//! Attributes every executed node to one op of the plan.
//!
//! Plans and profiles refer to the numbered ops of a graph, but a run also executes backward nodes, the loss, and large
//! constant expressions. Here the whole graph is compiled as a single stage and every executed node is assigned to one
//! op. A backward node belongs to the op whose rule emitted it. A loss belongs to the op that computes the predictions,
//! a constant expression to its first reader. Sums of times and saved bytes over ops then equal those of the run.

use super::backward::BackwardError;
use super::backward::{Backward, Made, Read, ReceivedGradients, backward};
use super::fragment::{Fragment, FragmentError, fragments};
use super::fuse::{Chains, Rules, chains};
use super::loss::{LOSS, Loss, LossError, TARGET, attach};
use super::memory::{ALIGNMENT, Needs, SharedArena, tensors};
use super::pipeline::{self, PassBug};
use crate::graph::{Graph, Node, Origin, order};
use crate::op::dropout::COUNTER;
use crate::op::table::rule;
use crate::op::{NodeId, Op, Unary, Value};
use crate::pass::gradient_accumulation::{accumulated_in_place, root, summed};
use crate::profile::arena::{Live, raise};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use thiserror::Error;

mod halves;

/// The gradient that starts the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Training {
    /// Inference: no backward.
    No,
    /// The gradient of the first float output that depends on a parameter. A graph without such an output has no
    /// backward, which is not an error.
    Gradient,
    /// This loss of the first output, with its class axis.
    Loss(Loss, Option<i64>),
}

#[derive(Debug, Error)]
pub enum AttributionError {
    #[error("the model has no op that depends on an input or a parameter")]
    Empty,
    #[error("the size of `{node}` is unknown or too large: {fact}; give its symbols a size")]
    Size { node: String, fact: String },
    #[error(transparent)]
    Loss(#[from] LossError),
    #[error(transparent)]
    Fragment(#[from] FragmentError),
    #[error(transparent)]
    Bug(#[from] PassBug),
    #[error(transparent)]
    Backward(Box<BackwardError>),
}

/// The executed nodes per op. Node ids refer to the graphs stored here, except in `ops`.
#[derive(Clone, Debug)]
pub struct Attribution {
    /// The numbered ops, as nodes of the original graph.
    pub ops: Vec<NodeId>,
    /// The value of the original graph that receives a gradient under [`Training::Gradient`].
    pub seeded: Option<Value>,
    pub forward: Graph,
    pub backward: Option<Graph>,
    /// Per op, the nodes of `forward` with a kernel, in order.
    pub forward_nodes: Vec<Vec<NodeId>>,
    /// Per op, the nodes of `backward` with a kernel, in order.
    pub backward_nodes: Vec<Vec<NodeId>>,
    /// The weight-gradient nodes of `backward`, which no earlier op waits for: the second part of a split backward.
    pub second: HashSet<NodeId>,
    /// Fused chains of `forward` and `backward`. Each is within one op, so no cut divides it.
    pub chains: [Chains; 2],
    /// Per op, the bytes of the targets that its loss reads; the original graph has no targets.
    pub target_bytes: Vec<u64>,
    /// Values of `forward` saved for the backward.
    pub saved: HashSet<Value>,
    /// Per op, the bytes of its outputs saved for the backward.
    pub saved_bytes: Vec<u64>,
    /// Per op, the peak of transient bytes during its forward or backward nodes. Saved tensors, parameters and gradient
    /// sums are excluded; a gradient is alive until it has been accumulated.
    pub live: Vec<Live>,
    /// Per op, the bytes that the input-gradient part of a split backward keeps for the op's weight-gradient part.
    pub between_bytes: Vec<u64>,
    /// Per op, the bytes of output gradients that the weight-gradient part of a split backward reads.
    pub arriving_bytes: Vec<u64>,
    /// Ops with a backward node that both reads parameters and computes parameter gradients.
    pub read_as_made: HashSet<usize>,
}

/// Tests whether a node has a kernel: sources exist already, and views alias their input.
pub fn runs(op: &Op) -> bool {
    !matches!(op, Op::Input(_) | Op::Parameter(_) | Op::State(_) | Op::Constant(_)) && !rule(op).is_view()
}

/// A graph with its training ops; every node is tagged with the op it is attributed to.
#[derive(Clone, Debug)]
pub struct Tagged {
    /// The tagged graph; [`owner`] reads a tag.
    pub graph: Graph,
    pub ops: Vec<NodeId>,
    /// The value that receives a gradient, and the node after the last stage that represents its reader.
    pub seeded: Option<(Value, NodeId)>,
}

/// Adds the training ops to a graph, and tags every node.
pub fn tagged(graph: &Graph, training: Training) -> Result<Tagged, AttributionError> {
    check_sizes(graph)?;
    let ops = order::numbered(graph);
    if ops.is_empty() {
        return Err(AttributionError::Empty);
    }
    let mut tagged = graph.clone();
    let mut seeded = None;
    match training {
        Training::No => {}
        Training::Loss(loss, axis) => {
            attach(&mut tagged, loss, axis)?;
        }
        Training::Gradient => {
            // A reader in a later stage sends the gradient, whatever the loss will be.
            seeded = seeded_output(graph, &ops).map(|value| {
                let reader = tagged.add(Op::Unary(Unary::Neg), &[value], &Origin::default());
                (value, reader.expect("every float can be negated"))
            });
        }
    }
    tag(&mut tagged, &ops);
    Ok(Tagged { graph: tagged, ops, seeded })
}

/// Attributes a graph of fixed sizes that has no loss yet.
pub fn attribute(graph: &Graph, training: Training) -> Result<Attribution, AttributionError> {
    let Tagged { graph: tagged, ops, seeded } = tagged(graph, training)?;
    let mut stage_of: HashMap<NodeId, usize> = HashMap::new();
    let mut received = ReceivedGradients::new();
    if let Some((value, reader)) = seeded {
        stage_of.insert(reader, 1);
        received.insert((value, 1, 0));
    }
    let stages = 1 + stage_of.len();
    for id in order::executed(&tagged) {
        stage_of.entry(id).or_insert(0);
    }
    let mut fragment = fragments(&tagged, &stage_of, stages)?.swap_remove(0);
    pipeline::forward(&mut fragment)?;
    let loss = match training {
        Training::Loss(..) => loss_of(&fragment),
        _ => None,
    };
    let is_training = loss.is_some() || !received.is_empty();
    let backward = if is_training {
        Some(backward(&fragment, loss, &received).map_err(Box::new).map_err(AttributionError::Backward)?)
    } else {
        None
    };
    let leaders = leaders(graph, &ops);
    let mut attribution = of_stage(fragment, backward, ops, seeded.map(|(value, _)| value), &leaders, [None, None]);
    if !matches!(training, Training::Loss(..)) {
        // In this case the input with the reserved name belongs to the model.
        attribution.target_bytes.fill(0);
    }
    Ok(attribution)
}

/// The loss of the fragment that computes it.
pub fn loss_of(fragment: &Fragment) -> Option<Value> {
    fragment.graph.outputs.iter().rev().find(|o| o.name == LOSS).map(|o| o.value)
}

/// Attributes the forward and backward of one stage, whose nodes are tagged with the numbers of `ops`. Nodes of other
/// ops cost nothing. With `arenas`, both runs are parts of longer ones, and tensors alive across the boundary count.
pub fn of_stage(
    fragment: Fragment,
    backward: Option<Backward>,
    ops: Vec<NodeId>,
    seeded: Option<Value>,
    leaders: &[Option<usize>],
    arenas: [Option<&SharedArena>; 2],
) -> Attribution {
    let forward_order = order::canonical(&fragment.graph);
    let forward_owners = owners(&fragment.graph, &forward_order);
    let forward_nodes = by_owner(&fragment.graph, &forward_order, &forward_owners, ops.len());
    let target_bytes = targets_by_owner(&fragment.graph, &forward_owners, ops.len());
    let saved: Vec<Value> = backward.iter().flat_map(|b| &b.reads).filter_map(|(_, read)| saved_value(read)).collect();
    let saved_bytes = saved_by_owner(&fragment, &forward_owners, &saved, ops.len());
    let saved_set: HashSet<Value> = saved.iter().copied().collect();
    let backward_order = backward.as_ref().map(|backward| order::canonical(&backward.graph)).unwrap_or_default();
    let backward_owners =
        backward.as_ref().map(|backward| owners(&backward.graph, &backward_order)).unwrap_or_default();
    let mut peaks = PeakBytes(vec![Live::default(); ops.len()]);
    let empty = HashSet::new();
    // A run within a longer one is never cut.
    let group = |(op, leader): (usize, &Option<usize>)| if arenas[0].is_some() { 0 } else { leader.unwrap_or(op) };
    let groups: Vec<usize> = leaders.iter().enumerate().map(group).collect();
    let (groups, arena) = (&groups[..], arenas[0]);
    let (graph, order, owners) = (&fragment.graph, &forward_order, &forward_owners);
    let run = Run { graph, order, owners, groups, arena, is_forward: true };
    let mut chains = [peaks.look(&run, [&saved_set, &empty], &[false, true]), Chains::default()];
    let mut backward_nodes = vec![Vec::new(); ops.len()];
    let mut second = HashSet::new();
    let [mut between_bytes, mut arriving_bytes] = [vec![0; ops.len()], vec![0; ops.len()]];
    let mut joint = HashSet::new();
    if let Some(backward) = &backward {
        backward_nodes = by_owner(&backward.graph, &backward_order, &backward_owners, ops.len());
        let accumulated = accumulated_in_place(&backward.graph, &summed(backward, &|_| false));
        let (graph, order, owners, arena) = (&backward.graph, &backward_order, &backward_owners, arenas[1]);
        let backward_run = Run { graph, order, owners, groups, arena, is_forward: false };
        chains[1] = peaks.look(&backward_run, [&empty, &accumulated], &[false]);
        joint = read_as_made(backward, owners);
        let halves = halves::halves(backward, leaders);
        let in_halves: Vec<NodeId> = halves.in_order(&backward_order);
        peaks.look(&Run { order: &in_halves, ..backward_run }, [&halves.between, &accumulated], &[true]);
        second = halves.second;
        [between_bytes, arriving_bytes] = halves.bytes;
    }
    Attribution {
        ops,
        seeded,
        forward: fragment.graph,
        backward: backward.map(|backward| backward.graph),
        forward_nodes,
        backward_nodes,
        second,
        chains,
        target_bytes,
        saved: saved_set,
        saved_bytes,
        live: peaks.0,
        between_bytes,
        arriving_bytes,
        read_as_made: joint,
    }
}

/// Ops with a node that reads parameters and computes parameter gradients.
fn read_as_made(backward: &Backward, owners: &HashMap<NodeId, usize>) -> HashSet<usize> {
    let graph = &backward.graph;
    let is_gradient = |role: &Made| matches!(role, Made::Parameter(_));
    let gradients = backward.output_roles.iter().zip(&graph.outputs).filter(|(role, _)| is_gradient(role));
    let producers: HashSet<NodeId> = gradients.map(|(_, output)| root(graph, output.value).node).collect();
    let is_parameter = |value: &Value| matches!(graph.node(root(graph, *value).node).op, Op::Parameter(_));
    let joint = producers.into_iter().filter(|producer| graph.inputs(*producer).iter().any(is_parameter));
    joint.filter_map(|producer| owners.get(&producer).copied()).collect()
}

fn check_sizes(graph: &Graph) -> Result<(), AttributionError> {
    for id in graph.ids() {
        let node = graph.node(id);
        let unknown = |fact: &&crate::tensor::fact::Fact| fact.bytes().is_none() || fact.concrete().is_none();
        if let Some(fact) = node.facts.iter().find(unknown) {
            let name = node.label();
            return Err(AttributionError::Size { node: name.to_string(), fact: fact.to_string() });
        }
    }
    Ok(())
}

/// The nodes that depend on input data. Nodes of parameters or random numbers alone do not count; nodes of both do, as
/// in a model fed with noise.
pub fn of_data(graph: &Graph) -> HashSet<NodeId> {
    let [mut data, mut random, mut parameters] = [(); 3].map(|()| HashSet::new());
    for id in order::canonical(graph) {
        let inputs = graph.inputs(id);
        let any = |set: &HashSet<NodeId>| inputs.iter().any(|v| set.contains(&v.node));
        let (is_random, is_learned) = (any(&random), any(&parameters));
        let set = match &graph.node(id).op {
            Op::Input(input) if input.name == COUNTER => &mut random,
            Op::Input(_) => &mut data,
            Op::Parameter(_) | Op::State(_) => &mut parameters,
            _ if any(&data) || (is_random && is_learned) => &mut data,
            _ if is_random => &mut random,
            _ if is_learned => &mut parameters,
            _ => continue,
        };
        set.insert(id);
    }
    data
}

/// Per op, the first data-dependent op that it leads to: itself, or for parameter-only and random-only ops a reader. A
/// dropout mask is thus generated in the stage that uses it.
pub fn leaders(graph: &Graph, ops: &[NodeId]) -> Vec<Option<usize>> {
    let data = of_data(graph);
    let op_index: HashMap<NodeId, usize> = ops.iter().enumerate().map(|(at, id)| (*id, at)).collect();
    let mut leaders = vec![None; ops.len()];
    for (at, id) in ops.iter().enumerate().rev() {
        let readers =
            graph.successors(*id).into_iter().filter_map(|reader| op_index.get(&graph.op_of(reader)).copied());
        let first = readers.filter_map(|reader| leaders[reader]).min();
        leaders[at] = if data.contains(id) { Some(at) } else { first };
    }
    leaders
}

fn seeded_output(graph: &Graph, ops: &[NodeId]) -> Option<Value> {
    let op_set: HashSet<NodeId> = ops.iter().copied().collect();
    let mut parameters: HashSet<NodeId> = HashSet::new();
    for id in order::canonical(graph) {
        let is = matches!(graph.node(id).op, Op::Parameter(_));
        if is || graph.inputs(id).iter().any(|v| parameters.contains(&v.node)) {
            parameters.insert(id);
        }
    }
    let can_be_seeded = |v: &Value| {
        graph.fact(*v).dtype.is_float() && parameters.contains(&v.node) && op_set.contains(&graph.op_of(v.node))
    };
    graph.outputs.iter().map(|o| o.value).find(can_be_seeded)
}

/// Tags each node with the number of its op. The tag replaces the source name, which every pass preserves. `ops` are
/// those of the graph before a loss was attached.
pub fn tag(graph: &mut Graph, ops: &[NodeId]) {
    let mut owner: HashMap<NodeId, usize> = ops.iter().enumerate().map(|(i, id)| (*id, i)).collect();
    let order = order::canonical(graph);
    for &id in &order {
        if let Some(op) = graph.node(id).part_of.and_then(|op| owner.get(&op).copied()) {
            owner.insert(id, op);
        }
    }
    let source = |op: &Op| matches!(op, Op::Input(_) | Op::Parameter(_) | Op::State(_));
    // Nodes after the ops: the loss.
    for &id in &order {
        let last = graph.inputs(id).iter().filter_map(|v| owner.get(&v.node).copied()).max();
        if let (None, Some(last)) = (owner.get(&id), last) {
            owner.insert(id, last);
        }
    }
    // Constant expressions that ops read.
    for &id in order.iter().rev().filter(|id| !source(&graph.node(**id).op)) {
        let first = graph.successors(id).iter().filter_map(|n| owner.get(n).copied()).min();
        if let (None, Some(first)) = (owner.get(&id), first) {
            owner.insert(id, first);
        }
    }
    for id in order {
        let source = owner.get(&id).map(usize::to_string).unwrap_or_default();
        graph.node_mut(id).origin = Origin { source, module: String::new() };
    }
}

/// The op number in a node's tag.
pub fn owner(node: &Node) -> Option<usize> {
    node.origin.source.parse().ok()
}

/// The op of each node of a compiled graph. Sums of parameter gradients come from no rule; they belong to the latest op
/// that contributes.
fn owners(graph: &Graph, order: &[NodeId]) -> HashMap<NodeId, usize> {
    let mut owners = HashMap::new();
    for &id in order {
        let direct = owner(graph.node(id));
        let inherited = || graph.inputs(id).iter().filter_map(|v| owners.get(&v.node).copied()).max();
        if let Some(owner) = direct.or_else(inherited) {
            owners.insert(id, owner);
        }
    }
    owners
}

fn by_owner(graph: &Graph, order: &[NodeId], owners: &HashMap<NodeId, usize>, ops: usize) -> Vec<Vec<NodeId>> {
    let mut nodes = vec![Vec::new(); ops];
    for &id in order {
        if let (true, Some(&owner)) = (runs(&graph.node(id).op), owners.get(&id)) {
            nodes[owner].push(id);
        }
    }
    nodes
}

/// Per op, the bytes of the targets that its loss reads.
fn targets_by_owner(graph: &Graph, owners: &HashMap<NodeId, usize>, ops: usize) -> Vec<u64> {
    let mut bytes = vec![0; ops];
    for id in graph.ids().filter(|id| matches!(&graph.node(*id).op, Op::Input(input) if input.name == TARGET)) {
        let value = Value { node: id, output: 0 };
        let owner = graph.consumers(value).iter().filter_map(|(reader, _)| owners.get(reader)).min();
        if let Some(&owner) = owner {
            bytes[owner] += graph.fact(value).bytes().unwrap_or(0);
        }
    }
    bytes
}

#[derive(Clone, Copy)]
struct Run<'a> {
    graph: &'a Graph,
    order: &'a [NodeId],
    owners: &'a HashMap<NodeId, usize>,
    /// Per op, the representative of the ops that always share its stage.
    groups: &'a [usize],
    arena: Option<&'a SharedArena>,
    is_forward: bool,
}

struct PeakBytes(Vec<Live>);

impl PeakBytes {
    /// Raises each op's peaks, for whole or split backwards, to the bytes alive while its nodes run. Returns the fused
    /// chains.
    fn look(&mut self, run: &Run<'_>, [saved, accumulated]: [&HashSet<Value>; 2], is_split: &[bool]) -> Chains {
        let Run { graph, order, owners, arena, is_forward, .. } = *run;
        let (empty, workspace, no_chains) = (HashSet::new(), HashMap::new(), Chains::default());
        let needs = Needs {
            separate: &empty,
            saved,
            retained: &empty,
            accumulated,
            workspace: &workspace,
            chains: &no_chains,
            arena,
        };
        // Nodes of one op are never separated.
        let has_one_owner = |a, b| owners.get(&a) == owners.get(&b);
        let (chains, alive) = chains(graph, order, &needs, &Rules { can_join: &has_one_owner, can_start: &|_| false });
        let crossing = self.crossing(run, &Needs { chains: &chains, ..needs });
        for ((id, alive), [made, read]) in order.iter().zip(alive).zip(crossing) {
            if let (true, Some(&owner)) = (runs(&graph.node(*id).op), owners.get(id)) {
                let live = &mut self.0[owner];
                // In the forward, an op reads from the ops it sends gradients to.
                let sides = if is_forward { [read, made] } else { [made, read] };
                for is_split in is_split {
                    let peak = if *is_split { &mut live.split } else { &mut live.whole };
                    raise(peak, alive as u64, sides);
                }
            }
        }
        chains
    }

    /// Per node, the live bytes that its group makes for other groups, and that other groups make for it.
    fn crossing(&self, run: &Run<'_>, needs: &Needs<'_>) -> Vec<[u64; 2]> {
        let Run { graph, order, owners, groups, arena, .. } = *run;
        let group = |id: &NodeId| owners.get(id).map(|owner| groups[*owner]);
        // Per group, the positions of its nodes and the positions at which they run.
        let mut nodes: BTreeMap<usize, Vec<[usize; 2]>> = BTreeMap::new();
        for (at, (id, runs_at)) in order.iter().zip(needs.chains.run_positions(order)).enumerate() {
            if let Some(group) = group(id) {
                nodes.entry(group).or_default().push([at, runs_at]);
            }
        }
        let outgoing: HashSet<Value> =
            arena.into_iter().flat_map(|arena| &arena.outgoing).map(|value| root(graph, *value)).collect();
        let mut crossing = vec![[0; 2]; order.len()];
        for tensor in tensors(graph, order, needs) {
            let is_incoming = arena.is_some_and(|arena| arena.incoming.contains(&tensor.root));
            let producer = group(&tensor.root.node).filter(|_| !is_incoming);
            let readers: BTreeSet<usize> = tensor.readers.iter().filter_map(group).collect();
            let mut count = |group: usize, side: usize| {
                let alive = nodes[&group].iter().filter(|[_, runs_at]| (tensor.first..=tensor.last).contains(runs_at));
                alive.for_each(|[at, _]| crossing[*at][side] += tensor.bytes as u64);
            };
            let is_other = |reader: &&usize| Some(**reader) != producer;
            if let Some(producer) =
                producer.filter(|_| outgoing.contains(&tensor.root) || readers.iter().any(|r| is_other(&r)))
            {
                count(producer, 0);
            }
            readers.iter().filter(is_other).for_each(|reader| count(*reader, 1));
        }
        crossing
    }
}

fn saved_value(read: &Read) -> Option<Value> {
    match read {
        Read::Saved(value) => Some(*value),
        Read::Gradient { .. } => None,
    }
}

/// Saved bytes per op. A saved view counts as its base; sources need no saving.
fn saved_by_owner(fragment: &Fragment, owners: &HashMap<NodeId, usize>, saved: &[Value], ops: usize) -> Vec<u64> {
    let graph = &fragment.graph;
    let mut roots: BTreeSet<Value> = BTreeSet::new();
    for &value in saved {
        let root = root(graph, value);
        if runs(&graph.node(root.node).op) || root.output > 0 {
            roots.insert(root);
        }
    }
    let mut bytes = vec![0u64; ops];
    for root in roots {
        if let Some(&owner) = owners.get(&root.node) {
            // Size in the memory layout.
            let size = graph.fact(root).bytes().and_then(|bytes| bytes.checked_next_multiple_of(ALIGNMENT as u64));
            bytes[owner] = bytes[owner].saturating_add(size.unwrap_or(u64::MAX));
        }
    }
    bytes
}
