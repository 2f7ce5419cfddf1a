//! Which nodes of an ONNX model stand in which stage.
//!
//! A plan speaks of core ops, and a node is one of them, several, or none. A node stands where the first of its ops stands, a product before
//! the bias that is added to it, and never before what it reads; where that leaves a stage without nodes, where the last of its ops
//! stands. What has no op of its own, such as shape arithmetic, stands with what it reads; what follows from constants
//! alone stands nowhere: every stage that reads it has its own.

use super::refusal::Refusal;
use crate::graph::Graph;
use crate::graph::order::numbered;
use crate::import::onnx::check_graph::{free, subgraphs};
use crate::import::onnx::model::{Node, OnnxModel};
use crate::import::onnx::name::shown;
use crate::plan::Plan;
use std::collections::{BTreeSet, HashMap};

/// Names that a note lists at most.
const LISTED: usize = 3;

/// What makes other numbers each time has a place of its own, whatever it reads.
const RANDOM: [&str; 6] =
    ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"];

/// The nodes of a model in their stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staged {
    /// For each node, in the order of the model, its stage, or none where it follows from constants alone.
    pub stages: Vec<Option<u32>>,
    /// Nodes whose ops the plan has in several stages, or that had to follow what they read.
    pub moved: Vec<String>,
}

/// The stage of every node.
pub fn staged(plan: &Plan, graph: &Graph, model: &OnnxModel) -> Result<Staged, Refusal> {
    let own = own(plan, graph, model);
    let count = plan.stages.len() as u32;
    let first = placed(&own, model, |(first, _)| first);
    if lacking(&first, count).is_none() {
        return Ok(first);
    }
    let last = placed(&own, model, |(_, last)| last);
    match lacking(&last, count) {
        None => Ok(last),
        Some(stage) => Err(Refusal::Parts { stage }),
    }
}

/// A stage without nodes.
fn lacking(staged: &Staged, count: u32) -> Option<u32> {
    let there: BTreeSet<u32> = staged.stages.iter().flatten().copied().collect();
    (0..count).find(|stage| !there.contains(stage))
}

/// Every node where `choice` of the stages of its ops says, but not before what it reads.
fn placed(own: &HashMap<usize, (u32, u32)>, model: &OnnxModel, choice: fn((u32, u32)) -> u32) -> Staged {
    let mut made: HashMap<&str, u32> = model.inputs.iter().map(|input| (input.name.as_str(), 0)).collect();
    let mut stages = Vec::with_capacity(model.nodes.len());
    let mut moved = Vec::new();
    for (at, node) in model.nodes.iter().enumerate() {
        let after = reads(node).iter().filter_map(|name| made.get(name)).copied().max();
        let stage = match (own.get(&at), after) {
            (None, None) if !RANDOM.contains(&node.op_type.as_str()) => None,
            (None, after) => Some(after.unwrap_or(0)),
            (Some(&span), after) => {
                let stage = choice(span).max(after.unwrap_or(0));
                if span != (stage, stage) {
                    moved.push(node.name.clone());
                }
                Some(stage)
            }
        };
        if let Some(stage) = stage {
            made.extend(node.outputs.iter().filter(|name| !name.is_empty()).map(|name| (name.as_str(), stage)));
        }
        stages.push(stage);
    }
    Staged { stages, moved }
}

/// The first and last stage of each node's ops.
fn own(plan: &Plan, graph: &Graph, model: &OnnxModel) -> HashMap<usize, (u32, u32)> {
    let places: HashMap<&str, usize> =
        model.nodes.iter().enumerate().map(|(at, node)| (node.name.as_str(), at)).collect();
    let ops = numbered(graph);
    let mut own: HashMap<usize, (u32, u32)> = HashMap::new();
    for stage in &plan.stages {
        let ids = stage.op_ids().filter_map(|op| ops.get(op as usize));
        for place in ids.filter_map(|id| place(&graph.node(*id).origin.source, &places)) {
            let span = own.entry(place).or_insert((stage.id.0, stage.id.0));
            *span = (span.0.min(stage.id.0), span.1.max(stage.id.0));
        }
    }
    own
}

/// The node that an op comes from: the one of that name, or the call or loop that it is in, whose name stands before a slash.
fn place(source: &str, places: &HashMap<&str, usize>) -> Option<usize> {
    if let Some(place) = places.get(source) {
        return Some(*place);
    }
    source.rmatch_indices('/').find_map(|(at, _)| places.get(&source[..at]).copied())
}

/// What a node reads, by itself and in its subgraphs.
pub fn reads(node: &Node) -> BTreeSet<&str> {
    let mut names: BTreeSet<&str> = node.inputs.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
    // The decoder has refused what nests too deep.
    names.extend(subgraphs(&node.attributes).filter_map(free).flatten());
    names
}

/// What to tell of nodes that are not where their ops are.
pub fn told(moved: &[String]) -> Option<String> {
    if moved.is_empty() {
        return None;
    }
    let names: Vec<String> = moved.iter().take(LISTED).map(|name| format!("`{}`", shown(name))).collect();
    let more = moved.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!(
        "{}{more}: the plan has parts of such nodes in other stages; a node is whole here, so that the predicted times hold but for \
         these parts",
        names.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ops_find_their_node() {
        let places = HashMap::from([("a", 0), ("a/b", 1), ("loop", 2)]);
        assert_eq!(place("a/b", &places), Some(1));
        assert_eq!(place("a/b/c/d", &places), Some(1));
        assert_eq!(place("loop/3/x", &places), Some(2));
        assert_eq!(place("x/loop", &places), None);
    }
}
