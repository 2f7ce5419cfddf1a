//! The operands of an optimizer step.

#[derive(Clone, Copy)]
pub struct OptimizerStep {
    pub round: u32,
    /// Number of micro-batches to average over.
    pub count: u32,
    /// Learning-rate scale.
    pub rate: f64,
    /// The version to update.
    pub from: u32,
    /// True if nothing uses version `from` after this step.
    pub in_place: bool,
    /// Factor on the averaged gradients (clipping and loss scale); `None` skips the step.
    pub factor: Option<f64>,
}
