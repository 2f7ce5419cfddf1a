//! Downloads under way.

use super::gpu::Gpu;
use super::queue::RawEvent;
use super::staging::{PinnedMemory, StagingBuffers};
use crate::device::download::PendingDownload;
use crate::device::error::DeviceError;
use std::sync::{Arc, Mutex, PoisonError};

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
        self.gpu.bind().map_err(|error| self.gpu.failed(error))?;
        Ok(self.event.has_occurred())
    }

    fn bytes(self: Box<Self>) -> Result<Vec<u8>, DeviceError> {
        let CudaDownload { gpu, memory, bytes, event, staging } = *self;
        let waited = gpu.bind().and_then(|()| if event.has_occurred() { Ok(()) } else { event.synchronize() });
        waited.map_err(|error| gpu.failed(error))?;
        let copy = memory[..bytes].to_vec();
        staging.lock().unwrap_or_else(PoisonError::into_inner).give_after(memory, event);
        Ok(copy)
    }
}
