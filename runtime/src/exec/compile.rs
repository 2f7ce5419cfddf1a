//! Compiles a graph with a stage assignment into stage code: ordered kernels and the memory offset of every tensor.
//!
//! Stages are compiled from last to first, because a stage must know which gradients later stages send.

use crate::device::api::Device;
use crate::device::error::DeviceError;
use crate::device::layout::is_half;
use crate::exec::compile_error::CompileError;
use crate::exec::memory_limit::{check_memory, check_sizes};
use crate::exec::moving_average::state_updates;
use crate::exec::sequence::{Planned, Sequence, Slot, TensorAddress, plan_tasks};
use crate::exec::stage_code::{GradientTerm, NamedTensor, StageCode, Transfer, bytes};
use compiler::graph::{Graph, Output, order};
use compiler::op::{NodeId, Op, Sharding as Split, Value};
use compiler::pass::backward::{Backward, Made, Read, ReceivedGradients, backward};
use compiler::pass::fragment::{Fragment, fragments};
use compiler::pass::fuse::{Chains, Rules, chains};
use compiler::pass::gradient_accumulation::{accumulated_in_place, read_only_as_sums, root, summed};
use compiler::pass::loss::LOSS;
use compiler::pass::memory::{Layout, Location, Needs, aligned};
use compiler::pass::pipeline;
use compiler::pass::recompute_parts::recompute_parts;
use compiler::pass::split_backward::parts;
use compiler::tensor::fact::Fact;
use compiler::tensor_parallel::cost::Machine;
use compiler::tensor_parallel::partition_stage::{Stage, share};
use compiler::tensor_parallel::strategy_search::choose;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Compiles a graph with concrete shapes for a device. `stage_of` maps every op that depends on a source to its stage. `loss` names the
/// result to minimise; with it the backward passes are compiled too.
pub fn compile(
    graph: &Graph,
    stage_of: &HashMap<NodeId, usize>,
    stages: usize,
    loss: Option<&str>,
    device: &dyn Device,
) -> Result<Vec<StageCode>, CompileError> {
    let recomputation = &Recomputation::default();
    let options = PassOptions { device, splits: false, joins: &|_| false, recomputation, machine: None };
    Ok(compile_with(graph, stage_of, stages, loss, options)?.0)
}

/// The device, and variants of the passes, which give bitwise equal results.
#[derive(Clone, Copy)]
pub struct PassOptions<'a> {
    /// Makes the kernels.
    pub device: &'a dyn Device,
    /// Splits the backward, which takes more memory.
    pub splits: bool,
    /// True for stages that compute weight gradients of several micro-batches in one kernel
    /// ([`joint`](compiler::pass::batched_weight_grad)).
    pub joins: &'a dyn Fn(usize) -> bool,
    pub recomputation: &'a Recomputation,
    /// A group like this one shares every stage, each op with its cheapest sharding.
    pub machine: Option<&'a Machine>,
}

/// What recomputed stages save and repeat. The backward of a stage repeats its parts; without parts, the forward of all
/// its recomputed nodes is repeated before the backward.
#[derive(Clone, Debug, Default)]
pub struct Recomputation {
    /// The parts of the nodes that are recomputed.
    pub parts: HashMap<NodeId, u32>,
    /// The nodes of recomputed stages whose activations are saved.
    pub saving: HashSet<NodeId>,
}

/// Like [`compile`], with variants of the passes. Also returns the sharding of each parameter.
pub fn compile_with(
    graph: &Graph,
    stage_of: &HashMap<NodeId, usize>,
    stages: usize,
    loss: Option<&str>,
    PassOptions { device, splits, joins, recomputation, machine }: PassOptions<'_>,
) -> Result<(Vec<StageCode>, BTreeMap<String, Split>), CompileError> {
    check_sizes(device, graph)?;
    let mut fragments = fragments(graph, stage_of, stages)?;
    let tied = tied_parameter_names(&fragments);
    let mut parameters = BTreeMap::new();
    let mut received_gradients = ReceivedGradients::new();
    let mut codes = Vec::new();
    // Nodes of a fragment keep their names.
    let name = |id: &NodeId| graph.node(*id).name.as_str();
    let saving: HashSet<&str> = recomputation.saving.iter().map(name).collect();
    let parts = recomputation.parts.iter().filter(|_| machine.is_none());
    let parts: HashMap<&str, u32> = parts.map(|(id, part)| (name(id), *part)).collect();
    for (stage, fragment) in fragments.iter_mut().enumerate().rev() {
        let mut recomputes_parts = false;
        if let Some(name) = loss {
            return_only_loss(&mut fragment.graph, name, machine.is_some());
        }
        pipeline::forward(fragment)?;
        let backward = match loss {
            None => None,
            Some(name) => {
                let scalar = fragment.graph.outputs.iter().find(|o| o.name == name).map(|o| o.value);
                let part = |id: NodeId| parts.get(fragment.graph.node(id).name.as_str()).map(|part| (id, *part));
                let own_parts: HashMap<NodeId, u32> = fragment.graph.ids().filter_map(part).collect();
                recomputes_parts = !own_parts.is_empty();
                let pass = backward(fragment, scalar, &received_gradients)
                    .map_err(Box::new)
                    .map_err(CompileError::Backward)?;
                let pass = if recomputes_parts { recompute_parts(fragment, pass, &own_parts) } else { pass };
                for role in &pass.output_roles {
                    if let Made::Gradient { received, group } = role {
                        received_gradients.insert((fragment.received[*received].value, stage, *group));
                    }
                }
                Some(pass)
            }
        };
        let nodes = fragment.graph.ids().filter(|_| !recomputes_parts);
        let nodes = nodes.filter(|id| saving.contains(fragment.graph.node(*id).name.as_str()));
        let saving: HashSet<NodeId> = nodes.collect();
        let mut code = match machine {
            None => Assembly::new(device, fragment, backward.as_ref(), (splits, joins(stage))).stage(loss, &saving)?,
            Some(machine) => {
                let unsharded = Stage::new(fragment, backward.as_ref(), &tied, machine);
                let sharded = share(&unsharded, &choose(unsharded.task(), machine)?.choice, machine, &saving)?;
                parameters.extend(sharded.parameters);
                let assembly = Assembly::new(device, &sharded.fragment, sharded.backward.as_ref(), (splits, false));
                assembly.stage(loss, &sharded.saving)?
            }
        };
        code.recomputes_parts = recomputes_parts;
        check_memory(device, &code)?;
        codes.push(code);
    }
    codes.reverse();
    Ok((codes, parameters))
}

/// Training returns only the loss. Results that no op reads stay, so that their parameters do; a group would gather them.
fn return_only_loss(graph: &mut Graph, name: &str, is_group: bool) {
    let ids = graph.outputs.iter().map(|output| output.value.node).filter(|_| !is_group);
    let unread: HashSet<NodeId> = ids.filter(|id| graph.successors(*id).is_empty()).collect();
    let stays = |output: &Output| unread.contains(&output.value.node);
    graph.outputs.retain(|output| [name, LOSS].contains(&output.name.as_str()) || stays(output));
}

/// Names of tied parameters: those that several stages read.
fn tied_parameter_names(fragments: &[Fragment]) -> BTreeSet<String> {
    let (mut seen, mut tied) = (BTreeSet::new(), BTreeSet::new());
    for fragment in fragments {
        for id in fragment.graph.ids() {
            if let Op::Parameter(parameter) = &fragment.graph.node(id).op
                && !seen.insert(parameter.name.clone())
            {
                tied.insert(parameter.name.clone());
            }
        }
    }
    tied
}

struct Assembly<'a> {
    device: &'a dyn Device,
    fragment: &'a Fragment,
    backward: Option<&'a Backward>,
    splits: bool,
    joins: bool,
    forward_layout: Layout,
    feeds: Vec<(NodeId, NamedTensor)>,
    parameters: Vec<(NodeId, NamedTensor)>,
    states: Vec<(NodeId, NamedTensor)>,
    constants: HashMap<NodeId, usize>,
    gradients_in: Vec<Transfer>,
}

impl<'a> Assembly<'a> {
    fn new(
        device: &'a dyn Device,
        fragment: &'a Fragment,
        backward: Option<&'a Backward>,
        (splits, joins): (bool, bool),
    ) -> Assembly<'a> {
        let graph = &fragment.graph;
        let received: HashSet<NodeId> = fragment.received.iter().map(|r| r.local).collect();
        let mut feeds = Vec::new();
        let mut parameters = Vec::new();
        let mut states = Vec::new();
        for id in order::canonical(graph) {
            let named = |name: &String, fact: &Fact| (id, NamedTensor::new(name, fact));
            match &graph.node(id).op {
                Op::Input(o) if !received.contains(&id) => feeds.push(named(&o.name, &o.fact)),
                Op::Parameter(o) => parameters.push(named(&o.name, &o.fact)),
                Op::State(o) => states.push(named(&o.name, &o.fact)),
                _ => {}
            }
        }
        let mut gradients_in: Vec<Transfer> = Vec::new();
        for (_, read) in backward.iter().flat_map(|b| &b.reads) {
            if let Read::Gradient { sent, stage, group } = *read {
                let sent = &fragment.sent[sent];
                let address = TensorAddress { slot: Slot::GradientIn(0), bytes: bytes(graph.fact(sent.local)) };
                gradients_in.push(Transfer { stage, value: sent.value, group, address });
            }
        }
        gradients_in.sort_by_key(|t| (t.stage, t.value, t.group));
        for (i, transfer) in gradients_in.iter_mut().enumerate() {
            transfer.address.slot = Slot::GradientIn(i);
        }
        Assembly {
            device,
            fragment,
            backward,
            splits,
            joins,
            forward_layout: Layout::default(),
            feeds,
            parameters,
            states,
            constants: HashMap::new(),
            gradients_in,
        }
    }

    /// Assembles the stage code. Training returns the loss, both scaled and unscaled. Nodes other than `saving` run
    /// first, so that recomputation repeats the first steps.
    fn stage(mut self, loss: Option<&str>, saving: &HashSet<NodeId>) -> Result<StageCode, DeviceError> {
        let graph = &self.fragment.graph;
        let kept: HashSet<Value> = self
            .backward
            .iter()
            .flat_map(|b| &b.reads)
            .filter_map(|(_, read)| if let Read::Saved(v) = read { Some(*v) } else { None })
            .collect();
        let samples = graph.averages.iter().map(|a| a.sample);
        let results = graph.outputs.iter().filter(|o| loss.is_none_or(|loss| [loss, LOSS].contains(&o.name.as_str())));
        let held: HashSet<Value> = results.clone().map(|o| o.value).chain(samples).collect();
        let own: HashSet<Value> = self.fragment.sent.iter().map(|s| s.local).collect();
        let (order, recomputed) = recomputed_first(graph, saving);
        let (added, workspace, apart) = (&HashSet::new(), &HashMap::new(), &Chains::default());
        let (own, kept, held) = (&own, &kept, &held);
        let needs = Needs {
            separate: own,
            saved: kept,
            retained: held,
            accumulated: added,
            workspace,
            chains: apart,
            arena: None,
        };
        let is_recomputed = |id: NodeId| recomputed.contains(&id);
        let same_pass = |a, b| is_recomputed(a) == is_recomputed(b);
        let rules = Rules { can_join: &same_pass, can_start: &|op| self.device.starts_chain(op) };
        let (fused, _) = chains(graph, &order, &needs, &rules);
        let (tasks, layout) = plan_tasks(self.device, graph, &order, fused, &needs, false)?;
        let recomputed_steps = tasks.iter().filter(|task| is_recomputed(task.node)).count();
        let saved_ends = layout.locations.iter().filter_map(|(value, location)| match location {
            Location::Saved(offset) if is_recomputed(value.node) => Some(offset + aligned(bytes(graph.fact(*value)))),
            _ => None,
        });
        let recomputed_bytes = saved_ends.max().unwrap_or(0);
        self.forward_layout = layout;
        let forward = self.forward_sequence(tasks);

        let mut sent: Vec<Transfer> = Vec::new();
        for s in &self.fragment.sent {
            let address = self.forward_address(s.local);
            sent.extend(s.to.iter().map(|&stage| Transfer { stage, value: s.value, group: 0, address }));
        }
        sent.sort_by_key(|t| (t.stage, t.value));
        let received = self.fragment.received.iter().enumerate().map(|(i, r)| Transfer {
            stage: r.from,
            value: r.value,
            group: 0,
            address: TensorAddress {
                slot: Slot::Received(i),
                bytes: bytes(graph.fact(Value { node: r.local, output: 0 })),
            },
        });
        let received: Vec<Transfer> = received.collect();
        let state_updates =
            state_updates(graph, |state| position(&self.states, state), |sample| self.forward_address(sample));
        let results = results.map(|o| {
            let named = NamedTensor::new(&o.name, graph.fact(o.value));
            (named, self.forward_address(o.value))
        });
        let results: Vec<(NamedTensor, TensorAddress)> = results.collect();

        let backward = self.backward_code()?;
        let reference = |s: &Sequence| -> Vec<String> {
            s.steps.iter().filter_map(|step| step.reference_op()).map(str::to_string).collect()
        };
        let mut reference_ops =
            [reference(&forward), reference(&backward.backward), reference(&backward.weight)].concat();
        reference_ops.sort();
        reference_ops.dedup();
        Ok(StageCode {
            forward,
            in_parts: self.splits,
            received,
            sent,
            own_bytes: self.forward_layout.own.iter().map(|(_, bytes)| *bytes).collect(),
            state_updates,
            results,
            kept_bytes: self.forward_layout.kept_bytes,
            recomputed_steps,
            recomputed_bytes,
            recomputed_own: self.forward_layout.own.iter().map(|(value, _)| is_recomputed(value.node)).collect(),
            arena_bytes: backward.arena_bytes.max(self.forward_layout.arena_bytes),
            reference_ops,
            feeds: self.feeds.into_iter().map(|(_, n)| n).collect(),
            parameters: self.parameters.into_iter().map(|(_, n)| n).collect(),
            states: self.states.into_iter().map(|(_, n)| n).collect(),
            gradients_in: self.gradients_in,
            ..backward
        })
    }

    fn forward_sequence(&mut self, tasks: Vec<Planned>) -> Sequence {
        let graph = &self.fragment.graph;
        let mut sequence = Sequence::default();
        for id in order::canonical(graph) {
            if let Op::Constant(c) = &graph.node(id).op {
                self.constants.insert(id, sequence.constants.len());
                sequence.constants.push(c.tensor.clone());
            }
        }
        for task in tasks {
            sequence.steps.push(task.step(graph, &self.forward_layout, &mut 0, |value| self.forward_address(*value)));
        }
        sequence
    }

    fn forward_address(&self, value: Value) -> TensorAddress {
        let bytes = bytes(self.fragment.graph.fact(value));
        let slot = match self.forward_layout.locations[&value] {
            Location::Arena(offset) => Slot::Arena(offset),
            Location::Saved(offset) => Slot::Saved(offset),
            Location::Own(index) => Slot::Own(index),
            Location::Source(node) => self.source_slot(node),
        };
        TensorAddress { slot, bytes }
    }

    fn source_slot(&self, node: NodeId) -> Slot {
        match self.fragment.graph.node(node).op {
            Op::Constant(_) => Slot::Constant(self.constants[&node]),
            Op::Parameter(_) => Slot::Parameter(position(&self.parameters, node)),
            Op::State(_) => Slot::State(position(&self.states, node)),
            _ => match self.fragment.received.iter().position(|r| r.local == node) {
                Some(i) => Slot::Received(i),
                None => Slot::Feed(position(&self.feeds, node)),
            },
        }
    }

    /// The part of the code that runs the backward.
    fn backward_code(&self) -> Result<StageCode, DeviceError> {
        let Some(backward) = self.backward else { return Ok(StageCode::default()) };
        let graph = &backward.graph;
        let parts = self.splits.then(|| parts(backward));
        let mut sequence = Sequence::default();
        let reads: HashMap<NodeId, Read> = backward.reads.iter().copied().collect();
        let mut sources: HashMap<NodeId, Slot> = HashMap::new();
        for id in order::canonical(graph) {
            let slot = match &graph.node(id).op {
                Op::Constant(c) => {
                    sequence.constants.push(c.tensor.clone());
                    Slot::Constant(sequence.constants.len() - 1)
                }
                Op::Parameter(p) => {
                    let index = self.parameters.iter().position(|(_, n)| n.name == p.name);
                    Slot::Parameter(index.expect("a parameter of the backward is one of the forward"))
                }
                Op::Input(_) => match reads[&id] {
                    Read::Saved(value) => self.saved_slot(value, &mut sequence),
                    Read::Gradient { sent, stage, group } => {
                        let value = self.fragment.sent[sent].value;
                        let index =
                            self.gradients_in.iter().position(|t| (t.stage, t.value, t.group) == (stage, value, group));
                        Slot::GradientIn(index.expect("every gradient that is read is also received"))
                    }
                },
                _ => continue,
            };
            sources.insert(id, slot);
        }
        // Sent gradients have buffers of their own; parameter gradients are read after the pass.
        let values_of = |is_role: fn(&Made) -> bool| -> HashSet<Value> {
            backward.output_roles.iter().zip(&graph.outputs).filter(|(m, _)| is_role(m)).map(|(_, o)| o.value).collect()
        };
        let own = values_of(|m| matches!(m, Made::Gradient { .. }));
        let order = parts.as_ref().map_or_else(|| order::canonical(graph), |parts| parts.order.clone());
        let kept = parts.as_ref().map(|parts| parts.crossing.clone()).unwrap_or_default();
        // Results of the input-gradient pass must persist until the weight-gradient pass; other micro-batches may run
        // in between.
        let is_first = |id: NodeId| parts.as_ref().is_some_and(|parts| !parts.second.contains(&id));
        let summed = summed(backward, &is_first);
        let mut held = values_of(|m| matches!(m, Made::Parameter(_)));
        held.retain(|value| !summed.contains_key(&root(graph, *value)));
        let added = accumulated_in_place(graph, &summed);
        let (added, workspace, apart) = (&added, &HashMap::new(), &Chains::default());
        let (own, kept, held) = (&own, &kept, &held);
        let needs = Needs {
            separate: own,
            saved: kept,
            retained: held,
            accumulated: added,
            workspace,
            chains: apart,
            arena: None,
        };
        let is_second = |id: NodeId| parts.as_ref().is_some_and(|parts| parts.second.contains(&id));
        let together = |a, b| is_second(a) == is_second(b);
        let rules = Rules { can_join: &together, can_start: &|op| self.device.starts_chain(op) };
        let (fused, _) = chains(graph, &order, &needs, &rules);
        // The kernels of a device may accumulate the gradients of more ops than all devices do.
        let unread = read_only_as_sums(graph, &summed);
        let device_needs = Needs { accumulated: &unread, ..needs };
        let (tasks, layout) = plan_tasks(self.device, graph, &order, fused, &device_needs, self.joins)?;
        // Sort the buffers of sent gradients by receiving stage, value and group.
        let mut gradients_out: Vec<(Transfer, Value)> = Vec::new();
        for (role, output) in backward.output_roles.iter().zip(&graph.outputs) {
            if let Made::Gradient { received, group } = *role {
                let source = &self.fragment.received[received];
                let address = TensorAddress { slot: Slot::Arena(0), bytes: bytes(graph.fact(output.value)) };
                gradients_out
                    .push((Transfer { stage: source.from, value: source.value, group, address }, output.value));
            }
        }
        gradients_out.sort_by_key(|(t, _)| (t.stage, t.value, t.group));
        let gradient_slots: HashMap<usize, usize> = gradients_out
            .iter()
            .enumerate()
            .filter_map(|(i, (_, v))| match layout.locations[v] {
                Location::Own(index) => Some((index, i)),
                _ => None,
            })
            .collect();
        let first_term = |value: &Value| summed.get(&root(graph, *value)).map(|terms| terms[0]);
        let address = |value: &Value| {
            let slot = match (layout.locations.get(value), first_term(value)) {
                // A 16-bit term cannot be written in place into its `f32` sum, except by an op that accumulates.
                (Some(&Location::Arena(offset)), Some(term)) if !is_half(graph.fact(*value).dtype) => {
                    Slot::Gradient { term, offset }
                }
                (Some(&Location::Arena(offset)), _) => Slot::Arena(offset),
                (Some(Location::Own(index)), _) => Slot::GradientOut(gradient_slots[index]),
                (Some(Location::Source(node)), _) => sources[node],
                (Some(&Location::Saved(offset)), _) => Slot::SplitBackward(offset),
                (None, term) => Slot::Sum(term.expect("a value without a buffer is accumulated")),
            };
            TensorAddress { slot, bytes: bytes(graph.fact(*value)) }
        };
        // The forward pass uses the same arena. Buffered operands of batched weight gradients must survive the passes
        // of other micro-batches, so they lie after it.
        let mut arena_bytes = layout.arena_bytes.max(self.forward_layout.arena_bytes);
        let mut second = Sequence::default();
        for task in tasks {
            let target = if is_second(task.node) { &mut second } else { &mut sequence };
            let adds = task.can_accumulate() && unread.contains(&task.outputs()[0]);
            let accumulated = task.outputs().iter().filter_map(|value| summed.get(value)).flatten().copied().collect();
            let mut step = task.step(graph, &layout, &mut arena_bytes, address);
            if adds {
                step.adds_to = accumulated;
                step.outputs.clear();
            } else {
                step.terms = accumulated;
            }
            target.steps.push(step);
        }
        if parts.is_some() {
            second.constants.clone_from(&sequence.constants);
        }
        let mut terms = Vec::new();
        for (role, output) in backward.output_roles.iter().zip(&graph.outputs) {
            if let Made::Parameter(i) = *role {
                let term = &self.fragment.parameter_terms[i];
                let parameter = position(&self.parameters, term.parameter);
                let is_summed = summed.contains_key(&root(graph, output.value));
                terms.push(GradientTerm { parameter, rank: term.rank, address: address(&output.value), is_summed });
            }
        }
        let gradients_out: Vec<Transfer> =
            gradients_out.iter().map(|(t, v)| Transfer { address: address(v), ..*t }).collect();
        let mut addresses =
            second.steps.iter().flat_map(|step| &step.inputs).chain(terms.iter().map(|term| &term.address));
        let reads_sent = parts.is_some() && addresses.any(|address| matches!(address.slot, Slot::GradientOut(_)));
        Ok(StageCode {
            backward: sequence,
            weight: second,
            gradient_terms: terms,
            gradients_out,
            weight_reads_sent: reads_sent,
            between_bytes: layout.kept_bytes,
            arena_bytes,
            ..StageCode::default()
        })
    }

    /// Location from which the backward pass reads a saved forward value.
    fn saved_slot(&self, value: Value, sequence: &mut Sequence) -> Slot {
        match self.forward_address(value).slot {
            // Constants belong to one sequence: the backward pass has its own copy.
            Slot::Constant(_) => {
                let Location::Source(node) = self.forward_layout.locations[&value] else {
                    unreachable!("a constant's buffer")
                };
                let Op::Constant(c) = &self.fragment.graph.node(node).op else { unreachable!("a constant's buffer") };
                sequence.constants.push(c.tensor.clone());
                Slot::Constant(sequence.constants.len() - 1)
            }
            slot => slot,
        }
    }
}

/// The canonical order with the recomputed nodes first, and these nodes: those that depend on no node of `saving`.
fn recomputed_first(graph: &Graph, saving: &HashSet<NodeId>) -> (Vec<NodeId>, HashSet<NodeId>) {
    let mut recomputed = HashSet::new();
    let (mut first, mut last) = (Vec::new(), Vec::new());
    for id in order::canonical(graph) {
        let depends = graph.inputs(id).iter().any(|value| !recomputed.contains(&value.node));
        if depends || saving.contains(&id) {
            last.push(id);
        } else {
            recomputed.insert(id);
            first.push(id);
        }
    }
    first.append(&mut last);
    (first, recomputed)
}

fn position(list: &[(NodeId, NamedTensor)], node: NodeId) -> usize {
    list.iter().position(|(id, _)| *id == node).expect("the node is one of the stage's sources")
}
