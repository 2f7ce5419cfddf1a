//! Several stages share a tied parameter and exchange its gradients.

use crate::comm::all_reduce::{Addends, AllReduce, Collective};
use crate::comm::communicator::{Communicator, PeerLost};
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::stage::gradients::GradientTerms;
use crate::stage::optimizer_step::OptimizerStep;
use compiler::plan::StageId;
use compiler::tensor::DType;
use std::collections::{BTreeMap, HashMap, VecDeque};
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
    /// Sums the terms in place, if the workers' devices can.
    pub all_reduce: Option<Arc<dyn AllReduce>>,
    /// Buffers of collectives in flight that are summed in place: the sum, then this worker's other terms.
    pub reducing: HashMap<u64, Vec<Arc<Buffer>>>,
}

impl TiedParameter {
    /// Contributes this worker's terms to collective `number`. If they are not `counted`, another worker's equal terms
    /// are. `dtype` and `bytes` are those of the sum.
    pub(super) fn bring(
        &mut self,
        number: u64,
        (own, counted): (GradientTerms, bool),
        (dtype, bytes): (DType, usize),
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        own.iter().try_for_each(|(_, term)| device.release(term))?;
        let terms = if counted { own.clone() } else { Vec::new() };
        let Some(all_reduce) = &self.all_reduce else {
            self.place.bring(number, self.member, terms);
            return Ok(());
        };
        let mut buffers: Vec<Arc<Buffer>> = own.into_iter().map(|(_, term)| term).collect();
        if buffers.is_empty() {
            buffers.push(device.take(bytes)?);
            device.release(&buffers[0])?;
        }
        // Members learn which terms there are.
        let elsewhere = Arc::new(Buffer::empty());
        let brought = terms.iter().map(|(rank, _)| (*rank, elsewhere.clone())).collect();
        let part = Addends { dtype, terms, sum: buffers[0].clone(), is_whole: true };
        self.reducing.insert(number, buffers);
        all_reduce.contribute(Collective::AllReduce(number), self.member, vec![Some(part)])?;
        self.place.bring(number, self.member, brought);
        Ok(())
    }

    /// The terms of all workers, or their sum. Blocks. Also returns this worker's terms, which it gives back after use.
    pub(super) fn meet(
        &mut self,
        number: u64,
        device: &DeviceContext,
    ) -> Result<(GradientTerms, GradientTerms), PeerLost> {
        let all = self.place.meet(number)?;
        let Some(buffers) = self.reducing.remove(&number) else {
            return Ok((all.iter().flatten().cloned().collect(), all.get(self.member).cloned().unwrap_or_default()));
        };
        let mut buffers = buffers.into_iter();
        let sum = buffers.next().filter(|_| all.iter().any(|terms| !terms.is_empty()));
        buffers.for_each(|term| device.give(term));
        Ok((sum.into_iter().map(|sum| (0, sum)).collect(), Vec::new()))
    }
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
