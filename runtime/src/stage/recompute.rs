//! Activation recomputation, and the weights of a backward pass without stashed versions.
//!
//! A recomputed stage frees the activations of all or its first ops after the forward pass. A program instruction
//! computes them again while gradients may still be in transit; without that instruction, the backward pass does. Both
//! use the weights of the backward pass, so both give the same bits.

use crate::device::error::DeviceError;
use crate::exec::executor::{ExecuteError, Item};
use crate::stage::lag::Lag;
use crate::stage::stage_worker::StageWorker;

impl StageWorker<'_> {
    /// Recomputes the activations with the weights of the backward pass, if they were freed.
    pub fn recompute(&mut self, item: u32, version: u32, lag: Lag) -> Result<(), ExecuteError> {
        let Some(mut state) = self.items.remove(&item) else { return Ok(()) };
        self.take_weights(&mut state, version, lag)?;
        self.recompute_activations(&mut state)?;
        self.give_weights(&mut state, lag);
        self.items.insert(item, state);
        Ok(())
    }

    pub(super) fn recompute_activations(&mut self, state: &mut Item) -> Result<(), ExecuteError> {
        if state.recomputed.is_none() { self.executor.recompute(state) } else { Ok(()) }
    }

    /// Sets the weights of the backward pass, unless the forward's weights are stashed.
    pub(super) fn take_weights(&mut self, state: &mut Item, version: u32, lag: Lag) -> Result<(), DeviceError> {
        if lag.is_stashed {
            return Ok(());
        }
        (state.weights, state.version) = (self.versions.get(&version).cloned().unwrap_or_default(), version);
        if self.needs_correction(lag) {
            state.weights = self.updater.correct(&state.weights, lag.updates, &self.executor.device)?;
        }
        Ok(())
    }

    /// Releases those weights again.
    pub(super) fn give_weights(&mut self, state: &mut Item, lag: Lag) {
        if lag.is_stashed {
            return;
        }
        let weights = std::mem::take(&mut state.weights);
        if self.needs_correction(lag) {
            weights.into_iter().for_each(|weight| self.executor.device.give(weight));
        }
    }

    fn needs_correction(&self, lag: Lag) -> bool {
        !lag.is_stashed && lag.updates > 0 && self.updater.has_drift()
    }
}
