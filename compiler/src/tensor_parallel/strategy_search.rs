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
    /// The index of its strategy among those of the node.
    strategy: usize,
    /// Per output, the sharding it is made in, and the second one it is kept in.
    outputs: Vec<(Sharding, Option<Sharding>)>,
}

/// All states of all nodes, with their costs.
pub struct Model<'a> {
    task: &'a SpmdTask,
    machine: &'a Machine,
    nodes: Vec<NodeId>,
    index_of: HashMap<NodeId, usize>,
    /// Matrices of weights that are sharded and never gathered, and what is computed from them alone.
    sharded_weights: HashSet<NodeId>,
    strategies: Vec<Vec<Strategy>>,
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
        let strategies = nodes.iter().map(|id| strategies_of(task, *id, &group, &sharded_weights)).collect();
        let index_of = nodes.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        let (states, factors) = (Vec::new(), Factors::default());
        let mut model = Model { task, machine, nodes, index_of, sharded_weights, strategies, states, factors };
        let reads = model.reads();
        for at in 0..model.nodes.len() {
            model.add_states(at, &reads);
        }
        model.couple();
        Ok(model)
    }

    /// The number of readers of each value, nodes and outputs, and the shardings in which they may read it.
    fn reads(&self) -> HashMap<Value, (usize, BTreeSet<Sharding>)> {
        let graph = &self.task.graph;
        let mut reads: HashMap<Value, (usize, BTreeSet<Sharding>)> = HashMap::new();
        for (&id, strategies) in self.nodes.iter().zip(&self.strategies) {
            let inputs = graph.inputs(id);
            for value in inputs.iter().collect::<BTreeSet<_>>() {
                reads.entry(*value).or_default().0 += 1;
            }
            for (value, sharding) in strategies.iter().flat_map(|strategy| inputs.iter().zip(&strategy.inputs)) {
                reads.entry(*value).or_default().1.insert(*sharding);
            }
        }
        for (value, end) in self.results() {
            let (readers, shardings) = reads.entry(value).or_default();
            *readers += 1;
            match end {
                End::Like(parameter) => {
                    let strategies = &self.strategies[self.index_of[&parameter]];
                    shardings.extend(strategies.iter().map(|strategy| strategy.outputs[0]));
                }
                End::Split(sharding) => drop(shardings.insert(sharding)),
                End::Whole => drop(shardings.insert(Sharding::Replicated)),
            }
        }
        reads
    }

    /// Values with a required sharding: outputs and samples of averages.
    fn results(&self) -> Vec<(Value, End)> {
        let graph = &self.task.graph;
        let outputs = graph.outputs.iter().map(|output| output.value).zip(self.task.ends.iter().copied());
        outputs.chain(graph.averages.iter().map(|average| (average.sample, End::Whole))).collect()
    }

    /// Adds the states of a node: its strategies, each with every choice of second shardings.
    fn add_states(&mut self, at: usize, reads: &HashMap<Value, (usize, BTreeSet<Sharding>)>) {
        let (id, graph) = (self.nodes[at], &self.task.graph);
        let (mut states, mut costs) = (Vec::new(), Vec::new());
        for (index, strategy) in self.strategies[at].iter().enumerate() {
            let mut made = vec![(Vec::new(), self.machine.strategy(graph, id, strategy))];
            for (output, &sharding) in strategy.outputs.iter().enumerate() {
                let value = Value { node: id, output: output as u32 };
                let fact = &graph.node(id).facts[output];
                let of_readers = reads.get(&value).filter(|(readers, _)| *readers > 1).map(|(_, shardings)| shardings);
                let seconds =
                    of_readers.map_or(vec![], |read| second_layouts(sharding, fact, self.machine.devices, read));
                let mut with_output = Vec::new();
                for (outputs, cost) in &made {
                    for second in [None].into_iter().chain(seconds.iter().copied().map(Some)) {
                        let conversion = second.map_or(0, |to| self.machine.conversion(fact, sharding, to));
                        with_output.push(([&outputs[..], &[(sharding, second)]].concat(), sum(*cost, conversion)));
                    }
                }
                made = with_output;
            }
            for (outputs, cost) in made {
                states.push(State { strategy: index, outputs });
                costs.push(cost);
            }
        }
        self.states.push(states);
        self.factors.variable(costs);
    }

    /// The cost of converting an output of a node in this state to sharding `to`.
    fn read_cost(&self, value: Value, state: &State, to: Sharding) -> Time {
        let (made, second) = state.outputs[value.output as usize];
        let fact = self.task.graph.fact(value);
        if self.sharded_weights.contains(&value.node) && made != to {
            return NEVER;
        }
        let direct = self.machine.conversion(fact, made, to);
        let from_second = second.map_or(NEVER, |layout| self.machine.conversion(fact, layout, to));
        direct.min(from_second)
    }

    fn couple(&mut self) {
        let graph = &self.task.graph;
        let mut factors = std::mem::take(&mut self.factors);
        for (reader, &id) in self.nodes.iter().enumerate() {
            // A value read twice in one sharding is converted once.
            let mut slots: BTreeMap<Value, Vec<usize>> = BTreeMap::new();
            for (slot, value) in graph.inputs(id).into_iter().enumerate() {
                slots.entry(value).or_default().push(slot);
            }
            for (value, slots) in slots {
                let producer = self.index_of[&value.node];
                let read = |strategy: &Strategy| slots.iter().map(|slot| strategy.inputs[*slot]).collect();
                let layouts: Vec<BTreeSet<Sharding>> = self.strategies[reader].iter().map(read).collect();
                let mut costs: BTreeMap<Sharding, Vec<Time>> = BTreeMap::new();
                for &to in layouts.iter().flatten() {
                    let cost = |state: &State| self.read_cost(value, state, to);
                    costs.entry(to).or_insert_with(|| self.states[producer].iter().map(cost).collect());
                }
                let of_layout = |read: &BTreeSet<Sharding>| read.iter().map(|to| &costs[to][..]).collect();
                let read_costs: Vec<Vec<&[Time]>> = layouts.iter().map(of_layout).collect();
                let costs_of = |state: &State| &read_costs[state.strategy];
                let of_states: Vec<&Vec<&[Time]>> = self.states[reader].iter().map(costs_of).collect();
                factors.add(producer, reader, |a, b| of_states[b].iter().map(|costs| costs[a]).fold(0, sum));
            }
        }
        for (value, end) in self.results() {
            let producer = self.index_of[&value.node];
            let replicate = |state: &State| self.read_cost(value, state, Sharding::Replicated);
            match end {
                End::Like(parameter) if parameter != value.node => {
                    let parameter_index = self.index_of[&parameter];
                    factors.add(producer, parameter_index, |a, b| {
                        let (sharding, _) = self.states[parameter_index][b].outputs[0];
                        self.read_cost(value, &self.states[producer][a], sharding)
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
        for (at, (&id, &state)) in self.nodes.iter().zip(states).enumerate() {
            let state = &self.states[at][state];
            let strategy = &self.strategies[at][state.strategy];
            if matches!(self.task.graph.node(id).op, Op::Parameter(_)) {
                choice.parameters.insert(id, strategy.outputs[0]);
            } else {
                choice.strategies.insert(id, strategy.clone());
            }
            for (output, (_, kept)) in state.outputs.iter().enumerate() {
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

/// The strategies of a node.
fn strategies_of(task: &SpmdTask, id: NodeId, group: &Group, sharded_weights: &HashSet<NodeId>) -> Vec<Strategy> {
    let node = task.graph.node(id);
    let inputs = task.graph.inputs(id);
    let facts: Vec<&Fact> = inputs.iter().map(|v| task.graph.fact(*v)).collect();
    let mut all = match &node.op {
        Op::Parameter(_) => {
            let mut all = parameter_strategies(&node.facts[0], group);
            if task.replicated.contains(&id) {
                all.truncate(1);
            } else if sharded_weights.contains(&id) && all.len() > 1 {
                // The first one replicates.
                all.remove(0);
            }
            return all;
        }
        _ if task.split.contains_key(&id) => {
            vec![Strategy { outputs: vec![task.split[&id]], ..Strategy::replicated(0, 1) }]
        }
        _ => strategies(&node.op, &facts, &node.facts, group),
    };
    // Constants and other inputs are replicated.
    if inputs.is_empty() {
        all.truncate(1);
    }
    all
}

/// Second shardings of a value that may be worth keeping beside the first one: replicated, and those in which its
/// readers read it. Another one would be converted again for each of them.
fn second_layouts(sharding: Sharding, fact: &Fact, devices: usize, read: &BTreeSet<Sharding>) -> Vec<Sharding> {
    match sharding {
        Sharding::Replicated => vec![],
        Sharding::Split(_) => vec![Sharding::Replicated],
        Sharding::Partial => {
            let is_possible = |to: &&Sharding| matches!(to, Sharding::Split(_)) && to.part(fact, devices).is_some();
            [Sharding::Replicated].into_iter().chain(read.iter().filter(is_possible).copied()).collect()
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
