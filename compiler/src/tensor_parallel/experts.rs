//! Weights of the experts of a mixture, and how a group shards them.
//!
//! A model has no op for experts: one batched product runs those of a layer, and its weight has the axes expert, input
//! and output. A group that splits the first axis holds whole experts on each device (expert parallelism), and exchanges
//! tokens by all-to-all.

use crate::graph::Graph;
use crate::op::{NodeId, Op, Sharding, Value};
use crate::profile::shared::ExpertWeights;
use std::collections::HashMap;

/// The most ops between a parameter and its product.
const FAR: usize = 4;

/// True if a graph has experts.
pub fn are_in(graph: &Graph) -> bool {
    !of_graph(graph, &HashMap::new()).is_empty()
}

/// The expert weights of a graph under these shardings, grouped; empty if it has none.
pub fn of_graph(graph: &Graph, layouts: &HashMap<&str, Sharding>) -> Vec<ExpertWeights> {
    let mut weights: Vec<ExpertWeights> = Vec::new();
    for id in graph.ids() {
        let Op::Parameter(parameter) = &graph.node(id).op else { continue };
        let sizes: Vec<u64> =
            parameter.fact.shape.iter().filter_map(|dim| dim.known()).map(|size| size as u64).collect();
        let [experts, inputs, outputs] = sizes[..] else { continue };
        if experts < 2 || inputs < 2 || outputs < 2 || !is_multiplied(graph, id, FAR) {
            continue;
        }
        let axis = match layouts.get(parameter.name.as_str()) {
            Some(Sharding::Split(cut)) => Some(cut.axis),
            _ => None,
        };
        match weights.iter_mut().find(|entry| (entry.experts, entry.axis) == (experts, axis)) {
            Some(entry) => entry.weights += 1,
            None => weights.push(ExpertWeights { experts, axis, weights: 1 }),
        }
    }
    weights.sort_by_key(|entry| (entry.experts, entry.axis));
    weights
}

/// True if a matrix product reads the tensor, or a tensor made of it alone, for example by a conversion.
fn is_multiplied(graph: &Graph, id: NodeId, depth: usize) -> bool {
    graph.consumers(Value { node: id, output: 0 }).iter().any(|&(reader, _)| match &graph.node(reader).op {
        Op::MatMul(_) | Op::GroupedMatMul(_) => true,
        _ => depth > 0 && graph.inputs(reader).len() == 1 && is_multiplied(graph, reader, depth - 1),
    })
}
