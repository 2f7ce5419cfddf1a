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
    /// This worker's rank in `communicator`.
    pub member: usize,
    /// Communicator of all workers of those stages. If the stages step together, each stage's first replica contributes
    /// the sums over replicas; otherwise every worker contributes its own.
    pub communicator: Arc<TiedGradientComm>,
    /// The stages holding it, if they step at different times. The parameter then has its own versions, and a
    /// micro-batch sees the newest one that needs no waiting. Empty if all stages step together.
    pub holders: Vec<StageId>,
    /// Sums the terms in place, if the workers' devices can.
    pub all_reduce: Option<Arc<dyn AllReduce>>,
    /// Buffers of collectives in flight that are summed in place: the sum, then this worker's other terms.
    pub reducing: HashMap<u64, Vec<Arc<Buffer>>>,
}

impl TiedParameter {
    /// Contributes this worker's terms to collective `number`. If they are not `is_counted`, another worker's equal terms
    /// are. `dtype` and `bytes` are those of the sum.
    pub(super) fn contribute(
        &mut self,
        number: u64,
        (own_terms, is_counted): (GradientTerms, bool),
        (dtype, bytes): (DType, usize),
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        own_terms.iter().try_for_each(|(_, term)| device.release(term))?;
        let terms = if is_counted { own_terms.clone() } else { Vec::new() };
        let Some(all_reduce) = &self.all_reduce else {
            self.communicator.contribute(number, self.member, terms);
            return Ok(());
        };
        let mut buffers: Vec<Arc<Buffer>> = own_terms.into_iter().map(|(_, term)| term).collect();
        if buffers.is_empty() {
            buffers.push(device.take(bytes)?);
            device.release(&buffers[0])?;
        }
        // Members learn which terms there are.
        let empty = Arc::new(Buffer::empty());
        let markers = terms.iter().map(|(rank, _)| (*rank, empty.clone())).collect();
        let part = Addends { dtype, terms, sum: buffers[0].clone(), is_whole: true };
        self.reducing.insert(number, buffers);
        all_reduce.contribute(Collective::AllReduce(number), self.member, vec![Some(part)])?;
        self.communicator.contribute(number, self.member, markers);
        Ok(())
    }

    /// The terms of all workers, or their sum. Blocks. Also returns this worker's terms, which it gives back after use.
    pub(super) fn wait(
        &mut self,
        number: u64,
        device: &DeviceContext,
    ) -> Result<(GradientTerms, GradientTerms), PeerLost> {
        let contributions = self.communicator.wait(number)?;
        let Some(buffers) = self.reducing.remove(&number) else {
            return Ok((
                contributions.iter().flatten().cloned().collect(),
                contributions.get(self.member).cloned().unwrap_or_default(),
            ));
        };
        let mut buffers = buffers.into_iter();
        let sum = buffers.next().filter(|_| contributions.iter().any(|terms| !terms.is_empty()));
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
    pub(super) steps: VecDeque<OptimizerStep>,
    /// Later versions restored from a checkpoint (`restored`), and recent ones that a checkpoint may need (`recent`).
    pub(super) restored: BTreeMap<u32, Arc<Buffer>>,
    pub(super) recent: BTreeMap<u32, Arc<Buffer>>,
}
