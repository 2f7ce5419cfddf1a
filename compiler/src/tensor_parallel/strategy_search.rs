//! Finds the cheapest sharding strategies for all ops of a graph.
//!
//! Each node is a variable. Its states are the strategies of its op, or the shardings of a parameter. A state also
//! gives each output an optional second sharding, kept for its readers. Unary costs are those of the strategy and of
//! the second shardings. Pairwise costs convert a value from the cheaper of its two shardings to the reader's. A
//! partial sum with two replicated readers is thus reduced once. Outputs add the conversion to their required sharding.
//! [`variable_elimination`](crate::tensor_parallel::variable_elimination) minimises the sum.

use crate::graph::order;
use crate::op::sharding::strategies;
use crate::op::{Group, NodeId, Op, Sharding, Strategy, Value};
use crate::tensor::fact::Fact;
use crate::tensor_parallel::cost::{Machine, NEVER, Time, sum};
use crate::tensor_parallel::variable_elimination::{Factors, MOST_ENTRIES};
use crate::tensor_parallel::{Choice, End, SpmdTask, blocks};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use thiserror::Error;

#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ChooseError {
    #[error("tensor-parallel degree {devices} is out of range; it must be from 2 to 64")]
    Devices { devices: usize },
    #[error("the size of `{node}` is unknown: {fact}; give its symbols a size")]
    Size { node: String, fact: String },
}

/// A solution of the search, with its cost and a lower bound.
#[derive(Clone, Debug)]
pub struct Chosen {
    pub choice: Choice,
    pub cost: Time,
    /// Lower bound on the cost of any choice.
    pub bound: Time,
    /// Total time with every op replicated.
    pub alone: Time,
}

#[derive(Clone, Debug)]
struct State {
    strategy: Strategy,
    /// Per output, the second sharding it is kept in.
    second: Vec<Option<Sharding>>,
}

/// All states of all nodes, with their costs.
pub struct Model<'a> {
    task: &'a SpmdTask,
    machine: &'a Machine,
    nodes: Vec<NodeId>,
    /// Matrices of weights that are sharded and never gathered, and what is computed from them alone.
    sharded_weights: HashSet<NodeId>,
    states: Vec<Vec<State>>,
    /// Costs of states and of pairs of states.
    pub factors: Factors,
}

/// Finds the cheapest choice for a tensor-parallel group.
pub fn choose(task: &SpmdTask, machine: &Machine) -> Result<Chosen, ChooseError> {
    choose_within(task, machine, MOST_ENTRIES)
}

/// [`choose`] with tables of at most `most_entries` entries.
pub fn choose_within(task: &SpmdTask, machine: &Machine, most_entries: usize) -> Result<Chosen, ChooseError> {
    let model = Model::of(task, machine)?;
    let solution = model.factors.minimize(most_entries);
    let alone = model.factors.cost(&vec![0; model.nodes.len()]);
    Ok(Chosen { choice: model.choice(&solution.states), cost: solution.cost, bound: solution.bound, alone })
}

/// The parameters that matrix products read, and the nodes between the two. Tied weights stay replicated.
fn matrices(task: &SpmdTask, nodes: &[NodeId]) -> HashSet<NodeId> {
    let graph = &task.graph;
    let mut of_weights: HashSet<NodeId> = HashSet::new();
    for &id in nodes {
        let inputs = graph.inputs(id);
        let is_weight = match &graph.node(id).op {
            Op::Parameter(_) => !task.replicated.contains(&id),
            Op::Cast(_) | Op::Transpose(_) | Op::Reshape(_) => inputs.iter().all(|v| of_weights.contains(&v.node)),
            _ => false,
        };
        if is_weight {
            of_weights.insert(id);
        }
    }
    let mut weights = HashSet::new();
    for &id in nodes.iter().rev().filter(|id| of_weights.contains(id)) {
        let readers = graph.successors(id);
        let is_product = |id: &NodeId| matches!(graph.node(*id).op, Op::MatMul(_) | Op::GroupedMatMul(_));
        if readers.iter().any(|reader| is_product(reader) || weights.contains(reader)) {
            weights.insert(id);
        }
    }
    weights
}

impl<'a> Model<'a> {
    pub fn of(task: &'a SpmdTask, machine: &'a Machine) -> Result<Model<'a>, ChooseError> {
        if !(2..=64).contains(&machine.devices) {
            return Err(ChooseError::Devices { devices: machine.devices });
        }
        for id in task.graph.ids() {
            let node = task.graph.node(id);
            if let Some(fact) = node.facts.iter().find(|f| f.concrete().is_none() || f.bytes().is_none()) {
                return Err(ChooseError::Size { node: node.label().to_string(), fact: fact.to_string() });
            }
        }
        let group = blocks::group(&task.graph, machine.devices);
        let nodes = order::canonical(&task.graph);
        let sharded_weights = if machine.keeps_weights { matrices(task, &nodes) } else { HashSet::new() };
        let mut model =
            Model { task, machine, nodes, sharded_weights, states: Vec::new(), factors: Factors::default() };
        let readers = model.readers();
        for at in 0..model.nodes.len() {
            let states = model.states_of(model.nodes[at], &group, &readers);
            let costs = states.iter().map(|state| model.state_cost(model.nodes[at], state)).collect();
            model.states.push(states);
            model.factors.variable(costs);
        }
        model.couple();
        Ok(model)
    }

    /// The readers of each value: nodes, and outputs, which are numbered after all nodes.
    fn readers(&self) -> HashMap<Value, BTreeSet<usize>> {
        let mut readers: HashMap<Value, BTreeSet<usize>> = HashMap::new();
        for (at, &id) in self.nodes.iter().enumerate() {
            for value in self.task.graph.inputs(id) {
                readers.entry(value).or_default().insert(at);
            }
        }
        for (at, value) in self.results().into_iter().enumerate() {
            readers.entry(value.0).or_default().insert(self.nodes.len() + at);
        }
        readers
    }

    /// Values with a required sharding: outputs and samples of averages.
    fn results(&self) -> Vec<(Value, End)> {
        let graph = &self.task.graph;
        let outputs = graph.outputs.iter().map(|output| output.value).zip(self.task.ends.iter().copied());
        outputs.chain(graph.averages.iter().map(|average| (average.sample, End::Whole))).collect()
    }

    fn states_of(&self, id: NodeId, group: &Group, readers: &HashMap<Value, BTreeSet<usize>>) -> Vec<State> {
        let graph = &self.task.graph;
        let node = graph.node(id);
        let inputs = graph.inputs(id);
        let facts: Vec<&Fact> = inputs.iter().map(|v| graph.fact(*v)).collect();
        let mut strategies = match &node.op {
            Op::Parameter(_) if self.task.replicated.contains(&id) => {
                parameter_strategies(&node.facts[0], group)[..1].to_vec()
            }
            Op::Parameter(_) if self.sharded_weights.contains(&id) => {
                let strategies = parameter_strategies(&node.facts[0], group);
                // The first one replicates.
                strategies[usize::from(strategies.len() > 1)..].to_vec()
            }
            Op::Parameter(_) => parameter_strategies(&node.facts[0], group),
            _ if self.task.split.contains_key(&id) => {
                vec![Strategy { outputs: vec![self.task.split[&id]], ..Strategy::replicated(0, 1) }]
            }
            _ => strategies(&node.op, &facts, &node.facts, group),
        };
        // Constants and other inputs are replicated.
        strategies.truncate(if inputs.is_empty() && !matches!(node.op, Op::Parameter(_)) {
            1
        } else {
            strategies.len()
        });
        let mut states = Vec::new();
        for strategy in strategies {
            let mut second: Vec<Vec<Option<Sharding>>> = vec![vec![]];
            for (output, layout) in strategy.outputs.iter().enumerate() {
                let value = Value { node: id, output: output as u32 };
                let is_shared = readers.get(&value).is_some_and(|readers| readers.len() > 1);
                let seconds = if is_shared { second_layouts(*layout, &node.facts[output], group) } else { vec![None] };
                second =
                    second.into_iter().flat_map(|k| seconds.iter().map(move |s| [&k[..], &[*s]].concat())).collect();
            }
            states.extend(second.into_iter().map(|second| State { strategy: strategy.clone(), second }));
        }
        states
    }

    /// The cost of a state, including conversions to second shardings.
    fn state_cost(&self, id: NodeId, state: &State) -> Time {
        let facts = &self.task.graph.node(id).facts;
        let conversions =
            state.second.iter().zip(&state.strategy.outputs).zip(facts).map(|((conversions, made), fact)| {
                conversions.map_or(0, |conversions| self.machine.conversion(fact, *made, conversions))
            });
        conversions.fold(self.machine.strategy(&self.task.graph, id, &state.strategy), sum)
    }

    /// The cost of converting an output of a node in this state to sharding `to`.
    fn read_cost(&self, value: Value, state: &State, to: Sharding) -> Time {
        let output = value.output as usize;
        let fact = self.task.graph.fact(value);
        if self.sharded_weights.contains(&value.node) && state.strategy.outputs[output] != to {
            return NEVER;
        }
        let direct = self.machine.conversion(fact, state.strategy.outputs[output], to);
        let from_second = state.second[output].map_or(NEVER, |layout| self.machine.conversion(fact, layout, to));
        direct.min(from_second)
    }

    fn couple(&mut self) {
        let graph = &self.task.graph;
        let index_of: HashMap<NodeId, usize> = self.nodes.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        let mut factors = std::mem::take(&mut self.factors);
        for (reader, &id) in self.nodes.iter().enumerate() {
            // A value read twice in one sharding is converted once.
            let mut slots: BTreeMap<Value, Vec<usize>> = BTreeMap::new();
            for (slot, value) in graph.inputs(id).into_iter().enumerate() {
                slots.entry(value).or_default().push(slot);
            }
            for (value, slots) in slots {
                let producer = index_of[&value.node];
                let layouts = |state: &State| -> Vec<Sharding> {
                    let mut read: Vec<Sharding> = slots.iter().map(|slot| state.strategy.inputs[*slot]).collect();
                    read.sort_unstable();
                    read.dedup();
                    read
                };
                let layouts: Vec<Vec<Sharding>> = self.states[reader].iter().map(layouts).collect();
                let mut known: Vec<Sharding> = layouts.concat();
                known.sort_unstable();
                known.dedup();
                let place = |layout: &Sharding| known.binary_search(layout).expect("it is one of them");
                let places: Vec<Vec<usize>> = layouts.iter().map(|read| read.iter().map(place).collect()).collect();
                let costs = |state: &State| known.iter().map(|to| self.read_cost(value, state, *to)).collect();
                let costs: Vec<Vec<Time>> = self.states[producer].iter().map(costs).collect();
                factors.add(producer, reader, |a, b| places[b].iter().map(|at| costs[a][*at]).fold(0, sum));
            }
        }
        for (value, end) in self.results() {
            let producer = index_of[&value.node];
            let replicate = |state: &State| self.read_cost(value, state, Sharding::Replicated);
            match end {
                End::Like(parameter) if parameter != value.node => {
                    let parameter_index = index_of[&parameter];
                    factors.add(producer, parameter_index, |a, b| {
                        self.read_cost(
                            value,
                            &self.states[producer][a],
                            self.states[parameter_index][b].strategy.outputs[0],
                        )
                    });
                }
                End::Like(_) => {}
                End::Split(sharding) => {
                    factors.add(producer, producer, |a, _| self.read_cost(value, &self.states[producer][a], sharding));
                }
                End::Whole => factors.add(producer, producer, |a, _| replicate(&self.states[producer][a])),
            }
        }
        self.factors = factors;
    }

    pub fn choice(&self, states: &[usize]) -> Choice {
        let mut choice = Choice::default();
        for ((&id, node_states), &at) in self.nodes.iter().zip(&self.states).zip(states) {
            let state = &node_states[at];
            if matches!(self.task.graph.node(id).op, Op::Parameter(_)) {
                choice.parameters.insert(id, state.strategy.outputs[0]);
            } else {
                choice.strategies.insert(id, state.strategy.clone());
            }
            for (output, kept) in state.second.iter().enumerate() {
                if let Some(kept) = kept {
                    choice.second_layouts.insert(Value { node: id, output: output as u32 }, *kept);
                }
            }
        }
        choice
    }
}

/// The shardings of a parameter: replicated, or split along any divisible axis.
fn parameter_strategies(fact: &Fact, group: &Group) -> Vec<Strategy> {
    let strategy = |layout| Strategy { outputs: vec![layout], ..Strategy::replicated(0, 1) };
    let mut strategies = vec![strategy(Sharding::Replicated)];
    for (axis, size) in fact.concrete().into_iter().flatten().enumerate() {
        for blocks in [1].into_iter().chain(group.blocks.get(&size).into_iter().flatten().copied()) {
            let layout = Sharding::Split(crate::op::SplitDim { axis, blocks });
            if layout.part(fact, group.devices).is_some() {
                strategies.push(strategy(layout));
            }
        }
    }
    strategies
}

/// Second shardings that may be worth keeping.
fn second_layouts(layout: Sharding, fact: &Fact, group: &Group) -> Vec<Option<Sharding>> {
    match layout {
        Sharding::Replicated => vec![None],
        Sharding::Split(_) => vec![None, Some(Sharding::Replicated)],
        Sharding::Partial => {
            let split = (0..fact.rank()).map(Sharding::split).filter(|s| s.part(fact, group.devices).is_some());
            [None, Some(Sharding::Replicated)].into_iter().chain(split.map(Some)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{BytesPerSecond, Seconds, device};
    use crate::graph::{Graph, Origin, Output};
    use crate::op::{Binary, Input, MatMul, Parameter, Unary};
    use crate::profile::shared::ActivationSharding;
    use crate::tensor::DType;
    use crate::tensor_parallel::spmd_graph::rewrite;

    /// A small chain of products and other ops with a residual connection; sizes and ops depend on a seed.
    fn task(seed: u64) -> SpmdTask {
        let mut graph = Graph::new("small");
        let origin = Origin::default();
        let mut state = seed;
        let mut draw = |limit: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % limit
        };
        let sizes = [64usize, 128, 6, 256];
        let (rows, width) = (sizes[draw(4) as usize], sizes[draw(4) as usize]);
        let input = Op::Input(Input { name: "x".into(), fact: Fact::of(DType::F32, &[rows, width]) });
        let value = |node| Value { node, output: 0 };
        let x = value(graph.add(input, &[], &origin).unwrap());
        let inner = sizes[draw(4) as usize];
        let shapes = [[width, inner], [inner, width]];
        let mut y = x;
        for (i, shape) in shapes.iter().enumerate() {
            let weight = Op::Parameter(Parameter { name: format!("w{i}"), fact: Fact::of(DType::F32, shape) });
            let weight = value(graph.add(weight, &[], &origin).unwrap());
            let product = Op::MatMul(MatMul { transpose_a: false, transpose_b: false });
            y = value(graph.add(product, &[y, weight], &origin).unwrap());
            if i == 0 && draw(2) == 0 {
                y = value(graph.add(Op::Unary(Unary::Relu), &[y], &origin).unwrap());
            }
        }
        let sum = value(graph.add(Op::Binary(Binary::Add), &[x, y], &origin).unwrap());
        graph.outputs = vec![Output { name: "sum".into(), value: sum }, Output { name: "y".into(), value: y }];
        SpmdTask { graph, ends: vec![End::Whole; 2], replicated: BTreeSet::new(), split: HashMap::new() }
    }

    fn machine(seed: u64) -> Machine {
        let device = device::find("cpu").unwrap().device();
        let bandwidth = BytesPerSecond([1e8, 1e9, 1e10, 1e12][seed as usize % 4]);
        Machine {
            device,
            devices: [2, 4][seed as usize / 4 % 2],
            bandwidth,
            latency: Seconds(1e-7),
            keeps_weights: false,
            activations: ActivationSharding::Replicated,
        }
    }

    #[test]
    fn the_choice_is_that_of_trying_everything() {
        let mut shared = 0;
        for seed in 0..24 {
            let (task, machine) = (task(seed), machine(seed));
            let model = Model::of(&task, &machine).unwrap();
            let sizes: Vec<usize> = model.factors.unary.iter().map(Vec::len).collect();
            let mut states = vec![0; sizes.len()];
            let mut best = NEVER;
            loop {
                best = best.min(model.factors.cost(&states));
                let Some(at) = (0..sizes.len()).find(|at| states[*at] + 1 < sizes[*at]) else { break };
                states[at] += 1;
                states[..at].fill(0);
            }
            let chosen = choose(&task, &machine).unwrap();
            assert_eq!((chosen.cost, chosen.bound), (best, best), "seed {seed}");
            assert_eq!(chosen.alone, model.factors.cost(&vec![0; sizes.len()]));
            shared += usize::from(chosen.cost < chosen.alone);
            // The rewritten graph costs as much as predicted.
            let rewritten = rewrite(&task, &chosen.choice, &machine).graph;
            let time = |id| {
                let inputs: Vec<Value> = rewritten.inputs(id);
                let inputs: Vec<&Fact> = inputs.iter().map(|value| rewritten.fact(*value)).collect();
                machine.node(&rewritten.node(id).op, &inputs, &rewritten.node(id).facts)
            };
            assert_eq!(rewritten.ids().map(time).sum::<Time>(), chosen.cost, "seed {seed}");
        }
        assert!((4..24).contains(&shared), "some are worth sharing and some are not: {shared}");
    }

    #[test]
    fn groups_and_sizes_are_checked() {
        let task = task(1);
        for devices in [0, 1, 65, usize::MAX] {
            let machine = Machine { devices, ..machine(0) };
            assert_eq!(choose(&task, &machine).unwrap_err(), ChooseError::Devices { devices });
        }
    }
}
