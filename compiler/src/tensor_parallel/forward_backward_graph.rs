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
    pub later: Vec<NodeId>,
}

/// Builds the joint graph of a stage. Parameters named in `whole` stay replicated.
pub fn joint(fragment: &Fragment, backward: Option<&Backward>, whole: &BTreeSet<String>, machine: &Machine) -> Joint {
    let mut graph = Graph::new(&fragment.graph.name);
    let mut forward: HashMap<Value, Value> = HashMap::new();
    for id in order::canonical(&fragment.graph) {
        copy(&fragment.graph, id, &mut graph, &mut forward);
    }
    let outputs = fragment.graph.outputs.iter().cloned();
    let sent = fragment.sent.iter().map(|sent| Output { name: String::new(), value: sent.local });
    graph.outputs = outputs.chain(sent).map(|output| Output { value: forward[&output.value], ..output }).collect();
    let own = |id: NodeId| forward[&Value { node: id, output: 0 }].node;
    let averages = fragment.graph.averages.iter().map(|average| MovingAverage {
        state: own(average.state),
        sample: forward[&average.sample],
        keep: average.keep,
    });
    graph.averages = averages.collect();
    let between = |fact: &Fact, is_learned: bool| match machine.between_stages(fact, is_learned) {
        Sharding::Replicated => None,
        split => Some(split),
    };
    let mut split: HashMap<NodeId, Sharding> = HashMap::new();
    for received in &fragment.received {
        let fact = &fragment.graph.node(received.local).facts[0];
        split.extend(between(fact, received.wanted).map(|sharding| (own(received.local), sharding)));
    }
    let end = |fact: &Fact, is_learned: bool| between(fact, is_learned).map_or(End::Whole, End::Split);
    let mut ends = vec![End::Whole; fragment.graph.outputs.len()];
    ends.extend(fragment.sent.iter().map(|sent| end(fragment.graph.fact(sent.local), sent.wanted)));
    let mut map: HashMap<Value, Value> = HashMap::new();
    let mut later = Vec::new();
    if let Some(made) = backward {
        let parameters = parameters(&fragment.graph);
        let reads: HashMap<NodeId, Read> = made.reads.iter().copied().collect();
        for id in order::canonical(&made.graph) {
            let node = made.graph.node(id);
            let own = Value { node: id, output: 0 };
            if let Some(Read::Saved(value)) = reads.get(&id) {
                map.insert(own, forward[value]);
                continue;
            }
            if let Op::Parameter(parameter) = &node.op
                && let Some(there) = parameters.get(&parameter.name)
            {
                map.insert(own, forward[there]);
                continue;
            }
            let joint = copy(&made.graph, id, &mut graph, &mut map);
            if let Some(Read::Gradient { .. }) = reads.get(&id) {
                split.extend(between(&node.facts[0], true).map(|sharding| (joint, sharding)));
            }
            later.push(joint);
        }
        let made_graph = &made.graph;
        for (output, made) in made.graph.outputs.iter().zip(&made.output_roles) {
            graph.outputs.push(Output { name: output.name.clone(), value: map[&output.value] });
            ends.push(match made {
                Made::Parameter(term) => End::Like(own(fragment.parameter_terms[*term].parameter)),
                Made::Gradient { .. } => end(made_graph.fact(output.value), true),
            });
        }
    }
    let stays =
        |id: &NodeId| matches!(&graph.node(*id).op, Op::Parameter(parameter) if whole.contains(&parameter.name));
    let whole = graph.ids().filter(stays).collect();
    Joint { task: SpmdTask { graph, ends, whole, split }, forward, backward: map, later }
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
