//! Moving averages of a model's states, such as the running mean and variance of batch normalisation.
//!
//! | statistics | updates per minibatch of M micro-batches | sample |
//! | --- | --- | --- |
//! | batch | M | the statistics of each micro-batch, in order |
//! | deferred | 1 | mean `m = Σ mᵢ / M` and variance `Σ vᵢ / M + Σ (mᵢ − m)² / M` of the whole minibatch |
//!
//! `mᵢ` and `vᵢ` are the mean and biased variance of micro-batch i; all have equal size. Normalisation always uses the
//! statistics of the micro-batch. A sample that is not a batch variance is averaged like a mean. The modes are equal
//! under schedules that do not split minibatches.

use crate::device::api::{AverageStep, Stream};
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::exec::sequence::TensorAddress;
use crate::exec::stage_code::{NamedTensor, StateUpdate, Variance};
use compiler::graph::Graph;
use compiler::op::{NodeId, Op, Value};
use compiler::tensor::DType;
use compiler::tensor::view::View;
use std::collections::BTreeMap;

/// Update mode of running statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Statistics {
    /// One update per micro-batch, as PyTorch does under gradient accumulation.
    #[default]
    Batch,
    /// One update per minibatch, with its overall statistics (torchgpipe's `DeferredBatchNorm`).
    Deferred {
        /// True if running variances average the unbiased variance.
        unbiased: bool,
    },
}

/// Number and samples of a micro-batch, in the order of the stage's state updates.
pub type Samples = (u32, Vec<Vec<u8>>);

/// State updates of a stage. `state` and `address_of` map nodes and values to their indices and locations.
pub fn state_updates(
    graph: &Graph,
    state: impl Fn(NodeId) -> usize,
    address_of: impl Fn(Value) -> TensorAddress,
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
    let state_update = |a: &compiler::graph::MovingAverage| StateUpdate {
        state: state(a.state),
        sample: address_of(a.sample),
        keep: a.keep,
        variance: variance(a.sample),
    };
    graph.averages.iter().map(state_update).collect()
}

/// Updates the states with the samples of a step, given in micro-batch order, `microbatches` per minibatch.
pub fn update_states(
    stream: &dyn Stream,
    statistics: Statistics,
    updates: &[StateUpdate],
    (states, named): (&mut [Buffer], &[NamedTensor]),
    samples: &[Samples],
    microbatches: u32,
) -> Result<(), DeviceError> {
    let values = |at: usize, sample: &Samples| numbers(named[updates[at].state].fact.dtype, &sample.1[at]);
    let Statistics::Deferred { unbiased } = statistics else {
        return samples.iter().try_for_each(|sample| {
            let values = (0..updates.len()).map(|at| values(at, sample));
            update(stream, updates, (states, named), values.collect())
        });
    };
    let mut minibatches: BTreeMap<u32, Vec<&Samples>> = BTreeMap::new();
    for sample in samples {
        minibatches.entry(sample.0 / microbatches.max(1)).or_default().push(sample);
    }
    for mut items in minibatches.into_values() {
        items.sort_by_key(|(item, _)| *item);
        let mean = |at: usize| average(items.iter().map(|item| values(at, item)));
        let pooled = |(at, update): (usize, &StateUpdate)| {
            let mut pooled = mean(at);
            if let Some(Variance { mean: mean_index, elements }) = update.variance {
                let centre = mean(mean_index);
                let squared_deviations = |item: &&Samples| {
                    let pairs = values(mean_index, item).into_iter().zip(&centre);
                    pairs.map(|(value, centre)| (value - centre).powi(2)).collect::<Vec<f64>>()
                };
                let deviation = average(items.iter().map(squared_deviations));
                let n = (elements * items.len()) as f64;
                let correction = if unbiased && n > 1.0 { n / (n - 1.0) } else { 1.0 };
                for (value, deviation) in pooled.iter_mut().zip(deviation) {
                    *value = (*value + deviation) * correction;
                }
            }
            pooled
        };
        update(stream, updates, (states, named), updates.iter().enumerate().map(pooled).collect())?;
    }
    Ok(())
}

/// Updates the states with one sample for each update, in order: those of different states in one call.
fn update(
    stream: &dyn Stream,
    updates: &[StateUpdate],
    (states, named): (&mut [Buffer], &[NamedTensor]),
    samples: Vec<Vec<f64>>,
) -> Result<(), DeviceError> {
    let mut pending = updates.iter().zip(&samples).peekable();
    while pending.peek().is_some() {
        let mut batch: BTreeMap<usize, (f64, &[f64])> = BTreeMap::new();
        while let Some((update, sample)) = pending.next_if(|(update, _)| !batch.contains_key(&update.state)) {
            batch.insert(update.state, (update.keep, sample));
        }
        let mut steps = Vec::new();
        for ((at, state), named) in states.iter_mut().enumerate().zip(named) {
            if let Some((keep, sample)) = batch.remove(&at) {
                steps.push(AverageStep { dtype: named.fact.dtype, sample, keep, state: state.region_mut() });
            }
        }
        stream.moving_averages(steps)?;
    }
    Ok(())
}

/// Elementwise mean of equally long rows.
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
