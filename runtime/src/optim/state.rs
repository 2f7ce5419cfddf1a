//! The optimizer state of a parameter.

use crate::device::buffer::Buffer;

/// Optimizer state of a parameter.
#[derive(Default)]
pub struct ParameterState {
    pub state: Vec<Buffer>,
    /// PipeMare's moving average of updates.
    pub drift: Option<Buffer>,
    pub updates: u32,
}
