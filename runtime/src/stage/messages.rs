//! The tensors that a stage sends to, and receives from, other stages.

use crate::comm::channel::TensorMessage;
use crate::device::error::DeviceError;
use crate::exec::phase::RunPhase;
use crate::stage::stage_worker::StageWorker;
use compiler::plan::StageId;
use compiler::schedule::Payload;

impl StageWorker<'_> {
    /// The tensors of a micro-batch for another stage.
    pub fn tensors_to_send(
        &mut self,
        item: u32,
        kind: Payload,
        peer_stage: StageId,
    ) -> Result<Vec<TensorMessage>, DeviceError> {
        let code = self.code;
        let (transfers, phase) = match kind {
            Payload::Activation => (&code.sent, RunPhase::Forward),
            Payload::Gradient => (&code.gradients_out, RunPhase::Backward),
        };
        let mut tensors = Vec::new();
        for (i, t) in transfers.iter().enumerate().filter(|(_, t)| t.stage == peer_stage.index()) {
            let Some(state) = self.items.get(&item) else { break };
            let buffer = match (kind, state.gradients_out.get(i)) {
                (Payload::Gradient, Some(Some(buffer))) => buffer.clone(),
                _ => self.executor.shared(phase, state, t.address)?,
            };
            self.executor.device.release(&buffer)?;
            tensors.push(TensorMessage { value: t.value, group: t.group, buffer });
        }
        Ok(tensors)
    }

    /// Marks gradients for a stage as sent, in any order. After the last send the micro-batch is freed.
    pub fn mark_gradients_sent(&mut self, item: u32, peer_stage: StageId) -> Result<(), DeviceError> {
        let Some(state) = self.items.get_mut(&item) else { return Ok(()) };
        for (slot, t) in state.gradients_out.iter_mut().zip(&self.code.gradients_out) {
            if t.stage == peer_stage.index()
                && let Some(buffer) = slot.take()
            {
                self.executor.device.give(buffer);
            }
        }
        self.release(item)
    }

    /// Stores the tensors received from another stage.
    pub fn receive_tensors(
        &mut self,
        peer_stage: StageId,
        kind: Payload,
        item: u32,
        tensors: Vec<TensorMessage>,
    ) -> Result<(), DeviceError> {
        let code = self.code;
        let transfers = match kind {
            Payload::Activation => &code.received,
            Payload::Gradient => &code.gradients_in,
        };
        let counter = self.executor.device.ledger();
        self.item(item)?;
        let Some(state) = self.items.get_mut(&item) else { return Ok(()) };
        let slots = match kind {
            Payload::Activation => &mut state.received,
            Payload::Gradient => &mut state.gradients_in,
        };
        for tensor in tensors {
            let index = transfers
                .iter()
                .position(|t| (t.stage, t.value, t.group) == (peer_stage.index(), tensor.value, tensor.group));
            if let Some(index) = index {
                // On separate devices sender and receiver each hold a copy, so both count one here. The sender reads an
                // activation again.
                counter.reserve_slot(tensor.buffer.len());
                if kind == Payload::Gradient {
                    tensor.buffer.release_slot();
                }
                slots[index] = Some(self.executor.device.receive(tensor.buffer)?);
            }
        }
        Ok(())
    }
}
