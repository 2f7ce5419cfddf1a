//! Common subexpression elimination: merges equal ops on equal inputs. Named sources are never merged.

use super::Changed;
use crate::graph::{Graph, order};
use crate::op::table::{attributes, rule};
use crate::op::{Constant, Op, Value};
use bytes::Bytes;
use std::collections::HashMap;

/// Merges every node into the first equal one, in canonical order.
pub fn cse(graph: &mut Graph) -> Changed {
    let mut first_of = HashMap::new();
    let mut changed = false;
    for id in order::canonical(graph) {
        let op = &graph.node(id).op;
        if matches!(op, Op::Input(_) | Op::Parameter(_) | Op::State(_)) {
            continue;
        }
        // Attributes are compared as text: ops contain floats, which have no hash. A constant, possibly megabytes, is
        // compared by its bytes.
        let (text, bytes) = match op {
            Op::Constant(Constant { tensor }) => {
                (format!("{} {:?}", tensor.dtype(), tensor.shape()), tensor.bytes().clone())
            }
            _ => (serde_json::Value::Object(attributes(op)).to_string(), Bytes::new()),
        };
        let key = (rule(op).name(), text, bytes, graph.inputs(id));
        match first_of.get(&key) {
            None => {
                first_of.insert(key, id);
            }
            Some(&first) => {
                for output in 0..graph.node(id).facts.len() as u32 {
                    graph.replace_uses(Value { node: id, output }, Value { node: first, output });
                }
                graph.remove(id);
                changed = true;
            }
        }
    }
    Changed::from(changed)
}
