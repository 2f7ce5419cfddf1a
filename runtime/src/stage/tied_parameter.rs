//! Several stages share a tied parameter and exchange its gradients.

use crate::comm::communicator::Communicator;
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::stage::gradients::GradientTerms;
use crate::stage::optimizer_step::OptimizerStep;
use compiler::plan::StageId;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// A tied parameter of this stage.
pub struct TiedParameter {
    /// Index into this stage's parameters.
    pub parameter: usize,
    /// This worker's rank in `communicator`.
    pub member: usize,
    /// Communicator of all workers of those stages. If the stages step together, each stage's first replica contributes
    /// the sums over replicas; otherwise every worker contributes its own.
    pub communicator: Arc<Communicator<GradientTerms>>,
    /// The stages holding it, if they step at different times. The parameter then has its own versions, and a
    /// micro-batch sees the newest one that needs no waiting. Empty if all stages step together.
    pub holders: Vec<StageId>,
}

impl TiedParameter {
    /// Contributes this worker's terms to collective `number`. If they are not `is_counted`, another worker's equal terms
    /// are.
    pub(super) fn contribute(
        &self,
        number: u64,
        own_terms: GradientTerms,
        is_counted: bool,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        own_terms.iter().try_for_each(|(_, term)| device.release(term))?;
        let (counted, others): (GradientTerms, GradientTerms) = own_terms.into_iter().partition(|_| is_counted);
        others.into_iter().for_each(|(_, term)| device.give(term));
        self.communicator.contribute(number, self.member, counted);
        Ok(())
    }

    /// The terms of all workers. Blocks. Also returns this worker's terms, which it gives back after use.
    pub(super) fn wait(&self, number: u64) -> Result<(GradientTerms, GradientTerms), DeviceError> {
        let contributions = self.communicator.wait(number)?;
        let own = contributions.get(self.member).cloned().unwrap_or_default();
        Ok((contributions.iter().flatten().cloned().collect(), own))
    }
}

pub(super) struct LateTiedWeight {
    /// Index into the stage's tied parameters; `parameter` indexes all its parameters.
    pub(super) tied: usize,
    pub(super) parameter: usize,
    pub(super) weight: Arc<Buffer>,
    pub(super) version: u32,
    /// Steps still to run, oldest first.
    pub(super) steps: VecDeque<OptimizerStep>,
    /// Later versions restored from a checkpoint (`restored`), and recent ones that a checkpoint may need (`recent`).
    pub(super) restored: BTreeMap<u32, Arc<Buffer>>,
    pub(super) recent: BTreeMap<u32, Arc<Buffer>>,
}
