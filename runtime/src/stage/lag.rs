//! The lag of a micro-batch says how old its weights are.

use crate::exec::phase::RoundPosition;

/// Staleness of a micro-batch: its distance to the update that applies its gradients.
#[derive(Clone, Copy)]
pub struct Lag {
    /// Updates between the forward's weight version and that update.
    pub updates: u32,
    /// Learning-rate scale at the micro-batch's minibatch.
    pub rate: f64,
    /// True if the backward uses the stashed weights of the forward.
    pub is_stashed: bool,
    pub position: RoundPosition,
}
