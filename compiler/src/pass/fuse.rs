//! Fuses elementwise ops into chains. A chain runs as one loop over blocks in the L1 cache, so its intermediates are
//! never written to memory. On some devices a normalisation may be the first op of a chain.
//!
//! The results of a chain have one shape. A chain runs at the position of its last op, so an op may join only if no
//! other op reads its result earlier. Every op rounds as it does alone: results are bitwise equal.
//!
//! ```text
//! %u = mul %x %root          unfused: six tensors are written and read      fused: one block of each at a time,
//! %e = erf %u                                                               and only %c is written whole
//! %g = add %e %one
//! %c = mul %g %half
//! ```

use super::memory::{Needs, live};
use crate::graph::Graph;
use crate::op::table::rule;
use crate::op::{Binary, NodeId, Op, Unary, Value};
use crate::tensor::DType;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Longer chains gain nothing.
const MOST_OPS: usize = 24;
pub const MOST_READ: usize = 12;
pub const MOST_WRITTEN: usize = 4;

/// The fused chains of a graph.
#[derive(Clone, Debug, Default)]
pub struct Chains {
    /// The ops of each chain in order, keyed by the last.
    pub by_last: BTreeMap<NodeId, Vec<NodeId>>,
    /// Values that are read only within their chain.
    pub inner: HashSet<Value>,
}

impl Chains {
    /// For every node of `order`, the position at which it runs.
    pub fn run_positions(&self, order: &[NodeId]) -> Vec<usize> {
        let mut positions: Vec<usize> = (0..order.len()).collect();
        let mut last_of: HashMap<NodeId, NodeId> = HashMap::new();
        for (last, ops) in &self.by_last {
            last_of.extend(ops.iter().map(|op| (*op, *last)));
        }
        let mut at_last: HashMap<NodeId, usize> = HashMap::new();
        for (at, id) in order.iter().enumerate().rev().filter(|_| !last_of.is_empty()) {
            if let Some(last) = last_of.get(id) {
                // Iterating backward, the last op of a chain comes first.
                positions[at] = *at_last.entry(*last).or_insert(at);
            }
        }
        positions
    }

    /// Takes the first op out of a chain. Dissolves a chain of two.
    pub fn without_first(&mut self, last: NodeId) {
        let Some(ops) = self.by_last.get_mut(&last) else { return };
        let first = ops.remove(0);
        self.inner.remove(&Value { node: first, output: 0 });
        if ops.len() < 2 {
            self.dissolve(last);
        }
    }

    pub fn dissolve(&mut self, last: NodeId) {
        for op in self.by_last.remove(&last).unwrap_or_default() {
            self.inner.remove(&Value { node: op, output: 0 });
        }
    }
}

/// The tensors that a chain reads and those that it writes, each once, in the order of the ops.
pub fn ends(graph: &Graph, ops: &[NodeId], inner: &HashSet<Value>) -> (Vec<Value>, Vec<Value>) {
    let mut inputs: Vec<Value> = Vec::new();
    for value in ops.iter().flat_map(|op| graph.inputs(*op)) {
        if !ops.contains(&value.node) && !inputs.contains(&value) {
            inputs.push(value);
        }
    }
    let outputs = ops.iter().flat_map(|op| graph.values(*op));
    (inputs, outputs.filter(|value| !inner.contains(value)).collect())
}

/// Which ops may be in one chain.
pub struct Rules<'a> {
    /// Ops for which this is false are not fused.
    pub can_join: &'a dyn Fn(NodeId, NodeId) -> bool,
    /// True for an op that is not elementwise but may be the first of a chain, whose elements are those of its first
    /// result.
    pub can_start: &'a dyn Fn(&Op) -> bool,
}

/// Finds the chains of a graph of fixed sizes executed in `order`. Chains that would raise the memory peak are dissolved.
/// Also returns [`live`] bytes with these chains.
pub fn chains(graph: &Graph, order: &[NodeId], needs: &Needs<'_>, rules: &Rules<'_>) -> (Chains, Vec<usize>) {
    let mut search = Search::new(graph, order, needs);
    for &id in order {
        search.add(id, rules);
    }
    let mut chains = search.into_chains();
    let unfused = live(graph, order, needs);
    let peak = unfused.iter().max().copied().unwrap_or(0);
    while !chains.by_last.is_empty() {
        let alive = live(graph, order, &Needs { chains: &chains, ..*needs });
        if alive.iter().all(|alive| *alive <= peak) {
            return (chains, alive);
        }
        let overfull = order.iter().zip(&alive).filter(|(id, alive)| **alive > peak && chains.by_last.contains_key(id));
        let overfull: Vec<NodeId> = overfull.map(|(id, _)| *id).collect();
        if overfull.is_empty() {
            break;
        }
        overfull.into_iter().for_each(|last| chains.dissolve(last));
    }
    (Chains::default(), unfused)
}

struct Search<'a> {
    graph: &'a Graph,
    needs: &'a Needs<'a>,
    position: HashMap<NodeId, usize>,
    results: HashSet<Value>,
    chain_of: HashMap<NodeId, usize>,
    /// Chains of one or more ops; merged ones are empty.
    chains: Vec<Vec<NodeId>>,
    /// Ops that may be the first of a chain but are not elementwise.
    starts: HashSet<NodeId>,
}

impl<'a> Search<'a> {
    fn new(graph: &'a Graph, order: &[NodeId], needs: &'a Needs<'a>) -> Search<'a> {
        let position = order.iter().enumerate().map(|(at, id)| (*id, at)).collect();
        let results = graph.outputs.iter().map(|output| output.value).collect();
        Search { graph, needs, position, results, chain_of: HashMap::new(), chains: Vec::new(), starts: HashSet::new() }
    }

    /// Merges an op into the chains of its inputs where legal, or starts a new one.
    fn add(&mut self, id: NodeId, rules: &Rules<'_>) {
        let is_start = (rules.can_start)(&self.graph.node(id).op);
        if !is_start && !is_elementwise(self.graph, id) {
            return;
        }
        let chain = self.chains.len();
        self.chains.push(vec![id]);
        self.chain_of.insert(id, chain);
        if is_start {
            self.starts.insert(id);
            return;
        }
        for value in self.graph.inputs(id) {
            let Some(&other_chain) = self.chain_of.get(&value.node) else { continue };
            let chain = self.chain_of[&id];
            if other_chain != chain && self.may_join(other_chain, chain, id, rules) {
                let mut merged = std::mem::take(&mut self.chains[other_chain]);
                merged.append(&mut self.chains[chain]);
                merged.sort_by_key(|op| self.position[op]);
                for op in &merged {
                    self.chain_of.insert(*op, chain);
                }
                self.chains[chain] = merged;
            }
        }
    }

    /// Tests whether a chain may merge with `id`'s chain and run at `id`.
    fn may_join(&self, other: usize, own: usize, id: NodeId, rules: &Rules<'_>) -> bool {
        let (other_ops, own_ops) = (&self.chains[other], &self.chains[own]);
        let shape = |id: NodeId| &self.graph.node(id).facts[0].shape;
        if other_ops.len() + own_ops.len() > MOST_OPS
            || shape(other_ops[0]) != shape(id)
            || !(rules.can_join)(other_ops[0], id)
        {
            return false;
        }
        let position = self.position[&id];
        let waits = |value: Value| self.first_read(value, [other, own]) > position;
        if !other_ops.iter().chain(own_ops).all(|op| self.graph.values(*op).into_iter().all(waits)) {
            return false;
        }
        let mut ops = other_ops.clone();
        ops.extend(own_ops);
        if !self.starts_well(&ops) {
            return false;
        }
        let inner = self.inner(&ops);
        let (inputs, outputs) = ends(self.graph, &ops, &inner);
        let of_start = ops.iter().map(|op| self.graph.node(*op).facts.len() - 1).sum::<usize>();
        inputs.len() <= MOST_READ && outputs.len() <= MOST_WRITTEN + of_start
    }

    /// Tests that the only op that is not elementwise, if there is one, runs first, and that the others read its first
    /// result alone.
    fn starts_well(&self, ops: &[NodeId]) -> bool {
        let mut starts = ops.iter().filter(|op| self.starts.contains(op));
        let Some(start) = starts.next() else { return true };
        let is_first = ops.iter().all(|op| self.position[op] >= self.position[start]);
        let reads_statistics = |value: Value| value.node == *start && value.output > 0;
        starts.next().is_none()
            && is_first
            && !ops.iter().any(|op| self.graph.inputs(*op).into_iter().any(reads_statistics))
    }

    /// The first position at which a value is read outside these chains or through a view, which would see data not yet
    /// computed.
    fn first_read(&self, origin: Value, chains: [usize; 2]) -> usize {
        let mut first = usize::MAX;
        let mut values = vec![origin];
        while let Some(value) = values.pop() {
            for (reader, _) in self.graph.consumers(value) {
                match self.chain_of.get(&reader) {
                    Some(chain) if chains.contains(chain) && value == origin => {}
                    // The position of the last op of its chain.
                    Some(&chain) => first = first.min(self.chains[chain].last().map_or(0, |op| self.position[op])),
                    None if rule(&self.graph.node(reader).op).is_view() => {
                        values.push(Value { node: reader, output: 0 });
                    }
                    None => first = first.min(self.position.get(&reader).copied().unwrap_or(0)),
                }
            }
        }
        first
    }

    /// The results that are read only within these ops.
    fn inner(&self, ops: &[NodeId]) -> HashSet<Value> {
        let needs = self.needs;
        let is_inner = |value: &Value| {
            let is_needed = [needs.separate, needs.saved, needs.retained].iter().any(|set| set.contains(value));
            let is_needed = is_needed || self.results.contains(value);
            let readers = self.graph.consumers(*value);
            !is_needed && !readers.is_empty() && readers.iter().all(|(reader, _)| ops.contains(reader))
        };
        ops.iter().flat_map(|op| self.graph.values(*op)).filter(is_inner).collect()
    }

    fn into_chains(self) -> Chains {
        let mut chains = Chains::default();
        for ops in self.chains.iter().filter(|ops| ops.len() > 1) {
            let Some(last) = ops.last() else { continue };
            chains.inner.extend(self.inner(ops));
            chains.by_last.insert(*last, ops.clone());
        }
        chains
    }
}

/// Tests for an elementwise op that cannot fail. Dropout also reads a counter.
fn is_elementwise(graph: &Graph, id: NodeId) -> bool {
    let node = graph.node(id);
    let values = graph.inputs(id);
    let operands = if matches!(node.op, Op::Dropout(_)) { &values[..1] } else { &values[..] };
    let is_supported = match node.op {
        Op::Dropout(_) => node.facts[0].dtype.is_float(),
        Op::Unary(op) => op != Unary::Not || node.facts[0].dtype == DType::Bool,
        Op::Binary(op) => !matches!(op, Binary::Mod | Binary::ShiftLeft | Binary::ShiftRight),
        Op::Compare(_) | Op::Select(_) | Op::Cast(_) => true,
        _ => false,
    };
    let is_plain = |dtype: DType| dtype.is_float() || dtype == DType::Bool;
    is_supported
        && is_plain(node.facts[0].dtype)
        && node.facts[0].bytes().is_some_and(|bytes| bytes > 0)
        && operands.iter().all(|value| is_plain(graph.fact(*value).dtype))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Origin, Output, order};
    use crate::op::{BatchNorm, Input, MatMul};
    use crate::pass::memory::{Location, plan};
    use crate::tensor::fact::Fact;

    struct Net(Graph);

    impl Net {
        fn input(&mut self, name: &str, shape: &[usize]) -> Value {
            self.op(Op::Input(Input { name: name.to_string(), fact: Fact::of(DType::F32, shape) }), &[])
        }

        fn op(&mut self, op: Op, inputs: &[Value]) -> Value {
            Value { node: self.0.add(op, inputs, &Origin::default()).unwrap(), output: 0 }
        }

        fn product(&mut self, a: Value, b: Value) -> Value {
            self.op(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[a, b])
        }

        /// The chains if `result` is the output and `kept` is saved.
        fn chains(self, result: Value, saved: &[Value]) -> Chains {
            self.chains_from(&|_| false, result, saved)
        }

        fn chains_from(mut self, starts: &dyn Fn(&Op) -> bool, result: Value, saved: &[Value]) -> Chains {
            self.0.outputs.push(Output { name: "y".to_string(), value: result });
            let graph = self.0;
            let order = order::canonical(&graph);
            let (empty, workspace, no_chains) = (HashSet::new(), HashMap::new(), Chains::default());
            let (saved, retained) = (saved.iter().copied().collect(), HashSet::from([result]));
            let needs = Needs {
                separate: &empty,
                saved: &saved,
                retained: &retained,
                accumulated: &empty,
                workspace: &workspace,
                chains: &no_chains,
                arena: None,
            };
            let rules = Rules { can_join: &|_, _| true, can_start: starts };
            let (chains, _) = chains(&graph, &order, &needs, &rules);
            // Inner values have no location, all others have one.
            let layout = plan(&graph, &order, &Needs { chains: &chains, ..needs });
            for value in graph.ids().flat_map(|id| graph.values(id)) {
                assert_eq!(layout.locations.contains_key(&value), !chains.inner.contains(&value));
                assert!(!saved.contains(&value) || matches!(layout.locations[&value], Location::Saved(_)));
            }
            chains
        }
    }

    const ADD: Op = Op::Binary(Binary::Add);

    fn nodes(values: &[Value]) -> Vec<NodeId> {
        values.iter().map(|value| value.node).collect()
    }

    #[test]
    fn ops_between_products_run_together() {
        let mut net = Net(Graph::new("net"));
        let [x, w, b] = [("x", &[8, 8][..]), ("w", &[8, 8]), ("b", &[8])].map(|(name, shape)| net.input(name, shape));
        let y = net.product(x, w);
        let s = net.op(ADD, &[y, b]);
        let g = net.op(Op::Unary(Unary::Gelu), &[s]);
        let r = net.op(ADD, &[g, x]);
        let z = net.product(r, w);
        let chains = net.chains(z, &[s]);
        assert_eq!(chains.by_last.into_iter().collect::<Vec<_>>(), [(r.node, nodes(&[s, g, r]))]);
        assert_eq!(chains.inner, HashSet::from([g]));
    }

    #[test]
    fn what_is_read_on_the_way_keeps_ops_apart() {
        let mut net = Net(Graph::new("net"));
        let x = net.input("x", &[8, 8]);
        let s = net.op(Op::Unary(Unary::Exp), &[x]);
        let t = net.op(Op::Unary(Unary::Tanh), &[s]);
        let y = net.product(t, x);
        let r = net.op(ADD, &[t, y]);
        let chains = net.chains(r, &[]);
        assert_eq!(chains.by_last.into_values().collect::<Vec<_>>(), [nodes(&[s, t])]);
    }

    #[test]
    fn a_norm_starts_one_chain() {
        let is_norm = &|op: &Op| matches!(op, Op::BatchNorm(_));
        let norm = |net: &mut Net, x: Value| {
            let [scale, bias] = ["scale", "bias"].map(|name| net.input(name, &[4]));
            net.op(Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), &[x, scale, bias])
        };
        let mut net = Net(Graph::new("net"));
        let [x, z] = ["x", "z"].map(|name| net.input(name, &[2, 4, 8]));
        let y = norm(&mut net, x);
        let s = net.op(ADD, &[y, z]);
        let r = net.op(Op::Unary(Unary::Relu), &[s]);
        // Its statistics are written.
        let mut chains = net.chains_from(is_norm, r, &[Value { output: 1, ..y }]);
        assert_eq!(chains.by_last, BTreeMap::from([(r.node, nodes(&[y, s, r]))]));
        assert_eq!(chains.inner, HashSet::from([y, s]));
        // The others go on without it, unless only one is left.
        chains.without_first(r.node);
        assert_eq!(chains.by_last, BTreeMap::from([(r.node, nodes(&[s, r]))]));
        assert_eq!(chains.inner, HashSet::from([s]));
        chains.without_first(r.node);
        assert!(chains.by_last.is_empty() && chains.inner.is_empty());

        // The sum of two norms is in the chain of one of them.
        let mut net = Net(Graph::new("net"));
        let x = net.input("x", &[2, 4, 8]);
        let (first, second) = (norm(&mut net, x), norm(&mut net, x));
        let s = net.op(ADD, &[first, second]);
        let chains = net.chains_from(is_norm, s, &[]);
        assert_eq!(chains.by_last.into_values().collect::<Vec<_>>(), [nodes(&[first, s])]);
        assert_eq!(chains.inner, HashSet::from([first]));

        // Elementwise ops before a norm are no part of its chain.
        let mut net = Net(Graph::new("net"));
        let x = net.input("x", &[2, 4, 8]);
        let e = net.op(Op::Unary(Unary::Exp), &[x]);
        let y = norm(&mut net, e);
        let s = net.op(ADD, &[y, e]);
        let chains = net.chains_from(is_norm, s, &[]);
        assert_eq!(chains.by_last.into_values().collect::<Vec<_>>(), [nodes(&[y, s])]);
    }

    #[test]
    fn shapes_are_not_mixed() {
        let mut net = Net(Graph::new("net"));
        let [x, y] = [("x", &[8][..]), ("y", &[4, 8])].map(|(name, shape)| net.input(name, shape));
        let s = net.op(Op::Unary(Unary::Exp), &[x]);
        let t = net.op(ADD, &[y, s]);
        assert!(net.chains(t, &[]).by_last.is_empty());
    }
}
