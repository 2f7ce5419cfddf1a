//! Stochastic depth, recognised: a mask that is drawn for whole rows and divided by the share of rows that it keeps is a
//! dropout of ones.
//!
//! Frameworks write it in two ways: `x · (bernoulli(keep) / keep)`, and `(x / keep) · ⌊keep + uniform⌋`. As a
//! [`Dropout`] it is known for what it is: when the model only answers, every row is kept.

use crate::graph::{Graph, Writer, order};
use crate::op::{Binary, Broadcast, Compare, Constant, Dropout, Emit, NodeId, Op, Unary, Value};
use crate::tensor::{DType, Tensor};

/// The most elements of a constant that are looked at: one for each row of a batch.
const MOST: usize = 1 << 16;

/// Replaces the masks of stochastic depth by dropouts.
pub fn row_dropout(graph: &mut Graph) {
    for id in order::canonical(graph) {
        // An earlier replacement may have left it without readers; it is still in the graph.
        match graph.node(id).op {
            Op::Binary(Binary::Div) => divided(graph, id),
            Op::Binary(Binary::Mul) => multiplied(graph, id),
            _ => {}
        }
    }
}

/// `mask / keep`
fn divided(graph: &mut Graph, id: NodeId) {
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

/// Zeros and ones that nothing else reads: one where a uniform number is below `keep`.
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
        let drawn = |value: Value| match graph.node(value.node).op {
            Op::Uniform(_) if sole(value) => Some(from(value)[0]),
            _ => None,
        };
        let mut inner = value;
        if matches!(graph.node(inner.node).op, Op::Cast(_)) {
            inner = from(inner)[0];
        }
        let (counter, keep) = match graph.node(inner.node).op {
            Op::Compare(Compare::Less) if sole(inner) => (drawn(from(inner)[0])?, number(graph, from(inner)[1])?),
            Op::Unary(Unary::Floor) => {
                let sum = from(inner)[0];
                let Op::Binary(Binary::Add) = graph.node(sum.node).op else { return None };
                let [a, b] = from(sum)[..] else { return None };
                match (drawn(a), drawn(b)) {
                    (Some(counter), None) => (counter, number(graph, b)?),
                    (None, Some(counter)) => (counter, number(graph, a)?),
                    _ => return None,
                }
            }
            _ => return None,
        };
        (keep > 0.0 && keep <= 1.0).then_some(Mask { value, counter, keep })
    }

    /// Whether a value is the share that is kept, as far as its element type tells.
    fn is_kept_share(&self, graph: &Graph, value: Value) -> bool {
        let exact = matches!(graph.fact(value).dtype, DType::F32 | DType::F64);
        let close = if exact { 1e-6 } else { 1e-2 };
        number(graph, value).is_some_and(|share| (share / self.keep - 1.0).abs() < close)
    }

    /// The dropout of ones in the mask's place.
    fn write(&self, graph: &mut Graph, at: NodeId) -> Value {
        let fact = graph.fact(self.value).clone();
        let origin = graph.node(at).origin.clone();
        let mut out = Writer { graph, origin };
        let tensor = Tensor::from_f64(&[], &[1.0]).cast(fact.dtype);
        let one = out.emit(Op::Constant(Constant { tensor }), &[]);
        let ones = match fact.rank() {
            0 => one,
            _ => out.emit(Op::Broadcast(Broadcast { shape: fact.shape }), &[one]),
        };
        // The share in the file may be an f32; what was 0.1 in the source is 0.1 here.
        let ratio = shortest(1.0 - shortest(self.keep));
        out.emit(Op::Dropout(Dropout { ratio, stream: 0 }), &[ones, self.counter])
    }
}

/// The shortest decimal that is the same number in `f32`.
fn shortest(number: f64) -> f64 {
    let short = number as f32;
    short.to_string().parse().unwrap_or(number)
}

/// The number that all elements of a value are, where that is known.
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
