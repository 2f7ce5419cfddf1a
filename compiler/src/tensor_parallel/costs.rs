//! The planner's per-op costs of a model under tensor parallelism.
//!
//! Each segment of ops ([`Segments`]) is sharded separately: its forward and backward are built as a stage and the
//! cheapest sharding is chosen. The resulting times and bytes per device are attributed to its ops. Equal segments
//! ([`dedup`](super::dedup)) are processed once. A search over stages uses segments of a few layers. Training shards a
//! stage as a whole, so the figures of a plan are those of its stages as segments.
//!
//! Times are the given ones, for example measured, scaled by the roofline ratio of sharded to unsharded execution, plus
//! collectives by a ring model:
//!
//! ```text
//! time(op) = given(op) · roofline(shards of op) / roofline(op) + collectives(op)
//! ```
//!
//! Values between segments are replicated, or split with sequence parallelism. If the consumer saves one for its backward, it counts for the op that makes
//! it, as within one stage. If the segments are in different stages, it counts as an input of the second.

use crate::graph::{Graph, order};
use crate::op::collective::is_meeting;
use crate::op::{NodeId, Op, Sharding, Value};
use crate::pass::attribution::{
    Attribution, AttributionError, Tagged, Training, leaders, loss_of, of_stage, owner, tagged,
};
use crate::pass::backward::{Backward, BackwardError, Read, ReceivedGradients, backward};
use crate::pass::costs::tensor_values;
use crate::pass::fragment::{Fragment, FragmentError, Term, fragment};
use crate::pass::gradient_accumulation::root;
use crate::pass::loss::LOSS;
use crate::pass::pipeline::{self, PassBug};
use crate::profile::arena::{ArenaPosition, Live};
use crate::profile::cost_graph::{CostGraph, OpId};
use crate::profile::shared::{OpTraffic, TensorParallelCosts};
use crate::tensor::fact::Fact;
use crate::tensor_parallel::cost::{Machine, Time, sum};
use crate::tensor_parallel::dedup::KeyContext;
use crate::tensor_parallel::experts;
use crate::tensor_parallel::partition_stage::{Shared, Stage, passages, share};
use crate::tensor_parallel::segments::{Segments, Sharded, cheapest, fused_ops, layer_starts, pieces};
use crate::tensor_parallel::strategy_search::{ChooseError, Chosen, choose, choose_within};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use thiserror::Error;

/// Table size limit of the search per segment. Stages have that of training, so that the choice is the same.
const MOST_ENTRIES: usize = 1 << 20;

#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum CostsError {
    #[error(transparent)]
    Attribution(#[from] AttributionError),
    #[error(transparent)]
    Fragment(#[from] FragmentError),
    #[error(transparent)]
    Bug(#[from] PassBug),
    #[error(transparent)]
    Backward(Box<BackwardError>),
    #[error(transparent)]
    Choose(#[from] ChooseError),
}

/// The costs of a graph of fixed sizes on a tensor-parallel group; `alone` are those of one device, with times.
pub fn shared_costs(
    graph: &Graph,
    training: Training,
    alone: &CostGraph,
    machine: &Machine,
) -> Result<TensorParallelCosts, CostsError> {
    shared_costs_by(graph, training, alone, machine, Sharded { segments: Segments::Cheapest, scratch: None })
}

/// Like [`shared_costs`], with other segments.
pub fn shared_costs_by(
    graph: &Graph,
    training: Training,
    alone: &CostGraph,
    machine: &Machine,
    of: Sharded<'_>,
) -> Result<TensorParallelCosts, CostsError> {
    let mut whole = tagged(graph, training)?;
    if let Training::Loss(..) = training {
        // Predictions are not returned during training.
        whole.graph.outputs.retain(|output| output.name == LOSS);
    }
    let pieces = match of.segments {
        Segments::Cheapest => pieces(alone),
        Segments::Ops => fused_ops(alone),
        Segments::Stages(stages) => stages.to_vec(),
    };
    let placed: Vec<NodeId> = order::executed(&whole.graph);
    let placed: Vec<NodeId> = placed.into_iter().filter(|id| owner(whole.graph.node(*id)).is_some()).collect();
    let all: HashSet<NodeId> = placed.iter().copied().collect();
    let (learned, needed) = (learned(&whole.graph), needed(&whole));
    let surroundings = KeyContext {
        graph: &whole.graph,
        placed: &all,
        learned: &learned,
        needed: &needed,
        constants: HashMap::new(),
        attributes: HashMap::new(),
    };
    let mut sharer = Sharer {
        whole: &whole,
        piece_of: pieces
            .iter()
            .enumerate()
            .flat_map(|(at, ops)| ops.iter().map(move |op| (*op as usize, at)))
            .collect(),
        leaders: leaders(graph, &whole.ops),
        needed: &needed,
        pieces: &pieces,
        placed: &placed,
        places: vec![Vec::new(); pieces.len()],
        machine,
        of,
        surroundings,
        known: HashMap::new(),
    };
    for (place, id) in placed.iter().enumerate() {
        if let Some(piece) = sharer.piece(*id) {
            sharer.places[piece].push(place);
        }
    }
    let runs = match of.segments {
        Segments::Cheapest => {
            // A framework that keeps weights in place also keeps layers whole.
            let starts = if machine.keeps_weights { layer_starts(alone, &pieces) } else { vec![false; pieces.len()] };
            cheapest(&pieces, &starts, |start, end| sharer.price(start, end))?
        }
        Segments::Ops | Segments::Stages(_) => (0..pieces.len()).map(|at| (at, at + 1)).collect(),
    };
    let mut costs = Costs::new(alone, &whole, machine, &learned);
    costs.may_be_cut = of.segments.is_of_stages();
    for (start, end) in runs {
        costs.add(&sharer.run(start, end)?);
    }
    Ok(costs.done(tensor_values(graph, &whole.ops)))
}

fn learned(graph: &Graph) -> HashSet<NodeId> {
    let mut learned = HashSet::new();
    for id in order::canonical(graph) {
        let is = matches!(graph.node(id).op, Op::Parameter(_));
        if is || graph.inputs(id).iter().any(|value| learned.contains(&value.node)) {
            learned.insert(id);
        }
    }
    learned
}

/// The nodes that the loss, or the value receiving a gradient, depends on; empty for inference.
fn needed(whole: &Tagged) -> HashSet<NodeId> {
    let losses = whole.graph.outputs.iter().filter(|output| output.name == LOSS).map(|output| output.value.node);
    let mut queue: Vec<NodeId> = losses.chain(whole.seeded.map(|(_, reader)| reader)).collect();
    let mut needed = HashSet::new();
    while let Some(id) = queue.pop() {
        if needed.insert(id) {
            queue.extend(whole.graph.inputs(id).into_iter().map(|value| value.node));
        }
    }
    needed
}

struct SegmentStage {
    fragment: Fragment,
    backward: Option<Backward>,
    /// Parameters that other segments also read.
    tied: BTreeSet<String>,
}

/// Results for a set of equal segments.
struct CachedSegment {
    /// The first of them.
    first: (usize, usize),
    chosen: Chosen,
    figures: Option<SegmentCosts>,
}

/// Costs of a segment on each device. Ops are indexed by their position in the segment, outside values by theirs.
#[derive(Clone, Default)]
struct SegmentCosts {
    ops: Vec<OpSegmentCosts>,
    /// Bytes and sharding of each parameter.
    parameters: Vec<(usize, u64, Sharding)>,
    /// Outside values saved for the backward.
    kept: Vec<usize>,
    /// Ops that save their sent value replicated.
    keeping: BTreeSet<usize>,
}

/// Times in picoseconds, sizes in bytes; arrays hold forward and backward.
#[derive(Clone, Copy, Default)]
struct OpSegmentCosts {
    alone: [Time; 2],
    shared: [Time; 2],
    meetings: [Time; 2],
    /// The weight-gradient part of the backward: alone, shared, collectives.
    second: [Time; 3],
    traffic: OpTraffic,
    saved: u64,
    live: Live,
    /// Workspace of the kernels of its shards, if known.
    scratch: Option<u64>,
    between: u64,
    arriving: u64,
    reads_as_it_makes: bool,
}

struct Segment<'a> {
    figures: &'a SegmentCosts,
    /// Ascending.
    ops: Vec<u32>,
    outside: Vec<Value>,
}

struct Sharer<'a> {
    whole: &'a Tagged,
    /// Piece index by op.
    piece_of: HashMap<usize, usize>,
    leaders: Vec<Option<usize>>,
    needed: &'a HashSet<NodeId>,
    pieces: &'a [Vec<u32>],
    placed: &'a [NodeId],
    /// For each piece, the positions of its nodes in `placed`.
    places: Vec<Vec<usize>>,
    machine: &'a Machine,
    of: Sharded<'a>,
    surroundings: KeyContext<'a>,
    known: HashMap<String, CachedSegment>,
}

impl Sharer<'_> {
    /// Forward and backward time of these pieces as one segment.
    fn price(&mut self, start: usize, end: usize) -> Result<Time, CostsError> {
        let (words, _) = self.words(start, end);
        if let Some(known) = self.known.get(&words) {
            return Ok(known.chosen.cost);
        }
        let staged = self.staged(start, end)?;
        let stage = Stage::new(&staged.fragment, staged.backward.as_ref(), &staged.tied, self.machine);
        let chosen = match self.of.segments.is_of_stages() {
            true => choose(stage.task(), self.machine)?,
            false => choose_within(stage.task(), self.machine, MOST_ENTRIES)?,
        };
        let cost = chosen.cost;
        self.known.insert(words, CachedSegment { first: (start, end), chosen, figures: None });
        Ok(cost)
    }

    /// The ops of some pieces, ascending.
    fn ops(&self, start: usize, end: usize) -> Vec<u32> {
        let mut ops = self.pieces[start..end].concat();
        ops.sort_unstable();
        ops
    }

    fn piece(&self, id: NodeId) -> Option<usize> {
        owner(self.whole.graph.node(id)).and_then(|op| self.piece_of.get(&op).copied())
    }

    fn words(&mut self, start: usize, end: usize) -> (String, Vec<Value>) {
        let ops = self.ops(start, end);
        let mut places = self.places[start..end].concat();
        places.sort_unstable();
        let run: Vec<NodeId> = places.into_iter().map(|place| self.placed[place]).collect();
        let graph = &self.whole.graph;
        let place = |id| owner(graph.node(id)).and_then(|op| ops.binary_search(&(op as u32)).ok()).unwrap_or(0);
        self.surroundings.words(&run, place)
    }

    /// Builds a stage of some pieces, between two stages for everything before and after.
    fn staged(&self, start: usize, end: usize) -> Result<SegmentStage, CostsError> {
        let graph = &self.whole.graph;
        let stage = |piece: usize| if piece < start { 0 } else { 1 + usize::from(piece >= end) };
        let placed = |id: &NodeId| self.piece(*id).map(|piece| (*id, stage(piece)));
        let mut place: HashMap<NodeId, usize> = self.placed.iter().filter_map(placed).collect();
        place.extend(self.whole.seeded.map(|(_, reader)| (reader, 2)));
        let mut fragment = fragment(graph, &place, 3, 1)?;
        pipeline::forward(&mut fragment)?;
        let mut arriving = ReceivedGradients::new();
        for sent in fragment.sent.iter().filter(|sent| self.needed.contains(&sent.value.node)) {
            for term in fragment.terms.get(&sent.local).into_iter().flatten() {
                if let Term::Remote { stage, group } = *term {
                    arriving.insert((sent.value, stage, group));
                }
            }
        }
        let scalar = loss_of(&fragment);
        let backward = match scalar.is_some() || !arriving.is_empty() {
            true => {
                Some(backward(&fragment, scalar, &arriving).map_err(|error| CostsError::Backward(Box::new(error)))?)
            }
            false => None,
        };
        let is_tied = |id: &NodeId| {
            let readers = graph.consumers(Value { node: *id, output: 0 });
            readers.iter().any(|(reader, _)| place.get(reader).is_some_and(|stage| *stage != 1))
        };
        let name = |id: NodeId| match &graph.node(id).op {
            Op::Parameter(parameter) if is_tied(&id) => Some(parameter.name.clone()),
            _ => None,
        };
        Ok(SegmentStage { tied: graph.ids().filter_map(name).collect(), fragment, backward })
    }

    /// The costs of some pieces as one segment.
    fn run(&mut self, start: usize, end: usize) -> Result<Segment<'_>, CostsError> {
        let (words, outside) = self.words(start, end);
        if !self.known.contains_key(&words) {
            self.price(start, end)?;
        }
        let known = &self.known[&words];
        if known.figures.is_none() {
            let (first, chosen) = (known.first, known.chosen.clone());
            let (_, outside) = self.words(first.0, first.1);
            let figures = self.figures(first, &chosen, &outside)?;
            self.known.get_mut(&words).expect("it was looked up").figures = Some(figures);
        }
        let ops = self.ops(start, end);
        let figures = self.known[&words].figures.as_ref().expect("they were made above");
        Ok(Segment { figures, ops, outside })
    }

    fn figures(
        &self,
        (start, end): (usize, usize),
        chosen: &Chosen,
        outside: &[Value],
    ) -> Result<SegmentCosts, CostsError> {
        let staged = self.staged(start, end)?;
        let stage = Stage::new(&staged.fragment, staged.backward.as_ref(), &staged.tied, self.machine);
        let shared = share(&stage, &chosen.choice, self.machine, &HashSet::new())?;
        let attributed = |fragment: &Fragment, backward: Option<&Backward>| {
            let passages = passages(fragment, backward);
            let passages = [Some(&passages[0]), Some(&passages[1])];
            of_stage(fragment.clone(), backward.cloned(), self.whole.ops.clone(), None, &self.leaders, passages)
        };
        let alone = attributed(&staged.fragment, staged.backward.as_ref());
        let parts = attributed(&shared.fragment, shared.backward.as_ref());
        let ops = self.ops(start, end);
        let mut figures = SegmentCosts { ops: vec![OpSegmentCosts::default(); ops.len()], ..SegmentCosts::default() };
        let scratch = self.of.scratch.map(|scratch| scratch(&parts));
        for (own, &op) in figures.ops.iter_mut().zip(&ops) {
            *own = self.of_op(op as usize, &alone, &parts);
            own.scratch = scratch.as_ref().map(|bytes| bytes[op as usize]);
            if self.of.segments.is_of_stages() {
                // What crosses the ends of the stage is in message buffers.
                let ends = ArenaPosition { first: true, last: true };
                own.live = Live { whole: [own.live.at(ends, false); 4], split: [own.live.at(ends, true); 4] };
            }
        }
        self.crossing(&mut figures, &staged, &shared, &parts, (&ops, outside));
        let graph = &self.whole.graph;
        for (at, value) in outside.iter().enumerate() {
            if let Op::Parameter(parameter) = &graph.node(value.node).op {
                let layout = shared.parameters.get(&parameter.name).copied().unwrap_or(Sharding::Replicated);
                let part = layout.part(&parameter.fact, self.machine.devices).and_then(|part| part.bytes());
                figures.parameters.push((at, part.unwrap_or(u64::MAX), layout));
            }
        }
        Ok(figures)
    }

    fn of_op(&self, op: usize, alone: &Attribution, parts: &Attribution) -> OpSegmentCosts {
        let times = |graph: Option<&Graph>, nodes: &[NodeId], wanted: &dyn Fn(&NodeId) -> bool| {
            let Some(graph) = graph else { return [0, 0] };
            nodes.iter().filter(|id| wanted(id)).fold([0, 0], |[own, meetings], &id| {
                let inputs: Vec<&Fact> = graph.inputs(id).into_iter().map(|value| graph.fact(value)).collect();
                let node = graph.node(id);
                let time = self.machine.node(&node.op, &inputs, &node.facts);
                if is_meeting(&node.op) { [own, sum(meetings, time)] } else { [sum(own, time), meetings] }
            })
        };
        let of = |all: &Attribution| {
            let forward = times(Some(&all.forward), &all.forward_nodes[op], &|_| true);
            let backward = times(all.backward.as_ref(), &all.backward_nodes[op], &|_| true);
            let second = times(all.backward.as_ref(), &all.backward_nodes[op], &|id| all.second.contains(id));
            [forward, backward, second]
        };
        let ([one, both, late], [forward, backward, second]) = (of(alone), of(parts));
        let mut traffic = OpTraffic::default();
        let sides = [(Some(&parts.forward), &parts.forward_nodes), (parts.backward.as_ref(), &parts.backward_nodes)];
        for (side, (graph, nodes)) in traffic.iter_mut().zip(sides) {
            let Some(graph) = graph else { continue };
            for &id in &nodes[op] {
                let node = graph.node(id);
                let input = graph.inputs(id).first().map(|value| graph.fact(*value));
                let found = input.zip(node.facts.first());
                if let Some((kind, one)) = found.and_then(|(from, to)| self.machine.traffic(&node.op, from, to)) {
                    side[kind].add(one);
                }
            }
        }
        OpSegmentCosts {
            alone: [one[0], both[0]],
            shared: [forward[0], backward[0]],
            meetings: [forward[1], backward[1]],
            second: [late[0], second[0], second[1]],
            traffic,
            saved: parts.saved_bytes[op],
            live: parts.live[op],
            between: parts.between_bytes[op],
            arriving: parts.arriving_bytes[op],
            reads_as_it_makes: parts.read_as_made.contains(&op),
            scratch: None,
        }
    }

    /// Attributes values that cross segments. In a stage of its own a segment receives them from outside; within a
    /// larger stage an op makes them.
    fn crossing(
        &self,
        figures: &mut SegmentCosts,
        staged: &SegmentStage,
        shared: &Shared,
        parts: &Attribution,
        (ops, outside): (&[u32], &[Value]),
    ) {
        let graph = &shared.fragment.graph;
        let reads = shared.backward.iter().flat_map(|backward| &backward.reads);
        let saved: HashSet<Value> = reads
            .filter_map(|(_, read)| match read {
                Read::Saved(value) => Some(root(graph, *value)),
                Read::Gradient { .. } => None,
            })
            .collect();
        for received in &shared.fragment.received {
            let local = Value { node: received.local, output: 0 };
            if let (true, Some(at)) =
                (saved.contains(&local), outside.iter().position(|value| *value == received.value))
            {
                figures.kept.push(at);
            }
        }
        let place = |value: Value| {
            let op = owner(self.whole.graph.node(value.node))?;
            ops.binary_search(&(op as u32)).ok()
        };
        for sent in shared.fragment.sent.iter().filter(|sent| saved.contains(&root(graph, sent.local))) {
            figures.keeping.extend(place(sent.value));
        }
        if let Some(made) = &shared.backward {
            let late: HashSet<Value> = parts
                .second
                .iter()
                .flat_map(|id| made.graph.inputs(*id))
                .map(|value| root(&made.graph, value))
                .collect();
            for (id, read) in &made.reads {
                let Read::Gradient { sent, .. } = read else { continue };
                let value = Value { node: *id, output: 0 };
                let size = made.graph.fact(value).bytes().unwrap_or(0);
                if let Some(at) = place(staged.fragment.sent[*sent].value).filter(|_| late.contains(&value)) {
                    figures.ops[at].arriving = figures.ops[at].arriving.saturating_add(size);
                }
            }
        }
    }
}

/// Accumulates the costs of the whole model, segment by segment.
struct Costs<'a> {
    alone: &'a CostGraph,
    whole: &'a Tagged,
    machine: &'a Machine,
    learned: &'a HashSet<NodeId>,
    graph: CostGraph,
    meetings: Vec<[f64; 2]>,
    traffic: Vec<OpTraffic>,
    layouts: HashMap<&'a str, Sharding>,
    parameters: HashMap<&'a str, usize>,
    /// Ops that save their sent value replicated, and values that readers save.
    keeping: BTreeSet<usize>,
    kept: BTreeMap<Value, usize>,
    /// True if segments may be cut: those of a plan's stages, whose figures are compared with other cuts.
    may_be_cut: bool,
}

impl<'a> Costs<'a> {
    fn new(alone: &'a CostGraph, whole: &'a Tagged, machine: &'a Machine, learned: &'a HashSet<NodeId>) -> Costs<'a> {
        let (graph, meetings) = (alone.clone(), vec![[0.0; 2]; alone.ops.len()]);
        let (traffic, layouts) = (vec![OpTraffic::default(); alone.ops.len()], HashMap::new());
        let parameters = alone.params.iter().enumerate().map(|(at, param)| (param.name.as_str(), at)).collect();
        let (keeping, kept) = (BTreeSet::new(), BTreeMap::new());
        Costs {
            alone,
            whole,
            machine,
            learned,
            graph,
            meetings,
            traffic,
            layouts,
            parameters,
            keeping,
            kept,
            may_be_cut: false,
        }
    }

    fn add(&mut self, run: &Segment<'_>) {
        let machine = self.machine;
        let scaled = |us: f64, alone: Time, shared: Time| scaled(machine, us, alone, shared);
        let leader = run.ops.iter().copied().find(|op| self.alone.ops[*op as usize].joins.is_none());
        for (&op, figures) in run.ops.iter().zip(&run.figures.ops) {
            let (cost, given) = (&mut self.graph.ops[op as usize], &self.alone.ops[op as usize]);
            let meetings = figures.meetings.map(microseconds);
            let part = |us: f64, side: usize| scaled(us, figures.alone[side], figures.shared[side]) + meetings[side];
            (cost.fwd_us, cost.bwd_us) = (rounded(part(given.fwd_us, 0)), rounded(part(given.bwd_us, 1)));
            let [late, shared, met] = figures.second;
            let second = |us: f64| rounded(scaled(us, late, shared) + microseconds(met)).min(cost.bwd_us);
            cost.weight_grad_us = given.weight_grad_us.map(second);
            (cost.saved_bytes, cost.live) = (figures.saved, figures.live);
            (cost.between_bytes, cost.arriving_bytes) = (figures.between, figures.arriving);
            // Tensor-parallel stages do not batch weight gradients.
            (cost.batched_grad_bytes, cost.batched_grad_workspace_bytes) = (0, 0);
            cost.reads_as_it_makes = figures.reads_as_it_makes;
            cost.workspace_bytes = figures.scratch.unwrap_or(cost.workspace_bytes);
            if !self.may_be_cut {
                cost.joins = leader.filter(|leader| *leader != op).map(OpId);
            }
            self.meetings[op as usize] = meetings.map(rounded);
            self.traffic[op as usize] = figures.traffic;
        }
        self.keeping.extend(run.figures.keeping.iter().map(|at| run.ops[*at] as usize));
        for &at in &run.figures.kept {
            let value = run.outside[at];
            self.kept.extend(owner(self.whole.graph.node(value.node)).map(|op| (value, op)));
        }
        for &(at, bytes, layout) in &run.figures.parameters {
            let node = &self.whole.graph.node(run.outside[at].node).op;
            if let Op::Parameter(parameter) = node {
                self.layouts.insert(&parameter.name, layout);
            }
            if let Op::Parameter(parameter) = node
                && let Some(&param) = self.parameters.get(parameter.name.as_str())
            {
                let param = &mut self.graph.params[param];
                // Shards with equal element counts.
                let wide = if param.master_bytes() > 0 { 2 } else { 1 };
                (param.bytes, param.sum_bytes) = (bytes, bytes.saturating_mul(wide));
            }
        }
    }

    /// What a device holds of a value between segments.
    fn between_segments(&self, value: Value) -> Fact {
        let fact = self.whole.graph.fact(value);
        let sharding = self.machine.between_stages(fact, self.learned.contains(&value.node));
        sharding.part(fact, self.machine.devices).unwrap_or_else(|| fact.clone())
    }

    /// The costs; `tensors` are the values of the tensors of the cost graph.
    fn done(mut self, tensors: Vec<Value>) -> TensorParallelCosts {
        if !self.machine.activations.is_replicated() {
            for (at, value) in tensors.into_iter().enumerate() {
                let bytes = self.between_segments(value).bytes().unwrap_or(u64::MAX);
                self.graph.tensors[at].bytes = bytes;
            }
        }
        for (value, op) in std::mem::take(&mut self.kept) {
            if !self.keeping.contains(&op) {
                let bytes = self.between_segments(value).bytes().unwrap_or(0);
                let cost = &mut self.graph.ops[op];
                cost.saved_bytes = cost.saved_bytes.saturating_add(bytes);
            }
        }
        for (op, id) in self.graph.ops.iter_mut().zip(&self.whole.ops) {
            let largest = self.whole.graph.node(*id).facts.iter().filter_map(Fact::bytes).max();
            op.unsaved = op.saved_bytes < largest.unwrap_or(0);
            op.param_bytes = 0;
        }
        for param in &self.graph.params {
            if let Some(first) = param.users.first() {
                let op = &mut self.graph.ops[first.index()];
                op.param_bytes = op.param_bytes.saturating_add(param.bytes);
            }
        }
        for (op, alone) in self.graph.ops.iter_mut().zip(&self.alone.ops).filter(|(_, alone)| alone.param_bytes > 0) {
            op.update_us = rounded(alone.update_us * (op.param_bytes as f64 / alone.param_bytes as f64));
        }
        let devices = self.machine.devices as u32;
        TensorParallelCosts {
            devices,
            keeps_weights: self.machine.keeps_weights,
            activations: self.machine.activations,
            graph: self.graph,
            meetings: self.meetings,
            traffic: self.traffic,
            experts: experts::of_graph(&self.whole.graph, &self.layouts),
        }
    }
}

/// Scales a given time by the roofline ratio. A time that only the group has is added to it; the rest is then the sum of
/// gradients from other segments, of parts if activations between segments are split.
fn scaled(machine: &Machine, us: f64, alone: Time, shared: Time) -> f64 {
    if alone > 0 {
        return us * (shared as f64 / alone as f64);
    }
    let parts = if machine.activations.is_replicated() { 1 } else { machine.devices };
    us / parts as f64 + microseconds(shared)
}

fn microseconds(time: Time) -> f64 {
    time as f64 / 1e6
}

/// Rounds to whole picoseconds, so that the decimal form in a file is exact.
fn rounded(us: f64) -> f64 {
    (us * 1e6).round() / 1e6
}
