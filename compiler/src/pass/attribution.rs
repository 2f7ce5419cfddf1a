//! Which op of a plan answers for which node that runs.
//!
//! Plans and profiles speak of the numbered ops of a graph. What runs for them is more: the nodes of the backward run,
//! the loss, tensors made from constants that were too large to fold. Here the whole graph is compiled as one stage,
//! exactly as a stage is, and every node of it that runs is given to one op: a backward node to the op whose rule wrote
//! it, a loss to the op that makes the predictions, what follows from constants to the first op that reads it. So times
//! and kept bytes that are summed over ops are those of the run.

use super::backward::BackwardError;
use super::backward::{Arriving, Backward, Made, Read, backward};
use super::fragment::{Fragment, FragmentError, fragments};
use super::fuse::{Chains, chains};
use super::loss::{LOSS, Loss, LossError, TARGET, attach};
use super::memory::{ALIGNMENT, Needs, Passage, tensors};
use super::pipeline::{self, PassBug};
use crate::graph::{Graph, Node, Origin, order};
use crate::op::dropout::COUNTER;
use crate::op::table::rule;
use crate::op::{NodeId, Op, Unary, Value};
use crate::pass::gradient_accumulation::{only_in_sums, root, summed};
use crate::profile::arena::{Live, raise};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use thiserror::Error;

mod halves;

/// What a backward run starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Training {
    /// There is none: the graph only answers.
    No,
    /// A gradient that arrives for the first float output which depends on a parameter. A graph without such an output
    /// has no backward run, which is no error.
    Gradient,
    /// This loss of the first output, with its axis of classes.
    Loss(Loss, Option<i64>),
}

/// Why a graph has no costs.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum AttributionError {
    #[error("the model has no op that depends on an input or a parameter")]
    Empty,
    #[error("the size of `{node}` is not known or too large: {fact}; give the symbols their sizes")]
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

/// The nodes that run, by the op that answers for them. Ids of nodes are those of the graphs here, not of the graph
/// that was attributed, but for `ops`.
#[derive(Clone, Debug)]
pub struct Attribution {
    /// The numbered ops, as nodes of the graph that was given.
    pub ops: Vec<NodeId>,
    /// The value of the given graph that a gradient arrives for under [`Training::Gradient`].
    pub seeded: Option<Value>,
    /// What the forward run of the whole graph runs.
    pub forward: Graph,
    /// What its backward run runs, if there is one.
    pub backward: Option<Graph>,
    /// For every op the nodes of `forward` that need a kernel, in order.
    pub forward_nodes: Vec<Vec<NodeId>>,
    /// For every op the nodes of `backward` that need a kernel, in order.
    pub backward_nodes: Vec<Vec<NodeId>>,
    /// The nodes of `backward` that no earlier op waits for: they make gradients of weights, and where a backward is split they are
    /// its second half.
    pub second: HashSet<NodeId>,
    /// The ops of `forward` and of `backward` that run together though one op answers for them, so that no cut parts them.
    pub chains: [Chains; 2],
    /// For every op the bytes of the targets that its loss reads, which the given graph does not know.
    pub target_bytes: Vec<u64>,
    /// For every op the bytes of its results that are kept from forward to backward.
    pub saved_bytes: Vec<u64>,
    /// For every op what is alive while its nodes run, forward or backward, beside what is kept, parameters and the
    /// sums of their gradients; a gradient is alive until it has been added to its sum.
    pub live: Vec<Live>,
    /// For every op the bytes that the first half of a split backward makes for the op's own second half.
    pub between_bytes: Vec<u64>,
    /// For every op the bytes of the gradients of its outputs that the second half of a split backward reads.
    pub arriving_bytes: Vec<u64>,
    /// Ops of whose backward a node reads parameters and makes gradients of some.
    pub read_as_made: HashSet<usize>,
}

/// Whether a node of a compiled graph is run: sources are there, and views are their first input.
pub fn runs(op: &Op) -> bool {
    !matches!(op, Op::Input(_) | Op::Parameter(_) | Op::State(_) | Op::Constant(_)) && !rule(op).is_view()
}

/// A graph with what training adds to it, every node tagged with the op that answers for it.
#[derive(Clone, Debug)]
pub struct Tagged {
    /// The graph; [`owner`] reads the tags.
    pub graph: Graph,
    /// The numbered ops of the graph that was given.
    pub ops: Vec<NodeId>,
    /// The value that a gradient arrives for, and the node behind the last stage that stands for its reader.
    pub seeded: Option<(Value, NodeId)>,
}

/// Adds to a graph what training does, and tags every node.
pub fn tagged(graph: &Graph, training: Training) -> Result<Tagged, AttributionError> {
    check_sizes(graph)?;
    let ops = order::numbered(graph);
    if ops.is_empty() {
        return Err(AttributionError::Empty);
    }
    let mut whole = graph.clone();
    let mut seeded = None;
    match training {
        Training::No => {}
        Training::Loss(loss, axis) => {
            attach(&mut whole, loss, axis)?;
        }
        Training::Gradient => {
            // A reader in a stage behind this one sends the gradient, whatever the loss will be.
            seeded = seeded_output(graph, &ops).map(|value| {
                let reader = whole.add(Op::Unary(Unary::Neg), &[value], &Origin::default());
                (value, reader.expect("every float can be negated"))
            });
        }
    }
    tag(&mut whole, &ops);
    Ok(Tagged { graph: whole, ops, seeded })
}

/// Attributes a graph of fixed sizes, which has no loss yet.
pub fn attribute(graph: &Graph, training: Training) -> Result<Attribution, AttributionError> {
    let Tagged { graph: whole, ops, seeded } = tagged(graph, training)?;
    let mut place: HashMap<NodeId, usize> = HashMap::new();
    let mut arriving = Arriving::new();
    if let Some((value, reader)) = seeded {
        place.insert(reader, 1);
        arriving.insert((value, 1, 0));
    }
    let stages = 1 + place.len();
    for id in order::numbered(&whole) {
        place.entry(id).or_insert(0);
    }
    let mut fragment = fragments(&whole, &place, stages)?.swap_remove(0);
    pipeline::forward(&mut fragment)?;
    let scalar = match training {
        Training::Loss(..) => loss_of(&fragment),
        _ => None,
    };
    let trains = scalar.is_some() || !arriving.is_empty();
    let made = if trains {
        Some(backward(&fragment, scalar, &arriving).map_err(Box::new).map_err(AttributionError::Backward)?)
    } else {
        None
    };
    let leaders = leaders(graph, &ops);
    let mut attribution = of_stage(fragment, made, ops, seeded.map(|(value, _)| value), &leaders, [None, None]);
    if !matches!(training, Training::Loss(..)) {
        // An input that happens to have the name is the model's own.
        attribution.target_bytes.fill(0);
    }
    Ok(attribution)
}

/// The loss of a fragment that has it.
pub fn loss_of(fragment: &Fragment) -> Option<Value> {
    fragment.graph.outputs.iter().rev().find(|o| o.name == LOSS).map(|o| o.value)
}

/// Attributes the runs of one stage, whose nodes are tagged with the numbers of `ops`. What other ops answer for costs nothing here, but for
/// what is there while these run, where the two runs are parts of longer ones.
pub fn of_stage(
    fragment: Fragment,
    made: Option<Backward>,
    ops: Vec<NodeId>,
    seeded: Option<Value>,
    leaders: &[Option<usize>],
    passages: [Option<&Passage>; 2],
) -> Attribution {
    let forward_order = order::canonical(&fragment.graph);
    let forward_owners = owners(&fragment.graph, &forward_order);
    let forward_nodes = by_owner(&fragment.graph, &forward_order, &forward_owners, ops.len());
    let target_bytes = targets_by_owner(&fragment.graph, &forward_owners, ops.len());
    let saved: Vec<Value> = made.iter().flat_map(|b| &b.reads).filter_map(|(_, read)| saved_value(read)).collect();
    let saved_bytes = saved_by_owner(&fragment, &forward_owners, &saved, ops.len());
    let kept: HashSet<Value> = saved.iter().copied().collect();
    let backward_order = made.as_ref().map(|made| order::canonical(&made.graph)).unwrap_or_default();
    let backward_owners = made.as_ref().map(|made| owners(&made.graph, &backward_order)).unwrap_or_default();
    let mut alive = Alive(vec![Live::default(); ops.len()]);
    let none = HashSet::new();
    // A run within a longer one is never cut.
    let group = |(op, leader): (usize, &Option<usize>)| if passages[0].is_some() { 0 } else { leader.unwrap_or(op) };
    let groups: Vec<usize> = leaders.iter().enumerate().map(group).collect();
    let (groups, passage) = (&groups[..], passages[0]);
    let (graph, order, owners) = (&fragment.graph, &forward_order, &forward_owners);
    let run = Run { graph, order, owners, groups, passage, is_forward: true };
    let mut chains = [alive.look(&run, [&kept, &none], &[false, true]), Chains::default()];
    let mut backward_nodes = vec![Vec::new(); ops.len()];
    let mut second = HashSet::new();
    let [mut between_bytes, mut arriving_bytes] = [vec![0; ops.len()], vec![0; ops.len()]];
    let mut in_one = HashSet::new();
    if let Some(made) = &made {
        backward_nodes = by_owner(&made.graph, &backward_order, &backward_owners, ops.len());
        let added = only_in_sums(&made.graph, &summed(made, &|_| false));
        let (graph, order, owners, passage) = (&made.graph, &backward_order, &backward_owners, passages[1]);
        let whole = Run { graph, order, owners, groups, passage, is_forward: false };
        chains[1] = alive.look(&whole, [&none, &added], &[false]);
        in_one = read_as_made(made, owners);
        let halves = halves::halves(made, leaders);
        let in_halves: Vec<NodeId> = halves.in_order(&backward_order);
        alive.look(&Run { order: &in_halves, ..whole }, [&halves.between, &added], &[true]);
        second = halves.second;
        [between_bytes, arriving_bytes] = halves.bytes;
    }
    Attribution {
        ops,
        seeded,
        forward: fragment.graph,
        backward: made.map(|made| made.graph),
        forward_nodes,
        backward_nodes,
        second,
        chains,
        target_bytes,
        saved_bytes,
        live: alive.0,
        between_bytes,
        arriving_bytes,
        read_as_made: in_one,
    }
}

/// Ops of whose nodes one reads parameters and makes gradients of some.
fn read_as_made(made: &Backward, owners: &HashMap<NodeId, usize>) -> HashSet<usize> {
    let graph = &made.graph;
    let of = |made: &Made| matches!(made, Made::Parameter(_));
    let gradients = made.makes.iter().zip(&graph.outputs).filter(|(made, _)| of(made));
    let makers: HashSet<NodeId> = gradients.map(|(_, output)| root(graph, output.value).node).collect();
    let is_parameter = |value: &Value| matches!(graph.node(root(graph, *value).node).op, Op::Parameter(_));
    let both = makers.into_iter().filter(|maker| graph.inputs(*maker).iter().any(is_parameter));
    both.filter_map(|maker| owners.get(&maker).copied()).collect()
}

fn check_sizes(graph: &Graph) -> Result<(), AttributionError> {
    for id in graph.ids() {
        let node = graph.node(id);
        let unknown = |fact: &&crate::tensor::fact::Fact| fact.bytes().is_none() || fact.concrete().is_none();
        if let Some(fact) = node.facts.iter().find(unknown) {
            let told = node.told();
            return Err(AttributionError::Size { node: told.to_string(), fact: fact.to_string() });
        }
    }
    Ok(())
}

/// The nodes that depend on an input. Parameters or random numbers alone are none; what is made of both is taken for one, as
/// the layers of a model that is fed with noise.
pub fn of_data(graph: &Graph) -> HashSet<NodeId> {
    let [mut data, mut random, mut learned] = [(); 3].map(|()| HashSet::new());
    for id in order::canonical(graph) {
        let inputs = graph.inputs(id);
        let any = |set: &HashSet<NodeId>| inputs.iter().any(|v| set.contains(&v.node));
        let (is_random, is_learned) = (any(&random), any(&learned));
        let set = match &graph.node(id).op {
            Op::Input(input) if input.name == COUNTER => &mut random,
            Op::Input(_) => &mut data,
            Op::Parameter(_) | Op::State(_) => &mut learned,
            _ if any(&data) || (is_random && is_learned) => &mut data,
            _ if is_random => &mut random,
            _ if is_learned => &mut learned,
            _ => continue,
        };
        set.insert(id);
    }
    data
}

/// For every op the first that it leads to and that depends on an input: itself, or for what follows from parameters or from
/// random numbers alone a reader. So a mask is drawn in the stage that reads it.
pub fn leaders(graph: &Graph, ops: &[NodeId]) -> Vec<Option<usize>> {
    let data = of_data(graph);
    let number: HashMap<NodeId, usize> = ops.iter().enumerate().map(|(at, id)| (*id, at)).collect();
    let mut leaders = vec![None; ops.len()];
    for (at, id) in ops.iter().enumerate().rev() {
        let readers = graph.successors(*id).into_iter().filter_map(|reader| number.get(&reader).copied());
        let first = readers.filter_map(|reader| leaders[reader]).min();
        leaders[at] = if data.contains(id) { Some(at) } else { first };
    }
    leaders
}

/// The output that a gradient arrives for.
fn seeded_output(graph: &Graph, ops: &[NodeId]) -> Option<Value> {
    let numbered: HashSet<NodeId> = ops.iter().copied().collect();
    let mut learned: HashSet<NodeId> = HashSet::new();
    for id in order::canonical(graph) {
        let is = matches!(graph.node(id).op, Op::Parameter(_));
        if is || graph.inputs(id).iter().any(|v| learned.contains(&v.node)) {
            learned.insert(id);
        }
    }
    let fits = |v: &Value| graph.fact(*v).dtype.is_float() && learned.contains(&v.node) && numbered.contains(&v.node);
    graph.outputs.iter().map(|o| o.value).find(fits)
}

/// Writes the number of the op that answers for a node in place of its source name, which every pass carries along; the ops are those of
/// the graph before a loss was attached.
pub fn tag(graph: &mut Graph, ops: &[NodeId]) {
    let mut owner: HashMap<NodeId, usize> = ops.iter().enumerate().map(|(i, id)| (*id, i)).collect();
    let order = order::canonical(graph);
    let source = |op: &Op| matches!(op, Op::Input(_) | Op::Parameter(_) | Op::State(_));
    // What follows from the ops: the loss.
    for &id in &order {
        let last = graph.inputs(id).iter().filter_map(|v| owner.get(&v.node).copied()).max();
        if let (None, Some(last)) = (owner.get(&id), last) {
            owner.insert(id, last);
        }
    }
    // What ops read that follows from constants.
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

/// The op whose number a node is tagged with.
pub fn owner(node: &Node) -> Option<usize> {
    node.origin.source.parse().ok()
}

/// The op that answers for each node of a compiled graph. Sums of a parameter's gradient are written by no rule: they
/// belong to the latest op that adds to them.
fn owners(graph: &Graph, order: &[NodeId]) -> HashMap<NodeId, usize> {
    let mut owners = HashMap::new();
    for &id in order {
        let own = owner(graph.node(id));
        let inherited = || graph.inputs(id).iter().filter_map(|v| owners.get(&v.node).copied()).max();
        if let Some(owner) = own.or_else(inherited) {
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

/// Bytes of the targets, with the op that stands for the loss that reads them.
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

/// A run whose nodes have owners.
#[derive(Clone, Copy)]
struct Run<'a> {
    graph: &'a Graph,
    order: &'a [NodeId],
    owners: &'a HashMap<NodeId, usize>,
    /// For each op the one that stands for all that share its stage, wherever that is cut.
    groups: &'a [usize],
    passage: Option<&'a Passage>,
    is_forward: bool,
}

/// What is alive while the nodes of each op run.
struct Alive(Vec<Live>);

impl Alive {
    /// Raises each op's figures, of whole backwards or of split ones, to what is alive while one of its nodes runs. Gives those that run
    /// together.
    fn look(&mut self, run: &Run<'_>, [kept, added]: [&HashSet<Value>; 2], is_split: &[bool]) -> Chains {
        let Run { graph, order, owners, passage, is_forward, .. } = *run;
        let (none, workspace, apart) = (HashSet::new(), HashMap::new(), Chains::default());
        let needs = Needs { own: &none, kept, held: &none, added, workspace: &workspace, chains: &apart, passage };
        // What one op answers for is never cut.
        let (together, alive) = chains(graph, order, &needs, &|a, b| owners.get(&a) == owners.get(&b));
        let crossing = self.crossing(run, &Needs { chains: &together, ..needs });
        for ((id, alive), [made, read]) in order.iter().zip(alive).zip(crossing) {
            if let (true, Some(&owner)) = (runs(&graph.node(*id).op), owners.get(id)) {
                let live = &mut self.0[owner];
                // What an op reads in a forward run comes from where it gives gradients to.
                let sides = if is_forward { [read, made] } else { [made, read] };
                for is_split in is_split {
                    let figures = if *is_split { &mut live.split } else { &mut live.whole };
                    raise(figures, alive as u64, sides);
                }
            }
        }
        together
    }

    /// For every node the bytes of what is alive while it runs that its group makes for others, and that others make for its group.
    fn crossing(&self, run: &Run<'_>, needs: &Needs<'_>) -> Vec<[u64; 2]> {
        let Run { graph, order, owners, groups, passage, .. } = *run;
        let group = |id: &NodeId| owners.get(id).map(|owner| groups[*owner]);
        // Of the nodes of each group, where they stand and where they run.
        let mut nodes: BTreeMap<usize, Vec<[usize; 2]>> = BTreeMap::new();
        for (at, (id, runs_at)) in order.iter().zip(needs.chains.places(order)).enumerate() {
            if let Some(group) = group(id) {
                nodes.entry(group).or_default().push([at, runs_at]);
            }
        }
        let goes: HashSet<Value> =
            passage.into_iter().flat_map(|passage| &passage.goes).map(|value| root(graph, *value)).collect();
        let mut crossing = vec![[0; 2]; order.len()];
        for tensor in tensors(graph, order, needs) {
            let comes = passage.is_some_and(|passage| passage.comes.contains(&tensor.root));
            let maker = group(&tensor.root.node).filter(|_| !comes);
            let readers: BTreeSet<usize> = tensor.readers.iter().filter_map(group).collect();
            let mut count = |group: usize, side: usize| {
                let alive = nodes[&group].iter().filter(|[_, runs_at]| (tensor.first..=tensor.last).contains(runs_at));
                alive.for_each(|[at, _]| crossing[*at][side] += tensor.bytes as u64);
            };
            let is_other = |reader: &&usize| Some(**reader) != maker;
            if let Some(maker) = maker.filter(|_| goes.contains(&tensor.root) || readers.iter().any(|r| is_other(&r))) {
                count(maker, 0);
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

/// Bytes that are kept for each op. A view is kept as the tensor that it is a view of; sources are there anyway.
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
            // As it is laid out.
            let size = graph.fact(root).bytes().and_then(|bytes| bytes.checked_next_multiple_of(ALIGNMENT as u64));
            bytes[owner] = bytes[owner].saturating_add(size.unwrap_or(u64::MAX));
        }
    }
    bytes
}
