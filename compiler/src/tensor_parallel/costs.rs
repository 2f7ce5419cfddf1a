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
use crate::pass::fragment::{Fragment, FragmentError, Term, Whole};
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
use crate::tensor_parallel::partition_stage::{Shared, Stage, share, shared_arenas};
use crate::tensor_parallel::segments::{Segments, Sharded, cheapest, fused_ops, layer_starts, pieces};
use crate::tensor_parallel::strategy_search::{ChooseError, Chosen, choose, choose_within};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use thiserror::Error;

/// Table size limit of the search per segment. Stages have that of training, so that the choice is the same.
const MOST_ENTRIES: usize = 1 << 18;

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
    options: Sharded<'_>,
) -> Result<TensorParallelCosts, CostsError> {
    let mut tagged = tagged(graph, training)?;
    if let Training::Loss(..) = training {
        // Predictions are not returned during training.
        tagged.graph.outputs.retain(|output| output.name == LOSS);
    }
    let pieces = match options.segments {
        Segments::Cheapest => pieces(alone),
        Segments::Ops => fused_ops(alone),
        Segments::Stages(stages) => stages.to_vec(),
    };
    let nodes: Vec<NodeId> = order::executed(&tagged.graph);
    let nodes: Vec<NodeId> = nodes.into_iter().filter(|id| owner(tagged.graph.node(*id)).is_some()).collect();
    let node_set: HashSet<NodeId> = nodes.iter().copied().collect();
    let (whole, loss_ancestors) = (Whole::of(&tagged.graph), loss_ancestors(&tagged));
    let parameter_dependents = &whole.parameter_dependents;
    let context = KeyContext {
        graph: &tagged.graph,
        nodes: &node_set,
        parameter_dependents,
        loss_ancestors: &loss_ancestors,
        constants: HashMap::new(),
        attributes: HashMap::new(),
    };
    let mut sharer = Sharer {
        tagged: &tagged,
        whole: &whole,
        piece_of: pieces
            .iter()
            .enumerate()
            .flat_map(|(at, ops)| ops.iter().map(move |op| (*op as usize, at)))
            .collect(),
        leaders: leaders(graph, &tagged.ops),
        loss_ancestors: &loss_ancestors,
        pieces: &pieces,
        nodes: &nodes,
        positions: vec![Vec::new(); pieces.len()],
        machine,
        options,
        context,
        cache: HashMap::new(),
    };
    for (position, id) in nodes.iter().enumerate() {
        if let Some(piece) = sharer.piece(*id) {
            sharer.positions[piece].push(position);
        }
    }
    let runs = match options.segments {
        Segments::Cheapest => {
            // A framework that keeps weights in place also keeps layers whole.
            let starts = if machine.keeps_weights { layer_starts(alone, &pieces) } else { vec![false; pieces.len()] };
            cheapest(&pieces, &starts, |start, end| sharer.price(start, end))?
        }
        Segments::Ops | Segments::Stages(_) => (0..pieces.len()).map(|at| (at, at + 1)).collect(),
    };
    let mut costs = Costs::new(alone, &tagged, machine, parameter_dependents);
    costs.may_be_cut = options.segments.is_of_stages();
    for (start, end) in runs {
        costs.add(&sharer.segment(start, end)?);
    }
    Ok(costs.finish(tensor_values(graph, &tagged.ops)))
}

/// The nodes that the loss, or the value receiving a gradient, depends on; empty for inference.
fn loss_ancestors(tagged: &Tagged) -> HashSet<NodeId> {
    let losses = tagged.graph.outputs.iter().filter(|output| output.name == LOSS).map(|output| output.value.node);
    let readers = tagged.seeded.map(|(_, reader)| reader);
    losses.chain(readers).flat_map(|node| tagged.graph.ancestors(Value { node, output: 0 })).collect()
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
    costs: Option<SegmentCosts>,
}

/// Costs of a segment on each device. Ops are indexed by their position in the segment, outside values by theirs.
#[derive(Clone, Default)]
struct SegmentCosts {
    ops: Vec<OpSegmentCosts>,
    /// Bytes and sharding of each parameter.
    parameters: Vec<(usize, u64, Sharding)>,
    /// Outside values saved for the backward.
    saved_values: Vec<usize>,
    /// Ops that save their sent value replicated.
    replicated_saves: BTreeSet<usize>,
}

/// Times in picoseconds, sizes in bytes; arrays hold forward and backward.
#[derive(Clone, Copy, Default)]
struct OpSegmentCosts {
    alone: [Time; 2],
    shared: [Time; 2],
    collectives: [Time; 2],
    /// The weight-gradient part of the backward: alone, shared, collectives.
    weight_grad: [Time; 3],
    traffic: OpTraffic,
    saved_bytes: u64,
    live: Live,
    /// Workspace of the kernels of its shards, if known.
    scratch: Option<u64>,
    between_bytes: u64,
    arriving_bytes: u64,
    reads_as_it_makes: bool,
}

struct Segment<'a> {
    costs: &'a SegmentCosts,
    /// Ascending.
    ops: Vec<u32>,
    outside: Vec<Value>,
}

struct Sharer<'a> {
    tagged: &'a Tagged,
    whole: &'a Whole<'a>,
    /// Piece index by op.
    piece_of: HashMap<usize, usize>,
    leaders: Vec<Option<usize>>,
    loss_ancestors: &'a HashSet<NodeId>,
    pieces: &'a [Vec<u32>],
    nodes: &'a [NodeId],
    /// For each piece, the positions of its nodes in `nodes`.
    positions: Vec<Vec<usize>>,
    machine: &'a Machine,
    options: Sharded<'a>,
    context: KeyContext<'a>,
    cache: HashMap<String, CachedSegment>,
}

impl Sharer<'_> {
    /// Forward and backward time of these pieces as one segment.
    fn price(&mut self, start: usize, end: usize) -> Result<Time, CostsError> {
        let (key, _) = self.key(start, end);
        if let Some(cached) = self.cache.get(&key) {
            return Ok(cached.chosen.cost);
        }
        let segment = self.segment_stage(start, end)?;
        let stage = Stage::new(&segment.fragment, segment.backward.as_ref(), &segment.tied, self.machine);
        let chosen = match self.options.segments.is_of_stages() {
            true => choose(stage.task(), self.machine)?,
            false => choose_within(stage.task(), self.machine, MOST_ENTRIES)?,
        };
        let cost = chosen.cost;
        self.cache.insert(key, CachedSegment { first: (start, end), chosen, costs: None });
        Ok(cost)
    }

    /// The ops of some pieces, ascending.
    fn ops(&self, start: usize, end: usize) -> Vec<u32> {
        let mut ops = self.pieces[start..end].concat();
        ops.sort_unstable();
        ops
    }

    fn piece(&self, id: NodeId) -> Option<usize> {
        owner(self.tagged.graph.node(id)).and_then(|op| self.piece_of.get(&op).copied())
    }

    fn key(&mut self, start: usize, end: usize) -> (String, Vec<Value>) {
        let ops = self.ops(start, end);
        let mut positions = self.positions[start..end].concat();
        positions.sort_unstable();
        let run: Vec<NodeId> = positions.into_iter().map(|place| self.nodes[place]).collect();
        let graph = &self.tagged.graph;
        let place = |id| owner(graph.node(id)).and_then(|op| ops.binary_search(&(op as u32)).ok()).unwrap_or(0);
        self.context.key(&run, place)
    }

    /// Builds a stage of some pieces, between two stages for everything before and after.
    fn segment_stage(&self, start: usize, end: usize) -> Result<SegmentStage, CostsError> {
        let graph = &self.tagged.graph;
        let stage = |piece: usize| if piece < start { 0 } else { 1 + usize::from(piece >= end) };
        let with_stage = |id: &NodeId| self.piece(*id).map(|piece| (*id, stage(piece)));
        let mut stage_of: HashMap<NodeId, usize> = self.nodes.iter().filter_map(with_stage).collect();
        stage_of.extend(self.tagged.seeded.map(|(_, reader)| (reader, 2)));
        let mut fragment = self.whole.fragment(&stage_of, 3, 1)?;
        pipeline::forward(&mut fragment)?;
        let mut received = ReceivedGradients::new();
        for sent in fragment.sent.iter().filter(|sent| self.loss_ancestors.contains(&sent.value.node)) {
            for term in fragment.terms.get(&sent.local).into_iter().flatten() {
                if let Term::Remote { stage, group } = *term {
                    received.insert((sent.value, stage, group));
                }
            }
        }
        let loss = loss_of(&fragment);
        let backward = match loss.is_some() || !received.is_empty() {
            true => Some(backward(&fragment, loss, &received).map_err(|error| CostsError::Backward(Box::new(error)))?),
            false => None,
        };
        let is_tied = |id: &NodeId| {
            let readers = graph.consumers(Value { node: *id, output: 0 });
            readers.iter().any(|(reader, _)| stage_of.get(reader).is_some_and(|stage| *stage != 1))
        };
        let name = |id: NodeId| match &graph.node(id).op {
            Op::Parameter(parameter) if is_tied(&id) => Some(parameter.name.clone()),
            _ => None,
        };
        Ok(SegmentStage { tied: graph.ids().filter_map(name).collect(), fragment, backward })
    }

    /// The costs of some pieces as one segment.
    fn segment(&mut self, start: usize, end: usize) -> Result<Segment<'_>, CostsError> {
        let (key, outside) = self.key(start, end);
        if !self.cache.contains_key(&key) {
            self.price(start, end)?;
        }
        let cached = &self.cache[&key];
        if cached.costs.is_none() {
            let (first, chosen) = (cached.first, cached.chosen.clone());
            let (_, outside) = self.key(first.0, first.1);
            let costs = self.segment_costs(first, &chosen, &outside)?;
            self.cache.get_mut(&key).expect("it was looked up").costs = Some(costs);
        }
        let ops = self.ops(start, end);
        let costs = self.cache[&key].costs.as_ref().expect("they were made above");
        Ok(Segment { costs, ops, outside })
    }

    fn segment_costs(
        &self,
        (start, end): (usize, usize),
        chosen: &Chosen,
        outside: &[Value],
    ) -> Result<SegmentCosts, CostsError> {
        let segment = self.segment_stage(start, end)?;
        let stage = Stage::new(&segment.fragment, segment.backward.as_ref(), &segment.tied, self.machine);
        let shared = share(&stage, &chosen.choice, self.machine, &HashSet::new())?;
        let attribute = |fragment: &Fragment, backward: Option<&Backward>| {
            let arenas = shared_arenas(fragment, backward);
            let arenas = [Some(&arenas[0]), Some(&arenas[1])];
            of_stage(fragment.clone(), backward.cloned(), self.tagged.ops.clone(), None, &self.leaders, arenas)
        };
        let alone = attribute(&segment.fragment, segment.backward.as_ref());
        let sharded = attribute(&shared.fragment, shared.backward.as_ref());
        let ops = self.ops(start, end);
        let mut costs = SegmentCosts { ops: vec![OpSegmentCosts::default(); ops.len()], ..SegmentCosts::default() };
        let scratch = self.options.scratch.map(|scratch| scratch(&sharded));
        for (op_costs, &op) in costs.ops.iter_mut().zip(&ops) {
            *op_costs = self.op_costs(op as usize, &alone, &sharded);
            op_costs.scratch = scratch.as_ref().map(|bytes| bytes[op as usize]);
            if self.options.segments.is_of_stages() {
                // What crosses the ends of the stage is in message buffers.
                let ends = ArenaPosition { first: true, last: true };
                op_costs.live =
                    Live { whole: [op_costs.live.at(ends, false); 4], split: [op_costs.live.at(ends, true); 4] };
            }
        }
        self.add_crossings(&mut costs, &segment, &shared, &sharded, (&ops, outside));
        let graph = &self.tagged.graph;
        for (at, value) in outside.iter().enumerate() {
            if let Op::Parameter(parameter) = &graph.node(value.node).op {
                let layout = shared.parameters.get(&parameter.name).copied().unwrap_or(Sharding::Replicated);
                let part = layout.part(&parameter.fact, self.machine.devices).and_then(|part| part.bytes());
                costs.parameters.push((at, part.unwrap_or(u64::MAX), layout));
            }
        }
        Ok(costs)
    }

    fn op_costs(&self, op: usize, alone: &Attribution, sharded: &Attribution) -> OpSegmentCosts {
        let times = |graph: Option<&Graph>, nodes: &[NodeId], is_counted: &dyn Fn(&NodeId) -> bool| {
            let Some(graph) = graph else { return [0, 0] };
            nodes.iter().filter(|id| is_counted(id)).fold([0, 0], |[compute, collectives], &id| {
                let inputs: Vec<&Fact> = graph.inputs(id).into_iter().map(|value| graph.fact(value)).collect();
                let node = graph.node(id);
                let time = self.machine.node(&node.op, &inputs, &node.facts);
                if is_meeting(&node.op) { [compute, sum(collectives, time)] } else { [sum(compute, time), collectives] }
            })
        };
        let by_phase = |attribution: &Attribution| {
            let forward = times(Some(&attribution.forward), &attribution.forward_nodes[op], &|_| true);
            let backward = times(attribution.backward.as_ref(), &attribution.backward_nodes[op], &|_| true);
            let weight_grad = times(attribution.backward.as_ref(), &attribution.backward_nodes[op], &|id| {
                attribution.second.contains(id)
            });
            [forward, backward, weight_grad]
        };
        let ([alone_forward, alone_backward, alone_weight_grad], [forward, backward, weight_grad]) =
            (by_phase(alone), by_phase(sharded));
        let mut traffic = OpTraffic::default();
        let sides =
            [(Some(&sharded.forward), &sharded.forward_nodes), (sharded.backward.as_ref(), &sharded.backward_nodes)];
        for (side, (graph, nodes)) in traffic.iter_mut().zip(sides) {
            let Some(graph) = graph else { continue };
            for &id in &nodes[op] {
                let node = graph.node(id);
                let input = graph.inputs(id).first().map(|value| graph.fact(*value));
                let facts = input.zip(node.facts.first());
                if let Some((kind, traffic)) = facts.and_then(|(from, to)| self.machine.traffic(&node.op, from, to)) {
                    side[kind].add(traffic);
                }
            }
        }
        OpSegmentCosts {
            alone: [alone_forward[0], alone_backward[0]],
            shared: [forward[0], backward[0]],
            collectives: [forward[1], backward[1]],
            weight_grad: [alone_weight_grad[0], weight_grad[0], weight_grad[1]],
            traffic,
            saved_bytes: sharded.saved_bytes[op],
            live: sharded.live[op],
            between_bytes: sharded.between_bytes[op],
            arriving_bytes: sharded.arriving_bytes[op],
            reads_as_it_makes: sharded.read_as_made.contains(&op),
            scratch: None,
        }
    }

    /// Attributes values that cross segments. In a stage of its own a segment receives them from outside; within a
    /// larger stage an op makes them.
    fn add_crossings(
        &self,
        costs: &mut SegmentCosts,
        segment: &SegmentStage,
        shared: &Shared,
        sharded: &Attribution,
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
                costs.saved_values.push(at);
            }
        }
        let op_position = |value: Value| {
            let op = owner(self.tagged.graph.node(value.node))?;
            ops.binary_search(&(op as u32)).ok()
        };
        for sent in shared.fragment.sent.iter().filter(|sent| saved.contains(&root(graph, sent.local))) {
            costs.replicated_saves.extend(op_position(sent.value));
        }
        if let Some(backward) = &shared.backward {
            let weight_grad_reads: HashSet<Value> = sharded
                .second
                .iter()
                .flat_map(|id| backward.graph.inputs(*id))
                .map(|value| root(&backward.graph, value))
                .collect();
            for (id, read) in &backward.reads {
                let Read::Gradient { sent, .. } = read else { continue };
                let value = Value { node: *id, output: 0 };
                let size = backward.graph.fact(value).bytes().unwrap_or(0);
                if let Some(at) =
                    op_position(segment.fragment.sent[*sent].value).filter(|_| weight_grad_reads.contains(&value))
                {
                    costs.ops[at].arriving_bytes = costs.ops[at].arriving_bytes.saturating_add(size);
                }
            }
        }
    }
}

/// Accumulates the costs of the whole model, segment by segment.
struct Costs<'a> {
    alone: &'a CostGraph,
    tagged: &'a Tagged,
    machine: &'a Machine,
    parameter_dependents: &'a HashSet<NodeId>,
    graph: CostGraph,
    meetings: Vec<[f64; 2]>,
    traffic: Vec<OpTraffic>,
    layouts: HashMap<&'a str, Sharding>,
    parameters: HashMap<&'a str, usize>,
    /// Ops that save their sent value replicated, and values that readers save.
    replicated_saves: BTreeSet<usize>,
    saved_values: BTreeMap<Value, usize>,
    /// True if segments may be cut: those of a plan's stages, whose figures are compared with other cuts.
    may_be_cut: bool,
}

impl<'a> Costs<'a> {
    fn new(alone: &'a CostGraph, tagged: &'a Tagged, machine: &'a Machine, dependents: &'a HashSet<NodeId>) -> Self {
        let (graph, meetings) = (alone.clone(), vec![[0.0; 2]; alone.ops.len()]);
        let (traffic, layouts) = (vec![OpTraffic::default(); alone.ops.len()], HashMap::new());
        let parameters = alone.params.iter().enumerate().map(|(at, param)| (param.name.as_str(), at)).collect();
        let (replicated_saves, saved_values) = (BTreeSet::new(), BTreeMap::new());
        Costs {
            alone,
            tagged,
            machine,
            parameter_dependents: dependents,
            graph,
            meetings,
            traffic,
            layouts,
            parameters,
            replicated_saves,
            saved_values,
            may_be_cut: false,
        }
    }

    fn add(&mut self, segment: &Segment<'_>) {
        let machine = self.machine;
        let scale = |us: f64, alone: Time, shared: Time| scale_time(machine, us, alone, shared);
        let leader = segment.ops.iter().copied().find(|op| self.alone.ops[*op as usize].joins.is_none());
        for (&op, costs) in segment.ops.iter().zip(&segment.costs.ops) {
            let (cost, unsharded) = (&mut self.graph.ops[op as usize], &self.alone.ops[op as usize]);
            let collectives = costs.collectives.map(microseconds);
            let part = |us: f64, side: usize| scale(us, costs.alone[side], costs.shared[side]) + collectives[side];
            (cost.fwd_us, cost.bwd_us) = (round_us(part(unsharded.fwd_us, 0)), round_us(part(unsharded.bwd_us, 1)));
            let [alone, shared, collective] = costs.weight_grad;
            let weight_grad = |us: f64| round_us(scale(us, alone, shared) + microseconds(collective)).min(cost.bwd_us);
            cost.weight_grad_us = unsharded.weight_grad_us.map(weight_grad);
            (cost.saved_bytes, cost.live) = (costs.saved_bytes, costs.live);
            (cost.between_bytes, cost.arriving_bytes) = (costs.between_bytes, costs.arriving_bytes);
            // Tensor-parallel stages do not batch weight gradients.
            (cost.batched_grad_bytes, cost.batched_grad_workspace_bytes) = (0, 0);
            cost.reads_as_it_makes = costs.reads_as_it_makes;
            cost.workspace_bytes = costs.scratch.unwrap_or(cost.workspace_bytes);
            if !self.may_be_cut {
                cost.joins = leader.filter(|leader| *leader != op).map(OpId);
            }
            self.meetings[op as usize] = collectives.map(round_us);
            self.traffic[op as usize] = costs.traffic;
        }
        self.replicated_saves.extend(segment.costs.replicated_saves.iter().map(|at| segment.ops[*at] as usize));
        for &at in &segment.costs.saved_values {
            let value = segment.outside[at];
            self.saved_values.extend(owner(self.tagged.graph.node(value.node)).map(|op| (value, op)));
        }
        for &(at, bytes, layout) in &segment.costs.parameters {
            let node = &self.tagged.graph.node(segment.outside[at].node).op;
            if let Op::Parameter(parameter) = node {
                self.layouts.insert(&parameter.name, layout);
            }
            if let Op::Parameter(parameter) = node
                && let Some(&param) = self.parameters.get(parameter.name.as_str())
            {
                let param = &mut self.graph.params[param];
                // Shards with equal element counts.
                let factor = if param.master_bytes() > 0 { 2 } else { 1 };
                (param.bytes, param.sum_bytes) = (bytes, bytes.saturating_mul(factor));
            }
        }
    }

    /// What a device holds of a value between segments.
    fn between_segments(&self, value: Value) -> Fact {
        let fact = self.tagged.graph.fact(value);
        let sharding = self.machine.between_stages(fact, self.parameter_dependents.contains(&value.node));
        sharding.part(fact, self.machine.devices).unwrap_or_else(|| fact.clone())
    }

    /// The costs; `tensors` are the values of the tensors of the cost graph.
    fn finish(mut self, tensors: Vec<Value>) -> TensorParallelCosts {
        if !self.machine.activations.is_replicated() {
            for (at, value) in tensors.into_iter().enumerate() {
                let bytes = self.between_segments(value).bytes().unwrap_or(u64::MAX);
                self.graph.tensors[at].bytes = bytes;
            }
        }
        for (value, op) in std::mem::take(&mut self.saved_values) {
            if !self.replicated_saves.contains(&op) {
                let bytes = self.between_segments(value).bytes().unwrap_or(0);
                let cost = &mut self.graph.ops[op];
                cost.saved_bytes = cost.saved_bytes.saturating_add(bytes);
            }
        }
        for (op, id) in self.graph.ops.iter_mut().zip(&self.tagged.ops) {
            let largest = self.tagged.graph.node(*id).facts.iter().filter_map(Fact::bytes).max();
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
            op.update_us = round_us(alone.update_us * (op.param_bytes as f64 / alone.param_bytes as f64));
        }
        let devices = self.machine.devices as u32;
        TensorParallelCosts {
            devices,
            keeps_weights: self.machine.keeps_weights,
            activations: self.machine.activations,
            graph: self.graph,
            meetings: self.meetings,
            traffic: self.traffic,
            experts: experts::of_graph(&self.tagged.graph, &self.layouts),
        }
    }
}

/// Scales a given time by the roofline ratio. A time that only the group has is added to it; the rest is then the sum of
/// gradients from other segments, of parts if activations between segments are split.
fn scale_time(machine: &Machine, us: f64, alone: Time, shared: Time) -> f64 {
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
fn round_us(us: f64) -> f64 {
    (us * 1e6).round() / 1e6
}
