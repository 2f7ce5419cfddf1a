//! Rewrites a graph with its sharding decisions to the SPMD graph that every device runs.
//!
//! Nodes are emitted in order, each as its strategy specifies. Conversions are inserted before a reader, once per value
//! and target sharding, and after nodes whose outputs need a final sharding. A split parameter has the shape of its
//! shard: the loader takes the device's shard of the full tensor.

use crate::graph::{Graph, MovingAverage, Origin, Output, Writer, order};
use crate::op::sharding::write;
use crate::op::{Emit, LocalContext, NodeId, Op, Sharding, Strategy, Value};
use crate::tensor::fact::Fact;
use crate::tensor_parallel::cost::{Machine, NEVER};
use crate::tensor_parallel::{Choice, SpmdTask, reshard};
use std::collections::HashMap;

#[derive(Clone, Debug)]
pub struct SpmdGraph {
    /// Outputs are those of the task, in order, in their required shardings.
    pub graph: Graph,
    /// The rewritten value for each original value and sharding.
    pub places: HashMap<(Value, Sharding), Value>,
    /// Per node of the task, the number of rewritten nodes before its conversions and itself.
    pub before: HashMap<NodeId, usize>,
}

/// Rewrites the graph. The machine decides which of two available shardings is cheaper to convert.
pub fn rewrite(task: &SpmdTask, choice: &Choice, machine: &Machine) -> SpmdGraph {
    let mut writing = Writing {
        task,
        choice,
        machine,
        done: SpmdGraph { graph: Graph::new(&task.graph.name), places: HashMap::new(), before: HashMap::new() },
    };
    let ends = task.graph.outputs.iter().zip(&task.ends).map(|(output, end)| (output.value, choice.end(*end)));
    let followed = task.graph.averages.iter().map(|average| (average.sample, Sharding::Replicated));
    let results: Vec<(Value, Sharding)> = ends.chain(followed).collect();
    let mut of_node: HashMap<NodeId, Vec<(Value, Sharding)>> = HashMap::new();
    for (value, layout) in &results {
        of_node.entry(value.node).or_default().push((*value, *layout));
    }
    for id in order::canonical(&task.graph) {
        writing.done.before.insert(id, writing.done.graph.len());
        writing.node(id);
        for (value, layout) in of_node.remove(&id).unwrap_or_default() {
            writing.resharded(value, layout);
        }
    }
    for (output, (value, layout)) in task.graph.outputs.iter().zip(results) {
        let value = writing.resharded(value, layout);
        writing.done.graph.outputs.push(Output { name: output.name.clone(), value });
    }
    for average in &task.graph.averages {
        let sample = writing.resharded(average.sample, Sharding::Replicated);
        let state = writing.resharded(Value { node: average.state, output: 0 }, Sharding::Replicated).node;
        writing.done.graph.averages.push(MovingAverage { state, sample, keep: average.keep });
    }
    writing.done
}

struct Writing<'a> {
    task: &'a SpmdTask,
    choice: &'a Choice,
    machine: &'a Machine,
    done: SpmdGraph,
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
            inputs.iter().zip(&strategy.inputs).map(|(value, layout)| self.resharded(*value, *layout)).collect();
        let whole: Vec<&Fact> = inputs.iter().map(|v| self.task.graph.fact(*v)).collect();
        let mut out = Writer { graph: &mut self.done.graph, origin: node.origin.clone() };
        let made = match &node.op {
            Op::Parameter(parameter) => {
                let mut part = parameter.clone();
                let layout = self.choice.made(Value { node: id, output: 0 });
                part.fact = layout.part(&parameter.fact, self.machine.devices).expect("the choice divides it evenly");
                out.emit_all(Op::Parameter(part), &[])
            }
            Op::Input(input) if self.task.split.contains_key(&id) => {
                let mut part = input.clone();
                let split = self.task.split[&id];
                part.fact = split.part(&input.fact, self.machine.devices).expect("the sharding divides it evenly");
                out.emit_all(Op::Input(part), &[])
            }
            op => write(
                op,
                strategy,
                &LocalContext { inputs: &resharded, whole: &whole, devices: self.machine.devices },
                &mut out,
            ),
        };
        for (output, local) in made.into_iter().enumerate() {
            let value = Value { node: id, output: output as u32 };
            self.done.places.insert((value, self.choice.made(value)), local);
        }
    }

    /// A value in sharding `to`, converted from the cheaper of its available shardings.
    fn resharded(&mut self, value: Value, to: Sharding) -> Value {
        if let Some(found) = self.done.places.get(&(value, to)) {
            return *found;
        }
        let made = self.choice.made(value);
        let fact = self.task.graph.fact(value);
        let far = |from: Sharding| self.machine.conversion(fact, from, to);
        let from = match self.choice.kept.get(&value) {
            Some(kept) if *kept == to => made,
            Some(kept) if far(*kept) < far(made) => *kept,
            _ => made,
        };
        debug_assert!(far(from) < NEVER, "the choice reshards {value:?} from {from} to {to}");
        let place = if from == made { self.done.places[&(value, made)] } else { self.resharded(value, from) };
        let op = reshard::op(from, to, self.machine.devices).expect("the choice requires nothing impossible");
        let origin = self.task.graph.node(value.node).origin.clone();
        let local = self.convert(op, place, origin);
        self.done.places.insert((value, to), local);
        local
    }

    fn convert(&mut self, op: Op, place: Value, origin: Origin) -> Value {
        Writer { graph: &mut self.done.graph, origin }.emit(op, &[place])
    }
}
