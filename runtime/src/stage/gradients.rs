//! Gradient accumulation: over the micro-batches of a replica, over replicas, and over the uses of a parameter.
//! Gradients of 16-bit parameters are accumulated in `f32`.

use crate::comm::communicator::PeerLost;
use crate::device::buffer::{Buffer, Pool};
use crate::device::cpu::half::{is_half, widen};
use crate::device::cpu::square::squares;
use crate::exec::compile::GradientTerm;
use crate::exec::executor::{Executor, Item, Sum};
use crate::optim::optimizer::{accumulate, add};
use crate::optim::update::{exclusive, wide};
use bytemuck::{cast_slice, cast_slice_mut};
use compiler::tensor::DType;
use compiler::tensor::view::ViewMut;
use std::ops::Range;
use std::sync::Arc;

/// Terms of a parameter's gradient, each with its rank in the sum.
pub type GradientTerms = Vec<(usize, Arc<Buffer>)>;

/// Lends the round's gradient sums to a backward pass, which accumulates into them; [`add_all`] takes them back.
pub fn begun(sums: &mut [Option<Arc<Buffer>>], executor: &mut Executor<'_>) -> Vec<Option<Sum>> {
    let code = executor.code;
    let of = |(term, sum): (&GradientTerm, &mut Option<Arc<Buffer>>)| {
        (term.is_summed && !leaves(executor, term)).then(|| match sum.take() {
            Some(buffer) => Sum { buffer, is_begun: true },
            None => Sum { buffer: empty(executor, term), is_begun: false },
        })
    };
    code.gradient_terms.iter().zip(sums).map(of).collect()
}

/// True if the term goes to its owners' shards as soon as it is computed.
fn leaves(executor: &Executor<'_>, term: &GradientTerm) -> bool {
    executor.pieces.as_ref().is_some_and(|pieces| pieces.takes(term.parameter))
}

/// Allocates the sum of a term.
fn empty(executor: &mut Executor<'_>, term: &GradientTerm) -> Arc<Buffer> {
    let dtype = executor.code.parameters[term.parameter].fact.dtype;
    executor.pool.take(gradient_bytes(dtype, term.place.bytes))
}

/// Size of the gradient sum for `bytes` of weights.
pub fn gradient_bytes(dtype: DType, bytes: usize) -> usize {
    bytes / dtype.size().max(1) * wide(dtype).size()
}

/// Writes the first term of a sum.
pub fn begin(dtype: DType, sum: &mut [u8], term: &[u8]) {
    match is_half(dtype) {
        true => widen(dtype, term, cast_slice_mut(sum)),
        false => sum.copy_from_slice(term),
    }
}

/// Takes back the sums that a backward pass accumulated into, and accumulates the remaining terms. With streaming it
/// blocks until earlier micro-batches have added theirs.
pub fn add_all(sums: &mut [Option<Arc<Buffer>>], executor: &mut Executor<'_>, item: &mut Item) -> Result<(), PeerLost> {
    let code = executor.code;
    let all = sums.iter_mut().zip(&code.gradient_terms).enumerate();
    for (at, (sum, term)) in all.filter(|(_, (_, term))| !term.is_summed) {
        let dtype = code.parameters[term.parameter].fact.dtype;
        if !leaves(executor, term) {
            add_left(sum, executor, item, term, dtype);
            continue;
        }
        let mut made = None;
        add_left(&mut made, executor, item, term, dtype);
        if let (Some(pieces), Some(made)) = (&executor.pieces, made) {
            pieces.add(code, at, item.turn, made.bytes())?;
            executor.pool.give(made);
        }
    }
    for (sum, made) in sums.iter_mut().zip(std::mem::take(&mut item.sums)) {
        *sum = made.map(|made| made.buffer).or_else(|| sum.take());
    }
    Ok(())
}

/// Accumulates a term that the backward pass wrote elsewhere.
fn add_left(
    sum: &mut Option<Arc<Buffer>>,
    executor: &mut Executor<'_>,
    item: &Item,
    term: &GradientTerm,
    dtype: DType,
) {
    if let Some(sum) = sum {
        return accumulate(dtype, exclusive(sum), executor.gradient(item, term.place));
    }
    let mut first = empty(executor, term);
    begin(dtype, exclusive(&mut first), executor.gradient(item, term.place));
    *sum = Some(first);
}

/// Sums the replicas' contributions in order, over the byte range `own(length)`. `stays` selects a pooled buffer,
/// otherwise one that is freed after use.
pub fn reduced<'a>(
    (pool, stays): (&mut Pool, bool),
    dtype: DType,
    parts: impl Iterator<Item = &'a Arc<Buffer>>,
    own: impl Fn(usize) -> Range<usize>,
) -> Option<Arc<Buffer>> {
    let mut sum: Option<Arc<Buffer>> = None;
    for part in parts {
        let part = &part.bytes()[own(part.len())];
        match &mut sum {
            None => sum = Some(copy(room(pool, part.len(), stays), part)),
            Some(sum) => accumulate(wide(dtype), exclusive(sum), part),
        }
    }
    sum
}

/// The gradient of a parameter: its terms summed in rank order. `stays` selects a pooled buffer if one is needed.
pub fn total(pool: &mut Pool, dtype: DType, mut terms: GradientTerms, stays: bool) -> Option<Arc<Buffer>> {
    terms.sort_by_key(|(rank, _)| *rank);
    let mut terms = terms.into_iter().map(|(_, sum)| sum);
    let mut total = terms.next()?;
    for term in terms {
        match Arc::get_mut(&mut total) {
            Some(sum) => accumulate(wide(dtype), sum.bytes_mut(), term.bytes()),
            // Other stages sum the same terms, so they must not change.
            None => {
                let mut sum = room(pool, total.len(), stays);
                add(wide(dtype), total.bytes(), term.bytes(), exclusive(&mut sum));
                total = sum;
            }
        }
    }
    Some(total)
}

fn room(pool: &mut Pool, bytes: usize, stays: bool) -> Arc<Buffer> {
    if stays { pool.take(bytes) } else { pool.once(bytes) }
}

fn copy(mut copy: Arc<Buffer>, bytes: &[u8]) -> Arc<Buffer> {
    exclusive(&mut copy).copy_from_slice(bytes);
    copy
}

/// Sum of squares of a parameter's gradient.
pub fn square(dtype: DType, gradient: &[u8]) -> f64 {
    match wide(dtype) {
        DType::F64 => squares(cast_slice::<u8, f64>(gradient)),
        _ => squares(cast_slice::<u8, f32>(gradient)),
    }
}

pub fn scaled(dtype: DType, gradient: &[u8], scale: f64) -> Buffer {
    let mut copy = Buffer::copy_of(gradient);
    if scale != 1.0 {
        let shape = [gradient.len() / wide(dtype).size()];
        let mut view = ViewMut::new(wide(dtype), &shape, copy.bytes_mut());
        for i in 0..shape[0] {
            let value = view.as_view().f64(i);
            view.set_f64(i, value * scale);
        }
    }
    copy
}
