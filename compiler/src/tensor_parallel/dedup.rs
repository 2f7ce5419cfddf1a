//! Canonical keys of segments, so that repeated segments of a model are sharded once.
//!
//! A key covers everything that sharding depends on: ops and attributes without names, sizes, consumers, and values to
//! and from other segments. Constant expressions count by content, or by node if large.

use crate::graph::Graph;
use crate::graph::hash::sha256;
use crate::op::table::{attributes, rule};
use crate::op::{NodeId, Op, Value};
use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// Larger constants, in bytes, are distinguished only by node.
const MOST_BYTES: usize = 1 << 20;

/// Context of the keys.
pub struct KeyContext<'a> {
    pub graph: &'a Graph,
    /// Ops assigned to a stage.
    pub placed: &'a HashSet<NodeId>,
    pub learned: &'a HashSet<NodeId>,
    pub needed: &'a HashSet<NodeId>,
    /// Cached keys of constant expressions.
    pub constants: HashMap<NodeId, String>,
    /// Cached attributes of ops.
    pub attributes: HashMap<NodeId, String>,
}

impl KeyContext<'_> {
    /// The key of these ops in order, and the outside values in the order in which the key names them; `owner` gives
    /// the op number that each node's costs count for.
    pub fn words(&mut self, run: &[NodeId], owner: impl Fn(NodeId) -> usize) -> (String, Vec<Value>) {
        let graph = self.graph;
        let place: HashMap<NodeId, usize> = run.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        let mut numbers: HashMap<Value, usize> = HashMap::new();
        let mut outside = Vec::new();
        let mut words = String::new();
        for &id in run {
            let op = &graph.node(id).op;
            let text = self.attributes.entry(id).or_insert_with(|| attribute_text(op));
            let _ = write!(words, "{} {} {text}", owner(id), rule(op).name());
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

    /// The key of an outside value.
    fn source(&mut self, value: Value, place: &HashMap<NodeId, usize>) -> String {
        let (graph, id) = (self.graph, value.node);
        let fact = graph.fact(value);
        let is_read_outside = || graph.consumers(value).iter().any(|(reader, _)| !place.contains_key(reader));
        match &graph.node(id).op {
            Op::Parameter(_) => format!("parameter {fact} {}", is_read_outside()),
            Op::Input(_) => format!("input {fact}"),
            Op::State(_) => format!("state {fact}"),
            _ if self.placed.contains(&id) => {
                // Outside readers contribute gradient terms, which do not matter here.
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
                let mut words = format!("{} {}", rule(op).name(), attribute_text(op));
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

/// The attributes of an op, without its name and random stream.
fn attribute_text(op: &Op) -> String {
    let mut about = attributes(op);
    about.remove("name");
    about.remove("stream");
    // Attention has a dropout of its own.
    about.values_mut().filter_map(serde_json::Value::as_object_mut).for_each(|inner| drop(inner.remove("stream")));
    if about.is_empty() { format!("{op:?}") } else { serde_json::Value::Object(about).to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Attention, Dropout, EmptyRow};

    #[test]
    fn random_streams_do_not_distinguish_segments() {
        let drops = |ratio, stream| attribute_text(&Op::Dropout(Dropout { ratio, stream }));
        assert_eq!(drops(0.1, 1), drops(0.1, 2));
        assert_ne!(drops(0.1, 1), drops(0.2, 1));
        let attends = |ratio, stream| {
            let dropout = Some(Dropout { ratio, stream });
            let attention = Attention { scale: 1.0, causal: true, empty: EmptyRow::Nan, dropout, part: None };
            attribute_text(&Op::Attention(attention))
        };
        assert_eq!(attends(0.1, 1), attends(0.1, 2));
        assert_ne!(attends(0.1, 1), attends(0.2, 1));
    }
}
