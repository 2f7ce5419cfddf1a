//! Actions of others between the steps of a pass, such as the exchange of ZeRO's shards.

use crate::comm::communicator::CollectiveError;
use crate::device::context::DeviceContext;
use crate::exec::executor::Item;
use crate::exec::phase::RunPhase;
use crate::exec::stage_code::StageCode;

pub trait StepHook: Send + Sync {
    /// True if any step of the pass has actions.
    fn has_actions(&self, phase: RunPhase) -> bool;

    /// Called before step `step` of the pass.
    fn before(
        &self,
        code: &StageCode,
        phase: RunPhase,
        step: usize,
        item: &mut Item,
        device: &DeviceContext,
    ) -> Result<(), CollectiveError>;

    /// Called after step `step` of the pass.
    fn after(
        &self,
        code: &StageCode,
        phase: RunPhase,
        step: usize,
        item: &mut Item,
        device: &DeviceContext,
    ) -> Result<(), CollectiveError>;
}
