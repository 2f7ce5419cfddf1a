//! Mixed precision: values, weights and messages in a two-byte type, statistics and the loss in `f32`.
//!
//! Every float becomes the narrow type, except
//! - the saved statistics of normalisations, and their scales and biases;
//! - running averages and their samples.
//!
//! All other ops compute in `f32` within a kernel and round their results (`runtime::device::cpu::half`), so sums and
//! means are rounded once. The optimizer keeps `f32` master weights besides the narrow ones of the stages.

use crate::graph::{Graph, Writer, order};
use crate::op::table::rule;
use crate::op::{Cast, Emit, NodeId, Op, Value};
use crate::pass::precision::{PrecisionError, precision};
use crate::tensor::DType;
use crate::tensor::fact::Fact;

/// Converts floats to the two-byte type `to`. Node ids are unchanged; each added cast is a part of the op that needs it.
pub fn mixed(graph: &Graph, to: DType) -> Result<Graph, PrecisionError> {
    let mut pass = Pass { graph: precision(graph, to)?, to };
    pass.states();
    for id in order::canonical(graph).into_iter().filter(|id| is_whole(&graph.node(*id).op)) {
        pass.widen(id)?;
    }
    Ok(pass.graph)
}

/// Tests for normalisations, which save statistics for the backward.
fn is_whole(op: &Op) -> bool {
    matches!(op, Op::LayerNorm(_) | Op::BatchNorm(_))
}

struct Pass {
    graph: Graph,
    to: DType,
}

impl Pass {
    /// Adds a cast of a value, as a part of `owner`.
    fn cast(&mut self, value: Value, to: DType, owner: NodeId) -> Value {
        let origin = self.graph.node(owner).origin.clone();
        let cast = Writer { graph: &mut self.graph, origin }.emit(Op::Cast(Cast { to }), &[value]);
        self.graph.node_mut(cast.node).part_of = Some(owner);
        cast
    }

    fn widen_source(&mut self, id: NodeId) {
        let node = self.graph.node_mut(id);
        match &mut node.op {
            Op::Parameter(o) => o.fact.dtype = DType::F32,
            Op::State(o) => o.fact.dtype = DType::F32,
            _ => return,
        }
        node.facts[0].dtype = DType::F32;
    }

    /// Running averages and their samples keep their precision.
    fn states(&mut self) {
        for at in 0..self.graph.averages.len() {
            let average = self.graph.averages[at].clone();
            let state = Value { node: average.state, output: 0 };
            if self.graph.fact(state).dtype == self.to {
                self.widen_source(state.node);
                for (reader, slot) in self.graph.consumers(state) {
                    if !is_whole(&self.graph.node(reader).op) {
                        let narrow = self.cast(state, self.to, reader);
                        self.graph.set_input(reader, slot, narrow);
                    }
                }
            }
            let producer = self.graph.node(average.sample.node);
            if self.graph.fact(average.sample).dtype == self.to && !is_whole(&producer.op) {
                let sample = self.cast(average.sample, DType::F32, average.sample.node);
                self.graph.averages[at].sample = sample;
            }
        }
    }

    /// Gives a normalisation its scale and bias in `f32`; readers of its statistics get them rounded.
    fn widen(&mut self, id: NodeId) -> Result<(), PrecisionError> {
        for (slot, value) in self.graph.inputs(id).into_iter().enumerate().skip(1) {
            if self.graph.fact(value).dtype != self.to {
                continue;
            }
            let is_source = matches!(self.graph.node(value.node).op, Op::Parameter(_) | Op::State(_));
            let readers = self.graph.successors(value.node);
            if is_source && readers.iter().all(|reader| is_whole(&self.graph.node(*reader).op)) {
                self.widen_source(value.node);
            } else {
                let wide = self.cast(value, DType::F32, id);
                self.graph.set_input(id, slot as u32, wide);
            }
        }
        let facts: Vec<Fact> = self.graph.inputs(id).into_iter().map(|v| self.graph.fact(v).clone()).collect();
        let node = self.graph.node(id);
        let inferred = rule(&node.op).infer(&facts.iter().collect::<Vec<_>>());
        let inferred = inferred.map_err(|fault| PrecisionError::of(node, DType::F32, fault))?;
        self.graph.node_mut(id).facts = inferred;
        for value in self.graph.values(id) {
            let readers = self.graph.consumers(value);
            let is_result = self.graph.outputs.iter().any(|output| output.value == value);
            if self.graph.fact(value).dtype == self.to || (readers.is_empty() && !is_result) {
                continue;
            }
            let narrow = self.cast(value, self.to, id);
            for (reader, slot) in readers {
                self.graph.set_input(reader, slot, narrow);
            }
            for output in self.graph.outputs.iter_mut().filter(|output| output.value == value) {
                output.value = narrow;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::verify::verify;
    use crate::graph::{MovingAverage, Origin, Output};
    use crate::op::{BatchNorm, Input, MatMul, Parameter, State, Unary};

    #[test]
    fn statistics_stay_wide_and_all_else_is_narrow() {
        let mut graph = Graph::new("net");
        let mut out = Writer { graph: &mut graph, origin: Origin::default() };
        let fact = |shape: &[usize]| Fact::of(DType::F32, shape);
        let parameter = |name: &str, shape| Op::Parameter(Parameter { name: name.into(), fact: fact(shape) });
        let x = out.emit(Op::Input(Input { name: "x".into(), fact: fact(&[4, 3]) }), &[]);
        let [w, s, b] = [("w", &[3, 5][..]), ("s", &[5]), ("b", &[5])].map(|(n, d)| out.emit(parameter(n, d), &[]));
        let state = out.emit(Op::State(State { name: "m".into(), fact: fact(&[5]) }), &[]);
        let h = out.emit(Op::MatMul(MatMul { transpose_a: false, transpose_b: false }), &[x, w]);
        let norm = out.emit_all(Op::BatchNorm(BatchNorm { epsilon: 1e-5 }), &[h, s, b]);
        let y = out.emit(Op::Unary(Unary::Tanh), &[norm[0]]);
        graph.outputs.push(Output { name: "y".into(), value: y });
        graph.averages.push(MovingAverage { state: state.node, sample: norm[1], keep: 0.9 });
        let mixed_graph = mixed(&graph, DType::Bf16).unwrap();
        verify(&mixed_graph).unwrap();
        let casts = mixed_graph.ids().filter(|id| mixed_graph.node(*id).part_of == Some(norm[0].node));
        assert_eq!(casts.count(), 0);
        for id in mixed_graph.ids() {
            let node = mixed_graph.node(id);
            let expected = match &node.op {
                Op::Parameter(p) => p.name != "w",
                Op::State(_) => true,
                Op::Cast(c) => c.to == DType::F32,
                _ => false,
            };
            assert_eq!(node.facts[0].dtype == DType::F32, expected, "{}", rule(&node.op).name());
        }
        assert_eq!(mixed_graph.fact(mixed_graph.averages[0].sample).dtype, DType::F32);
    }
}
