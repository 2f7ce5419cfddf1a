//! The contents of a checkpoint besides weights and running statistics.

use crate::checkpoint::encode::Flight;
use compiler::tensor::Tensor;
use std::collections::BTreeMap;

/// A checkpoint to resume from, without its weights and states.
#[derive(Debug, Default)]
pub struct ResumePoint {
    /// Finished minibatches.
    pub minibatches: u32,
    /// Loss-scaling state: scale and number of good steps.
    pub scale: Option<(f64, u32)>,
    /// Optimizer state, by `parameter/kind`.
    pub optimizer: BTreeMap<String, Tensor>,
    /// In-flight state by stage and replica; `None` under another plan.
    pub flight: Option<BTreeMap<(u32, u32), Flight>>,
}
