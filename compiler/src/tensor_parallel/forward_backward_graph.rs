//! The forward and backward of a stage as one joint graph.
//!
//! The backward reads forward values directly, parameters occur once, and a gradient from another stage is an input.
//! Parameter gradients have the sharding of their parameters. Everything sent to other stages or users is replicated;
//! with sequence parallelism, activations and gradients between stages are split.

use crate::graph::{Graph, MovingAverage, Output, order};
use crate::op::{NodeId, Op, Sharding, Value};
use crate::pass::backward::{Backward, Made, Read};
use crate::pass::fragment::Fragment;
use crate::tensor::fact::Fact;
use crate::tensor_parallel::cost::Machine;
use crate::tensor_parallel::{End, SpmdTask};
use std::collections::{BTreeSet, HashMap};

#[derive(Clone, Debug)]
pub struct Joint {
    /// Forward ops precede backward ops. Outputs: those of the fragment, its sent values, and those of the backward,
    /// each in order.
    pub task: SpmdTask,
    /// Maps forward fragment values to joint values.
    pub forward: HashMap<Value, Value>,
    /// Maps backward graph values to joint values.
    pub backward: HashMap<Value, Value>,
    pub backward_nodes: Vec<NodeId>,
}

/// Builds the joint graph of a stage. Parameters named in `whole` stay replicated.
pub fn joint(fragment: &Fragment, backward: Option<&Backward>, tied: &BTreeSet<String>, machine: &Machine) -> Joint {
    let mut graph = Graph::new(&fragment.graph.name);
    let mut forward: HashMap<Value, Value> = HashMap::new();
    for id in order::canonical(&fragment.graph) {
        copy(&fragment.graph, id, &mut graph, &mut forward);
    }
    let outputs = fragment.graph.outputs.iter().cloned();
    let sent = fragment.sent.iter().map(|sent| Output { name: String::new(), value: sent.local });
    graph.outputs = outputs.chain(sent).map(|output| Output { value: forward[&output.value], ..output }).collect();
    let forward_node = |id: NodeId| forward[&Value { node: id, output: 0 }].node;
    let averages = fragment.graph.averages.iter().map(|average| MovingAverage {
        state: forward_node(average.state),
        sample: forward[&average.sample],
        keep: average.keep,
    });
    graph.averages = averages.collect();
    let between = |fact: &Fact, needs_gradient: bool| match machine.between_stages(fact, needs_gradient) {
        Sharding::Replicated => None,
        split => Some(split),
    };
    let mut split: HashMap<NodeId, Sharding> = HashMap::new();
    for received in &fragment.received {
        let fact = &fragment.graph.node(received.local).facts[0];
        split.extend(between(fact, received.needs_gradient).map(|sharding| (forward_node(received.local), sharding)));
    }
    let end = |fact: &Fact, needs_gradient: bool| between(fact, needs_gradient).map_or(End::Whole, End::Split);
    let mut ends = vec![End::Whole; fragment.graph.outputs.len()];
    ends.extend(fragment.sent.iter().map(|sent| end(fragment.graph.fact(sent.local), sent.needs_gradient)));
    let mut map: HashMap<Value, Value> = HashMap::new();
    let mut backward_nodes = Vec::new();
    if let Some(backward) = backward {
        let parameters = parameters(&fragment.graph);
        let reads: HashMap<NodeId, Read> = backward.reads.iter().copied().collect();
        for id in order::canonical(&backward.graph) {
            let node = backward.graph.node(id);
            let value = Value { node: id, output: 0 };
            if let Some(Read::Saved(saved)) = reads.get(&id) {
                map.insert(value, forward[saved]);
                continue;
            }
            if let Op::Parameter(parameter) = &node.op
                && let Some(parameter_value) = parameters.get(&parameter.name)
            {
                map.insert(value, forward[parameter_value]);
                continue;
            }
            let joint = copy(&backward.graph, id, &mut graph, &mut map);
            if let Some(Read::Gradient { .. }) = reads.get(&id) {
                split.extend(between(&node.facts[0], true).map(|sharding| (joint, sharding)));
            }
            backward_nodes.push(joint);
        }
        let backward_graph = &backward.graph;
        for (output, role) in backward.graph.outputs.iter().zip(&backward.output_roles) {
            graph.outputs.push(Output { name: output.name.clone(), value: map[&output.value] });
            ends.push(match role {
                Made::Parameter(term) => End::Like(forward_node(fragment.parameter_terms[*term].parameter)),
                Made::Gradient { .. } => end(backward_graph.fact(output.value), true),
            });
        }
    }
    let is_replicated =
        |id: &NodeId| matches!(&graph.node(*id).op, Op::Parameter(parameter) if tied.contains(&parameter.name));
    let replicated = graph.ids().filter(is_replicated).collect();
    Joint { task: SpmdTask { graph, ends, replicated, split }, forward, backward: map, backward_nodes }
}

fn copy(from: &Graph, id: NodeId, graph: &mut Graph, map: &mut HashMap<Value, Value>) -> NodeId {
    let node = from.node(id);
    let inputs: Vec<Value> = from.inputs(id).iter().map(|value| map[value]).collect();
    let copy = graph.add(node.op.clone(), &inputs, &node.origin).expect("the op fitted where it comes from");
    for value in from.values(id) {
        map.insert(value, Value { node: copy, output: value.output });
    }
    copy
}

fn parameters(graph: &Graph) -> HashMap<String, Value> {
    let name = |id: NodeId| match &graph.node(id).op {
        Op::Parameter(parameter) => Some((parameter.name.clone(), Value { node: id, output: 0 })),
        _ => None,
    };
    graph.ids().filter_map(name).collect()
}
