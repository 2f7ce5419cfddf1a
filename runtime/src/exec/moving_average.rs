//! How states follow values: running means and variances of batch normalisation, and whatever else a model averages.
//!
//! | statistics | a minibatch of M microbatches makes | with |
//! | --- | --- | --- |
//! | batch | M updates | the statistics of each microbatch, in their order |
//! | deferred | one update | the mean `m = Σ mᵢ / M` and the variance `Σ vᵢ / M + Σ (mᵢ − m)² / M` of the whole minibatch |
//!
//! `mᵢ` and `vᵢ` are mean and biased variance of microbatch i; microbatches are equally large. Every microbatch is normalised with
//! statistics of its own either way. A value that is no variance of a batch is averaged as a mean is. Under schedules of whole
//! minibatches the two are one.

use crate::device::buffer::Buffer;
use crate::exec::compile::NamedTensor;
use crate::exec::sequence::TensorAddress;
use crate::optim::policy::Statistics;
use compiler::graph::Graph;
use compiler::op::{NodeId, Op, Value};
use compiler::tensor::DType;
use compiler::tensor::view::{View, ViewMut};
use std::collections::BTreeMap;

/// How a state follows a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateUpdate {
    /// The state, by place in [`StageCode::states`](crate::exec::compile::StageCode::states).
    pub state: usize,
    /// The value after a forward run.
    pub sample: TensorAddress,
    /// The share that is kept.
    pub keep: f64,
    /// What is known of the value where it is the variance of a batch.
    pub variance: Option<Variance>,
}

/// A variance of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variance {
    /// The mean of the same batch, by place among the stage's follows.
    pub mean: usize,
    /// The numbers that it is the variance of.
    pub elements: usize,
}

/// The samples of an item, in the order of the stage's follows.
pub type Samples = (u32, Vec<Vec<u8>>);

/// How the states of a stage follow its values. `state` and `place` say where these are.
pub fn follows(
    graph: &Graph,
    state: impl Fn(NodeId) -> usize,
    place: impl Fn(Value) -> TensorAddress,
) -> Vec<StateUpdate> {
    let variance = |sample: Value| {
        let norm = sample.node;
        if sample.output != 2 || !matches!(graph.node(norm).op, Op::BatchNorm(_)) {
            return None;
        }
        let mean = graph.averages.iter().position(|a| a.sample == Value { node: norm, output: 1 })?;
        let shape = graph.fact(graph.inputs(norm)[0]).concrete()?;
        let elements = shape.iter().enumerate().filter(|(axis, _)| *axis != 1).map(|(_, size)| size).product();
        Some(Variance { mean, elements })
    };
    let of = |a: &compiler::graph::MovingAverage| StateUpdate {
        state: state(a.state),
        sample: place(a.sample),
        keep: a.keep,
        variance: variance(a.sample),
    };
    graph.averages.iter().map(of).collect()
}

/// Lets the states follow the samples of a step, which come in the order of items, `microbatches` of them to a minibatch.
pub fn follow(
    statistics: Statistics,
    follows: &[StateUpdate],
    (states, named): (&mut [Buffer], &[NamedTensor]),
    samples: &[Samples],
    microbatches: u32,
) {
    let mut step = |follow: &StateUpdate, sample: &[f64]| {
        let bytes = states[follow.state].bytes_mut();
        move_along(named[follow.state].fact.dtype, bytes, sample, follow.keep);
    };
    let values = |at: usize, of: &Samples| numbers(named[follows[at].state].fact.dtype, &of.1[at]);
    let Statistics::Deferred { unbiased } = statistics else {
        for sample in samples {
            follows.iter().enumerate().for_each(|(at, follow)| step(follow, &values(at, sample)));
        }
        return;
    };
    let mut minibatches: BTreeMap<u32, Vec<&Samples>> = BTreeMap::new();
    for sample in samples {
        minibatches.entry(sample.0 / microbatches.max(1)).or_default().push(sample);
    }
    for mut items in minibatches.into_values() {
        items.sort_by_key(|(item, _)| *item);
        let mean = |at: usize| average(items.iter().map(|item| values(at, item)));
        for (at, follow) in follows.iter().enumerate() {
            let mut whole = mean(at);
            if let Some(Variance { mean: of, elements }) = follow.variance {
                let centre = mean(of);
                let apart = |item: &&Samples| {
                    let from = values(of, item).into_iter().zip(&centre);
                    from.map(|(value, centre)| (value - centre).powi(2)).collect::<Vec<f64>>()
                };
                let between = average(items.iter().map(apart));
                let n = (elements * items.len()) as f64;
                let correction = if unbiased && n > 1.0 { n / (n - 1.0) } else { 1.0 };
                for (value, between) in whole.iter_mut().zip(between) {
                    *value = (*value + between) * correction;
                }
            }
            step(follow, &whole);
        }
    }
}

/// The mean of rows of numbers.
fn average(rows: impl Iterator<Item = Vec<f64>>) -> Vec<f64> {
    let mut count = 0.0;
    let mut sum: Vec<f64> = Vec::new();
    for row in rows {
        count += 1.0;
        if sum.is_empty() {
            sum = row;
        } else {
            sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
        }
    }
    sum.iter_mut().for_each(|sum| *sum /= count);
    sum
}

fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let shape = [bytes.len() / dtype.size()];
    let view = View::new(dtype, &shape, bytes);
    (0..shape[0]).map(|i| view.f64(i)).collect()
}

/// `state ← keep · state + (1 − keep) · sample`, computed in `f64`.
fn move_along(dtype: DType, state: &mut [u8], sample: &[f64], keep: f64) {
    let shape = [state.len() / dtype.size()];
    let mut state = ViewMut::new(dtype, &shape, state);
    for (i, sample) in sample.iter().enumerate().take(shape[0]) {
        let old = state.as_view().f64(i);
        state.set_f64(i, keep * old + (1.0 - keep) * sample);
    }
}
