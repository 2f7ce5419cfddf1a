//! Events and timestamps of a GPU.

use super::gpu::Gpu;
use super::queue::RawEvent;
use crate::device::error::DeviceError;
use crate::device::event::{DeviceEvent, DeviceTimestamp};
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

/// An event of a GPU.
pub struct CudaEvent {
    pub(super) gpu: Arc<Gpu>,
    /// Number of its stream.
    pub(super) stream: u64,
    pub(super) event: RawEvent,
}

impl DeviceEvent for CudaEvent {
    fn stream(&self) -> u64 {
        self.stream
    }

    fn has_occurred(&self) -> bool {
        self.gpu.bind().is_ok() && self.event.has_occurred()
    }

    fn synchronize(&self) -> Result<(), DeviceError> {
        let status = self.gpu.bind().and_then(|()| self.event.synchronize());
        status.map_err(|error| self.gpu.device_error(error))
    }
}

/// A timed event of a GPU.
pub struct CudaTimestamp {
    pub(super) gpu: Arc<Gpu>,
    pub(super) event: RawEvent,
}

impl DeviceTimestamp for CudaTimestamp {
    fn since(&self, earlier: &dyn DeviceTimestamp) -> Result<Option<Duration>, DeviceError> {
        let earlier = (earlier as &dyn Any).downcast_ref::<CudaTimestamp>();
        let is_same_gpu = |earlier: &&CudaTimestamp| earlier.gpu.info().ordinal == self.gpu.info().ordinal;
        let Some(earlier) = earlier.filter(is_same_gpu) else { return Ok(None) };
        let time = || {
            self.gpu.bind()?;
            self.event.synchronize()?;
            self.event.since(&earlier.event)
        };
        time().map(Some).map_err(|error| self.gpu.device_error(error))
    }
}
