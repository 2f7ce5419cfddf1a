//! Which gradients of weights are made of several items of a round at once.
//!
//! A gradient of a large weight of few rows takes as long as its sum is read and written. Where what it reads is small beside that, it is put by
//! until there are [`ITEMS`] of it, and one kernel makes and adds the gradient of all: the same op on so many times the rows. Items are put by
//! in the order of their round, by eights from its first; the rest of a round goes one by one. So sums are formed alike whatever the schedule and
//! wherever stages are cut. A round of fewer items puts nothing by, nor do replicas whose gradients leave as they are made (ZeRO 2).

use crate::op::Op;
use crate::pass::memory::aligned;
use crate::tensor::DType;
use crate::tensor::fact::Fact;

/// How many items go together.
pub const ITEMS: u32 = 8;

/// Whether a worker that has so many items of a round puts any by, as one of so many replicas at this level of ZeRO.
pub fn joins(items: u32, replicas: u32, zero: u32) -> bool {
    items >= ITEMS && (replicas < 2 || zero < 2)
}

/// Where an op makes gradients of several items at once: what it reads then. `made` is the gradient.
pub fn joined(op: &Op, inputs: &[Fact], made: &Fact) -> Option<Vec<Fact>> {
    let suits = match op {
        Op::ConvWeightGrad(_) => true,
        Op::MatMul(op) => op.transpose_a && !op.transpose_b && inputs.iter().all(|input| input.rank() == 2),
        _ => false,
    };
    if !suits || !matches!(made.dtype, DType::F32 | DType::F64) || put_by(inputs)? > made.bytes()? {
        return None;
    }
    inputs.iter().map(times).collect()
}

/// Bytes of what is put by of so many items.
pub fn put_by(inputs: &[Fact]) -> Option<u64> {
    let one = |input: &Fact| u64::try_from(aligned(usize::try_from(times(input)?.bytes()?).ok()?)).ok();
    inputs.iter().map(one).try_fold(0u64, |sum, bytes| sum.checked_add(bytes?))
}

/// So many of these, one behind the other along the first axis.
fn times(input: &Fact) -> Option<Fact> {
    let mut shape = input.concrete()?;
    let first = shape.first_mut()?;
    *first = first.checked_mul(ITEMS as usize)?;
    Some(Fact::of(input.dtype, &shape))
}
