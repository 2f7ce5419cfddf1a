//! Recognises stochastic depth: a random mask over whole rows, divided by its keep probability, is a dropout of ones.
//!
//! Frameworks write it as `x · (bernoulli(keep) / keep)` or as `(x / keep) · ⌊keep + uniform⌋`. As a [`Dropout`] it is
//! disabled in evaluation.

use crate::graph::{Graph, Writer, order};
use crate::op::{Binary, Broadcast, Compare, Constant, Dropout, Emit, NodeId, Op, Unary, Value};
use crate::tensor::{DType, Tensor};

/// Maximum number of elements of a constant that are compared; one per row of a batch.
const MOST: usize = 1 << 16;

pub fn row_dropout(graph: &mut Graph) {
    for id in order::canonical(graph) {
        // An earlier replacement may have made the node dead, but not removed it.
        match graph.node(id).op {
            Op::Binary(Binary::Div) => replace_division(graph, id),
            Op::Binary(Binary::Mul) => multiplied(graph, id),
            _ => {}
        }
    }
}

/// `mask / keep`
fn replace_division(graph: &mut Graph, id: NodeId) {
    let inputs = graph.inputs(id);
    let Some(mask) = Mask::read(graph, inputs[0]).filter(|mask| mask.is_kept_share(graph, inputs[1])) else { return };
    let ones = mask.write(graph, id);
    graph.replace_uses(Value { node: id, output: 0 }, ones);
}

/// `(x / keep) · mask`, either factor first.
fn multiplied(graph: &mut Graph, id: NodeId) {
    let inputs = graph.inputs(id);
    for (slot, other) in [(0u32, 1usize), (1, 0)] {
        let (factor, mask) = (inputs[slot as usize], inputs[other]);
        let Op::Binary(Binary::Div) = graph.node(factor.node).op else { continue };
        let quotient = graph.inputs(factor.node);
        let Some(mask) = Mask::read(graph, mask).filter(|mask| mask.is_kept_share(graph, quotient[1])) else {
            continue;
        };
        if graph.consumers(factor).len() != 1 {
            continue;
        }
        let ones = mask.write(graph, id);
        graph.set_input(id, slot, quotient[0]);
        graph.set_input(id, other as u32, ones);
        return;
    }
}

/// A mask without other readers: 1 where a uniform number is below `keep`, else 0.
struct Mask {
    value: Value,
    counter: Value,
    keep: f64,
}

impl Mask {
    fn read(graph: &Graph, value: Value) -> Option<Mask> {
        let sole = |value: Value| graph.consumers(value).len() == 1 && graph.outputs.iter().all(|o| o.value != value);
        let from = |value: Value| graph.inputs(value.node);
        if !sole(value) || !graph.fact(value).dtype.is_float() {
            return None;
        }
        let uniform_of = |value: Value| match graph.node(value.node).op {
            Op::Uniform(_) if sole(value) => Some(from(value)[0]),
            _ => None,
        };
        let mut inner = value;
        if matches!(graph.node(inner.node).op, Op::Cast(_)) {
            inner = from(inner)[0];
        }
        let (counter, keep) = match graph.node(inner.node).op {
            Op::Compare(Compare::Less) if sole(inner) => (uniform_of(from(inner)[0])?, number(graph, from(inner)[1])?),
            Op::Unary(Unary::Floor) => {
                let sum = from(inner)[0];
                let Op::Binary(Binary::Add) = graph.node(sum.node).op else { return None };
                let [a, b] = from(sum)[..] else { return None };
                match (uniform_of(a), uniform_of(b)) {
                    (Some(counter), None) => (counter, number(graph, b)?),
                    (None, Some(counter)) => (counter, number(graph, a)?),
                    _ => return None,
                }
            }
            _ => return None,
        };
        (keep > 0.0 && keep <= 1.0).then_some(Mask { value, counter, keep })
    }

    /// True if the value equals the keep probability within the precision of its element type.
    fn is_kept_share(&self, graph: &Graph, value: Value) -> bool {
        let exact = matches!(graph.fact(value).dtype, DType::F32 | DType::F64);
        let close = if exact { 1e-6 } else { 1e-2 };
        number(graph, value).is_some_and(|share| (share / self.keep - 1.0).abs() < close)
    }

    /// Adds the dropout of ones that replaces the mask.
    fn write(&self, graph: &mut Graph, at: NodeId) -> Value {
        let fact = graph.fact(self.value).clone();
        let origin = graph.node(at).origin.clone();
        let mut out = Writer { graph, origin };
        let tensor = Tensor::from_f64(&[], &[1.0]).cast(fact.dtype);
        let scalar_one = out.emit(Op::Constant(Constant { tensor }), &[]);
        let ones = match fact.rank() {
            0 => scalar_one,
            _ => out.emit(Op::Broadcast(Broadcast { shape: fact.shape }), &[scalar_one]),
        };
        // The probability may be stored as an F32; 0.1 in the source stays 0.1.
        let ratio = shortest(1.0 - shortest(self.keep));
        out.emit(Op::Dropout(Dropout { ratio, stream: 0 }), &[ones, self.counter])
    }
}

/// The number with the shortest decimal that rounds to the same `f32`.
fn shortest(number: f64) -> f64 {
    let short = number as f32;
    short.to_string().parse().unwrap_or(number)
}

/// The value of all elements, if constant and equal.
fn number(graph: &Graph, mut value: Value) -> Option<f64> {
    loop {
        match &graph.node(value.node).op {
            Op::Constant(constant) if (1..=MOST).contains(&constant.tensor.len()) => {
                let numbers = constant.tensor.to_f64();
                return numbers.iter().all(|other| *other == numbers[0]).then_some(numbers[0]);
            }
            Op::Broadcast(_) | Op::Reshape(_) | Op::Cast(_) => value = graph.inputs(value.node)[0],
            _ => return None,
        }
    }
}
