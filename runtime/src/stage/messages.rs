//! The tensors that a stage sends to, and receives from, other stages.

use crate::comm::channel::TensorMessage;
use crate::device::error::DeviceError;
use crate::exec::phase::RunPhase;
use crate::stage::stage_worker::StageWorker;
use compiler::plan::StageId;
use compiler::schedule::Payload;

impl StageWorker<'_> {
    /// The tensors of a micro-batch for another stage.
    pub fn parcels(&mut self, item: u32, kind: Payload, other: StageId) -> Result<Vec<TensorMessage>, DeviceError> {
        let code = self.code;
        let (transfers, run) = match kind {
            Payload::Activation => (&code.sent, RunPhase::Forward),
            Payload::Gradient => (&code.gradients_out, RunPhase::Backward),
        };
        let mut parcels = Vec::new();
        for (i, t) in transfers.iter().enumerate().filter(|(_, t)| t.stage == other.index()) {
            let Some(state) = self.items.get(&item) else { break };
            let buffer = match (kind, state.gradients_out.get(i)) {
                (Payload::Gradient, Some(Some(buffer))) => buffer.clone(),
                _ => self.executor.shared(run, state, t.place)?,
            };
            self.executor.device.release(&buffer)?;
            parcels.push(TensorMessage { value: t.value, group: t.group, buffer });
        }
        Ok(parcels)
    }

    /// Marks gradients for a stage as sent, in any order. After the last send the micro-batch is freed.
    pub fn sent_gradients(&mut self, item: u32, other: StageId) -> Result<(), DeviceError> {
        let Some(state) = self.items.get_mut(&item) else { return Ok(()) };
        for (slot, t) in state.gradients_out.iter_mut().zip(&self.code.gradients_out) {
            if t.stage == other.index()
                && let Some(buffer) = slot.take()
            {
                self.executor.device.give(buffer);
            }
        }
        self.release(item)
    }

    /// Stores the tensors received from another stage.
    pub fn unpack(
        &mut self,
        other: StageId,
        kind: Payload,
        item: u32,
        parcels: Vec<TensorMessage>,
    ) -> Result<(), DeviceError> {
        let code = self.code;
        let transfers = match kind {
            Payload::Activation => &code.received,
            Payload::Gradient => &code.gradients_in,
        };
        let ledger = self.executor.device.ledger();
        self.item(item)?;
        let Some(state) = self.items.get_mut(&item) else { return Ok(()) };
        let slots = match kind {
            Payload::Activation => &mut state.received,
            Payload::Gradient => &mut state.gradients_in,
        };
        for parcel in parcels {
            let at = transfers
                .iter()
                .position(|t| (t.stage, t.value, t.group) == (other.index(), parcel.value, parcel.group));
            if let Some(at) = at {
                // On separate devices sender and receiver each hold a copy, so both count one here. The sender reads an
                // activation again.
                ledger.reserve_slot(parcel.buffer.len());
                if kind == Payload::Gradient {
                    parcel.buffer.release_slot();
                }
                slots[at] = Some(self.executor.device.receive(parcel.buffer)?);
            }
        }
        Ok(())
    }
}
