//! Seeded synthetic data with the model's input shapes and in-range indices.

use super::mix;
use crate::exec::stage_code::NamedTensor;
use compiler::graph::Graph;
use compiler::op::dropout::COUNTER;
use compiler::op::{Op, Value};
use compiler::pass::loss::{LOSS_SCALE, TARGET};
use compiler::pass::minibatch_mean::is_factor;
use compiler::tensor::{DType, Tensor};
use std::collections::BTreeMap;

/// Generates `rows` rows for feeds whose first dimension is `item_rows`, and one value of the feed's own shape for
/// others. Floats are uniform in [-1, 1); integers are uniform in the range that their readers in `graph` accept. The
/// dropout counter is 0.
pub fn synthetic(
    graph: &Graph,
    feeds: &[NamedTensor],
    item_rows: usize,
    rows: usize,
    seed: u64,
) -> BTreeMap<String, Tensor> {
    let mut arrays = BTreeMap::new();
    // The order of the feeds depends on the cuts, so streams are numbered by name. Those that passes add come last, since
    // they depend on the precision; so the data of the others stays.
    let mut order: Vec<&NamedTensor> = feeds.iter().filter(|feed| !is_factor(&feed.name)).collect();
    let added = [TARGET, COUNTER, LOSS_SCALE];
    order.sort_by_key(|feed| (added.iter().position(|name| *name == feed.name), &feed.name));
    for (stream, feed) in order.into_iter().enumerate() {
        let mut shape = feed.fact.concrete().unwrap_or_default();
        match shape.first_mut() {
            Some(first) if *first == item_rows => *first = rows,
            // Targets of flattened predictions, per sample.
            Some(first) if feed.name == TARGET && item_rows > 0 && first.is_multiple_of(item_rows) => {
                *first /= item_rows;
                shape.insert(0, rows);
            }
            _ => {}
        }
        let count: usize = shape.iter().product();
        let draw = |i: usize| mix(mix(seed ^ mix(stream as u64)) ^ i as u64);
        let tensor = if feed.fact.dtype.is_float() {
            let uniform = |i| (draw(i) >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
            match feed.fact.dtype {
                // The usual type needs no memory beside its own.
                DType::F32 => Tensor::from_f32(&shape, &(0..count).map(|i| uniform(i) as f32).collect::<Vec<_>>()),
                _ => Tensor::from_f64(&shape, &(0..count).map(uniform).collect::<Vec<_>>()),
            }
        } else {
            let limit = if feed.name == COUNTER { 1 } else { limit(graph, &feed.name).map_or(2, |limit| limit.below) };
            let limit = limit.max(1) as u64;
            Tensor::from_i64(&shape, &(0..count).map(|i| (draw(i) % limit) as i64).collect::<Vec<_>>())
        };
        arrays.insert(feed.name.clone(), tensor.cast(feed.fact.dtype));
    }
    arrays
}

/// The index range of an input.
pub struct Limit {
    /// Exclusive upper bound.
    pub below: i64,
    /// Label that losses ignore, if only losses with this setting read the input.
    pub ignored: Option<i64>,
}

/// The index range that every reader of the input accepts; `None` if no reader restricts it.
pub fn limit(graph: &Graph, name: &str) -> Option<Limit> {
    let input = graph.ids().find(|id| matches!(&graph.node(*id).op, Op::Input(i) if i.name == name));
    let input = input?;
    let mut limit = i64::MAX;
    let mut ignored = Vec::new();
    let mut queue = vec![Value { node: input, output: 0 }];
    while let Some(value) = queue.pop() {
        for (reader, slot) in graph.consumers(value) {
            let table = |axis: usize| graph.fact(graph.inputs(reader)[0]).shape[axis].known().unwrap_or(i64::MAX);
            match &graph.node(reader).op {
                Op::Gather(g) if slot == 1 => {
                    limit = limit.min(table(g.axis));
                    ignored.push(None);
                }
                Op::BatchGather(g) if slot == 1 => {
                    limit = limit.min(table(g.batch));
                    ignored.push(None);
                }
                Op::CrossEntropy(c) if slot == 1 => {
                    limit = limit.min(table(c.axis));
                    ignored.push(c.ignore);
                }
                Op::Reshape(_) | Op::Cast(_) | Op::Transpose(_) | Op::Slice(_) | Op::Broadcast(_) => {
                    queue.push(Value { node: reader, output: 0 });
                }
                _ => {}
            }
        }
    }
    let first = ignored.first().copied().flatten();
    let ignored = first.filter(|_| ignored.iter().all(|other| *other == first));
    (limit != i64::MAX).then_some(Limit { below: limit, ignored })
}
