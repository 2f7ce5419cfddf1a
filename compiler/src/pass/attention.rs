//! Recognises attention in its parts and replaces it by one op, so that no score matrix is stored or planned.
//!
//! ```text
//! scores  = q·kᵀ, scaled by numbers before or after         ──▶  y, lse = attention q k v [mask] [counter]
//! scores  = scores + mask, or select(mask, scores, -∞)
//! weights = softmax(scores), zeroed in empty rows, dropped out
//! y       = weights·v
//! ```
//!
//! Recognised are the forms of ONNX `Attention`, `scaled_dot_product_attention` and its decompositions, the zoo, and
//! models that write out these ops: keys may be given transposed, operands may be reshaped to rank 3 and back, and
//! repeated key heads become grouped heads. The result is that of the parts up to rounding; [`EmptyRow`] tells what a
//! row without a key gives. The parts stay if another op reads scores or weights, or if the mask needs a gradient.
//!
//! A mask is causal if [`index_function`] proves it. Beside another mask that holds only for -∞: with finite numbers, a
//! row whose causal keys are all hidden by the other mask would attend to later keys.

mod empty_row;
pub mod index_function;
mod operand;

use super::Changed;
use crate::graph::{Graph, Writer, order};
use crate::op::{Attention, Binary, Dropout, Emit, EmptyRow, MatMul, NodeId, Op, Reshape, Softmax, Unary, Value};
use crate::tensor::DType;
use crate::tensor::dim::Dim;
use index_function::IndexFunctions;
use operand::Operand;
use std::collections::HashSet;

/// A score of at most this has no weight beside an ordinary one. Masks in models are this low, or the lowest number.
const HIDDEN: f64 = -1e9;

/// The same for `f16`, whose lowest number is -65504.
const HIDDEN_F16: f64 = -6e4;

/// Ops between a product and its softmax.
const STEPS: usize = 16;

/// Replaces every attention.
pub fn attention(graph: &mut Graph) -> Changed {
    let mut pass = Pass { functions: IndexFunctions::default(), trainable: trainable(graph) };
    let mut changed = false;
    for id in order::canonical(graph) {
        if let Op::MatMul(product) = graph.node(id).op
            && let Some(found) = pass.match_product(graph, id, product)
        {
            changed |= pass.write(graph, id, found).is_some();
        }
    }
    Changed::from(changed)
}

/// Nodes whose outputs have a gradient in training.
fn trainable(graph: &Graph) -> HashSet<NodeId> {
    let mut trainable = HashSet::new();
    for id in order::canonical(graph) {
        let node = graph.node(id);
        let follows = graph.inputs(id).iter().any(|v| trainable.contains(&v.node) && graph.fact(*v).dtype.is_float());
        if matches!(node.op, Op::Parameter(_)) || follows && !matches!(node.op, Op::StopGradient(_)) {
            trainable.insert(id);
        }
    }
    trainable
}

struct Pass {
    functions: IndexFunctions,
    trainable: HashSet<NodeId>,
}

/// What is added to the scores, or replaces them.
#[derive(Clone, Copy)]
enum Mask {
    Add(Value),
    /// Scores where the condition has this value become `fill`.
    Where {
        condition: Value,
        hidden: bool,
        fill: f64,
    },
}

/// How rows become zero after the softmax.
#[derive(Clone, Copy)]
enum Zeroed {
    /// Weights where the condition has this value.
    Where { condition: Value, hidden: bool },
    /// Weights that are NaN, or rows whose scores are all -∞.
    Empty,
}

/// The weights of a product: a softmax, and what follows it.
struct Weights {
    /// The input of the softmax.
    scores: Value,
    dropout: Option<(Dropout, Value)>,
    zeroed: Option<Zeroed>,
    /// The node that reads the scores for a test of empty rows.
    test: Option<NodeId>,
}

/// The ops between a product and a softmax, from the softmax on.
#[derive(Clone)]
struct Scores {
    product: NodeId,
    factor: f64,
    masks: Vec<Mask>,
    /// A condition under which rows are set to 0 before the softmax.
    cleared: Option<Value>,
    /// A node that may read the first value too.
    test: Option<NodeId>,
    steps: usize,
}

struct Found {
    op: Attention,
    /// The shape of the scores without the last two axes.
    lead: Vec<Dim>,
    operands: [Operand; 3],
    mask: Option<FoundMask>,
    counter: Option<Value>,
}

enum FoundMask {
    /// Booleans, true where a key is hidden if `hidden`, or numbers.
    One { value: Value, hidden: bool },
    /// Numbers that are added up.
    Sum(Vec<Value>),
}

impl Pass {
    fn match_product(&mut self, graph: &Graph, id: NodeId, product: MatMul) -> Option<Found> {
        let [weights, value] = graph.inputs(id)[..] else { return None };
        if product.transpose_a {
            return None;
        }
        let weights = self.weights(graph, weights)?;
        let shape = &graph.fact(weights.scores).shape;
        let [lead @ .., _, keys] = shape.as_slice() else { return None };
        if lead.is_empty() {
            return None;
        }
        let start =
            Scores { product: id, factor: 1.0, masks: Vec::new(), cleared: None, test: weights.test, steps: STEPS };
        let scores = self.scores(graph, weights.scores, start)?;
        let Op::MatMul(inner) = graph.node(scores.product).op else { return None };
        let [query, key] = graph.inputs(scores.product)[..] else { return None };
        let query = Operand::read(graph, &mut self.functions, query, inner.transpose_a, lead)?;
        let key = Operand::read(graph, &mut self.functions, key, !inner.transpose_b, lead)?;
        let value = Operand::read(graph, &mut self.functions, value, product.transpose_b, lead)?;
        let dtype = graph.fact(query.value).dtype;
        let result = graph.node(id).facts[0].dtype;
        let alike = [query.value, key.value, value.value].iter().all(|v| graph.fact(*v).dtype == dtype);
        if !alike || result != dtype || query.repeats.is_some() || key.repeats != value.repeats {
            return None;
        }
        let scale = scores.factor * query.factor * key.factor;
        if !scale.is_finite() || value.factor != 1.0 || (keys.known() == Some(0)) {
            return None;
        }
        let (op, mask) = self.masks(graph, &weights, &scores, dtype)?;
        let op = Attention { scale, dropout: weights.dropout.map(|(op, _)| op), ..op };
        let counter = weights.dropout.map(|(_, counter)| counter);
        Some(Found { op, lead: lead.to_vec(), operands: [query, key, value], mask, counter })
    }

    /// Follows the left operand of the last product back to its softmax.
    fn weights(&mut self, graph: &Graph, mut value: Value) -> Option<Weights> {
        let (mut dropout, mut zeroed, mut tested) = (None, None, None);
        // The nodes of a test of the softmax for NaN.
        let mut nan_test: [NodeId; 3] = [value.node; 3];
        for _ in 0..STEPS {
            let node = graph.node(value.node);
            let inputs = graph.inputs(value.node);
            if let Op::Softmax(Softmax { axis }) = node.op {
                let is_test_read = graph.successors(value.node).iter().all(|reader| nan_test.contains(reader));
                let is_read_here = !is_result(graph, value) && (is_test_read || graph.consumers(value).len() == 1);
                let test = match tested {
                    Some((scores, test)) => (scores == inputs[0]).then_some(Some(test))?,
                    None => None,
                };
                let is_last = axis + 1 == graph.fact(value).rank();
                return (is_last && is_read_here).then_some(Weights { scores: inputs[0], dropout, zeroed, test });
            }
            if !is_sole(graph, value) {
                return None;
            }
            value = match node.op {
                Op::Dropout(op) if dropout.is_none() => {
                    dropout = Some((op, inputs[1]));
                    inputs[0]
                }
                Op::Cast(_) if graph.fact(inputs[0]).dtype.is_float() => inputs[0],
                Op::Reshape(_) if operand::keeps_matrices(graph, inputs[0], value) => inputs[0],
                Op::Select(_) if zeroed.is_none() => {
                    let is_zero = |pass: &mut Pass, v: Value| pass.functions.number(graph, v) == Some(0.0);
                    let (operand, hidden) = if is_zero(self, inputs[1]) {
                        (inputs[2], true)
                    } else if is_zero(self, inputs[2]) {
                        (inputs[1], false)
                    } else {
                        return None;
                    };
                    zeroed = Some(Zeroed::Where { condition: inputs[0], hidden });
                    if let Some((nodes, is_nan)) = empty_row::nan_test(graph, inputs[0], operand) {
                        nan_test = [nodes[0], nodes[1], value.node];
                        zeroed = (is_nan == hidden).then_some(Zeroed::Empty);
                    } else if let Some((scores, test)) = empty_row::of_all(graph, &mut self.functions, inputs[0]) {
                        tested = Some((scores, test));
                        zeroed = hidden.then_some(Zeroed::Empty);
                    }
                    zeroed?;
                    operand
                }
                _ => return None,
            };
        }
        None
    }

    /// Follows the input of a softmax back to the product of queries and keys.
    fn scores(&mut self, graph: &Graph, mut value: Value, mut state: Scores) -> Option<Scores> {
        loop {
            state.steps = state.steps.checked_sub(1)?;
            let test = state.test.take();
            let readers = graph.consumers(value).into_iter().filter(|(reader, _)| Some(*reader) != test).count();
            if readers != 1 || is_result(graph, value) {
                return None;
            }
            let inputs = graph.inputs(value.node);
            let (op, fact) = (&graph.node(value.node).op, graph.fact(value));
            let number = |pass: &mut Pass, v: Value| pass.functions.number(graph, v);
            value = match op {
                Op::MatMul(_) => {
                    state.product = value.node;
                    return Some(state);
                }
                Op::Cast(_) if graph.fact(inputs[0]).dtype.is_float() => inputs[0],
                Op::Reshape(_) if operand::keeps_matrices(graph, inputs[0], value) => {
                    // Masks before the reshape have other leading axes.
                    let mut inner = state.clone();
                    inner.masks.clear();
                    let mut inner = self.scores(graph, inputs[0], inner)?;
                    if inner.masks.iter().any(|mask| !has_plain_lead(graph, *mask)) || inner.cleared != state.cleared {
                        return None;
                    }
                    state.masks.append(&mut inner.masks);
                    return Some(Scores { masks: state.masks, ..inner });
                }
                Op::Binary(Binary::Mul) => {
                    let (factor, operand) = match (number(self, inputs[0]), number(self, inputs[1])) {
                        (_, Some(factor)) => (factor, inputs[0]),
                        (Some(factor), None) => (factor, inputs[1]),
                        (None, None) => return None,
                    };
                    state.factor *= factor;
                    operand
                }
                Op::Binary(Binary::Div) => {
                    state.factor /= number(self, inputs[1])?;
                    inputs[0]
                }
                Op::Binary(Binary::Add) => {
                    // The mask is the operand that is no product.
                    for (scores, mask) in [(inputs[0], inputs[1]), (inputs[1], inputs[0])] {
                        let mut inner = state.clone();
                        if graph.fact(scores) != fact || self.trainable.contains(&mask.node) {
                            continue;
                        }
                        self.add(graph, mask, &mut inner.masks, state.factor)?;
                        if let Some(inner) = self.scores(graph, scores, inner) {
                            return Some(inner);
                        }
                    }
                    return None;
                }
                Op::Select(_) => {
                    let [condition, yes, no] = inputs[..] else { return None };
                    let (operand, fill, hidden) = match (number(self, yes), number(self, no)) {
                        (_, Some(fill)) => (yes, fill, false),
                        (Some(fill), None) => (no, fill, true),
                        (None, None) => return None,
                    };
                    if graph.fact(operand) != fact {
                        return None;
                    }
                    if fill == 0.0 && hidden && state.masks.is_empty() && state.cleared.is_none() && state.factor == 1.0
                    {
                        state.cleared = Some(condition);
                    } else {
                        // A positive factor after the mask keeps hidden scores hidden.
                        let fill = fill * state.factor;
                        if state.factor <= 0.0 || fill > least(fact.dtype) {
                            return None;
                        }
                        state.masks.push(Mask::Where { condition, hidden, fill });
                    }
                    operand
                }
                _ => return None,
            };
        }
    }

    /// Adds the terms of an additive mask.
    fn add(&mut self, graph: &Graph, mask: Value, masks: &mut Vec<Mask>, factor: f64) -> Option<()> {
        if factor != 1.0 {
            return None;
        }
        if let (Op::Binary(Binary::Add), true) = (&graph.node(mask.node).op, masks.len() < STEPS) {
            let inputs = graph.inputs(mask.node);
            // Only of a sum with a causal term, which is then left out.
            if inputs.iter().any(|term| self.causal(graph, *term) == Some(f64::NEG_INFINITY)) {
                inputs.iter().try_for_each(|term| self.add(graph, *term, masks, factor))?;
                return Some(());
            }
        }
        masks.push(Mask::Add(mask));
        Some(())
    }

    /// The number that a causal additive mask adds above the diagonal.
    fn causal(&mut self, graph: &Graph, mask: Value) -> Option<f64> {
        let (below, above) = self.functions.of(graph, mask)?.causal()?;
        (below == 0.0).then_some(above)
    }

    /// What a causal mask makes of scores above the diagonal, if they have no weight.
    fn causal_fill(&mut self, graph: &Graph, mask: Mask, dtype: DType) -> Option<f64> {
        let fill = match mask {
            Mask::Add(mask) => self.causal(graph, mask)?,
            Mask::Where { condition, hidden, fill } => {
                let (below, above) = self.functions.of(graph, condition)?.causal()?;
                ((below != 0.0) != hidden && (above != 0.0) == hidden).then_some(fill)?
            }
        };
        (fill <= least(dtype)).then_some(fill)
    }

    /// The attributes and the mask of the op.
    fn masks(
        &mut self,
        graph: &Graph,
        weights: &Weights,
        scores: &Scores,
        dtype: DType,
    ) -> Option<(Attention, Option<FoundMask>)> {
        let mut causal = false;
        let mut masks = Vec::new();
        for &mask in &scores.masks {
            match self.causal_fill(graph, mask, dtype) {
                Some(fill) if fill == f64::NEG_INFINITY || scores.masks.len() == 1 => causal = true,
                _ => masks.push(self.as_condition(graph, mask)),
            }
        }
        let fills =
            masks.iter().filter_map(|mask| if let Mask::Where { fill, .. } = mask { Some(*fill) } else { None });
        let is_endless = fills.clone().all(|fill| fill == f64::NEG_INFINITY);
        let conditions = fills.count();
        let empty = match weights.zeroed {
            Some(zeroed) => {
                let is_consistent = match zeroed {
                    Zeroed::Empty => is_endless && scores.cleared.is_none(),
                    Zeroed::Where { condition, hidden } => match (&masks[..], scores.cleared) {
                        (&[Mask::Where { condition: mask_condition, hidden: mask_hidden, .. }], None) if !causal => {
                            mask_condition == condition && mask_hidden == hidden
                        }
                        (_, Some(cleared)) => {
                            hidden && cleared == condition && self.is_of_empty_rows(graph, condition, &scores.masks)
                        }
                        _ => false,
                    },
                };
                is_consistent.then_some(EmptyRow::Zero)?
            }
            None if scores.cleared.is_some() => return None,
            None if is_endless => EmptyRow::Nan,
            None if masks.len() == 1 && !causal => EmptyRow::Mean,
            None => return None,
        };
        let op = Attention { scale: 1.0, causal, empty, dropout: None, part: None };
        let mask = match masks[..] {
            [] => None,
            [Mask::Where { condition, hidden, .. }] => Some(FoundMask::One { value: condition, hidden }),
            [Mask::Add(value)] if graph.fact(value).dtype == dtype => Some(FoundMask::One { value, hidden: false }),
            _ if conditions == 0 => {
                let terms: Vec<Value> = masks
                    .iter()
                    .filter_map(|mask| if let Mask::Add(value) = mask { Some(*value) } else { None })
                    .collect();
                terms.iter().all(|term| graph.fact(*term).dtype == dtype).then_some(Some(FoundMask::Sum(terms)))?
            }
            _ => return None,
        };
        Some((op, mask))
    }

    /// An additive mask of 0 and -∞ as a condition.
    fn as_condition(&mut self, graph: &Graph, mask: Mask) -> Mask {
        let Mask::Add(value) = mask else { return mask };
        let Op::Select(_) = graph.node(value.node).op else { return mask };
        let [condition, yes, no] = graph.inputs(value.node)[..] else { return mask };
        let fill = f64::NEG_INFINITY;
        match (self.functions.number(graph, yes), self.functions.number(graph, no)) {
            (Some(0.0), Some(no)) if no == fill => Mask::Where { condition, hidden: false, fill },
            (Some(yes), Some(0.0)) if yes == fill => Mask::Where { condition, hidden: true, fill },
            _ => mask,
        }
    }

    /// Tests whether a condition holds for the rows that these masks, added up, leave without a key.
    fn is_of_empty_rows(&mut self, graph: &Graph, condition: Value, masks: &[Mask]) -> bool {
        let Some(bias) = empty_row::of_maximum(graph, &mut self.functions, condition) else { return false };
        let mut terms = Vec::new();
        let is_same = |(a, b): (&Mask, &Mask)| matches!((a, b), (Mask::Add(a), Mask::Add(b)) if a == b);
        self.add(graph, bias, &mut terms, 1.0).is_some()
            && terms.len() == masks.len()
            && terms.iter().zip(masks).all(is_same)
    }

    /// Adds the op in place of the last product. `None` if the shapes do not fit after all.
    fn write(&mut self, graph: &mut Graph, id: NodeId, found: Found) -> Option<()> {
        let origin = graph.node(id).origin.clone();
        let fact = graph.node(id).facts[0].clone();
        let [query, key, value] = found.operands;
        let mut out = Writer { graph, origin };
        let mut inputs = vec![
            query.write(&mut out, &found.lead)?,
            key.write(&mut out, &found.lead)?,
            value.write(&mut out, &found.lead)?,
        ];
        match found.mask {
            None => {}
            Some(FoundMask::One { value, hidden: false }) => inputs.push(value),
            Some(FoundMask::One { value, hidden: true }) => inputs.push(out.emit(Op::Unary(Unary::Not), &[value])),
            Some(FoundMask::Sum(terms)) => {
                let mut sum = *terms.first()?;
                for term in &terms[1..] {
                    sum = Value {
                        node: out.graph.add(Op::Binary(Binary::Add), &[sum, *term], &out.origin).ok()?,
                        output: 0,
                    };
                }
                inputs.push(sum);
            }
        }
        inputs.extend(found.counter);
        let node = out.graph.add(Op::Attention(found.op), &inputs, &out.origin).ok()?;
        let mut y = Value { node, output: 0 };
        if *out.graph.fact(y) != fact {
            let op = Op::Reshape(Reshape { shape: fact.shape.clone() });
            y = Value { node: out.graph.add(op, &[y], &out.origin).ok()?, output: 0 };
        }
        let is_trained = self.trainable.contains(&id);
        if is_trained {
            self.trainable.extend([node, y.node]);
        }
        graph.replace_uses(Value { node: id, output: 0 }, y);
        Some(())
    }
}

/// The score below which a key has no weight.
fn least(dtype: DType) -> f64 {
    if dtype == DType::F16 { HIDDEN_F16 } else { HIDDEN }
}

fn is_result(graph: &Graph, value: Value) -> bool {
    graph.outputs.iter().any(|o| o.value == value) || graph.averages.iter().any(|a| a.sample == value)
}

/// True if one op reads the value.
fn is_sole(graph: &Graph, value: Value) -> bool {
    graph.consumers(value).len() == 1 && !is_result(graph, value)
}

/// True if the mask has no leading axes, or only of size 1.
fn has_plain_lead(graph: &Graph, mask: Mask) -> bool {
    let (Mask::Add(value) | Mask::Where { condition: value, .. }) = mask;
    let shape = &graph.fact(value).shape;
    shape.len() <= 3 && shape.iter().rev().skip(2).all(|dim| dim.is(1))
}
