//! Removes dead nodes and renumbers the rest densely in topological order.
//!
//! Inputs stay even if they are unused, because the caller provides them. A moving average stays while the value it
//! tracks does.

use crate::graph::order::canonical;
use crate::graph::{AddError, Graph, MovingAverage, Output};
use crate::op::{NodeId, Op, Value};
use std::collections::{HashMap, HashSet};

/// A copy of the graph without dead nodes.
pub fn prune(graph: &Graph) -> Result<Graph, AddError> {
    let mut alive: HashSet<NodeId> = HashSet::new();
    let mut waiting: Vec<NodeId> = graph.outputs.iter().map(|o| o.value.node).collect();
    mark_reachable(graph, &mut alive, &mut waiting);
    let averages: Vec<&MovingAverage> = graph.averages.iter().filter(|a| alive.contains(&a.sample.node)).collect();
    waiting.extend(averages.iter().map(|a| a.state));
    waiting.extend(graph.ids().filter(|id| matches!(graph.node(*id).op, Op::Input(_))));
    mark_reachable(graph, &mut alive, &mut waiting);

    let mut kept = Graph::new(&graph.name);
    let mut places: HashMap<NodeId, NodeId> = HashMap::with_capacity(alive.len());
    let moved = |places: &HashMap<NodeId, NodeId>, v: Value| Value { node: places[&v.node], output: v.output };
    for id in canonical(graph).into_iter().filter(|id| alive.contains(id)) {
        let node = graph.node(id);
        let inputs: Vec<Value> = graph.inputs(id).into_iter().map(|v| moved(&places, v)).collect();
        places.insert(id, kept.add(node.op.clone(), &inputs, &node.origin)?);
    }
    let output = |o: &Output| Output { name: o.name.clone(), value: moved(&places, o.value) };
    kept.outputs = graph.outputs.iter().map(output).collect();
    let average =
        |a: &MovingAverage| MovingAverage { state: places[&a.state], sample: moved(&places, a.sample), keep: a.keep };
    kept.averages = averages.into_iter().map(average).collect();
    Ok(kept)
}

fn mark_reachable(graph: &Graph, alive: &mut HashSet<NodeId>, waiting: &mut Vec<NodeId>) {
    while let Some(id) = waiting.pop() {
        if alive.insert(id) {
            waiting.extend(graph.inputs(id).into_iter().map(|v| v.node));
        }
    }
}
