//! Memory traffic of a graph on a GPU whose compiler fuses elementwise ops, as `torch.compile` and Megatron-LM's fused
//! kernels do.
//!
//! A kernel is a group of elementwise ops, normalisations, softmaxes and reductions over the same elements. Values that
//! only the group reads stay in registers. A group grows by the readers of its values. An op joins the newest group
//! that it reads from, so groups never depend on each other in a circle. Transposes and slices are free: the kernels
//! on both sides address memory with strides. A normalisation converts what it reads and writes itself.

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

/// The traffic of all nodes with a kernel. `saved` are values that must be written even if only their group reads them.
pub fn traffic(graph: &Graph, saved: &HashSet<Value>) -> HashMap<NodeId, Traffic> {
    let order: Vec<NodeId> = order::canonical(graph).into_iter().filter(|id| !is_free(&graph.node(*id).op)).collect();
    let mut groups = Groups { of: HashMap::new(), loads: HashSet::new(), elements: Vec::new() };
    for &id in &order {
        groups.add(graph, id);
    }
    let returned = graph.outputs.iter().map(|output| output.value);
    let written_values: HashSet<Value> =
        saved.iter().copied().chain(returned).map(|value| root(graph, value)).collect();
    let mut read_values: HashSet<(usize, Value)> = HashSet::new();
    let mut launched: HashSet<usize> = HashSet::new();
    let per_node = order.iter().map(|&id| {
        let group = groups.of[&id];
        let mut bytes = 0.0;
        for value in graph.inputs(id) {
            let source = root(graph, value);
            if groups.of.get(&source.node) != Some(&group) && read_values.insert((group, value)) {
                bytes += size(graph, value);
            }
        }
        for value in graph.values(id) {
            if written_values.contains(&value)
                || readers(graph, value).iter().any(|reader| groups.of.get(reader) != Some(&group))
            {
                bytes += size(graph, value);
            }
        }
        (id, Traffic { bytes, launches: launched.insert(group) })
    });
    per_node.collect()
}

struct Groups {
    of: HashMap<NodeId, usize>,
    /// Groups of one cast of a saved value for a normalisation, which its reader takes over.
    loads: HashSet<usize>,
    /// Elements that each group iterates over; 0 for a group that nothing joins.
    elements: Vec<f64>,
}

impl Groups {
    fn add(&mut self, graph: &Graph, id: NodeId) {
        let op = &graph.node(id).op;
        let elements = if can_fuse(op) { iterated_elements(graph, id) } else { 0.0 };
        let producers: Vec<NodeId> = graph.inputs(id).into_iter().map(|value| root(graph, value).node).collect();
        let read_groups: Vec<usize> = producers.iter().filter_map(|maker| self.of.get(maker).copied()).collect();
        let newest = read_groups.iter().copied().filter(|group| !self.loads.contains(group)).max();
        let is_stored = matches!(op, Op::Cast(_)) && producers.iter().any(|maker| is_norm(&graph.node(*maker).op));
        let group = match newest.filter(|group| is_stored || (elements > 0.0 && self.elements[*group] == elements)) {
            Some(group) => group,
            None => {
                self.elements.push(elements);
                self.elements.len() - 1
            }
        };
        if let ([], Op::Cast(_), [reader]) = (&read_groups[..], op, &readers(graph, Value { node: id, output: 0 })[..])
            && is_norm(&graph.node(*reader).op)
        {
            self.loads.insert(group);
        }
        if is_norm(op) {
            let is_load = |maker: &NodeId| self.of.get(maker).is_some_and(|of| self.loads.contains(of));
            let loads: Vec<NodeId> = producers.into_iter().filter(is_load).collect();
            self.of.extend(loads.into_iter().map(|load| (load, group)));
        }
        self.of.insert(id, group);
    }
}

fn is_norm(op: &Op) -> bool {
    matches!(op, Op::LayerNorm(_) | Op::LayerNormGrad(_) | Op::BatchNorm(_) | Op::BatchNormGrad(_))
}

/// Ops that fuse with others over the same elements.
fn can_fuse(op: &Op) -> bool {
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
            | Op::BatchNorm(_)
            | Op::BatchNormGrad(_)
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
fn iterated_elements(graph: &Graph, id: NodeId) -> f64 {
    let inputs = graph.inputs(id).into_iter().map(|value| elements(graph.fact(value)));
    let outputs = graph.node(id).facts.iter().map(elements);
    inputs.chain(outputs).fold(0.0, f64::max)
}

fn size(graph: &Graph, value: Value) -> f64 {
    graph.fact(value).bytes().unwrap_or(u64::MAX) as f64
}

/// The nodes that read a value, also through views.
fn readers(graph: &Graph, value: Value) -> Vec<NodeId> {
    let mut readers = Vec::new();
    let mut queue = vec![value];
    while let Some(value) = queue.pop() {
        for (reader, _) in graph.consumers(value) {
            match rule(&graph.node(reader).op).is_view() {
                true => queue.extend(graph.values(reader)),
                false => readers.push(reader),
            }
        }
    }
    readers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Origin, Output, Writer};
    use crate::op::{BatchNorm, Binary, Cast, Emit, Input, MatMul, Softmax, Unary};
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
        let inference = traffic(&graph, &HashSet::new());
        let of = |traffic: &HashMap<NodeId, Traffic>, value: Value| {
            (traffic[&value.node].bytes, traffic[&value.node].launches)
        };
        let matrix = 256.0;
        assert_eq!(of(&inference, y), (3.0 * matrix, true));
        assert_eq!(of(&inference, sum), (matrix + 32.0, true));
        assert_eq!(of(&inference, act), (0.0, false));
        assert_eq!(of(&inference, soft), (matrix, false));
        // A value that the backward needs is written.
        let training = traffic(&graph, &HashSet::from([act]));
        assert_eq!(of(&training, act), (matrix, false));
    }

    #[test]
    fn normalisations_convert_what_they_read_and_write() {
        let mut graph = Graph::new("net");
        let mut out = Writer { graph: &mut graph, origin: Origin::default() };
        let mut input = |name: &str, dtype: DType, shape: &[usize]| {
            out.emit(Op::Input(Input { name: name.into(), fact: Fact::of(dtype, shape) }), &[])
        };
        let x = input("x", DType::Bf16, &[4, 8, 8]);
        let [scale, bias] = ["s", "b"].map(|name| input(name, DType::F32, &[8]));
        let wide = out.emit(Op::Cast(Cast { to: DType::F32 }), &[x]);
        let norm = out.emit_all(Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), &[wide, scale, bias]);
        let narrow = out.emit(Op::Cast(Cast { to: DType::Bf16 }), &[norm[0]]);
        graph.outputs.push(Output { name: "y".into(), value: narrow });
        let traffic = traffic(&graph, &HashSet::new());
        let costs = [wide, norm[0], narrow].map(|value| traffic[&value.node]);
        assert_eq!(costs.iter().filter(|one| one.launches).count(), 1);
        // Two bytes an element are read and two written, beside the scale and the bias.
        assert_eq!(costs.iter().map(|one| one.bytes).sum::<f64>(), 4.0 * 256.0 + 2.0 * 32.0);
    }
}
