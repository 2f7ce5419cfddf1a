//! Actions of others between the steps of a pass, such as the exchange of ZeRO's shards.

use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::exec::executor::Item;
use crate::exec::phase::RunPhase;
use crate::exec::stage_code::StageCode;

pub trait StepHook: Send + Sync {
    /// True if any step of the pass has actions.
    fn has_actions(&self, phase: RunPhase) -> bool;

    /// Called before each step of a pass, given by its number, and again when it `is_done`.
    fn act(
        &self,
        code: &StageCode,
        at: (RunPhase, usize),
        is_done: bool,
        item: &mut Item,
        device: &DeviceContext,
    ) -> Result<(), DeviceError>;
}
