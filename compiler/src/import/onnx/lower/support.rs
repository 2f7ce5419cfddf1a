//! Finds all operators of a model that pipec cannot lower.

use super::table;
use crate::import::onnx::model::{Function, Node, OnnxModel};
use crate::text::name::short_name;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

/// All unsupported operators of a model, in alphabetical order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsupported(pub Vec<Missing>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Qualified with the domain, except for the standard domain.
    pub operator: String,
    pub count: usize,
    pub node: String,
    /// The module of that node; may be empty.
    pub module: String,
    /// Its Python source line; empty if the file does not have it.
    pub line: String,
    /// The reason, unless the operator is simply not implemented.
    pub why: Option<&'static str>,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unsupported operators: ")?;
        for (n, missing) in self.0.iter().enumerate() {
            let Missing { operator, count, node, module, line, why } = missing;
            let comma = if n > 0 { ", " } else { "" };
            write!(f, "{comma}{} ×{count} (first: node `{}`", short_name(operator), short_name(node))?;
            if !module.is_empty() {
                write!(f, " in module `{}`", short_name(module))?;
            }
            if !line.is_empty() {
                write!(f, ", {}", short_name(line))?;
            }
            if let Some(why) = why {
                write!(f, "; {why}")?;
            }
            f.write_str(")")?;
        }
        Ok(())
    }
}

/// Checks all nodes of the main graph and of the functions they call. Branches and loop bodies are checked when they
/// are lowered.
pub fn check(model: &OnnxModel) -> Result<(), Unsupported> {
    let key = |f: &Function| (f.domain.clone(), f.name.clone(), f.overload.clone());
    let functions: HashMap<_, _> = model.functions.iter().map(|function| (key(function), function)).collect();
    let mut missing: BTreeMap<String, Missing> = BTreeMap::new();
    let mut seen: HashSet<(&str, &str, &str)> = HashSet::new();
    let mut pending: Vec<&[Node]> = vec![&model.nodes];
    while let Some(nodes) = pending.pop() {
        for node in nodes {
            if let Some(function) = functions.get(&(node.domain.clone(), node.op_type.clone(), node.overload.clone())) {
                if seen.insert((&function.domain, &function.name, &function.overload)) {
                    pending.push(&function.nodes);
                }
                continue;
            }
            let control = matches!(node.op_type.as_str(), "If" | "Loop" | "Scan");
            if (control && node.domain.is_empty()) || table::find_in(&node.domain, &node.op_type).is_some() {
                continue;
            }
            let operator = match node.domain.as_str() {
                "" => node.op_type.clone(),
                domain => format!("{domain}.{}", node.op_type),
            };
            let entry = missing.entry(operator.clone()).or_insert_with(|| {
                let why = why(node);
                Missing {
                    operator,
                    count: 0,
                    node: node.name.clone(),
                    module: node.module.clone(),
                    line: String::new(),
                    why,
                }
            });
            entry.count += 1;
        }
    }
    if missing.is_empty() { Ok(()) } else { Err(Unsupported(missing.into_values().collect())) }
}

fn why(node: &Node) -> Option<&'static str> {
    if !node.domain.is_empty() {
        return Some("not a standard ONNX operator");
    }
    Some(match node.op_type.as_str() {
        "Multinomial" => "random numbers of this distribution are not implemented",
        name if name.contains("Sequence") || name.starts_with("Optional") => "sequences and optionals",
        name if name.starts_with("String") || name == "TfIdfVectorizer" => "strings",
        _ => return None,
    })
}
