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
    let mut reachable: HashSet<NodeId> = HashSet::new();
    let mut pending: Vec<NodeId> = graph.outputs.iter().map(|o| o.value.node).collect();
    mark_reachable(graph, &mut reachable, &mut pending);
    let averages: Vec<&MovingAverage> = graph.averages.iter().filter(|a| reachable.contains(&a.sample.node)).collect();
    pending.extend(averages.iter().map(|a| a.state));
    pending.extend(graph.ids().filter(|id| matches!(graph.node(*id).op, Op::Input(_))));
    mark_reachable(graph, &mut reachable, &mut pending);

    let mut pruned = Graph::new(&graph.name);
    let mut new_ids: HashMap<NodeId, NodeId> = HashMap::with_capacity(reachable.len());
    let remap = |new_ids: &HashMap<NodeId, NodeId>, v: Value| Value { node: new_ids[&v.node], output: v.output };
    for id in canonical(graph).into_iter().filter(|id| reachable.contains(id)) {
        let node = graph.node(id);
        let inputs: Vec<Value> = graph.inputs(id).into_iter().map(|v| remap(&new_ids, v)).collect();
        new_ids.insert(id, pruned.add(node.op.clone(), &inputs, &node.origin)?);
    }
    let output = |o: &Output| Output { name: o.name.clone(), value: remap(&new_ids, o.value) };
    pruned.outputs = graph.outputs.iter().map(output).collect();
    let average =
        |a: &MovingAverage| MovingAverage { state: new_ids[&a.state], sample: remap(&new_ids, a.sample), keep: a.keep };
    pruned.averages = averages.into_iter().map(average).collect();
    Ok(pruned)
}

fn mark_reachable(graph: &Graph, reachable: &mut HashSet<NodeId>, pending: &mut Vec<NodeId>) {
    while let Some(id) = pending.pop() {
        if reachable.insert(id) {
            pending.extend(graph.inputs(id).into_iter().map(|v| v.node));
        }
    }
}
