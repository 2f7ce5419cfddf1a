//! Hash of a graph: ops, attributes, facts and edges in canonical order, without node names.

use super::{Graph, order};
use crate::op::table::{attributes, rule};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fmt::Write;

/// SHA-256 in hexadecimal. Equal graphs have equal hashes; origins do not matter.
pub fn hash(graph: &Graph) -> String {
    let order = order::canonical(graph);
    let position_of: HashMap<_, _> = order.iter().enumerate().map(|(i, id)| (*id, i)).collect();
    let mut sha = Sha256::new();
    let mut line = String::new();
    let mut flush = |text: &mut String| {
        sha.update(text.as_bytes());
        text.clear();
    };
    for id in &order {
        let node = graph.node(*id);
        let _ = write!(line, "{} {}", rule(&node.op).name(), serde_json::Value::Object(attributes(&node.op)));
        for v in graph.inputs(*id) {
            let _ = write!(line, " {}#{}", position_of[&v.node], v.output);
        }
        for fact in &node.facts {
            let _ = write!(line, " : {fact}");
        }
        line.push('\n');
        flush(&mut line);
    }
    for o in &graph.outputs {
        let _ = writeln!(line, "output {:?} {}#{}", o.name, position_of[&o.value.node], o.value.output);
    }
    for a in &graph.averages {
        let (state, sample) = (position_of[&a.state], position_of[&a.sample.node]);
        let _ = writeln!(line, "average {state} {sample}#{} {}", a.sample.output, a.keep);
    }
    flush(&mut line);
    digits(&sha.finalize())
}

pub fn sha256(bytes: &[u8]) -> String {
    digits(&Sha256::digest(bytes))
}

fn digits(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
