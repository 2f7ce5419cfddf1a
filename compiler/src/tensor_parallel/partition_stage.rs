//! Converts a stage to the SPMD stage that each device of a group runs.
//!
//! The joint graph is rewritten and split again at the start of the backward. The result is an ordinary fragment with
//! its backward, so the stage executor needs no changes. It sends and receives the same values and computes the same
//! gradients, sharded where parameters are.

use crate::graph::{Graph, Output, order};
use crate::op::table::rule;
use crate::op::{Input, NodeId, Op, Sharding, Value};
use crate::pass::backward::{Backward, Made, Read};
use crate::pass::fragment::{Fragment, ParameterTerm, Received, Sent};
use crate::pass::memory::SharedArena;
use crate::pass::pipeline::{self, PassBug};
use crate::tensor_parallel::cost::Machine;
use crate::tensor_parallel::forward_backward_graph::{Joint, joint};
use crate::tensor_parallel::spmd_graph::{SpmdGraph, rewrite};
use crate::tensor_parallel::{Choice, SpmdTask};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// The SPMD form of a stage.
#[derive(Clone, Debug)]
pub struct Shared {
    /// The forward. Its gradient terms are empty, because the backward exists already.
    pub fragment: Fragment,
    pub backward: Option<Backward>,
    pub parameters: BTreeMap<String, Sharding>,
    /// Nodes of the forward that save their activations if the stage is recomputed.
    pub saving: HashSet<NodeId>,
}

/// Bytes per device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Parameters; also the size of their gradients and of each optimizer-state value.
    pub parameters: u64,
    /// Values saved for the backward, per micro-batch in flight; views count as their base.
    pub saved: u64,
}

/// A stage before sharding.
#[derive(Clone, Debug)]
pub struct Stage<'a> {
    fragment: &'a Fragment,
    backward: Option<&'a Backward>,
    joint: Joint,
}

impl<'a> Stage<'a> {
    /// Builds the joint graph. Parameters named in `tied` stay replicated: other stages have them too.
    pub fn new(
        fragment: &'a Fragment,
        backward: Option<&'a Backward>,
        tied: &BTreeSet<String>,
        machine: &Machine,
    ) -> Stage<'a> {
        Stage { fragment, backward, joint: joint(fragment, backward, tied, machine) }
    }

    /// The task for [`strategy_search`](super::strategy_search).
    pub fn task(&self) -> &SpmdTask {
        &self.joint.task
    }
}

/// Shards a stage according to a choice for its task. `saving` are the nodes of its forward that save their activations
/// if the stage is recomputed.
pub fn share(
    stage: &Stage<'_>,
    choice: &Choice,
    machine: &Machine,
    saving: &HashSet<NodeId>,
) -> Result<Shared, PassBug> {
    let Stage { fragment, backward, joint } = stage;
    let spmd = rewrite(&joint.task, choice, machine);
    let boundary = joint.backward_nodes.iter().map(|id| spmd.starts[id]).min().unwrap_or(spmd.graph.len());
    let splitter = StageSplitter {
        fragment,
        joint,
        choice,
        spmd: &spmd,
        boundary,
        regathers: !machine.activations.is_replicated(),
    };
    let saving = splitter.nodes_written_for(saving);
    let mut shared = splitter.forward();
    let backward = backward.map(|backward| splitter.backward(backward));
    let mut backward = backward.map(finish).transpose()?;
    simplify(&mut shared, backward.as_mut())?;
    let name = |id: &NodeId| match &joint.task.graph.node(*id).op {
        Op::Parameter(parameter) => parameter.name.clone(),
        _ => String::new(),
    };
    let parameters = choice.parameters.iter().map(|(id, layout)| (name(id), *layout)).collect();
    Ok(Shared { fragment: shared, backward, parameters, saving })
}

struct StageSplitter<'a> {
    fragment: &'a Fragment,
    joint: &'a Joint,
    choice: &'a Choice,
    spmd: &'a SpmdGraph,
    /// Id of the first backward node.
    boundary: usize,
    /// True if the backward gathers activations again that the forward gathered.
    regathers: bool,
}

impl StageSplitter<'_> {
    fn is_forward(&self, id: NodeId) -> bool {
        (id.0 as usize) < self.boundary
    }

    /// The rewritten value of a forward fragment value, in the sharding it is made in.
    fn spmd_value(&self, value: Value) -> Value {
        let value = self.joint.forward[&value];
        self.spmd.values[&(value, self.choice.layout(value))]
    }

    /// The forward nodes that were written for these nodes of the fragment.
    fn nodes_written_for(&self, nodes: &HashSet<NodeId>) -> HashSet<NodeId> {
        let joint = |id: &NodeId| self.joint.forward[&Value { node: *id, output: 0 }].node;
        let sources: HashSet<NodeId> = nodes.iter().map(joint).collect();
        let mut begins: Vec<(usize, NodeId)> = self.spmd.starts.iter().map(|(id, begin)| (*begin, *id)).collect();
        // Of several nodes that begin at the same place, the last in order writes.
        begins.sort_unstable();
        let owner = |id: NodeId| begins[begins.partition_point(|(begin, _)| *begin <= id.0 as usize) - 1].1;
        self.spmd.graph.ids().filter(|id| self.is_forward(*id) && sources.contains(&owner(*id))).collect()
    }

    fn forward(&self) -> Fragment {
        let mut graph = Graph::new(&self.spmd.graph.name);
        for id in self.spmd.graph.ids().filter(|id| self.is_forward(*id)) {
            let node = self.spmd.graph.node(id);
            let copy = graph.add(node.op.clone(), &self.spmd.graph.inputs(id), &node.origin);
            debug_assert_eq!(
                copy.as_ref().ok(),
                Some(&id),
                "nodes are numbered in the order in which they are written"
            );
        }
        let results = self.fragment.graph.outputs.len();
        graph.outputs = self.spmd.graph.outputs[..results].to_vec();
        graph.averages = self.spmd.graph.averages.clone();
        let spmd_node = |id: NodeId| self.spmd_value(Value { node: id, output: 0 }).node;
        let received =
            self.fragment.received.iter().map(|r| Received { local: spmd_node(r.local), groups: vec![], ..r.clone() });
        let sent = self.fragment.sent.iter().zip(&self.spmd.graph.outputs[results..]);
        let sent = sent.map(|(sent, output)| Sent { local: output.value, ..sent.clone() });
        let terms = self.fragment.parameter_terms.iter();
        let terms = terms.map(|t| ParameterTerm { parameter: spmd_node(t.parameter), rank: t.rank, uses: vec![] });
        Fragment {
            received: received.collect(),
            sent: sent.collect(),
            terms: BTreeMap::new(),
            parameter_terms: terms.collect(),
            graph,
        }
    }

    fn backward(&self, unsharded: &Backward) -> Backward {
        let mut sharded = Backward {
            graph: Graph::new(&unsharded.graph.name),
            reads: vec![],
            output_roles: unsharded.output_roles.clone(),
        };
        let mut map: HashMap<Value, Value> = HashMap::new();
        for id in order::canonical(&self.spmd.graph).into_iter().filter(|id| !self.is_forward(*id)) {
            let node = self.spmd.graph.node(id);
            let inputs: Vec<Value> =
                self.spmd.graph.inputs(id).iter().map(|value| self.resolve(*value, &mut sharded, &mut map)).collect();
            let copy =
                sharded.graph.add(node.op.clone(), &inputs, &node.origin).expect("the op fitted in the joint graph");
            for value in self.spmd.graph.values(id) {
                map.insert(value, Value { node: copy, output: value.output });
            }
        }
        for (id, read) in unsharded.reads.iter().filter(|(_, read)| matches!(read, Read::Gradient { .. })) {
            let gradient = self.joint.backward[&Value { node: *id, output: 0 }];
            let spmd_gradient = self.spmd.values[&(gradient, self.choice.layout(gradient))];
            sharded.reads.push((map[&spmd_gradient].node, *read));
        }
        let results = self.fragment.graph.outputs.len() + self.fragment.sent.len();
        for output in &self.spmd.graph.outputs[results..] {
            let mut output = output.clone();
            output.value = self.resolve(output.value, &mut sharded, &mut map);
            sharded.graph.outputs.push(output);
        }
        sharded
    }

    /// Maps a value to the backward graph: a forward value becomes a saved input, except for sources, which are copied.
    /// With sequence parallelism, an activation is saved split and gathered again.
    fn resolve(&self, value: Value, backward: &mut Backward, map: &mut HashMap<Value, Value>) -> Value {
        if let Some(mapped) = map.get(&value) {
            return *mapped;
        }
        let node = self.spmd.graph.node(value.node);
        if self.regathers && self.is_forward(value.node) && matches!(node.op, Op::AllGather(_)) {
            let part = self.resolve(self.spmd.graph.inputs(value.node)[0], backward, map);
            let gathered =
                backward.graph.add(node.op.clone(), &[part], &node.origin).expect("it fitted in the joint graph");
            map.insert(value, Value { node: gathered, output: 0 });
            return Value { node: gathered, output: 0 };
        }
        let is_source = matches!(node.op, Op::Constant(_) | Op::Parameter(_) | Op::Iota(_));
        let op = if is_source {
            node.op.clone()
        } else {
            let name = format!("saved {}#{}", node.name, value.output);
            Op::Input(Input { name, fact: self.spmd.graph.fact(value).clone() })
        };
        let copy = backward.graph.add(op, &[], &node.origin).expect("a source takes no inputs");
        if !is_source {
            backward.reads.push((copy, Read::Saved(value)));
        }
        let copy = Value { node: copy, output: 0 };
        map.insert(value, copy);
        copy
    }
}

fn finish(mut backward: Backward) -> Result<Backward, PassBug> {
    pipeline::concrete(&mut backward.graph)?;
    let graph = &mut backward.graph;
    let results: HashSet<NodeId> = graph.outputs.iter().map(|o| o.value.node).collect();
    backward.reads.retain(|(id, _)| graph.contains(*id) && (!graph.successors(*id).is_empty() || results.contains(id)));
    let read_inputs: HashSet<NodeId> = backward.reads.iter().map(|(id, _)| *id).collect();
    let unread_inputs: Vec<NodeId> =
        graph.ids().filter(|id| matches!(graph.node(*id).op, Op::Input(_)) && !read_inputs.contains(id)).collect();
    unread_inputs.into_iter().for_each(|id| graph.remove(id));
    Ok(backward)
}

/// Simplifies a forward; saved values are live. Saved values that fold to constants are copied to the backward.
fn simplify(fragment: &mut Fragment, backward: Option<&mut Backward>) -> Result<(), PassBug> {
    let results = fragment.graph.outputs.len();
    let saved = backward.iter().flat_map(|backward| &backward.reads).filter_map(|(id, read)| match read {
        Read::Saved(value) => Some((*id, *value)),
        Read::Gradient { .. } => None,
    });
    let (readers, values): (Vec<NodeId>, Vec<Value>) = saved.unzip();
    fragment.graph.outputs.extend(values.into_iter().map(|value| Output { name: String::new(), value }));
    pipeline::forward(fragment)?;
    let saved_values: Vec<Value> = fragment.graph.outputs.drain(results..).map(|output| output.value).collect();
    let Some(backward) = backward else { return Ok(()) };
    backward.reads.retain(|(_, read)| matches!(read, Read::Gradient { .. }));
    for (reader, value) in readers.into_iter().zip(saved_values) {
        let node = fragment.graph.node(value.node);
        if matches!(node.op, Op::Constant(_)) {
            backward.graph.node_mut(reader).op = node.op.clone();
        } else {
            backward.reads.push((reader, Read::Saved(value)));
        }
    }
    Ok(())
}

/// The tensors that the forward and backward of a segment share with other segments of its stage.
pub fn shared_arenas(fragment: &Fragment, backward: Option<&Backward>) -> [SharedArena; 2] {
    let value_of = |node: NodeId| Value { node, output: 0 };
    let forward = SharedArena {
        incoming: fragment.received.iter().map(|received| value_of(received.local)).collect(),
        outgoing: fragment.sent.iter().map(|sent| sent.local).collect(),
    };
    let Some(stage_backward) = backward else { return [forward, SharedArena::default()] };
    let is_received = |read: &Read| matches!(read, Read::Gradient { .. });
    let is_sent = |role: &Made| matches!(role, Made::Gradient { .. });
    let outputs = stage_backward.output_roles.iter().zip(&stage_backward.graph.outputs);
    let backward = SharedArena {
        incoming: stage_backward
            .reads
            .iter()
            .filter(|(_, read)| is_received(read))
            .map(|(id, _)| value_of(*id))
            .collect(),
        outgoing: outputs.filter(|(role, _)| is_sent(role)).map(|(_, output)| output.value).collect(),
    };
    [forward, backward]
}

/// The memory of a stage on each device.
pub fn memory(fragment: &Fragment, backward: Option<&Backward>) -> Memory {
    let graph = &fragment.graph;
    let bytes = |value: Value| graph.fact(value).bytes().unwrap_or(u64::MAX);
    let mut saved: HashSet<Value> = HashSet::new();
    for (_, read) in backward.iter().flat_map(|backward| &backward.reads) {
        let Read::Saved(mut value) = *read else { continue };
        while value.output == 0 && rule(&graph.node(value.node).op).is_view() {
            value = graph.inputs(value.node)[0];
        }
        if !matches!(graph.node(value.node).op, Op::Constant(_) | Op::Parameter(_) | Op::State(_) | Op::Input(_)) {
            saved.insert(value);
        }
    }
    let parameters = graph.ids().filter(|id| matches!(graph.node(*id).op, Op::Parameter(_)));
    let parameters = parameters.map(|node| bytes(Value { node, output: 0 }));
    Memory {
        parameters: parameters.fold(0, u64::saturating_add),
        saved: saved.into_iter().map(bytes).fold(0, u64::saturating_add),
    }
}
