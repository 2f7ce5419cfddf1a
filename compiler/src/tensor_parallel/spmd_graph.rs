//! Rewrites a graph with its sharding decisions to the SPMD graph that every device runs.
//!
//! Nodes are emitted in order, each as its strategy specifies. Conversions are inserted before a reader, once per value
//! and target sharding, and after nodes whose outputs need a final sharding. A split parameter has the shape of its
//! shard: the loader takes the device's shard of the full tensor.

use crate::graph::{Graph, MovingAverage, Origin, Output, Writer, order};
use crate::op::sharding::write;
use crate::op::{Emit, NodeId, Op, Sharding, Strategy, Value};
use crate::tensor::fact::Fact;
use crate::tensor_parallel::cost::{Machine, NEVER};
use crate::tensor_parallel::{Choice, SpmdTask, reshard};
use std::collections::HashMap;

#[derive(Clone, Debug)]
pub struct SpmdGraph {
    /// Outputs are those of the task, in order, in their required shardings.
    pub graph: Graph,
    /// The rewritten value for each original value and sharding.
    pub values: HashMap<(Value, Sharding), Value>,
    /// Per node of the task, the number of rewritten nodes before its conversions and itself.
    pub starts: HashMap<NodeId, usize>,
}

/// Rewrites the graph. The machine decides which of two available shardings is cheaper to convert.
pub fn rewrite(task: &SpmdTask, choice: &Choice, machine: &Machine) -> SpmdGraph {
    let mut writing = Writing {
        task,
        choice,
        machine,
        spmd: SpmdGraph { graph: Graph::new(&task.graph.name), values: HashMap::new(), starts: HashMap::new() },
    };
    let ends = task.graph.outputs.iter().zip(&task.ends).map(|(output, end)| (output.value, choice.end(*end)));
    let averages = task.graph.averages.iter().map(|average| (average.sample, Sharding::Replicated));
    let results: Vec<(Value, Sharding)> = ends.chain(averages).collect();
    let mut of_node: HashMap<NodeId, Vec<(Value, Sharding)>> = HashMap::new();
    for (value, layout) in &results {
        of_node.entry(value.node).or_default().push((*value, *layout));
    }
    for id in order::canonical(&task.graph) {
        writing.spmd.starts.insert(id, writing.spmd.graph.len());
        writing.node(id);
        for (value, layout) in of_node.remove(&id).unwrap_or_default() {
            writing.reshard(value, layout);
        }
    }
    for (output, (value, layout)) in task.graph.outputs.iter().zip(results) {
        let value = writing.reshard(value, layout);
        writing.spmd.graph.outputs.push(Output { name: output.name.clone(), value });
    }
    for average in &task.graph.averages {
        let sample = writing.reshard(average.sample, Sharding::Replicated);
        let state = writing.reshard(Value { node: average.state, output: 0 }, Sharding::Replicated).node;
        writing.spmd.graph.averages.push(MovingAverage { state, sample, keep: average.keep });
    }
    writing.spmd
}

struct Writing<'a> {
    task: &'a SpmdTask,
    choice: &'a Choice,
    machine: &'a Machine,
    spmd: SpmdGraph,
}

impl Writing<'_> {
    fn node(&mut self, id: NodeId) {
        let node = self.task.graph.node(id);
        let inputs = self.task.graph.inputs(id);
        let replicated;
        let strategy = match self.choice.strategies.get(&id) {
            Some(strategy) => strategy,
            None => {
                replicated = Strategy::replicated(inputs.len(), node.facts.len());
                &replicated
            }
        };
        let resharded: Vec<Value> =
            inputs.iter().zip(&strategy.inputs).map(|(value, layout)| self.reshard(*value, *layout)).collect();
        let facts: Vec<&Fact> = inputs.iter().map(|v| self.task.graph.fact(*v)).collect();
        let mut out = Writer { graph: &mut self.spmd.graph, origin: node.origin.clone() };
        let outputs = match &node.op {
            Op::Parameter(parameter) => {
                let mut part = parameter.clone();
                let layout = self.choice.layout(Value { node: id, output: 0 });
                part.fact = layout.part(&parameter.fact, self.machine.devices).expect("the choice divides it evenly");
                out.emit_all(Op::Parameter(part), &[])
            }
            Op::Input(input) if self.task.split.contains_key(&id) => {
                let mut part = input.clone();
                let split = self.task.split[&id];
                part.fact = split.part(&input.fact, self.machine.devices).expect("the sharding divides it evenly");
                out.emit_all(Op::Input(part), &[])
            }
            op => write(op, strategy, &resharded, &facts, self.machine.devices, &mut out),
        };
        for (output, local) in outputs.into_iter().enumerate() {
            let value = Value { node: id, output: output as u32 };
            self.spmd.values.insert((value, self.choice.layout(value)), local);
        }
    }

    /// A value in sharding `to`, converted from the cheaper of its available shardings.
    fn reshard(&mut self, value: Value, to: Sharding) -> Value {
        if let Some(existing) = self.spmd.values.get(&(value, to)) {
            return *existing;
        }
        let layout = self.choice.layout(value);
        let fact = self.task.graph.fact(value);
        let cost_from = |from: Sharding| self.machine.conversion(fact, from, to);
        let from = match self.choice.second_layouts.get(&value) {
            Some(second) if *second == to => layout,
            Some(second) if cost_from(*second) < cost_from(layout) => *second,
            _ => layout,
        };
        debug_assert!(cost_from(from) < NEVER, "the choice reshards {value:?} from {from} to {to}");
        let source = if from == layout { self.spmd.values[&(value, layout)] } else { self.reshard(value, from) };
        let op = reshard::op(from, to, self.machine.devices).expect("the choice requires nothing impossible");
        let origin = self.task.graph.node(value.node).origin.clone();
        let local = self.convert(op, source, origin);
        self.spmd.values.insert((value, to), local);
        local
    }

    fn convert(&mut self, op: Op, source: Value, origin: Origin) -> Value {
        Writer { graph: &mut self.spmd.graph, origin }.emit(op, &[source])
    }
}
