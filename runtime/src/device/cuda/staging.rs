//! Pinned host memory for copies between host and GPU.
//!
//! A copy from pinned memory is asynchronous, so the memory is reused only after the copy: an event marks its end.

use super::queue::{Queue, RawEvent};
use cudarc::driver::{DriverError, result, sys};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;

/// Buffers in flight for which the host does not wait: this many that are large enough, or any with this many bytes
/// together.
const MOST: usize = 16;
const MOST_BYTES: usize = 16 << 20;

/// The smallest buffer in bytes.
const LEAST: usize = 256;

/// Page-locked host memory.
pub struct PinnedMemory {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its bytes, like a boxed slice.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// Zeroed memory. The calling thread has bound a context.
    pub fn new(bytes: usize) -> Result<PinnedMemory, DriverError> {
        let size = bytes.max(1);
        // SAFETY: freed once, when dropped.
        let start = unsafe { result::malloc_host(size, sys::CU_MEMHOSTALLOC_PORTABLE) }?.cast::<u8>();
        let start = NonNull::new(start).ok_or(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY))?;
        // SAFETY: the driver has allocated these bytes.
        unsafe { start.as_ptr().write_bytes(0, size) };
        Ok(PinnedMemory { start, bytes })
    }
}

impl Deref for PinnedMemory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated and initialised in `new`.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for PinnedMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` and freed only here. The driver waits for copies of it.
        let _ = unsafe { result::free_host(self.start.as_ptr().cast()) };
    }
}

/// The pinned buffers of a stream, oldest use first.
#[derive(Default)]
pub struct StagingBuffers {
    buffers: Vec<(PinnedMemory, RawEvent)>,
}

impl StagingBuffers {
    /// A buffer of at least this size that no copy uses: the smallest, or else the first that a copy leaves.
    pub fn take(&mut self, bytes: usize) -> Result<PinnedMemory, DriverError> {
        let fits = |at: &usize| self.buffers[*at].0.len() >= bytes;
        let mut fitting: Vec<usize> = (0..self.buffers.len()).filter(fits).collect();
        let oldest = fitting.first().copied();
        fitting.sort_by_key(|at| self.buffers[*at].0.len());
        if let Some(at) = fitting.iter().copied().find(|at| self.buffers[*at].1.has_occurred()) {
            return Ok(self.buffers.remove(at).0);
        }
        let size = bytes.next_power_of_two().max(LEAST);
        let total_bytes: usize = self.buffers.iter().map(|(memory, _)| memory.len()).sum();
        match oldest.filter(|_| fitting.len() >= MOST && total_bytes + size > MOST_BYTES) {
            None => PinnedMemory::new(size),
            Some(oldest) => {
                let (memory, event) = self.buffers.remove(oldest);
                event.synchronize()?;
                Ok(memory)
            }
        }
    }

    /// Keeps a buffer for later copies, after the work that is queued in a stream.
    pub fn give(&mut self, memory: PinnedMemory, queue: &Queue) -> Result<(), DriverError> {
        self.give_after(memory, RawEvent::record(queue)?);
        Ok(())
    }

    /// Keeps a buffer for later copies, after an event.
    pub fn give_after(&mut self, memory: PinnedMemory, event: RawEvent) {
        self.buffers.push((memory, event));
    }
}
