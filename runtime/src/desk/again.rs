//! Running a stage's forward again for a backward, and the weights that a backward has where none are stashed.
//!
//! A stage that is recomputed lets go of what its forward made as soon as that is over. It is made again by an instruction of the
//! program, while gradients may still be on their way, or by the backward itself where the program says nothing. Both have the
//! weights of the backward, so that the two give the same bits.

use super::{Desk, Lag};
use crate::execute::{ExecuteError, Item};

impl Desk<'_> {
    /// Runs the item's forward again with the weights of its backward, where what that reads was let go.
    pub fn recompute(&mut self, item: u32, version: u32, lag: Lag) -> Result<(), ExecuteError> {
        let Some(mut state) = self.items.remove(&item) else { return Ok(()) };
        self.take_weights(&mut state, version, lag);
        self.again(&mut state)?;
        self.give_weights(&mut state, lag);
        self.items.insert(item, state);
        Ok(())
    }

    pub(super) fn again(&mut self, state: &mut Item) -> Result<(), ExecuteError> {
        if state.kept.is_none() { self.executor.again(state) } else { Ok(()) }
    }

    /// Gives the item the weights of its backward, where they are not those that it holds since its forward.
    pub(super) fn take_weights(&mut self, state: &mut Item, version: u32, lag: Lag) {
        if lag.is_stashed {
            return;
        }
        (state.weights, state.version) = (self.versions.get(&version).cloned().unwrap_or_default(), version);
        if self.sets_back(lag) {
            state.weights = self.stepper.back(&state.weights, lag.updates, &mut self.executor.pool);
        }
    }

    /// Takes them away again.
    pub(super) fn give_weights(&mut self, state: &mut Item, lag: Lag) {
        if lag.is_stashed {
            return;
        }
        let weights = std::mem::take(&mut state.weights);
        if self.sets_back(lag) {
            weights.into_iter().for_each(|weight| self.executor.pool.give(weight));
        }
    }

    fn sets_back(&self, lag: Lag) -> bool {
        !lag.is_stashed && lag.updates > 0 && self.stepper.drifts()
    }
}
