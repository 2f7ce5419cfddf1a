//! The text form of a graph, which parses back to the same graph.
//!
//! ```text
//! graph "mlp" {
//!   %input0 = input name="x" fact={"dtype":"f32","shape":["batch",784]} : f32[batch, 784]
//!   %parameter1 = parameter name="0.weight" fact={..} : f32[10, 784]
//!   %matmul2 = matmul %input0 %parameter1 transpose_a=false transpose_b=true : f32[batch, 10] from "/0/Gemm" in "0"
//!   output "logits" %matmul2
//!   average %state7 %batch_norm9#1 0.9
//! }
//! ```
//!
//! Each line is a node: name, op, inputs (`#k` for an output other than the first), attributes as JSON, output facts,
//! origin. Names are JSON strings and may contain any character.

use super::{Graph, MovingAverage, Origin, Output, order};
use crate::op::table::{attributes, parse as parse_op, rule};
use crate::op::{NodeId, Value};
use crate::tensor::fact::Fact;
use serde_json::{Map, Value as Json};
use std::collections::HashMap;
use std::fmt::Write;
use thiserror::Error;

/// A syntax or semantic error in the text form.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("line {line}: {fault}")]
pub struct ParseError {
    /// Counted from 1.
    pub line: usize,
    pub fault: String,
}

/// Prints the graph in canonical order.
pub fn print(graph: &Graph) -> String {
    let mut text = format!("graph {} {{\n", quote(&graph.name));
    let value_text = |v: Value| match v.output {
        0 => format!("%{}", graph.node(v.node).name),
        k => format!("%{}#{k}", graph.node(v.node).name),
    };
    for id in order::canonical(graph) {
        let node = graph.node(id);
        let _ = write!(text, "  %{} = {}", node.name, rule(&node.op).name());
        for v in graph.inputs(id) {
            let _ = write!(text, " {}", value_text(v));
        }
        for (key, value) in attributes(&node.op) {
            let _ = write!(text, " {key}={value}");
        }
        text.push_str(" :");
        for (i, fact) in node.facts.iter().enumerate() {
            let _ = write!(text, "{} {fact}", if i > 0 { "," } else { "" });
        }
        if !node.origin.source.is_empty() {
            let _ = write!(text, " from {}", quote(&node.origin.source));
        }
        if !node.origin.module.is_empty() {
            let _ = write!(text, " in {}", quote(&node.origin.module));
        }
        text.push('\n');
    }
    for o in &graph.outputs {
        let _ = writeln!(text, "  output {} {}", quote(&o.name), value_text(o.value));
    }
    for a in &graph.averages {
        let _ = writeln!(text, "  average %{} {} {:?}", graph.node(a.state).name, value_text(a.sample), a.keep);
    }
    text.push_str("}\n");
    text
}

fn quote(text: &str) -> String {
    Json::String(text.to_string()).to_string()
}

/// Parses the output of [`print()`]. Facts are inferred again and must equal those in the text.
pub fn parse(text: &str) -> Result<Graph, ParseError> {
    let mut graph = Graph::default();
    let mut names: HashMap<String, NodeId> = HashMap::new();
    let mut is_closed = false;
    for (at, line) in text.lines().enumerate() {
        let error = |fault: String| ParseError { line: at + 1, fault };
        let mut words = Words { rest: line.trim() };
        if words.rest.is_empty() {
            continue;
        }
        if is_closed {
            return Err(error("text after the closing brace".into()));
        }
        let result = if words.rest.starts_with('%') {
            node(&mut words, &mut graph, &mut names)
        } else {
            match words.word() {
                "graph" => words.json().and_then(as_string).map(|name| graph.name = name),
                "output" => output(&mut words, &mut graph, &names),
                "average" => average(&mut words, &mut graph, &names),
                "}" => {
                    is_closed = true;
                    Ok(())
                }
                other => Err(format!("expected a node, `output`, `average` or `}}`, found `{other}`")),
            }
        };
        result.map_err(error)?;
    }
    if is_closed {
        Ok(graph)
    } else {
        Err(ParseError { line: text.lines().count(), fault: "the graph has no end".into() })
    }
}

fn node(words: &mut Words<'_>, graph: &mut Graph, names: &mut HashMap<String, NodeId>) -> Result<(), String> {
    let name = words.word()[1..].to_string();
    if words.word() != "=" {
        return Err("expected `=`".into());
    }
    let op_name = words.word().to_string();
    let mut inputs = Vec::new();
    while words.rest.starts_with('%') {
        inputs.push(checked(value(words.word(), names)?, graph)?);
    }
    let mut fields = Map::new();
    while !words.rest.starts_with(':') {
        let Some(at) = words.rest.find('=') else { return Err("expected `key=value` or `:`".into()) };
        let key = words.rest[..at].trim().to_string();
        words.rest = &words.rest[at + 1..];
        fields.insert(key, words.json()?);
    }
    let declared = words.facts();
    let origin = Origin { source: words.after("from")?, module: words.after("in")? };
    let op = parse_op(&op_name, fields).map_err(|e| format!("`{op_name}`: {e}"))?;
    let id = graph.add(op, &inputs, &origin).map_err(|e| e.to_string())?;
    let inferred = graph.node(id).facts.iter().map(Fact::to_string).collect::<Vec<_>>().join(", ");
    if inferred != declared {
        return Err(format!("`%{name}` is declared as {declared}, but its op computes {inferred}"));
    }
    graph.node_mut(id).name.clone_from(&name);
    if names.insert(name.clone(), id).is_some() {
        return Err(format!("two nodes are named `%{name}`"));
    }
    Ok(())
}

fn output(words: &mut Words<'_>, graph: &mut Graph, names: &HashMap<String, NodeId>) -> Result<(), String> {
    let name = as_string(words.json()?)?;
    let value = checked(value(words.word(), names)?, graph)?;
    graph.outputs.push(Output { name, value });
    Ok(())
}

fn average(words: &mut Words<'_>, graph: &mut Graph, names: &HashMap<String, NodeId>) -> Result<(), String> {
    let state = value(words.word(), names)?.node;
    let sample = checked(value(words.word(), names)?, graph)?;
    let keep = words.word().parse().map_err(|_| "expected the momentum of an average".to_string())?;
    graph.averages.push(MovingAverage { state, sample, keep });
    Ok(())
}

fn value(word: &str, names: &HashMap<String, NodeId>) -> Result<Value, String> {
    let unknown = || format!("unknown word `{word}`");
    let reference = word.strip_prefix('%').ok_or_else(unknown)?;
    let (name, output) = match reference.split_once('#') {
        Some((name, k)) => (name, k.parse().map_err(|_| unknown())?),
        None => (reference, 0),
    };
    Ok(Value { node: *names.get(name).ok_or_else(unknown)?, output })
}

fn checked(value: Value, graph: &Graph) -> Result<Value, String> {
    if (value.output as usize) < graph.node(value.node).facts.len() {
        Ok(value)
    } else {
        Err(format!("`%{}` has no output {}", graph.node(value.node).name, value.output))
    }
}

fn as_string(json: Json) -> Result<String, String> {
    json.as_str().map(str::to_string).ok_or_else(|| "expected a quoted name".to_string())
}

struct Words<'a> {
    rest: &'a str,
}

impl<'a> Words<'a> {
    fn word(&mut self) -> &'a str {
        let rest = self.rest.trim_start();
        let end = rest.find(' ').unwrap_or(rest.len());
        self.rest = rest[end..].trim_start();
        &rest[..end]
    }

    fn json(&mut self) -> Result<Json, String> {
        let mut stream = serde_json::Deserializer::from_str(self.rest).into_iter::<Json>();
        let value = stream.next().ok_or("expected a value")?.map_err(|e| e.to_string())?;
        self.rest = self.rest[stream.byte_offset()..].trim_start();
        Ok(value)
    }

    /// `: fact, fact` up to the origin or the end of the line.
    fn facts(&mut self) -> String {
        let rest = self.rest[1..].trim_start();
        // Facts contain no quotes, so the first keyword followed by a string ends them.
        let end = [" from \"", " in \""].iter().filter_map(|k| rest.find(k)).min().unwrap_or(rest.len());
        self.rest = rest[end..].trim_start();
        rest[..end].trim_end().to_string()
    }

    /// The string after a keyword; empty if the keyword is missing.
    fn after(&mut self, keyword: &str) -> Result<String, String> {
        match self.rest.strip_prefix(keyword) {
            Some(rest) => {
                self.rest = rest.trim_start();
                as_string(self.json()?)
            }
            None => Ok(String::new()),
        }
    }
}
