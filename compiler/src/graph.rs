//! The intermediate representation: a directed acyclic graph of core ops.
//!
//! Nodes are ops with the facts of their outputs; edges carry tensors from an output to an input. Every node keeps its
//! [`Origin`], so that reports use the source model's names. A graph is plain data: it can be printed and parsed
//! ([`text`]), verified ([`verify`]) and compared ([`isomorphism`]).
//!
//! A [`MovingAverage`] updates a state from a value of the graph, such as a running mean from the batch mean. The
//! executor applies it once per run, in minibatch order.

pub mod bind;
pub mod evaluate;
pub mod evaluate_spmd;
pub mod hash;
pub mod isomorphism;
pub mod order;
pub mod text;
pub mod verify;

use crate::op::table::rule;
use crate::op::{Emit, FactError, NodeId, Op, Value};
use crate::tensor::fact::Fact;
use petgraph::Direction;
use petgraph::stable_graph::{NodeIndex, StableDiGraph};
use petgraph::visit::EdgeRef;
use std::collections::HashSet;
use thiserror::Error;

/// A node's origin in the source model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The source node, e.g. `/1/a/qkv/MatMul`; empty if there is none.
    pub source: String,
    /// The enclosing module, e.g. `1.a.qkv`; empty if unknown.
    pub module: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Unique; used in the text form.
    pub name: String,
    pub op: Op,
    /// Element type and shape of each output.
    pub facts: Vec<Fact>,
    pub origin: Origin,
    /// The op that this node is a part of, for nodes that a pass adds to an op, such as casts. Plans do not number it.
    pub part_of: Option<NodeId>,
}

impl Node {
    /// The name for messages: the source node, or else the node's own name.
    pub fn label(&self) -> &str {
        if self.origin.source.is_empty() { &self.name } else { &self.origin.source }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Edge {
    output: u32,
    input: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Name in the source model and in result files.
    pub name: String,
    pub value: Value,
}

/// `state ← keep · state + (1 − keep) · sample`, once per run of the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct MovingAverage {
    /// The [`State`](crate::op::State) node.
    pub state: NodeId,
    pub sample: Value,
    /// Decay factor, 0 to 1.
    pub keep: f64,
}

#[derive(Debug, Error, PartialEq)]
#[error("{op}: {fault}")]
pub struct AddError {
    pub op: String,
    pub fault: FactError,
}

/// A directed acyclic graph of core ops, with its outputs and state updates.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    pub name: String,
    pub outputs: Vec<Output>,
    pub averages: Vec<MovingAverage>,
    dag: StableDiGraph<Node, Edge>,
}

fn index(id: NodeId) -> NodeIndex {
    NodeIndex::new(id.0 as usize)
}

fn id(index: NodeIndex) -> NodeId {
    NodeId(index.index() as u32)
}

impl Graph {
    pub fn new(name: &str) -> Graph {
        Graph { name: name.to_string(), ..Graph::default() }
    }

    /// Adds an op and infers its facts. The id may be reused from a removed node, so ids do not imply an order; see
    /// [`order`].
    pub fn add(&mut self, op: Op, inputs: &[Value], origin: &Origin) -> Result<NodeId, AddError> {
        let facts: Vec<Fact> = inputs.iter().map(|&v| self.fact(v).clone()).collect();
        let facts = rule(&op)
            .infer(&facts.iter().collect::<Vec<_>>())
            .map_err(|fault| AddError { op: rule(&op).name().to_string(), fault })?;
        let name = String::new();
        let node = self.dag.add_node(Node { name, op, facts, origin: origin.clone(), part_of: None });
        self.dag[node].name = format!("{}{}", rule(&self.dag[node].op).name(), node.index());
        for (slot, value) in inputs.iter().enumerate() {
            self.dag.add_edge(index(value.node), node, Edge { output: value.output, input: slot as u32 });
        }
        Ok(id(node))
    }

    pub fn len(&self) -> usize {
        self.dag.node_count()
    }

    pub fn is_empty(&self) -> bool {
        self.dag.node_count() == 0
    }

    /// All nodes in id order.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.dag.node_indices().map(id)
    }

    pub fn contains(&self, node: NodeId) -> bool {
        self.dag.contains_node(index(node))
    }

    /// A node. Panics if it does not exist.
    pub fn node(&self, node: NodeId) -> &Node {
        &self.dag[index(node)]
    }

    /// A mutable node. The caller must keep the facts consistent with the op.
    pub fn node_mut(&mut self, node: NodeId) -> &mut Node {
        &mut self.dag[index(node)]
    }

    /// The op that a node belongs to: itself, or the op that it is a part of.
    pub fn op_of(&self, node: NodeId) -> NodeId {
        self.node(node).part_of.unwrap_or(node)
    }

    pub fn fact(&self, value: Value) -> &Fact {
        &self.node(value.node).facts[value.output as usize]
    }

    pub fn inputs(&self, node: NodeId) -> Vec<Value> {
        let mut edges: Vec<(u32, Value)> = self
            .dag
            .edges_directed(index(node), Direction::Incoming)
            .map(|e| (e.weight().input, Value { node: id(e.source()), output: e.weight().output }))
            .collect();
        edges.sort_unstable();
        edges.into_iter().map(|(_, value)| value).collect()
    }

    pub fn values(&self, node: NodeId) -> Vec<Value> {
        (0..self.node(node).facts.len() as u32).map(|output| Value { node, output }).collect()
    }

    /// The consumers of a value as (node, input) pairs, sorted by id.
    pub fn consumers(&self, value: Value) -> Vec<(NodeId, u32)> {
        let mut uses: Vec<(NodeId, u32)> = self
            .dag
            .edges_directed(index(value.node), Direction::Outgoing)
            .filter(|e| e.weight().output == value.output)
            .map(|e| (id(e.target()), e.weight().input))
            .collect();
        uses.sort_unstable();
        uses
    }

    /// The consumers of any output of a node, sorted and distinct.
    pub fn successors(&self, node: NodeId) -> Vec<NodeId> {
        let mut ids: Vec<NodeId> = self.dag.neighbors_directed(index(node), Direction::Outgoing).map(id).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    }

    /// The nodes that lead to a value, and its own.
    pub fn ancestors(&self, value: Value) -> HashSet<NodeId> {
        let (mut seen, mut open) = (HashSet::new(), vec![value.node]);
        while let Some(node) = open.pop() {
            if seen.insert(node) {
                open.extend(self.dag.neighbors_directed(index(node), Direction::Incoming).map(id));
            }
        }
        seen
    }

    /// The number of a constant, possibly cast, reshaped or broadcast.
    pub fn number(&self, mut value: Value) -> Option<f64> {
        loop {
            match &self.node(value.node).op {
                Op::Constant(constant) if constant.tensor.len() == 1 => return Some(constant.tensor.to_f64()[0]),
                Op::Cast(_) | Op::Reshape(_) | Op::Broadcast(_) => value = self.inputs(value.node)[0],
                _ => return None,
            }
        }
    }

    /// Replaces `old` by `new` in all consumers: ops, outputs and averages.
    pub fn replace_uses(&mut self, old: Value, new: Value) {
        let edges: Vec<_> = self
            .dag
            .edges_directed(index(old.node), Direction::Outgoing)
            .filter(|e| e.weight().output == old.output)
            .map(|e| (e.id(), e.target(), e.weight().input))
            .collect();
        for (edge, target, input) in edges {
            self.dag.remove_edge(edge);
            self.dag.add_edge(index(new.node), target, Edge { output: new.output, input });
        }
        for output in self.outputs.iter_mut().filter(|o| o.value == old) {
            output.value = new;
        }
        for average in self.averages.iter_mut().filter(|a| a.sample == old) {
            average.sample = new;
        }
    }

    pub fn set_input(&mut self, node: NodeId, slot: u32, new: Value) {
        let edge = self
            .dag
            .edges_directed(index(node), Direction::Incoming)
            .find(|e| e.weight().input == slot)
            .map(|e| e.id())
            .expect("the slot is one of the node's inputs");
        self.dag.remove_edge(edge);
        self.dag.add_edge(index(new.node), index(node), Edge { output: new.output, input: slot });
    }

    /// Removes a node that has no consumers.
    pub fn remove(&mut self, node: NodeId) {
        self.dag.remove_node(index(node));
    }
}

/// Emits ops into a graph under one origin.
pub struct Writer<'a> {
    pub graph: &'a mut Graph,
    pub origin: Origin,
}

impl Emit for Writer<'_> {
    fn emit_all(&mut self, op: Op, inputs: &[Value]) -> Vec<Value> {
        let node = match self.graph.add(op, inputs, &self.origin) {
            Ok(node) => node,
            Err(e) => panic!("a compiler rule wrote an op that does not fit: {e}"),
        };
        self.graph.values(node)
    }

    fn fact(&self, value: Value) -> Fact {
        self.graph.fact(value).clone()
    }
}
