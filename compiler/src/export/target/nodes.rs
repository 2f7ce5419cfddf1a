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

pub fn assign_stages(plan: &Plan, graph: &Graph, model: &OnnxModel) -> Result<Staged, Refusal> {
    let spans = stage_spans(plan, graph, model);
    let count = plan.stages.len() as u32;
    let first = place_nodes(&spans, model, |(first, _)| first);
    if missing_stage(&first, count).is_none() {
        return Ok(first);
    }
    let last = place_nodes(&spans, model, |(_, last)| last);
    match missing_stage(&last, count) {
        None => Ok(last),
        Some(stage) => Err(Refusal::Parts { stage }),
    }
}

/// The first stage without nodes.
fn missing_stage(staged: &Staged, count: u32) -> Option<u32> {
    let present: BTreeSet<u32> = staged.stages.iter().flatten().copied().collect();
    (0..count).find(|stage| !present.contains(stage))
}

/// Assigns each node to the stage that `choice` selects from the first and last stage of its ops, but not before its
/// inputs.
fn place_nodes(spans: &HashMap<usize, (u32, u32)>, model: &OnnxModel, choice: fn((u32, u32)) -> u32) -> Staged {
    let mut stage_of_tensor: HashMap<&str, u32> = model.inputs.iter().map(|input| (input.name.as_str(), 0)).collect();
    let mut stages = Vec::with_capacity(model.nodes.len());
    let mut moved = Vec::new();
    for (at, node) in model.nodes.iter().enumerate() {
        let earliest = reads(node).iter().filter_map(|name| stage_of_tensor.get(name)).copied().max();
        let stage = match (spans.get(&at), earliest) {
            (None, None) if !RANDOM.contains(&node.op_type.as_str()) => None,
            (None, earliest) => Some(earliest.unwrap_or(0)),
            (Some(&span), earliest) => {
                let stage = choice(span).max(earliest.unwrap_or(0));
                if span != (stage, stage) {
                    moved.push(node.name.clone());
                }
                Some(stage)
            }
        };
        if let Some(stage) = stage {
            stage_of_tensor
                .extend(node.outputs.iter().filter(|name| !name.is_empty()).map(|name| (name.as_str(), stage)));
        }
        stages.push(stage);
    }
    Staged { stages, moved }
}

/// The first and last stage of each node's ops.
fn stage_spans(plan: &Plan, graph: &Graph, model: &OnnxModel) -> HashMap<usize, (u32, u32)> {
    let index_of: HashMap<&str, usize> =
        model.nodes.iter().enumerate().map(|(at, node)| (node.name.as_str(), at)).collect();
    let ops = numbered(graph);
    let mut spans: HashMap<usize, (u32, u32)> = HashMap::new();
    for stage in &plan.stages {
        let ids = stage.op_ids().filter_map(|op| ops.get(op as usize));
        for node in ids.filter_map(|id| find_node(&graph.node(*id).origin.source, &index_of)) {
            let span = spans.entry(node).or_insert((stage.id.0, stage.id.0));
            *span = (span.0.min(stage.id.0), span.1.max(stage.id.0));
        }
    }
    spans
}

/// The node an op comes from: the node with that name, or the enclosing call or loop, whose name precedes a slash.
fn find_node(source: &str, index_of: &HashMap<&str, usize>) -> Option<usize> {
    if let Some(node) = index_of.get(source) {
        return Some(*node);
    }
    source.rmatch_indices('/').find_map(|(at, _)| index_of.get(&source[..at]).copied())
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
    let suffix = moved.len().saturating_sub(LISTED);
    let suffix = if suffix > 0 { format!(" and {suffix} more") } else { String::new() };
    Some(format!(
        "{}{suffix}: the plan splits these nodes across stages, but a node is whole here; the predicted times do not \
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
        assert_eq!(find_node("a/b", &places), Some(1));
        assert_eq!(find_node("a/b/c/d", &places), Some(1));
        assert_eq!(find_node("loop/3/x", &places), Some(2));
        assert_eq!(find_node("x/loop", &places), None);
    }
}
