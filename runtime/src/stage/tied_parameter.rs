//! Several stages share a tied parameter and exchange its gradients.

use crate::comm::communicator::Communicator;
use crate::device::buffer::Buffer;
use crate::stage::gradients::GradientTerms;
use crate::stage::optimizer_step::OptimizerStep;
use compiler::plan::StageId;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Exchanges gradient terms of a tied parameter among its stages.
pub type TiedGradientComm = Communicator<GradientTerms>;

/// A tied parameter of this stage.
pub struct TiedParameter {
    /// Index into this stage's parameters.
    pub parameter: usize,
    /// This worker's rank in `place`.
    pub member: usize,
    /// Communicator of all workers of those stages. If the stages step together, each stage's first replica contributes
    /// the sums over replicas; otherwise every worker contributes its own.
    pub place: Arc<TiedGradientComm>,
    /// The stages holding it, if they step at different times. The parameter then has its own versions, and a
    /// micro-batch sees the newest one that needs no waiting. Empty if all stages step together.
    pub holders: Vec<StageId>,
}

pub(super) struct LateTiedWeight {
    /// Index into the stage's tied parameters; `parameter` indexes all its parameters.
    pub(super) tied: usize,
    pub(super) parameter: usize,
    pub(super) weight: Arc<Buffer>,
    pub(super) version: u32,
    /// Steps still to run, oldest first.
    pub(super) waiting: VecDeque<OptimizerStep>,
    /// Later versions restored from a checkpoint (`given`), and recent ones that a checkpoint may need (`kept`).
    pub(super) given: BTreeMap<u32, Arc<Buffer>>,
    pub(super) kept: BTreeMap<u32, Arc<Buffer>>,
}
