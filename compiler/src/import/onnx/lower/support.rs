//! Which operators of a model pipec cannot lower, all of them at once.

use super::table;
use crate::import::onnx::model::{Node, OnnxModel};
use crate::import::onnx::name::shown;
use std::collections::BTreeMap;
use std::fmt;

/// Operators that are not supported, by name, with how often each stands in the model and where first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsupported(pub Vec<Missing>);

/// An operator that is not supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// The operator, with its domain unless that is the standard one.
    pub operator: String,
    /// How many nodes have it.
    pub count: usize,
    /// The first of them.
    pub node: String,
    /// Why, where there is more to say than that nobody wrote it yet.
    pub why: Option<&'static str>,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unsupported operators: ")?;
        for (n, missing) in self.0.iter().enumerate() {
            let Missing { operator, count, node, why } = missing;
            let comma = if n > 0 { ", " } else { "" };
            write!(f, "{comma}{} ×{count} (first: node `{}`", shown(operator), shown(node))?;
            if let Some(why) = why {
                write!(f, "; {why}")?;
            }
            f.write_str(")")?;
        }
        Ok(())
    }
}

/// Whether every node can be lowered.
pub fn check(model: &OnnxModel) -> Result<(), Unsupported> {
    let mut missing: BTreeMap<String, Missing> = BTreeMap::new();
    for node in &model.nodes {
        if table::find_in(&node.domain, &node.op_type).is_some() {
            continue;
        }
        let operator = match node.domain.as_str() {
            "" => node.op_type.clone(),
            domain => format!("{domain}.{}", node.op_type),
        };
        let entry = missing.entry(operator.clone()).or_insert_with(|| {
            let why = why(model, node);
            Missing { operator, count: 0, node: node.name.clone(), why }
        });
        entry.count += 1;
    }
    if missing.is_empty() { Ok(()) } else { Err(Unsupported(missing.into_values().collect())) }
}

fn why(model: &OnnxModel, node: &Node) -> Option<&'static str> {
    if model.functions.iter().any(|f| f.domain == node.domain && f.name == node.op_type) {
        return Some("a function of the model; inline functions before exporting");
    }
    if !node.domain.is_empty() {
        return Some("not an operator of the standard");
    }
    Some(match node.op_type.as_str() {
        "If" | "Loop" | "Scan" => "control flow: what runs would depend on values",
        "Bernoulli" | "Multinomial" | "RandomNormal" | "RandomNormalLike" | "RandomUniform" | "RandomUniformLike" => {
            "random numbers"
        }
        name if name.contains("Sequence") || name.starts_with("Optional") => "sequences and optionals",
        name if name.starts_with("String") || name == "TfIdfVectorizer" => "strings",
        _ => return None,
    })
}
