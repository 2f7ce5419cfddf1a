//! A run of ops in words that are the same for every run alike: what a model repeats is shared once.
//!
//! The words say all that sharing depends on: ops with their attributes but for names, sizes, who reads what, what comes from outside and what is read
//! there. What follows from constants counts by its contents, or by its place in the graph where those are large.

use crate::graph::Graph;
use crate::graph::hash::sha256;
use crate::op::table::{attributes, rule};
use crate::op::{NodeId, Op, Value};
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Constants of more bytes are told apart by their place alone.
const MOST_BYTES: usize = 1 << 20;

/// What the words are taken from.
pub struct Surroundings<'a> {
    /// The graph, with all that training adds.
    pub graph: &'a Graph,
    /// Ops that have a stage.
    pub placed: &'a HashSet<NodeId>,
    /// What depends on parameters.
    pub learned: &'a HashSet<NodeId>,
    /// What the loss depends on.
    pub needed: &'a HashSet<NodeId>,
    /// Words of what follows from constants, as far as they were asked for.
    pub constants: HashMap<NodeId, String>,
}

impl Surroundings<'_> {
    /// The words of these ops, in their order, and the values that come from outside in the order in which the words name them; `owner`
    /// gives for each op the number that its costs are told by.
    pub fn words(&mut self, run: &[NodeId], owner: impl Fn(NodeId) -> usize) -> (String, Vec<Value>) {
        let graph = self.graph;
        let place: HashMap<NodeId, usize> = run.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        let mut numbers: HashMap<Value, usize> = HashMap::new();
        let mut outside = Vec::new();
        let mut words = String::new();
        for &id in run {
            let op = &graph.node(id).op;
            let _ = write!(words, "{} {} {}", owner(id), rule(op).name(), said(op));
            for value in graph.inputs(id) {
                let Some(at) = place.get(&value.node) else {
                    let number = *numbers.entry(value).or_insert_with(|| {
                        outside.push(value);
                        outside.len() - 1
                    });
                    let _ = write!(words, " o{number}:{}", self.source(value, &place));
                    continue;
                };
                let _ = write!(words, " {at}#{}", value.output);
            }
            for value in graph.values(id) {
                let _ = write!(words, " >{}", graph.fact(value));
                for (reader, slot) in graph.consumers(value).iter().filter(|(reader, _)| self.placed.contains(reader)) {
                    match place.get(reader) {
                        Some(at) => drop(write!(words, " {at}.{slot}")),
                        None => words.push_str(" out"),
                    }
                }
                let ends = graph.outputs.iter().filter(|output| output.value == value).count();
                let _ = write!(words, " {ends}{}", self.needed.contains(&id));
            }
            for average in graph.averages.iter().filter(|average| average.sample.node == id) {
                let _ = write!(words, " average {} {}", average.sample.output, average.keep);
            }
            words.push('\n');
        }
        (words, outside)
    }

    /// What comes from outside.
    fn source(&mut self, value: Value, place: &HashMap<NodeId, usize>) -> String {
        let (graph, id) = (self.graph, value.node);
        let fact = graph.fact(value);
        let is_read_outside = || graph.consumers(value).iter().any(|(reader, _)| !place.contains_key(reader));
        match &graph.node(id).op {
            Op::Parameter(_) => format!("parameter {fact} {}", is_read_outside()),
            Op::Input(_) => format!("input {fact}"),
            Op::State(_) => format!("state {fact}"),
            _ if self.placed.contains(&id) => {
                // Readers on the other side have terms of its gradient that are no matter here.
                format!("value {fact} {} {}", self.learned.contains(&id), self.needed.contains(&id))
            }
            _ => format!("{}#{}", self.constant(id), value.output),
        }
    }

    fn constant(&mut self, id: NodeId) -> String {
        if let Some(known) = self.constants.get(&id) {
            return known.clone();
        }
        let graph = self.graph;
        let words = match &graph.node(id).op {
            Op::Constant(constant) if constant.tensor.bytes().len() > MOST_BYTES => format!("node {}", id.0),
            Op::Constant(constant) => {
                format!("{} {}", graph.fact(Value { node: id, output: 0 }), sha256(constant.tensor.bytes()))
            }
            op => {
                let mut words = format!("{} {}", rule(op).name(), said(op));
                for value in graph.inputs(id) {
                    let _ = write!(words, " ({}#{})", self.constant(value.node), value.output);
                }
                words
            }
        };
        let hash = sha256(words.as_bytes());
        self.constants.insert(id, hash.clone());
        hash
    }
}

/// The attributes of an op but for its name, and but for what tells the dropouts of a model apart.
fn said(op: &Op) -> String {
    let mut about = attributes(op);
    about.remove("name");
    about.remove("stream");
    if about.is_empty() { format!("{op:?}") } else { serde_json::Value::Object(about).to_string() }
}
