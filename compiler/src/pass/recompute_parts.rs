//! Recomputes forward values within a backward fragment, part by part.
//!
//! The backward reads saved values. Those made within a part of the forward are computed again from the inputs of the
//! part, all of a part before the first of them is read. The canonical order of the new graph is the order in which its
//! nodes are added: every other node is added just before the first that reads it. So one part is in memory at a time.

use super::backward::{Backward, Read};
use super::fragment::Fragment;
use crate::graph::{Graph, Output, order};
use crate::op::{Input, NodeId, Op, Value};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The backward that recomputes the values that only their own part reads. Values that other parts read, that are sent to
/// other stages or returned, and samples of running averages stay saved. `parts`: the parts of forward nodes.
pub fn recompute_parts(fragment: &Fragment, backward: Backward, parts: &HashMap<NodeId, u32>) -> Backward {
    let forward = &fragment.graph;
    let sent = fragment.sent.iter().map(|sent| sent.local);
    let results = forward.outputs.iter().map(|output| output.value);
    let samples = forward.averages.iter().map(|average| average.sample);
    let leaving: HashSet<Value> = sent.chain(results).chain(samples).collect();
    let part_of = |value: &Value| {
        let part = parts.get(&value.node).copied().filter(|_| !leaving.contains(value));
        part.filter(|part| forward.consumers(*value).iter().all(|(reader, _)| parts.get(reader) == Some(part)))
    };
    let values = forward.ids().flat_map(|id| forward.values(id));
    let recomputed: HashMap<Value, u32> = values.filter_map(|value| Some((value, part_of(&value)?))).collect();
    let mut reads_of_part: HashMap<u32, Vec<Value>> = HashMap::new();
    for (_, read) in &backward.reads {
        if let Read::Saved(value) = read
            && let Some(part) = recomputed.get(value)
        {
            reads_of_part.entry(*part).or_default().push(*value);
        }
    }
    let place = order::canonical(forward).into_iter().enumerate().map(|(place, id)| (id, place)).collect();
    let mut recomputing = Recomputing {
        forward,
        place,
        recomputed,
        reads_of_part,
        graph: Graph::new(&backward.graph.name),
        reads: Vec::new(),
        again: HashMap::new(),
        parameters: HashMap::new(),
    };
    let reads: HashMap<NodeId, Read> = backward.reads.iter().copied().collect();
    let mut copies: HashMap<Value, Value> = HashMap::new();
    for id in demanded(&backward.graph) {
        let node = backward.graph.node(id);
        let is_made_later =
            matches!((&node.op, reads.get(&id)), (Op::Input(_), Some(Read::Saved(_))) | (Op::Parameter(_), _));
        if is_made_later {
            continue;
        }
        let inputs = backward.graph.inputs(id);
        let inputs: Vec<Value> =
            inputs.iter().map(|input| recomputing.copy(&backward.graph, *input, &reads, &copies)).collect();
        let copy = recomputing.graph.add(node.op.clone(), &inputs, &node.origin).expect("the op fitted before");
        recomputing.reads.extend(reads.get(&id).map(|read| (copy, *read)));
        for value in backward.graph.values(id) {
            copies.insert(value, Value { node: copy, output: value.output });
        }
    }
    for output in &backward.graph.outputs {
        let value = recomputing.copy(&backward.graph, output.value, &reads, &copies);
        recomputing.graph.outputs.push(Output { name: output.name.clone(), value });
    }
    let Recomputing { graph, reads, .. } = recomputing;
    Backward { graph, reads, output_roles: backward.output_roles }
}

/// The nodes that outputs depend on, each just before the first that reads it. In canonical order, nodes that read only
/// saved values run early, and whole parts would be recomputed for them.
fn demanded(graph: &Graph) -> Vec<NodeId> {
    let place: HashMap<NodeId, usize> = order::canonical(graph).into_iter().zip(0..).collect();
    let mut results: Vec<NodeId> = graph.outputs.iter().map(|output| output.value.node).collect();
    results.sort_by_key(|id| place[id]);
    let (mut demanded, mut seen) = (Vec::new(), HashSet::new());
    for result in results {
        let mut open = vec![(result, false)];
        while let Some((id, is_ready)) = open.pop() {
            if is_ready {
                demanded.push(id);
            } else if seen.insert(id) {
                open.push((id, true));
                open.extend(graph.inputs(id).iter().rev().map(|input| (input.node, false)));
            }
        }
    }
    demanded
}

struct Recomputing<'a> {
    forward: &'a Graph,
    /// The position of each forward node in canonical order.
    place: HashMap<NodeId, usize>,
    /// The part of each value that is recomputed.
    recomputed: HashMap<Value, u32>,
    /// What the backward reads of the parts that it has not recomputed yet.
    reads_of_part: HashMap<u32, Vec<Value>>,
    graph: Graph,
    reads: Vec<(NodeId, Read)>,
    /// Forward values in the new graph.
    again: HashMap<Value, Value>,
    parameters: HashMap<String, Value>,
}

impl Recomputing<'_> {
    /// A value of the old backward in the new one.
    fn copy(
        &mut self,
        old: &Graph,
        value: Value,
        reads: &HashMap<NodeId, Read>,
        copies: &HashMap<Value, Value>,
    ) -> Value {
        match (&old.node(value.node).op, reads.get(&value.node)) {
            (Op::Input(_), Some(Read::Saved(saved))) => self.forward_value(*saved),
            (op @ Op::Parameter(_), _) => self.parameter(op, value.node, old),
            _ => copies[&value],
        }
    }

    fn parameter(&mut self, op: &Op, node: NodeId, graph: &Graph) -> Value {
        let Op::Parameter(parameter) = op else { unreachable!("the caller has one") };
        if let Some(known) = self.parameters.get(&parameter.name) {
            return *known;
        }
        let copy = self.graph.add(op.clone(), &[], &graph.node(node).origin).expect("a parameter has no inputs");
        let copy = Value { node: copy, output: 0 };
        self.parameters.insert(parameter.name.clone(), copy);
        copy
    }

    /// A forward value in the new graph: saved, or made again from what is saved, with all else that the backward reads of
    /// its part.
    fn forward_value(&mut self, value: Value) -> Value {
        let mut needed: BTreeSet<(usize, u32, NodeId)> = BTreeSet::new();
        let mut open = vec![value];
        while let Some(value) = open.pop() {
            let is_new =
                !self.again.contains_key(&value) && needed.insert((self.place[&value.node], value.output, value.node));
            if let Some(part) = self.recomputed.get(&value).filter(|_| is_new) {
                open.extend(self.forward.inputs(value.node));
                open.extend(self.reads_of_part.remove(part).into_iter().flatten());
            }
        }
        for (_, output, id) in needed {
            self.add_forward(Value { node: id, output });
        }
        self.again[&value]
    }

    /// Adds a forward value whose inputs are there, if it is recomputed.
    fn add_forward(&mut self, value: Value) {
        if self.again.contains_key(&value) {
            return;
        }
        let node = self.forward.node(value.node);
        if self.recomputed.contains_key(&value) {
            let inputs: Vec<Value> = self.forward.inputs(value.node).iter().map(|input| self.again[input]).collect();
            let again = self.graph.add(node.op.clone(), &inputs, &node.origin).expect("the op fitted in the forward");
            for value in self.forward.values(value.node) {
                if self.recomputed.contains_key(&value) {
                    self.again.insert(value, Value { node: again, output: value.output });
                }
            }
            return;
        }
        let copy = match &node.op {
            op @ Op::Parameter(_) => self.parameter(op, value.node, self.forward),
            op @ (Op::Constant(_) | Op::Iota(_)) => {
                let copy = self.graph.add(op.clone(), &[], &node.origin).expect("a constant has no inputs");
                Value { node: copy, output: 0 }
            }
            _ => {
                let name = format!("saved {}#{}", node.name, value.output);
                let op = Op::Input(Input { name, fact: self.forward.fact(value).clone() });
                let copy = self.graph.add(op, &[], &node.origin).expect("an input has no inputs");
                self.reads.push((copy, Read::Saved(value)));
                Value { node: copy, output: 0 }
            }
        };
        self.again.insert(value, copy);
    }
}
