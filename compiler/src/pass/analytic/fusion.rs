//! Memory traffic of a graph on a GPU whose compiler fuses elementwise ops, as `torch.compile` and Megatron-LM's fused
//! kernels do.
//!
//! A kernel is a group of elementwise ops, normalisations, softmaxes and reductions over the same elements. Values that
//! only the group reads stay in registers. A group grows by the readers of its values. An op joins the newest group
//! that it reads from, so groups never depend on each other in a circle. Transposes and slices are free: the kernels
//! on both sides address memory with strides.

use crate::graph::{Graph, order};
use crate::op::table::rule;
use crate::op::{NodeId, Op, Value, elements};
use crate::pass::gradient_accumulation::root;
use std::collections::{HashMap, HashSet};

/// What one node adds to its kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Bytes read from memory and written to it.
    pub bytes: f64,
    /// True for the first node of a kernel.
    pub launches: bool,
}

/// The traffic of all nodes with a kernel. `kept` are values that must be written even if only their group reads them.
pub fn traffic(graph: &Graph, kept: &HashSet<Value>) -> HashMap<NodeId, Traffic> {
    let order: Vec<NodeId> = order::canonical(graph).into_iter().filter(|id| !is_free(&graph.node(*id).op)).collect();
    let mut groups = Groups { of: HashMap::new(), elements: Vec::new() };
    for &id in &order {
        groups.place(graph, id);
    }
    let returned = graph.outputs.iter().map(|output| output.value);
    let written: HashSet<Value> = kept.iter().copied().chain(returned).map(|value| root(graph, value)).collect();
    let mut read: HashSet<(usize, Value)> = HashSet::new();
    let mut launched: HashSet<usize> = HashSet::new();
    let each = order.iter().map(|&id| {
        let group = groups.of[&id];
        let mut bytes = 0.0;
        for value in graph.inputs(id) {
            let source = root(graph, value);
            if groups.of.get(&source.node) != Some(&group) && read.insert((group, value)) {
                bytes += size(graph, value);
            }
        }
        for value in graph.values(id) {
            if written.contains(&value)
                || readers(graph, value).iter().any(|reader| groups.of.get(reader) != Some(&group))
            {
                bytes += size(graph, value);
            }
        }
        (id, Traffic { bytes, launches: launched.insert(group) })
    });
    each.collect()
}

struct Groups {
    of: HashMap<NodeId, usize>,
    /// Elements that each group iterates over; 0 for a group that nothing joins.
    elements: Vec<f64>,
}

impl Groups {
    fn place(&mut self, graph: &Graph, id: NodeId) {
        let own = if fuses(&graph.node(id).op) { iterated(graph, id) } else { 0.0 };
        let read = graph.inputs(id).into_iter().filter_map(|value| self.of.get(&root(graph, value).node).copied());
        let newest = read.max().filter(|group| own > 0.0 && self.elements[*group] == own);
        let group = newest.unwrap_or(self.elements.len());
        if newest.is_none() {
            self.elements.push(own);
        }
        self.of.insert(id, group);
    }
}

/// Ops that fuse with others over the same elements.
fn fuses(op: &Op) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::Compare(_)
            | Op::Select(_)
            | Op::Cast(_)
            | Op::BitCast(_)
            | Op::Broadcast(_)
            | Op::Dropout(_)
            | Op::DropoutPart(_)
            | Op::Reduce(_)
            | Op::Softmax(_)
            | Op::LogSoftmax(_)
            | Op::LayerNorm(_)
            | Op::LayerNormGrad(_)
            | Op::CrossEntropy(_)
            | Op::CrossEntropyGrad(_)
    )
}

/// Sources exist, views alias their input, and strides express transposes and slices.
pub fn is_free(op: &Op) -> bool {
    let is_source = matches!(op, Op::Input(_) | Op::Parameter(_) | Op::State(_) | Op::Constant(_));
    is_source || rule(op).is_view() || matches!(op, Op::Transpose(_) | Op::Slice(_))
}

/// The number of elements that a kernel of this op iterates over.
fn iterated(graph: &Graph, id: NodeId) -> f64 {
    let inputs = graph.inputs(id).into_iter().map(|value| elements(graph.fact(value)));
    let outputs = graph.node(id).facts.iter().map(elements);
    inputs.chain(outputs).fold(0.0, f64::max)
}

fn size(graph: &Graph, value: Value) -> f64 {
    graph.fact(value).bytes().unwrap_or(u64::MAX) as f64
}

/// The nodes that read a value, also through views.
fn readers(graph: &Graph, value: Value) -> Vec<NodeId> {
    let mut found = Vec::new();
    let mut queue = vec![value];
    while let Some(value) = queue.pop() {
        for (reader, _) in graph.consumers(value) {
            match rule(&graph.node(reader).op).is_view() {
                true => queue.extend(graph.values(reader)),
                false => found.push(reader),
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Origin, Output, Writer};
    use crate::op::{Binary, Emit, Input, MatMul, Softmax, Unary};
    use crate::tensor::DType;
    use crate::tensor::fact::Fact;

    #[test]
    fn a_chain_between_two_products_reads_and_writes_once() {
        let mut graph = Graph::new("net");
        let mut out = Writer { graph: &mut graph, origin: Origin::default() };
        let mut input = |name: &str, shape: &[usize]| {
            out.emit(Op::Input(Input { name: name.into(), fact: Fact::of(DType::F32, shape) }), &[])
        };
        let (x, w, bias) = (input("x", &[8, 8]), input("w", &[8, 8]), input("b", &[8]));
        let product = || Op::MatMul(MatMul { transpose_a: false, transpose_b: false });
        let y = out.emit(product(), &[x, w]);
        let sum = out.emit(Op::Binary(Binary::Add), &[y, bias]);
        let act = out.emit(Op::Unary(Unary::Gelu), &[sum]);
        let soft = out.emit(Op::Softmax(Softmax { axis: 1 }), &[act]);
        let z = out.emit(product(), &[soft, w]);
        graph.outputs.push(Output { name: "z".into(), value: z });
        let none = traffic(&graph, &HashSet::new());
        let of = |traffic: &HashMap<NodeId, Traffic>, value: Value| {
            (traffic[&value.node].bytes, traffic[&value.node].launches)
        };
        let matrix = 256.0;
        assert_eq!(of(&none, y), (3.0 * matrix, true));
        assert_eq!(of(&none, sum), (matrix + 32.0, true));
        assert_eq!(of(&none, act), (0.0, false));
        assert_eq!(of(&none, soft), (matrix, false));
        // A value that the backward needs is written.
        let kept = traffic(&graph, &HashSet::from([act]));
        assert_eq!(of(&kept, act), (matrix, false));
    }
}
