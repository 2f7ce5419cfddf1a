//! Common subexpression elimination: equal ops on equal inputs become one. Sources with a name are never merged.

use super::Changed;
use crate::graph::{Graph, order};
use crate::op::table::{attributes, rule};
use crate::op::{Constant, Op, Value};
use bytes::Bytes;
use std::collections::HashMap;

/// Merges every node into the first one that says the same.
pub fn cse(graph: &mut Graph) -> Changed {
    let mut seen = HashMap::new();
    let mut changed = false;
    for id in order::canonical(graph) {
        let op = &graph.node(id).op;
        if matches!(op, Op::Input(_) | Op::Parameter(_) | Op::State(_)) {
            continue;
        }
        // The attributes as text are the key: ops hold floats, which have no hash of their own. A constant, which may be
        // megabytes, is its bytes.
        let (text, bytes) = match op {
            Op::Constant(Constant { tensor }) => {
                (format!("{} {:?}", tensor.dtype(), tensor.shape()), tensor.bytes().clone())
            }
            _ => (serde_json::Value::Object(attributes(op)).to_string(), Bytes::new()),
        };
        let key = (rule(op).name(), text, bytes, graph.inputs(id));
        match seen.get(&key) {
            None => {
                seen.insert(key, id);
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
