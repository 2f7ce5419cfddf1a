//! Gradient accumulation: over the micro-batches of a replica, and over the uses of a parameter.
//! Gradients of 16-bit parameters are accumulated in `f32`.

use crate::comm::communicator::Tensors;
use crate::device::api::Elementwise;
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::device::layout::{accumulation_bytes, accumulation_type};
use crate::exec::executor::{Executor, Item, Sum};
use crate::exec::stage_code::GradientTerm;
use crate::zero::streaming::ShardStream;
use compiler::tensor::DType;
use std::sync::Arc;

/// Terms of a parameter's gradient, each with its rank in the sum.
pub type GradientTerms = Tensors;

/// Lends the round's gradient sums to a backward pass, which accumulates into them; [`collect_sums`] takes them back.
pub fn lend_sums(
    sums: &mut [Option<Arc<Buffer>>],
    executor: &Executor<'_>,
    shard_stream: Option<&ShardStream>,
) -> Result<Vec<Option<Sum>>, DeviceError> {
    let code = executor.code;
    let lend = |(term, sum): (&GradientTerm, &mut Option<Arc<Buffer>>)| {
        if !term.is_summed || is_streamed(shard_stream, term) {
            return Ok(None);
        }
        Ok(Some(match sum.take() {
            Some(buffer) => Sum { buffer, is_begun: true },
            None => Sum { buffer: allocate_sum(executor, term)?, is_begun: false },
        }))
    };
    code.gradient_terms.iter().zip(sums).map(lend).collect()
}

/// True if the term goes to its owners' shards as soon as it is computed.
pub fn is_streamed(shard_stream: Option<&ShardStream>, term: &GradientTerm) -> bool {
    shard_stream.is_some_and(|shard_stream| shard_stream.is_streamed(term.parameter))
}

pub fn allocate_sum(executor: &Executor<'_>, term: &GradientTerm) -> Result<Arc<Buffer>, DeviceError> {
    let dtype = executor.code.parameters[term.parameter].fact.dtype;
    executor.device.take(accumulation_bytes(dtype, term.address.bytes))
}

/// Takes back the sums that a backward pass accumulated into, and accumulates the remaining terms. With streaming it
/// blocks until earlier micro-batches have added theirs.
pub fn collect_sums(
    sums: &mut [Option<Arc<Buffer>>],
    executor: &Executor<'_>,
    shard_stream: Option<&ShardStream>,
    item: &mut Item,
) -> Result<(), DeviceError> {
    let code = executor.code;
    let terms = sums.iter_mut().zip(&code.gradient_terms).enumerate();
    for (index, (sum, term)) in terms.filter(|(_, (_, term))| !term.is_summed) {
        let dtype = code.parameters[term.parameter].fact.dtype;
        if !is_streamed(shard_stream, term) {
            accumulate_term(sum, executor, item, term, dtype)?;
            continue;
        }
        let mut value = None;
        accumulate_term(&mut value, executor, item, term, dtype)?;
        if let (Some(shard_stream), Some(value)) = (shard_stream, value) {
            shard_stream.add(code, index, item.position, &value, &executor.device)?;
            executor.device.give(value);
        }
    }
    for (sum, value) in sums.iter_mut().zip(std::mem::take(&mut item.sums)) {
        *sum = value.map(|value| value.buffer).or_else(|| sum.take());
    }
    Ok(())
}

/// Accumulates a term that the backward pass wrote elsewhere.
fn accumulate_term(
    sum: &mut Option<Arc<Buffer>>,
    executor: &Executor<'_>,
    item: &Item,
    term: &GradientTerm,
    dtype: DType,
) -> Result<(), DeviceError> {
    let (stream, value) = (&executor.device.stream, executor.gradient(item, term.address));
    if let Some(sum) = sum {
        return stream.accumulate(dtype, value, Buffer::exclusive(sum));
    }
    let mut first = allocate_sum(executor, term)?;
    stream.begin_sum(dtype, value, Buffer::exclusive(&mut first))?;
    *sum = Some(first);
    Ok(())
}

/// The gradient of a parameter: its terms summed in rank order. `is_pooled` selects a pooled buffer if one is needed.
pub fn sum_terms(
    device: &DeviceContext,
    dtype: DType,
    mut terms: GradientTerms,
    is_pooled: bool,
) -> Result<Option<Arc<Buffer>>, DeviceError> {
    terms.sort_by_key(|(rank, _)| *rank);
    let (dtype, mut terms) = (accumulation_type(dtype), terms.into_iter().map(|(_, sum)| sum));
    let Some(first) = terms.next() else { return Ok(None) };
    let mut total = device.receive(first)?;
    for term in terms {
        let mut term = device.receive(term)?;
        // Other stages sum the same terms, so only a copy on this device may change. Sums of two numbers are the same in
        // either order.
        if Arc::get_mut(&mut total).is_none() && Arc::get_mut(&mut term).is_some() {
            std::mem::swap(&mut total, &mut term);
        }
        match device.try_exclusive(&mut total)? {
            Some(sum) => device.stream.accumulate(dtype, term.region(), sum)?,
            None => {
                let mut sum = new_sum(device, total.len(), is_pooled)?;
                let operands = [total.region(), term.region()];
                device.stream.elementwise(Elementwise::Add, dtype, &operands, Buffer::exclusive(&mut sum))?;
                device.give_foreign(std::mem::replace(&mut total, sum))?;
            }
        }
        device.give_shared(term)?;
    }
    Ok(Some(total))
}

fn new_sum(device: &DeviceContext, bytes: usize, is_pooled: bool) -> Result<Arc<Buffer>, DeviceError> {
    if is_pooled { device.take(bytes) } else { device.once(bytes) }
}

/// A copy of a gradient sum, multiplied by `scale`.
pub fn scaled_copy(device: &DeviceContext, dtype: DType, gradient: &Buffer, scale: f64) -> Result<Buffer, DeviceError> {
    let mut copy = device.copy_of(gradient.region())?;
    if scale != 1.0 {
        let (verb, dtype) = (Elementwise::Scale(scale), accumulation_type(dtype));
        device.stream.elementwise(verb, dtype, &[], copy.region_mut())?;
    }
    Ok(copy)
}
