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

pub struct KeyContext<'a> {
    pub graph: &'a Graph,
    /// Ops assigned to a stage.
    pub nodes: &'a HashSet<NodeId>,
    pub parameter_dependents: &'a HashSet<NodeId>,
    pub loss_ancestors: &'a HashSet<NodeId>,
    /// Cached keys of constant expressions.
    pub constants: HashMap<NodeId, String>,
    /// Cached attributes of ops.
    pub attributes: HashMap<NodeId, String>,
}

impl KeyContext<'_> {
    /// The key of these ops in order, and the outside values in the order in which the key names them; `owner` gives
    /// the op number that each node's costs count for.
    pub fn key(&mut self, run: &[NodeId], owner: impl Fn(NodeId) -> usize) -> (String, Vec<Value>) {
        let graph = self.graph;
        let position_of: HashMap<NodeId, usize> = run.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        let mut numbers: HashMap<Value, usize> = HashMap::new();
        let mut outside = Vec::new();
        let mut key = String::new();
        for &id in run {
            let op = &graph.node(id).op;
            let text = self.attributes.entry(id).or_insert_with(|| attribute_text(op));
            let _ = write!(key, "{} {} {text}", owner(id), rule(op).name());
            for value in graph.inputs(id) {
                let Some(at) = position_of.get(&value.node) else {
                    let number = *numbers.entry(value).or_insert_with(|| {
                        outside.push(value);
                        outside.len() - 1
                    });
                    let _ = write!(key, " o{number}:{}", self.source(value, &position_of));
                    continue;
                };
                let _ = write!(key, " {at}#{}", value.output);
            }
            for value in graph.values(id) {
                let _ = write!(key, " >{}", graph.fact(value));
                for (reader, slot) in graph.consumers(value).iter().filter(|(reader, _)| self.nodes.contains(reader)) {
                    match position_of.get(reader) {
                        Some(at) => drop(write!(key, " {at}.{slot}")),
                        None => key.push_str(" out"),
                    }
                }
                let output_count = graph.outputs.iter().filter(|output| output.value == value).count();
                let _ = write!(key, " {output_count}{}", self.loss_ancestors.contains(&id));
            }
            for average in graph.averages.iter().filter(|average| average.sample.node == id) {
                let _ = write!(key, " average {} {}", average.sample.output, average.keep);
            }
            key.push('\n');
        }
        (key, outside)
    }

    /// The key of an outside value.
    fn source(&mut self, value: Value, position_of: &HashMap<NodeId, usize>) -> String {
        let (graph, id) = (self.graph, value.node);
        let fact = graph.fact(value);
        let is_read_outside = || graph.consumers(value).iter().any(|(reader, _)| !position_of.contains_key(reader));
        match &graph.node(id).op {
            Op::Parameter(_) => format!("parameter {fact} {}", is_read_outside()),
            Op::Input(_) => format!("input {fact}"),
            Op::State(_) => format!("state {fact}"),
            _ if self.nodes.contains(&id) => {
                // Outside readers contribute gradient terms, which do not matter here.
                format!(
                    "value {fact} {} {}",
                    self.parameter_dependents.contains(&id),
                    self.loss_ancestors.contains(&id)
                )
            }
            _ => format!("{}#{}", self.constant(id), value.output),
        }
    }

    fn constant(&mut self, id: NodeId) -> String {
        if let Some(cached) = self.constants.get(&id) {
            return cached.clone();
        }
        let graph = self.graph;
        let text = match &graph.node(id).op {
            Op::Constant(constant) if constant.tensor.bytes().len() > MOST_BYTES => format!("node {}", id.0),
            Op::Constant(constant) => {
                format!("{} {}", graph.fact(Value { node: id, output: 0 }), sha256(constant.tensor.bytes()))
            }
            op => {
                let mut text = format!("{} {}", rule(op).name(), attribute_text(op));
                for value in graph.inputs(id) {
                    let _ = write!(text, " ({}#{})", self.constant(value.node), value.output);
                }
                text
            }
        };
        let hash = sha256(text.as_bytes());
        self.constants.insert(id, hash.clone());
        hash
    }
}

/// The attributes of an op, without its name and random stream.
fn attribute_text(op: &Op) -> String {
    let mut attributes = attributes(op);
    attributes.remove("name");
    attributes.remove("stream");
    // Attention has a dropout of its own.
    attributes.values_mut().filter_map(serde_json::Value::as_object_mut).for_each(|inner| drop(inner.remove("stream")));
    if attributes.is_empty() { format!("{op:?}") } else { serde_json::Value::Object(attributes).to_string() }
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
