//! Selects the weight gradients that are computed for several micro-batches at once.
//!
//! The gradient of a large weight over few rows is bound by reading and writing its sum. If its operands are small in
//! comparison, they are buffered for [`ITEMS`] micro-batches, and one kernel on the concatenated rows computes and
//! accumulates the gradient. Micro-batches are grouped in order from the start of a round; the remainder is processed
//! one by one. Sums therefore do not depend on schedule or cuts. Rounds with fewer micro-batches do not buffer, nor do
//! replicas that reduce-scatter gradients immediately (ZeRO 2).

use crate::op::Op;
use crate::pass::memory::aligned;
use crate::tensor::DType;
use crate::tensor::fact::Fact;

/// Micro-batches per group.
pub const ITEMS: u32 = 8;

/// Tests whether a worker with `items` micro-batches per round buffers operands, given its replica count and ZeRO
/// stage.
pub fn joins(items: u32, replicas: u32, zero: u32) -> bool {
    items >= ITEMS && (replicas < 2 || zero < 2)
}

/// The concatenated operands if the op computes batched gradients, else `None`. `result` is the gradient.
pub fn joined(op: &Op, inputs: &[Fact], result: &Fact) -> Option<Vec<Fact>> {
    let is_supported = match op {
        Op::ConvWeightGrad(_) => true,
        Op::MatMul(op) => op.transpose_a && !op.transpose_b && inputs.iter().all(|input| input.rank() == 2),
        _ => false,
    };
    if !is_supported || !matches!(result.dtype, DType::F32 | DType::F64) || batched_grads(inputs)? > result.bytes()? {
        return None;
    }
    inputs.iter().map(concatenated).collect()
}

/// Bytes of the buffered operands of [`ITEMS`] micro-batches.
pub fn batched_grads(inputs: &[Fact]) -> Option<u64> {
    let aligned_bytes =
        |input: &Fact| u64::try_from(aligned(usize::try_from(concatenated(input)?.bytes()?).ok()?)).ok();
    inputs.iter().map(aligned_bytes).try_fold(0u64, |sum, bytes| sum.checked_add(bytes?))
}

/// The concatenation of [`ITEMS`] tensors along the first axis.
fn concatenated(input: &Fact) -> Option<Fact> {
    let mut shape = input.concrete()?;
    let first = shape.first_mut()?;
    *first = first.checked_mul(ITEMS as usize)?;
    Some(Fact::of(input.dtype, &shape))
}
