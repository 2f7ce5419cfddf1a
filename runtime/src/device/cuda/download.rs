//! Downloads under way.

use super::gpu::Gpu;
use super::queue::RawEvent;
use super::staging::{PinnedMemory, StagingBuffers};
use crate::device::download::PendingDownload;
use crate::device::error::DeviceError;
use parking_lot::Mutex;
use std::sync::Arc;

/// A copy to pinned memory, which returns to its stream.
pub struct CudaDownload {
    pub(super) gpu: Arc<Gpu>,
    pub(super) memory: PinnedMemory,
    pub(super) bytes: usize,
    pub(super) event: RawEvent,
    pub(super) staging: Arc<Mutex<StagingBuffers>>,
}

impl PendingDownload for CudaDownload {
    fn is_done(&self) -> Result<bool, DeviceError> {
        self.gpu.bind().map_err(|error| self.gpu.device_error(error))?;
        Ok(self.event.has_occurred())
    }

    fn wait(&self) -> Result<(), DeviceError> {
        let wait = || if self.event.has_occurred() { Ok(()) } else { self.event.synchronize() };
        self.gpu.bind().and_then(|()| wait()).map_err(|error| self.gpu.device_error(error))
    }

    fn bytes(self: Box<Self>) -> Result<Vec<u8>, DeviceError> {
        self.wait()?;
        let CudaDownload { memory, bytes, event, staging, .. } = *self;
        let copy = memory[..bytes].to_vec();
        staging.lock().give_after(memory, event);
        Ok(copy)
    }
}
