//! Assigns the nodes of an ONNX model to stages.
//!
//! A plan assigns core ops, and a node corresponds to one, several or no core ops. A node goes to the stage of its
//! first op, such as a product before its bias, but never before the nodes it reads from. If that leaves a stage empty,
//! the stage of the last op is used instead. A node without ops, such as shape arithmetic, goes to the stage of its
//! inputs. A node that depends only on constants has no stage: each stage that reads it gets a copy.

use super::refusal::Refusal;
use crate::graph::Graph;
use crate::graph::order::numbered;
use crate::import::onnx::check_graph::{free, subgraphs};
use crate::import::onnx::model::{Node, OnnxModel};
use crate::plan::Plan;
use crate::text::name::short_name;
use std::collections::{BTreeSet, HashMap};

/// Maximum number of names listed in a note.
const LISTED: usize = 3;

/// Random ops are not constant, even without inputs.
const RANDOM: [&str; 6] =
    ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Staged {
    /// For each node in model order, its stage, or `None` if it depends only on constants.
    pub stages: Vec<Option<u32>>,
    /// Nodes whose ops are in several stages of the plan, or which were moved to a later stage because of their inputs.
    pub moved: Vec<String>,
}

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

/// The first stage without nodes.
fn lacking(staged: &Staged, count: u32) -> Option<u32> {
    let there: BTreeSet<u32> = staged.stages.iter().flatten().copied().collect();
    (0..count).find(|stage| !there.contains(stage))
}

/// Assigns each node to the stage that `choice` selects from the first and last stage of its ops, but not before its
/// inputs.
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

/// The node an op comes from: the node with that name, or the enclosing call or loop, whose name precedes a slash.
fn place(source: &str, places: &HashMap<&str, usize>) -> Option<usize> {
    if let Some(place) = places.get(source) {
        return Some(*place);
    }
    source.rmatch_indices('/').find_map(|(at, _)| places.get(&source[..at]).copied())
}

pub fn reads(node: &Node) -> BTreeSet<&str> {
    let mut names: BTreeSet<&str> = node.inputs.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
    // The decoder refused subgraphs that nest too deep, so `free` succeeds.
    names.extend(subgraphs(&node.attributes).filter_map(free).flatten());
    names
}

/// A note about nodes that are not in the stage of all their ops.
pub fn moved_note(moved: &[String]) -> Option<String> {
    if moved.is_empty() {
        return None;
    }
    let names: Vec<String> = moved.iter().take(LISTED).map(|name| format!("`{}`", short_name(name))).collect();
    let more = moved.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!(
        "{}{more}: the plan splits these nodes across stages, but a node is whole here; the predicted times do not \
         cover the moved parts",
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
