//! Streams and events of the driver, as owned handles.

use super::gpu::Function;
use cudarc::driver::{DriverError, result, sys};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A CUDA stream, destroyed when it is dropped; queued work continues.
pub struct Queue {
    stream: sys::CUstream,
    number: u64,
}

static NEXT: AtomicU64 = AtomicU64::new(0);

// SAFETY: a stream may be used from any thread that has bound its context.
unsafe impl Send for Queue {}
// SAFETY: the driver locks its streams.
unsafe impl Sync for Queue {}

impl Queue {
    /// A stream that does not wait for the default stream. The calling thread has bound a context.
    pub fn new() -> Result<Queue, DriverError> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        Ok(Queue { stream, number: NEXT.fetch_add(1, Ordering::Relaxed) })
    }

    /// Queues a kernel with these parameters of 8 bytes. The calling thread has bound the stream's context.
    ///
    /// # Safety
    ///
    /// The kernel takes as many parameters, and addresses among them have the sizes that it was made for.
    pub(super) unsafe fn launch(
        &self,
        function: Function,
        (blocks, threads): (u32, u32),
        words: &mut [u64],
    ) -> Result<(), DriverError> {
        let mut parameters: Vec<*mut c_void> = words.iter_mut().map(|word| (word as *mut u64).cast()).collect();
        // SAFETY: the caller's promise.
        unsafe { result::launch_kernel(function.0, (blocks, 1, 1), (threads, 1, 1), 0, self.stream, &mut parameters) }
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.stream
    }

    /// Its number, which no other stream ever has.
    pub fn number(&self) -> u64 {
        self.number
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed only here.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// A CUDA event.
pub struct RawEvent(sys::CUevent);

// SAFETY: the driver locks its events.
unsafe impl Send for RawEvent {}
// SAFETY: as above.
unsafe impl Sync for RawEvent {}

impl RawEvent {
    /// An event after the work that is queued in a stream. The calling thread has bound its context.
    pub fn record(queue: &Queue) -> Result<RawEvent, DriverError> {
        RawEvent::with(queue, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event whose time is measured.
    pub fn record_timed(queue: &Queue) -> Result<RawEvent, DriverError> {
        RawEvent::with(queue, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// The time between two timed events, which have occurred. Its resolution is about 0.5 µs.
    pub fn since(&self, earlier: &RawEvent) -> Result<Duration, DriverError> {
        // SAFETY: both events are live.
        let milliseconds = unsafe { result::event::elapsed(earlier.0, self.0) }?;
        Ok(Duration::from_secs_f64((f64::from(milliseconds) / 1e3).max(0.0)))
    }

    fn with(queue: &Queue, flags: sys::CUevent_flags) -> Result<RawEvent, DriverError> {
        let event = RawEvent(result::event::create(flags)?);
        // SAFETY: event and stream are live and belong to the bound context.
        unsafe { result::event::record(event.0, queue.raw()) }?;
        Ok(event)
    }

    pub fn has_occurred(&self) -> bool {
        // SAFETY: the event is live.
        unsafe { result::event::query(self.0) }.is_ok()
    }

    pub fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the event is live.
        unsafe { result::event::synchronize(self.0) }
    }

    /// Delays later work of a stream until the event has occurred.
    pub fn delay(&self, queue: &Queue) -> Result<(), DriverError> {
        // SAFETY: event and stream are live; they may belong to different GPUs.
        unsafe { result::stream::wait_event(queue.raw(), self.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT) }
    }
}

impl Drop for RawEvent {
    fn drop(&mut self) {
        // SAFETY: created in `record` and destroyed only here; the driver keeps what streams still wait for.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
