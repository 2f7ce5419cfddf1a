//! Cuts a graph into one fragment per stage.
//!
//! A fragment has the ops of its stage and copies of every parameter, state and constant they read. Values are sent
//! directly from the producing stage to each consuming stage, across any number of stages.
//!
//! The gradient of a value is a sum with one term per use, added from the last user (by op number) to the first. The
//! sum must be bitwise independent of the cuts. A stage therefore adds only terms at the head of this order and sends
//! all others separately: see [`Term`].

use crate::graph::{Graph, MovingAverage, Output, order};
use crate::op::{Input, NodeId, Op, Value};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use thiserror::Error;

/// A use of a value: a node of the fragment and its input index.
pub type Use = (NodeId, u32);

/// A term of a value's gradient, in summation order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Term {
    Local(Use),
    /// A group of uses in another stage, which sends their sum.
    Remote {
        stage: usize,
        /// Index of that stage's group for this value.
        group: usize,
    },
}

/// A value received from an earlier stage.
#[derive(Clone, Debug)]
pub struct Received {
    /// The value in the whole graph.
    pub value: Value,
    pub from: usize,
    /// Its [`Input`] node in the fragment.
    pub local: NodeId,
    /// The producer needs its gradient.
    pub needs_gradient: bool,
    /// Groups of uses whose terms are summed and sent back together, from the last to the first.
    pub groups: Vec<Vec<Use>>,
}

/// A value sent to later stages.
#[derive(Clone, Debug)]
pub struct Sent {
    pub value: Value,
    pub local: Value,
    /// The receiving stages.
    pub to: Vec<usize>,
    /// Its gradient is needed here.
    pub needs_gradient: bool,
}

/// Limit on the uses of a parameter with separate terms: see [`Fragment::parameter_terms`].
const SEPARATE_USES: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterTerm {
    pub parameter: NodeId,
    /// Position in the sum over all stages, from 0.
    pub rank: usize,
    /// From the last to the first.
    pub uses: Vec<Use>,
}

/// The part of a graph that one stage runs.
#[derive(Clone, Debug)]
pub struct Fragment {
    /// The ops, with an [`Input`] for every received value. Ids increase in the order of the whole graph.
    pub graph: Graph,
    /// By producer stage and value.
    pub received: Vec<Received>,
    pub sent: Vec<Sent>,
    /// The gradient terms of every float value that needs a gradient, in summation order.
    pub terms: BTreeMap<Value, Vec<Term>>,
    /// The gradient terms of the parameters. For a parameter with several uses (a tied embedding), terms stay separate
    /// until the optimizer step, so that all stages sum them in one order. Above eight uses, each stage has one term
    /// instead.
    pub parameter_terms: Vec<ParameterTerm>,
}

/// A placement that cannot be cut.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FragmentError {
    #[error("op `{node}` is in no stage")]
    Unplaced { node: String },
    #[error("stage {to} reads `{node}` of stage {from}, which comes later")]
    Backward { node: String, from: usize, to: usize },
    #[error("stage {stage} of {stages} has no op")]
    Empty { stage: usize, stages: usize },
}

/// The fragments of all stages; `stage_of` gives the stage of every node that depends on a source.
pub fn fragments(
    graph: &Graph,
    stage_of: &HashMap<NodeId, usize>,
    stages: usize,
) -> Result<Vec<Fragment>, FragmentError> {
    let whole = Whole::of(graph);
    (0..stages).map(|stage| whole.fragment(stage_of, stages, stage)).collect()
}

/// A graph that is cut, perhaps many times.
pub struct Whole<'a> {
    graph: &'a Graph,
    order: Vec<NodeId>,
    /// The nodes that depend on a parameter, parameters included.
    pub parameter_dependents: HashSet<NodeId>,
}

impl<'a> Whole<'a> {
    pub fn of(graph: &'a Graph) -> Whole<'a> {
        let order = order::canonical(graph);
        let parameter_dependents = order::dependents(graph, &order, |op| matches!(op, Op::Parameter(_)));
        Whole { graph, order, parameter_dependents }
    }

    /// The fragment of one stage.
    pub fn fragment(
        &self,
        stage_of: &HashMap<NodeId, usize>,
        stages: usize,
        stage: usize,
    ) -> Result<Fragment, FragmentError> {
        let Whole { graph, order, parameter_dependents } = self;
        Cut { graph, stage_of, order, parameter_dependents, stage, stages }.fragment()
    }
}

struct Cut<'a> {
    graph: &'a Graph,
    stage_of: &'a HashMap<NodeId, usize>,
    order: &'a [NodeId],
    parameter_dependents: &'a HashSet<NodeId>,
    stage: usize,
    stages: usize,
}

impl Cut<'_> {
    fn fragment(&self) -> Result<Fragment, FragmentError> {
        let nodes = self.needed_nodes()?;
        let mut local = Graph::new(&self.graph.name);
        let mut map: HashMap<Value, Value> = HashMap::new();
        let mut received = Vec::new();
        for &id in self.order {
            let node = self.graph.node(id);
            let is_inside = nodes.contains(&id);
            if !is_inside {
                for value in self.graph.values(id).into_iter().filter(|v| self.is_read_here(*v, &nodes)) {
                    let name = format!("{}#{}", node.name, value.output);
                    let fact = self.graph.fact(value).clone();
                    let input = Op::Input(Input { name: name.clone(), fact });
                    let input = local.add(input, &[], &node.origin).expect("an input takes no inputs");
                    // Copied nodes keep their names, so a generated one could collide.
                    local.node_mut(input).name = name;
                    map.insert(value, Value { node: input, output: 0 });
                    let from = self.stage_of[&id];
                    received.push((value, from, input));
                }
                continue;
            }
            let inputs: Vec<Value> = self.graph.inputs(id).iter().map(|v| map[v]).collect();
            let copy = local.add(node.op.clone(), &inputs, &node.origin).expect("the op fitted in the whole graph");
            local.node_mut(copy).name.clone_from(&node.name);
            for value in self.graph.values(id) {
                map.insert(value, Value { node: copy, output: value.output });
            }
        }
        let uses = |value: Value, stage: usize| -> Vec<Use> {
            let mut uses = self.uses(value);
            uses.retain(|u| self.stage_of.get(&u.0) == Some(&stage));
            uses
        };
        let to_local = |u: &Use| (map[&Value { node: u.0, output: 0 }].node, u.1);
        let needs_gradient =
            |v: Value| self.parameter_dependents.contains(&v.node) && self.graph.fact(v).dtype.is_float();
        let received: Vec<Received> = {
            let mut received = received;
            received.sort_by_key(|(value, from, _)| (*from, *value));
            let groups = |value| {
                let groups = self.groups(value).into_iter().filter(|(stage, _)| *stage == self.stage);
                groups.map(|(_, uses)| uses.iter().map(to_local).collect()).collect()
            };
            received
                .into_iter()
                .map(|(value, from, local)| Received {
                    value,
                    from,
                    local,
                    needs_gradient: needs_gradient(value),
                    groups: groups(value),
                })
                .collect()
        };
        let mut sent = Vec::new();
        let mut terms = BTreeMap::new();
        for &id in self.order.iter().filter(|id| self.stage_of.get(id) == Some(&self.stage)) {
            for value in self.graph.values(id) {
                let to: BTreeSet<usize> =
                    (0..self.stages).filter(|s| *s != self.stage && !uses(value, *s).is_empty()).collect();
                if !to.is_empty() {
                    let to = to.into_iter().collect();
                    sent.push(Sent { value, local: map[&value], to, needs_gradient: needs_gradient(value) });
                }
                if self.graph.fact(value).dtype.is_float() {
                    terms.insert(map[&value], self.terms(value, to_local));
                }
            }
        }
        for output in self.graph.outputs.iter().filter(|o| nodes.contains(&o.value.node)) {
            let is_in_stage = self.stage_of.get(&output.value.node).is_none_or(|s| *s == self.stage);
            if is_in_stage {
                local.outputs.push(Output { name: output.name.clone(), value: map[&output.value] });
            }
        }
        for a in self.graph.averages.iter().filter(|a| self.stage_of.get(&a.sample.node) == Some(&self.stage)) {
            let state = map[&Value { node: a.state, output: 0 }].node;
            local.averages.push(MovingAverage { state, sample: map[&a.sample], keep: a.keep });
        }
        let parameter_terms = self.parameter_terms(&map);
        Ok(Fragment { graph: local, received, sent, terms, parameter_terms })
    }

    /// The nodes of the fragment: the stage's ops, and every source and constant expression they read.
    fn needed_nodes(&self) -> Result<HashSet<NodeId>, FragmentError> {
        let name = |id: NodeId| self.graph.node(id).label().to_string();
        let stage_nodes: Vec<NodeId> =
            self.order.iter().copied().filter(|id| self.stage_of.get(id) == Some(&self.stage)).collect();
        if stage_nodes.is_empty() {
            return Err(FragmentError::Empty { stage: self.stage, stages: self.stages });
        }
        let mut nodes: HashSet<NodeId> = stage_nodes.iter().copied().collect();
        let mut queue: Vec<NodeId> = stage_nodes;
        queue.extend(
            self.graph
                .averages
                .iter()
                .filter(|a| self.stage_of.get(&a.sample.node) == Some(&self.stage))
                .map(|a| a.state),
        );
        // Outputs that are constant expressions belong to the last stage.
        if self.stage + 1 == self.stages {
            queue.extend(self.graph.outputs.iter().map(|o| o.value.node).filter(|id| !self.stage_of.contains_key(id)));
        }
        while let Some(id) = queue.pop() {
            nodes.insert(id);
            for v in self.graph.inputs(id) {
                match self.stage_of.get(&v.node) {
                    Some(stage) if *stage > self.stage => {
                        return Err(FragmentError::Backward { node: name(v.node), from: *stage, to: self.stage });
                    }
                    Some(_) => {}
                    None if self.is_numbered(v.node) => return Err(FragmentError::Unplaced { node: name(v.node) }),
                    None if nodes.insert(v.node) => queue.push(v.node),
                    None => {}
                }
            }
        }
        Ok(nodes)
    }

    /// Tests whether an unplaced node should have a stage, because it depends on run-time data.
    fn is_numbered(&self, id: NodeId) -> bool {
        !matches!(self.graph.node(id).op, Op::Input(_) | Op::Parameter(_) | Op::State(_))
            && self.graph.inputs(id).iter().any(|v| {
                self.stage_of.contains_key(&v.node)
                    || matches!(self.graph.node(v.node).op, Op::Input(_) | Op::Parameter(_) | Op::State(_))
            })
    }

    fn is_read_here(&self, value: Value, nodes: &HashSet<NodeId>) -> bool {
        self.stage_of.contains_key(&value.node)
            && self.graph.consumers(value).iter().any(|(consumer, _)| nodes.contains(consumer))
    }

    /// All uses of a value by placed ops, from the last to the first.
    fn uses(&self, value: Value) -> Vec<Use> {
        let mut uses = self.graph.consumers(value);
        uses.retain(|(consumer, _)| self.stage_of.contains_key(consumer));
        uses.reverse();
        uses
    }

    /// The uses of a value in groups that are summed before sending: those at the head of the order together, every
    /// other one alone.
    fn groups(&self, value: Value) -> Vec<(usize, Vec<Use>)> {
        let uses = self.uses(value);
        let Some(head) = uses.first().map(|u| self.stage_of[&u.0]) else { return Vec::new() };
        let length = uses.iter().take_while(|u| self.stage_of[&u.0] == head).count();
        let mut groups = vec![(head, uses[..length].to_vec())];
        groups.extend(uses[length..].iter().map(|u| (self.stage_of[&u.0], vec![*u])));
        groups
    }

    fn terms(&self, value: Value, to_local: impl Fn(&Use) -> Use) -> Vec<Term> {
        let mut counts: HashMap<usize, usize> = HashMap::new();
        let mut terms = Vec::new();
        for (stage, uses) in self.groups(value) {
            if stage == self.stage {
                terms.extend(uses.iter().map(|u| Term::Local(to_local(u))));
            } else {
                let group = counts.entry(stage).or_insert(0);
                terms.push(Term::Remote { stage, group: *group });
                *group += 1;
            }
        }
        terms
    }

    fn parameter_terms(&self, map: &HashMap<Value, Value>) -> Vec<ParameterTerm> {
        let mut terms = Vec::new();
        for &id in self.order.iter().filter(|id| matches!(self.graph.node(**id).op, Op::Parameter(_))) {
            let value = Value { node: id, output: 0 };
            let Some(parameter) = map.get(&value).map(|v| v.node) else { continue };
            let uses = self.uses(value);
            let by_rank: Vec<Vec<Use>> = if uses.len() <= SEPARATE_USES {
                uses.into_iter().map(|u| vec![u]).collect()
            } else {
                let mut by_stage: BTreeMap<std::cmp::Reverse<usize>, Vec<Use>> = BTreeMap::new();
                for u in uses {
                    by_stage.entry(std::cmp::Reverse(self.stage_of[&u.0])).or_default().push(u);
                }
                by_stage.into_values().collect()
            };
            for (rank, uses) in by_rank.into_iter().enumerate() {
                if self.stage_of[&uses[0].0] == self.stage {
                    let uses = uses.iter().map(|u| (map[&Value { node: u.0, output: 0 }].node, u.1)).collect();
                    terms.push(ParameterTerm { parameter, rank, uses });
                }
            }
        }
        terms
    }
}
