//! Rewrites a sum of zero-padded parts of a tensor as a concatenation of the parts.
//!
//! The gradient of a split tensor is such a sum. Without this pass every part is written at full size, and all are
//! added.
//!
//! ```text
//! %a = pad %dq low=[0, 0] high=[0, 8] ..          %j = concat %dq %dk axis=1
//! %b = pad %dk low=[0, 4] high=[0, 0] ..   ──▶    %s = add %j %zero
//! %s = add %a %b
//! ```
//!
//! The addition of zero stays because it turns -0 into 0.

use crate::graph::{Graph, order};
use crate::op::unary::scalar;
use crate::op::{Binary, Concat, NodeId, Op, Pad, Value};
use crate::pass::Changed;

/// Above the number of parts of any real split.
const MOST_PARTS: usize = 64;

/// A part with its offset and size along the axis.
struct PaddedPart {
    value: Value,
    first: i64,
    size: i64,
}

/// Replaces sums of padded parts by concatenations.
pub fn join(graph: &mut Graph) -> Changed {
    let mut changed = false;
    // In reverse order, so that a sum is rewritten before the partial sums it contains.
    for id in order::canonical(graph).into_iter().rev() {
        if !graph.contains(id) || !matches!(graph.node(id).op, Op::Binary(Binary::Add)) {
            continue;
        }
        let Some((axis, parts)) = parts(graph, id) else { continue };
        let node = graph.node(id);
        let (origin, dtype) = (node.origin.clone(), node.facts[0].dtype);
        let values: Vec<Value> = parts.iter().map(|part| part.value).collect();
        let result = graph.add(Op::Concat(Concat { axis }), &values, &origin).and_then(|concat| {
            let zero = graph.add(scalar(dtype, 0.0), &[], &origin)?;
            let of = |node| Value { node, output: 0 };
            graph.add(Op::Binary(Binary::Add), &[of(concat), of(zero)], &origin)
        });
        let sum = result.expect("parts that make up a whole can be joined");
        graph.replace_uses(Value { node: id, output: 0 }, Value { node: sum, output: 0 });
        changed = true;
    }
    Changed::from(changed)
}

/// The parts added at a node, sorted by offset, and their axis; `None` unless they cover the whole axis exactly once.
fn parts(graph: &Graph, sum: NodeId) -> Option<(usize, Vec<PaddedPart>)> {
    let mut pads: Vec<NodeId> = Vec::new();
    let mut queue = vec![sum];
    while let Some(id) = queue.pop() {
        for value in graph.inputs(id) {
            let is_read_here_alone = graph.consumers(value).len() == 1;
            match &graph.node(value.node).op {
                Op::Binary(Binary::Add) if is_read_here_alone => queue.push(value.node),
                Op::Pad(_) if is_read_here_alone && pads.len() < MOST_PARTS => pads.push(value.node),
                _ => return None,
            }
        }
    }
    let Op::Pad(first) = &graph.node(*pads.first()?).op else { return None };
    let axis = (0..first.low.len()).find(|&axis| !(first.low[axis].is(0) && first.high[axis].is(0)))?;
    let sum_fact = &graph.node(sum).facts[0];
    let mut parts: Vec<PaddedPart> = Vec::new();
    for pad in pads {
        let value = graph.inputs(pad)[0];
        let Op::Pad(op) = &graph.node(pad).op else { return None };
        if !is_along(op, axis) || graph.node(pad).facts[0] != *sum_fact {
            return None;
        }
        parts.push(PaddedPart { value, first: op.low[axis].known()?, size: graph.fact(value).shape[axis].known()? });
    }
    parts.sort_by_key(|part| part.first);
    let mut end = 0;
    for part in &parts {
        if part.first != end || part.size <= 0 {
            return None;
        }
        end = part.first.checked_add(part.size)?;
    }
    (sum_fact.shape[axis].known() == Some(end)).then_some((axis, parts))
}

/// Tests for a zero padding along only this axis.
fn is_along(op: &Pad, axis: usize) -> bool {
    let other_axes = (0..op.low.len()).filter(|other| *other != axis);
    op.value.to_bits() == 0.0f64.to_bits()
        && op.interior.iter().all(|between| *between == 0)
        && other_axes.into_iter().all(|other| op.low[other].is(0) && op.high[other].is(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::verify::verify;
    use crate::graph::{Origin, Output, evaluate};
    use crate::op::Input;
    use crate::pass::dce::dce;
    use crate::tensor::fact::Fact;
    use crate::tensor::{DType, Tensor};

    /// The sum of parts given as (first column, columns), of two rows by six columns.
    fn sum_graph(parts: &[(i64, i64)]) -> Graph {
        let mut graph = Graph::new("sum");
        let origin = Origin::default();
        let mut sum: Option<Value> = None;
        for (i, (first, size)) in parts.iter().enumerate() {
            let fact = Fact::of(DType::F32, &[2, *size as usize]);
            let input = graph.add(Op::Input(Input { name: format!("p{i}"), fact }), &[], &origin).unwrap();
            let (low, high) = (vec![0i64.into(), (*first).into()], vec![0i64.into(), (6 - first - size).into()]);
            let pad = Op::Pad(Pad { low, high, interior: vec![0, 0], value: 0.0 });
            let pad = graph.add(pad, &[Value { node: input, output: 0 }], &origin).unwrap();
            let pad = Value { node: pad, output: 0 };
            sum = Some(match sum {
                None => pad,
                Some(sum) => {
                    Value { node: graph.add(Op::Binary(Binary::Add), &[sum, pad], &origin).unwrap(), output: 0 }
                }
            });
        }
        graph.outputs.push(Output { name: "y".to_string(), value: sum.unwrap() });
        graph
    }

    fn answer(graph: &Graph, parts: &[(i64, i64)]) -> Vec<u8> {
        let inputs = parts.iter().enumerate().map(|(i, (_, size))| {
            let values: Vec<f64> =
                (0..2 * size).map(|j| if j == 1 { -0.0 } else { (10 * i as i64 + j) as f64 }).collect();
            (format!("p{i}"), Tensor::from_f64(&[2, *size as usize], &values).cast(DType::F32))
        });
        evaluate::evaluate(graph, &inputs.collect()).unwrap()[&graph.outputs[0].value].bytes().to_vec()
    }

    #[test]
    fn the_gradient_of_a_split_is_joined_with_the_same_bits() {
        for parts in [&[(0, 2), (2, 3), (5, 1)][..], &[(4, 2), (0, 4)]] {
            let mut graph = sum_graph(parts);
            let before = answer(&graph, parts);
            assert_eq!(join(&mut graph), Changed::Yes);
            dce(&mut graph);
            verify(&graph).unwrap();
            let has = |name: &str| graph.ids().any(|id| crate::op::table::rule(&graph.node(id).op).name() == name);
            assert!(has("concat") && !has("pad"), "{parts:?}");
            assert_eq!(answer(&graph, parts), before, "{parts:?}");
        }
    }

    #[test]
    fn what_overlaps_or_leaves_room_is_added_up() {
        for parts in [&[(0, 2), (1, 5)][..], &[(0, 2), (3, 3)], &[(0, 2), (2, 3)], &[(0, 3), (0, 3), (3, 3)]] {
            assert_eq!(join(&mut sum_graph(parts)), Changed::No, "{parts:?}");
        }
    }
}
