//! Builds the backward fragment of a stage from its forward fragment, with the list of values to save.
//!
//! Reverse-mode differentiation by source transformation: in reverse order, each op's rule emits ops from its output
//! gradients to its input gradients. Terms of a gradient are summed in the order fixed by
//! [`fragment`](super::fragment). Forward values that the backward reads are saved, except that constants are copied,
//! parameters are read again at the same weight version, and casts to a wider float are made again from what they read.

use super::fragment::{Fragment, Term, Use};
use super::loss::seed;
use super::pipeline::{self, PassBug};
use crate::graph::{Graph, Origin, Output, Writer, order};
use crate::op::table::rule;
use crate::op::{Binary, Emit, Input, NodeId, Op, Value, expr};
use std::collections::{HashMap, HashSet};
use thiserror::Error;

/// The source of a backward input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    Saved(Value),
    /// A gradient term of a sent value, from a stage that reads it.
    Gradient {
        /// Index in [`Fragment::sent`].
        sent: usize,
        stage: usize,
        /// Index of that stage's reader group.
        group: usize,
    },
}

/// The role of a backward output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// A parameter gradient term: index in [`Fragment::parameter_terms`].
    Parameter(usize),
    /// A gradient term of a received value, sent to its producer.
    Gradient {
        /// Index in [`Fragment::received`].
        received: usize,
        /// Index of the reader group.
        group: usize,
    },
}

/// The backward fragment of a stage.
#[derive(Clone, Debug)]
pub struct Backward {
    /// Ops from saved values, parameters and received gradients to parameter gradients and sent gradients.
    pub graph: Graph,
    /// The source of each [`Input`] of the graph.
    pub reads: Vec<(NodeId, Read)>,
    /// The role of each output of the graph, in order.
    pub output_roles: Vec<Made>,
}

#[derive(Debug, Error)]
pub enum BackwardError {
    #[error("node `{node}` ({op}) has no gradient for its output {output}, which the loss depends on")]
    NoRule { node: String, op: String, output: usize },
    #[error(transparent)]
    Bug(#[from] PassBug),
}

/// Gradient terms that later stages send: the value in the whole graph, the stage, and its reader group.
pub type ReceivedGradients = HashSet<(Value, usize, usize)>;

/// Builds the backward fragment at fixed sizes. `loss` is the scalar to minimise, if it is in this fragment; `received`
/// lists the gradient terms that later stages send (a reader may have none).
pub fn backward(
    fragment: &Fragment,
    loss: Option<Value>,
    received: &ReceivedGradients,
) -> Result<Backward, BackwardError> {
    let mut joint = Joint::new(fragment);
    let forward_order = order::canonical(&fragment.graph);
    for &id in forward_order.iter().rev() {
        joint.node(id, loss, received)?;
    }
    let results = joint.results();
    let (graph, reads) = joint.extract(&results);
    Ok(finish(graph, reads, results.into_iter().map(|(made, _)| made).collect())?)
}

struct Joint<'a> {
    fragment: &'a Fragment,
    /// The forward graph followed by the backward ops.
    graph: Graph,
    /// The forward nodes; all others are backward ops.
    forward: HashSet<NodeId>,
    /// Nodes that need a gradient.
    active: HashSet<NodeId>,
    /// The gradient contributed by each use of a value.
    contributions: HashMap<Use, Value>,
    /// The inputs for received gradients.
    arrived: HashMap<NodeId, Read>,
}

impl<'a> Joint<'a> {
    fn new(fragment: &'a Fragment) -> Joint<'a> {
        let graph = fragment.graph.clone();
        let need_gradient: HashSet<NodeId> =
            fragment.received.iter().filter(|r| r.needs_gradient).map(|r| r.local).collect();
        let mut active = HashSet::new();
        for id in order::canonical(&graph) {
            let is_source = matches!(graph.node(id).op, Op::Parameter(_)) || need_gradient.contains(&id);
            if is_source || graph.inputs(id).iter().any(|v| active.contains(&v.node)) {
                active.insert(id);
            }
        }
        let forward = graph.ids().collect();
        Joint { fragment, graph, forward, active, contributions: HashMap::new(), arrived: HashMap::new() }
    }

    fn is_active(&self, value: Value) -> bool {
        self.active.contains(&value.node) && self.graph.fact(value).dtype.is_float()
    }

    fn node(&mut self, id: NodeId, loss: Option<Value>, received: &ReceivedGradients) -> Result<(), BackwardError> {
        let node = self.graph.node(id).clone();
        if !self.active.contains(&id) || matches!(node.op, Op::Parameter(_) | Op::Input(_)) {
            return Ok(());
        }
        let outputs = self.graph.values(id);
        let d_outputs: Vec<Option<Value>> =
            outputs.iter().map(|v| self.gradient(*v, loss == Some(*v), received, &node.origin)).collect();
        if d_outputs.iter().all(Option::is_none) {
            return Ok(());
        }
        let unsupported = (0..outputs.len()).find(|&o| d_outputs[o].is_some() && !rule(&node.op).takes_gradient(o));
        if let Some(output) = unsupported {
            let name = node.label().to_string();
            return Err(BackwardError::NoRule { node: name, op: rule(&node.op).name().to_string(), output });
        }
        let inputs = self.graph.inputs(id);
        let needs_gradient: Vec<bool> = inputs.iter().map(|v| self.is_active(*v)).collect();
        let mut out = Writer { graph: &mut self.graph, origin: node.origin };
        let gradients = expr::backward(rule(&node.op), [&inputs, &outputs], &d_outputs, &needs_gradient, &mut out);
        for (slot, gradient) in gradients.into_iter().enumerate() {
            if let (Some(gradient), true) = (gradient, needs_gradient[slot]) {
                self.contributions.insert((id, slot as u32), gradient);
            }
        }
        Ok(())
    }

    /// The gradient of a value: the sum of its terms in their order.
    fn gradient(
        &mut self,
        value: Value,
        is_loss: bool,
        received: &ReceivedGradients,
        origin: &Origin,
    ) -> Option<Value> {
        let mut sum: Option<Value> = None;
        if is_loss {
            let one = seed(self.graph.fact(value).dtype);
            let shape = self.graph.fact(value).shape.clone();
            let mut out = Writer { graph: &mut self.graph, origin: origin.clone() };
            let one = out.emit(one, &[]);
            let is_scalar = shape.is_empty();
            sum = Some(if is_scalar { one } else { out.emit(Op::Reshape(crate::op::Reshape { shape }), &[one]) });
        }
        for term in self.fragment.terms.get(&value).cloned().unwrap_or_default() {
            let term = match term {
                Term::Local(usage) => self.contributions.get(&usage).copied(),
                Term::Remote { stage, group } => self.remote(value, stage, group, received),
            };
            if let Some(term) = term {
                sum = Some(self.add(sum, term, origin));
            }
        }
        sum
    }

    fn add(&mut self, sum: Option<Value>, term: Value, origin: &Origin) -> Value {
        match sum {
            None => term,
            Some(sum) => {
                Writer { graph: &mut self.graph, origin: origin.clone() }.emit(Op::Binary(Binary::Add), &[sum, term])
            }
        }
    }

    fn remote(&mut self, value: Value, stage: usize, group: usize, received: &ReceivedGradients) -> Option<Value> {
        let sent = self.fragment.sent.iter().position(|s| s.local == value)?;
        if !received.contains(&(self.fragment.sent[sent].value, stage, group)) {
            return None;
        }
        let name = format!("gradient of {} from stage {stage}, group {group}", self.graph.node(value.node).name);
        let fact = self.graph.fact(value).clone();
        let input =
            self.graph.add(Op::Input(Input { name, fact }), &[], &Origin::default()).expect("an input takes no inputs");
        self.arrived.insert(input, Read::Gradient { sent, stage, group });
        Some(Value { node: input, output: 0 })
    }

    /// The outputs of the backward graph, as values of the joint graph.
    fn results(&mut self) -> Vec<(Made, Value)> {
        let mut results = Vec::new();
        let sum_of = |joint: &mut Joint<'_>, uses: &[Use]| {
            let terms: Vec<Value> = uses.iter().filter_map(|u| joint.contributions.get(u).copied()).collect();
            terms.into_iter().fold(None, |sum, term| Some(joint.add(sum, term, &Origin::default())))
        };
        for (i, term) in self.fragment.parameter_terms.iter().enumerate() {
            if let Some(sum) = sum_of(self, &term.uses) {
                results.push((Made::Parameter(i), sum));
            }
        }
        for (i, received) in self.fragment.received.iter().enumerate().filter(|(_, r)| r.needs_gradient) {
            for (group, uses) in received.groups.iter().enumerate() {
                if let Some(sum) = sum_of(self, uses) {
                    results.push((Made::Gradient { received: i, group }, sum));
                }
            }
        }
        results
    }

    fn extract(&self, results: &[(Made, Value)]) -> (Graph, Vec<(NodeId, Read)>) {
        let mut nodes: HashSet<NodeId> = HashSet::new();
        let is_new = |id: &NodeId| !self.forward.contains(id);
        let mut queue: Vec<NodeId> = results.iter().map(|(_, v)| v.node).filter(is_new).collect();
        while let Some(id) = queue.pop() {
            if nodes.insert(id) {
                queue.extend(self.graph.inputs(id).into_iter().map(|v| v.node).filter(is_new));
            }
        }
        let mut graph = Graph::new(&self.graph.name);
        let mut reads = Vec::new();
        let mut map: HashMap<Value, Value> = HashMap::new();
        for id in order::canonical(&self.graph).into_iter().filter(|id| nodes.contains(id)) {
            let inputs: Vec<Value> =
                self.graph.inputs(id).iter().map(|v| self.resolve(*v, &mut graph, &mut map, &mut reads)).collect();
            let node = self.graph.node(id);
            let copy = graph.add(node.op.clone(), &inputs, &node.origin).expect("the op fitted in the joint graph");
            if let Some(read) = self.arrived.get(&id) {
                reads.push((copy, *read));
            }
            for value in self.graph.values(id) {
                map.insert(value, Value { node: copy, output: value.output });
            }
        }
        for (i, (_, value)) in results.iter().enumerate() {
            let value = self.resolve(*value, &mut graph, &mut map, &mut reads);
            graph.outputs.push(Output { name: format!("d{i}"), value });
        }
        (graph, reads)
    }

    /// True for a cast to a wider float. The narrow value takes less memory and makes the same bits again.
    fn is_widened(&self, narrow: Value, wide: Value) -> bool {
        let [from, to] = [narrow, wide].map(|value| self.graph.fact(value).dtype);
        from.is_float() && to.is_float() && from.size() < to.size()
    }

    /// Maps a value of the joint graph to the backward graph: a forward value becomes a constant, a parameter, a saved
    /// input, or the cast of one.
    fn resolve(
        &self,
        value: Value,
        graph: &mut Graph,
        map: &mut HashMap<Value, Value>,
        reads: &mut Vec<(NodeId, Read)>,
    ) -> Value {
        if let Some(mapped) = map.get(&value) {
            return *mapped;
        }
        let node = self.graph.node(value.node);
        if let (Op::Cast(_), [narrow]) = (&node.op, &self.graph.inputs(value.node)[..])
            && self.is_widened(*narrow, value)
        {
            let narrow = self.resolve(*narrow, graph, map, reads);
            let wide = graph.add(node.op.clone(), &[narrow], &node.origin).expect("the cast fitted in the joint graph");
            let wide = Value { node: wide, output: 0 };
            map.insert(value, wide);
            return wide;
        }
        let is_source = matches!(node.op, Op::Constant(_) | Op::Parameter(_) | Op::Iota(_));
        let op = if is_source {
            node.op.clone()
        } else {
            let name = format!("saved {}#{}", node.name, value.output);
            Op::Input(Input { name, fact: self.graph.fact(value).clone() })
        };
        let copy = graph.add(op, &[], &node.origin).expect("a source takes no inputs");
        if !is_source {
            reads.push((copy, Read::Saved(value)));
        }
        let copy = Value { node: copy, output: 0 };
        map.insert(value, copy);
        copy
    }
}

fn finish(mut graph: Graph, mut reads: Vec<(NodeId, Read)>, output_roles: Vec<Made>) -> Result<Backward, PassBug> {
    pipeline::concrete(&mut graph)?;
    let results: HashSet<NodeId> = graph.outputs.iter().map(|o| o.value.node).collect();
    reads.retain(|(node, _)| !graph.successors(*node).is_empty() || results.contains(node));
    let read_inputs: HashSet<NodeId> = reads.iter().map(|(node, _)| *node).collect();
    let unread_inputs: Vec<NodeId> =
        graph.ids().filter(|id| matches!(graph.node(*id).op, Op::Input(_)) && !read_inputs.contains(id)).collect();
    for id in unread_inputs {
        graph.remove(id);
    }
    Ok(Backward { graph, reads, output_roles })
}
