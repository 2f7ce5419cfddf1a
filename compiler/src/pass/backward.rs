//! From a stage's forward fragment to its backward fragment, and the list of what must be kept in between.
//!
//! Reverse-mode differentiation by source transformation: the rule of every op, last op first, writes ops that turn
//! the gradient of its outputs into those of its inputs. Terms of a sum are added in the order that
//! [`fragment`](super::fragment) fixed. What the backward ops read of the forward run is saved; constants are copied,
//! parameters are read again at the same version.

use super::fragment::{Fragment, Term, Use};
use super::loss::seed;
use super::pipeline::{self, PassBug};
use crate::graph::{Graph, Origin, Output, Writer, order};
use crate::op::table::rule;
use crate::op::{Binary, Emit, Input, NodeId, Op, Site, Value};
use std::collections::{HashMap, HashSet};
use thiserror::Error;

/// Where an input of the backward graph comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// A value of the forward fragment that is kept until now.
    Saved(Value),
    /// A term of the gradient of a sent value, from the stage that read it.
    Gradient {
        /// Index in [`Fragment::sent`].
        sent: usize,
        /// The stage it comes from.
        stage: usize,
        /// Which of that stage's groups.
        group: usize,
    },
}

/// A result of the backward graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// A term of a parameter's gradient: index in [`Fragment::parameter_terms`].
    Parameter(usize),
    /// A term of the gradient of a received value, to be sent to its producer.
    Gradient {
        /// Index in [`Fragment::received`].
        received: usize,
        /// Which of its groups.
        group: usize,
    },
}

/// The backward fragment of a stage.
#[derive(Clone, Debug)]
pub struct Backward {
    /// Ops from saved values, parameters and arriving gradients to leaving gradients.
    pub graph: Graph,
    /// What each [`Input`] of the graph is.
    pub reads: Vec<(NodeId, Read)>,
    /// What each output of the graph is, in order.
    pub makes: Vec<Made>,
}

/// Why a fragment has no backward.
#[derive(Debug, Error)]
pub enum BackwardError {
    /// A gradient arrives where an op has no rule for it.
    #[error("node `{node}` ({op}) has no gradient for its output {output}, which the loss depends on")]
    NoRule {
        /// The node, in the words of the source model.
        node: String,
        /// Its op.
        op: String,
        /// The output that a gradient arrives at, counted from 0.
        output: usize,
    },
    /// A pass broke the graph.
    #[error(transparent)]
    Bug(#[from] PassBug),
}

/// A term that the backward of a later stage sends: the whole graph's value, the stage, and its group.
pub type Arriving = HashSet<(Value, usize, usize)>;

/// The backward fragment at fixed sizes. `loss` is the fragment's scalar that is made small, where it has it; `arriving`
/// says which gradient terms the later stages really send (a reader may have no gradient).
pub fn backward(fragment: &Fragment, loss: Option<Value>, arriving: &Arriving) -> Result<Backward, BackwardError> {
    let mut joint = Joint::new(fragment);
    let forward_order = order::canonical(&fragment.graph);
    for &id in forward_order.iter().rev() {
        joint.node(id, loss, arriving)?;
    }
    let results = joint.results();
    let (graph, reads) = joint.extract(&results);
    Ok(finish(graph, reads, results.into_iter().map(|(made, _)| made).collect())?)
}

struct Joint<'a> {
    fragment: &'a Fragment,
    /// The forward graph, with the backward ops behind it.
    graph: Graph,
    /// The nodes that were there before; all others are backward ops.
    forward: HashSet<NodeId>,
    /// Values that a gradient is wanted for.
    active: HashSet<NodeId>,
    /// The gradient that each use of a value contributes.
    contributions: HashMap<Use, Value>,
    /// The inputs that stand for arriving gradients.
    arrived: HashMap<NodeId, Read>,
}

impl<'a> Joint<'a> {
    fn new(fragment: &'a Fragment) -> Joint<'a> {
        let graph = fragment.graph.clone();
        let wanted: HashSet<NodeId> = fragment.received.iter().filter(|r| r.wanted).map(|r| r.local).collect();
        let mut active = HashSet::new();
        for id in order::canonical(&graph) {
            let source = matches!(graph.node(id).op, Op::Parameter(_)) || wanted.contains(&id);
            if source || graph.inputs(id).iter().any(|v| active.contains(&v.node)) {
                active.insert(id);
            }
        }
        let forward = graph.ids().collect();
        Joint { fragment, graph, forward, active, contributions: HashMap::new(), arrived: HashMap::new() }
    }

    fn is_active(&self, value: Value) -> bool {
        self.active.contains(&value.node) && self.graph.fact(value).dtype.is_float()
    }

    /// Writes the backward ops of one forward node.
    fn node(&mut self, id: NodeId, loss: Option<Value>, arriving: &Arriving) -> Result<(), BackwardError> {
        let node = self.graph.node(id).clone();
        if !self.active.contains(&id) || matches!(node.op, Op::Parameter(_) | Op::Input(_)) {
            return Ok(());
        }
        let outputs = self.graph.values(id);
        let d_outputs: Vec<Option<Value>> =
            outputs.iter().map(|v| self.gradient(*v, loss == Some(*v), arriving, &node.origin)).collect();
        if d_outputs.iter().all(Option::is_none) {
            return Ok(());
        }
        let refused = (0..outputs.len()).find(|&o| d_outputs[o].is_some() && !rule(&node.op).takes_gradient(o));
        if let Some(output) = refused {
            let told = node.told().to_string();
            return Err(BackwardError::NoRule { node: told, op: rule(&node.op).name().to_string(), output });
        }
        let inputs = self.graph.inputs(id);
        let wanted: Vec<bool> = inputs.iter().map(|v| self.is_active(*v)).collect();
        let site = Site { inputs: &inputs, outputs: &outputs, d_outputs: &d_outputs, wanted: &wanted };
        let mut out = Writer { graph: &mut self.graph, origin: node.origin };
        let gradients = rule(&node.op).backward(site, &mut out);
        for (slot, gradient) in gradients.into_iter().enumerate() {
            if let (Some(gradient), true) = (gradient, wanted[slot]) {
                self.contributions.insert((id, slot as u32), gradient);
            }
        }
        Ok(())
    }

    /// The gradient of a value: the sum of its terms in their order.
    fn gradient(&mut self, value: Value, is_loss: bool, arriving: &Arriving, origin: &Origin) -> Option<Value> {
        let mut sum: Option<Value> = None;
        if is_loss {
            let one = seed(self.graph.fact(value).dtype);
            let shape = self.graph.fact(value).shape.clone();
            let mut out = Writer { graph: &mut self.graph, origin: origin.clone() };
            let one = out.emit(one, &[]);
            let scalar = shape.is_empty();
            sum = Some(if scalar { one } else { out.emit(Op::Reshape(crate::op::Reshape { shape }), &[one]) });
        }
        for term in self.fragment.terms.get(&value).cloned().unwrap_or_default() {
            let term = match term {
                Term::Local(usage) => self.contributions.get(&usage).copied(),
                Term::Remote { stage, group } => self.remote(value, stage, group, arriving),
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

    fn remote(&mut self, value: Value, stage: usize, group: usize, arriving: &Arriving) -> Option<Value> {
        let sent = self.fragment.sent.iter().position(|s| s.local == value)?;
        if !arriving.contains(&(self.fragment.sent[sent].value, stage, group)) {
            return None;
        }
        let name = format!("gradient of {} from stage {stage}, group {group}", self.graph.node(value.node).name);
        let fact = self.graph.fact(value).clone();
        let input =
            self.graph.add(Op::Input(Input { name, fact }), &[], &Origin::default()).expect("an input takes no inputs");
        self.arrived.insert(input, Read::Gradient { sent, stage, group });
        Some(Value { node: input, output: 0 })
    }

    /// What the backward graph makes, with the values in the joint graph.
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
        for (i, received) in self.fragment.received.iter().enumerate().filter(|(_, r)| r.wanted) {
            for (group, uses) in received.groups.iter().enumerate() {
                if let Some(sum) = sum_of(self, uses) {
                    results.push((Made::Gradient { received: i, group }, sum));
                }
            }
        }
        results
    }

    /// The backward ops as a graph of their own.
    fn extract(&self, results: &[(Made, Value)]) -> (Graph, Vec<(NodeId, Read)>) {
        let mut needed: HashSet<NodeId> = HashSet::new();
        let is_new = |id: &NodeId| !self.forward.contains(id);
        let mut queue: Vec<NodeId> = results.iter().map(|(_, v)| v.node).filter(is_new).collect();
        while let Some(id) = queue.pop() {
            if needed.insert(id) {
                queue.extend(self.graph.inputs(id).into_iter().map(|v| v.node).filter(is_new));
            }
        }
        let mut graph = Graph::new(&self.graph.name);
        let mut reads = Vec::new();
        let mut map: HashMap<Value, Value> = HashMap::new();
        for id in order::canonical(&self.graph).into_iter().filter(|id| needed.contains(id)) {
            let inputs: Vec<Value> =
                self.graph.inputs(id).iter().map(|v| self.bring(*v, &mut graph, &mut map, &mut reads)).collect();
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
            let value = self.bring(*value, &mut graph, &mut map, &mut reads);
            graph.outputs.push(Output { name: format!("d{i}"), value });
        }
        (graph, reads)
    }

    /// A value of the joint graph in the backward graph: a forward value comes in as a constant, a parameter or a
    /// saved tensor.
    fn bring(
        &self,
        value: Value,
        graph: &mut Graph,
        map: &mut HashMap<Value, Value>,
        reads: &mut Vec<(NodeId, Read)>,
    ) -> Value {
        if let Some(found) = map.get(&value) {
            return *found;
        }
        let node = self.graph.node(value.node);
        let source = matches!(node.op, Op::Constant(_) | Op::Parameter(_) | Op::Iota(_));
        let op = if source {
            node.op.clone()
        } else {
            let name = format!("saved {}#{}", node.name, value.output);
            Op::Input(Input { name, fact: self.graph.fact(value).clone() })
        };
        let copy = graph.add(op, &[], &node.origin).expect("a source takes no inputs");
        if !source {
            reads.push((copy, Read::Saved(value)));
        }
        let copy = Value { node: copy, output: 0 };
        map.insert(value, copy);
        copy
    }
}

fn finish(mut graph: Graph, mut reads: Vec<(NodeId, Read)>, makes: Vec<Made>) -> Result<Backward, PassBug> {
    pipeline::concrete(&mut graph)?;
    let results: HashSet<NodeId> = graph.outputs.iter().map(|o| o.value.node).collect();
    reads.retain(|(node, _)| !graph.successors(*node).is_empty() || results.contains(node));
    let used: HashSet<NodeId> = reads.iter().map(|(node, _)| *node).collect();
    let unused: Vec<NodeId> =
        graph.ids().filter(|id| matches!(graph.node(*id).op, Op::Input(_)) && !used.contains(id)).collect();
    for id in unused {
        graph.remove(id);
    }
    Ok(Backward { graph, reads, makes })
}
