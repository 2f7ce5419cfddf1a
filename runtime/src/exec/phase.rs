//! The passes of a micro-batch, and its position in a round of gradient accumulation.

use crate::exec::sequence::Sequence;
use crate::exec::stage_code::StageCode;
use compiler::pass::batched_weight_grad::ITEMS;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunPhase {
    Forward,
    /// The backward pass, or the input-gradient pass if split.
    Backward,
    /// The weight-gradient pass.
    Weight,
}

impl RunPhase {
    pub fn sequence(self, code: &StageCode) -> &Sequence {
        match self {
            RunPhase::Forward => &code.forward,
            RunPhase::Backward => &code.backward,
            RunPhase::Weight => &code.weight,
        }
    }
}

/// Position of a micro-batch among those that accumulate into the same sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundPosition {
    pub round: u32,
    /// Micro-batches of the round before this one, over all replicas.
    pub before: u32,
    /// Micro-batches of the round that this worker has already run backward.
    pub done: u64,
    /// Micro-batches of the round on this worker.
    pub count: u64,
}

impl RoundPosition {
    /// True if its weight gradients are computed in a full batch of [`ITEMS`] micro-batches.
    pub fn is_joined(&self) -> bool {
        self.done < self.count / u64::from(ITEMS) * u64::from(ITEMS)
    }
}
