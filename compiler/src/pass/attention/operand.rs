//! Queries, keys and values as operands of a product: scaled, transposed, reshaped, or with repeated heads.

use super::index_function::IndexFunctions;
use crate::graph::{Graph, Writer};
use crate::op::{Binary, Op, Reshape, Transpose, Value};
use crate::tensor::dim::{Dim, volume};

/// Ops between an operand and its product.
const STEPS: usize = 16;

/// An operand without what the attention op does itself.
#[derive(Clone)]
pub struct Operand {
    pub value: Value,
    /// Stored with its last two axes exchanged.
    is_transposed: bool,
    /// The numbers that it was multiplied with.
    pub factor: f64,
    /// The number of query heads that share each head.
    pub repeats: Option<Dim>,
}

impl Operand {
    /// Follows an operand back. Its leading axes, as the product reads them, have as many elements as `lead`.
    pub fn read(
        graph: &Graph,
        functions: &mut IndexFunctions,
        value: Value,
        is_transposed: bool,
        lead: &[Dim],
    ) -> Option<Operand> {
        let shape = &graph.fact(value).shape;
        if volume(&shape[..shape.len().checked_sub(2)?]).ok()? != volume(lead).ok()? {
            return None;
        }
        let mut operand = Operand { value, is_transposed, factor: 1.0, repeats: None };
        for _ in 0..STEPS {
            let inputs = graph.inputs(operand.value.node);
            let node = graph.node(operand.value.node);
            operand.value = match &node.op {
                Op::Binary(Binary::Mul) => {
                    match (functions.number(graph, inputs[0]), functions.number(graph, inputs[1])) {
                        (_, Some(factor)) if graph.fact(inputs[0]) == graph.fact(operand.value) => {
                            operand.factor *= factor;
                            inputs[0]
                        }
                        (Some(factor), None) if graph.fact(inputs[1]) == graph.fact(operand.value) => {
                            operand.factor *= factor;
                            inputs[1]
                        }
                        _ => break,
                    }
                }
                Op::Binary(Binary::Div) => match functions.number(graph, inputs[1]) {
                    Some(factor) if graph.fact(inputs[0]) == graph.fact(operand.value) => {
                        operand.factor /= factor;
                        inputs[0]
                    }
                    _ => break,
                },
                Op::Transpose(op) if is_last_axes_swap(&op.perm) => {
                    operand.is_transposed = !operand.is_transposed;
                    inputs[0]
                }
                Op::Reshape(_) if keeps_matrices(graph, inputs[0], operand.value) => inputs[0],
                Op::Broadcast(_) if operand.repeats.is_none() => match repeated(graph, inputs[0], operand.value) {
                    Some(repeats) => {
                        operand.repeats = Some(repeats);
                        inputs[0]
                    }
                    None => break,
                },
                _ => break,
            };
        }
        Some(operand)
    }

    /// Emits the operand with these leading axes, the last of which counts its heads times their repeats.
    pub fn write(&self, out: &mut Writer<'_>, lead: &[Dim]) -> Option<Value> {
        let mut value = self.value;
        let mut shape = lead.to_vec();
        if let Some(repeats) = &self.repeats {
            let heads = shape.last_mut()?;
            *heads = heads.div_exact(repeats).ok()?;
        }
        let stored = out.graph.fact(value).shape.clone();
        shape.extend_from_slice(&stored[stored.len() - 2..]);
        if stored != shape {
            value =
                Value { node: out.graph.add(Op::Reshape(Reshape { shape }), &[value], &out.origin).ok()?, output: 0 };
        }
        if self.is_transposed {
            // The transpose of a transpose is one.
            let (from, mut perm) = match &out.graph.node(value.node).op {
                Op::Transpose(op) => (out.graph.inputs(value.node)[0], op.perm.clone()),
                _ => (value, (0..out.graph.fact(value).rank()).collect()),
            };
            let rank = perm.len();
            perm.swap(rank - 2, rank - 1);
            value = from;
            if perm.iter().enumerate().any(|(axis, from)| axis != *from) {
                let node = out.graph.add(Op::Transpose(Transpose { perm }), &[value], &out.origin).ok()?;
                value = Value { node, output: 0 };
            }
        }
        Some(value)
    }
}

/// True for a permutation that exchanges only the last two axes.
fn is_last_axes_swap(perm: &[usize]) -> bool {
    let rank = perm.len();
    let counterpart = |axis: usize| if axis + 2 == rank { rank - 1 } else { rank - 2 };
    rank >= 2
        && perm.iter().enumerate().all(|(axis, from)| *from == if axis + 2 < rank { axis } else { counterpart(axis) })
}

/// True if a reshape changes leading axes only.
pub fn keeps_matrices(graph: &Graph, from: Value, to: Value) -> bool {
    let (from, to) = (&graph.fact(from).shape, &graph.fact(to).shape);
    let matrix = |shape: &[Dim]| shape.len().checked_sub(2).map(|at| shape[at..].to_vec());
    matrix(from).is_some_and(|matrix_from| Some(matrix_from) == matrix(to)) && from.len() > 2 && to.len() > 2
}

/// The size to which a broadcast expands the last leading axis, if it expands nothing else.
fn repeated(graph: &Graph, from: Value, to: Value) -> Option<Dim> {
    let (from, to) = (&graph.fact(from).shape, &graph.fact(to).shape);
    let axis = to.len().checked_sub(3)?;
    let is_equal_elsewhere =
        from.len() == to.len() && (0..to.len()).all(|other| other == axis || from[other] == to[other]);
    (is_equal_elsewhere && from[axis].is(1) && !to[axis].is(1)).then(|| to[axis].clone())
}
