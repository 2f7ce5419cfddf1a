//! A worker's access to its device: a stream, and pools of memory.

use crate::device::api::{Device, Stream};
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use crate::device::pool::Pool;
use crate::device::region::{Region, RegionMut};
use std::cell::RefCell;
use std::sync::Arc;

/// The device of a worker as one thread uses it.
pub struct DeviceContext {
    pub device: Arc<dyn Device>,
    pub stream: Box<dyn Stream>,
    pool: RefCell<Pool>,
    /// Buffers that this pool does not count: operands of collectives, and copies of buffers of other devices.
    staging: RefCell<Pool>,
    /// Contexts on other devices.
    other_contexts: RefCell<Vec<DeviceContext>>,
}

impl DeviceContext {
    /// A context with its own stream. `counter` counts the memory of its pool.
    pub fn new(device: Arc<dyn Device>, counter: Arc<MemoryCounter>) -> Result<DeviceContext, DeviceError> {
        let (pool, staging) = (Pool::new(device.clone(), counter), Pool::new(device.clone(), Arc::default()));
        let stream = device.stream()?;
        let other_contexts = RefCell::default();
        Ok(DeviceContext { device, stream, pool: RefCell::new(pool), staging: RefCell::new(staging), other_contexts })
    }

    /// Counts the pool's buffers.
    pub fn ledger(&self) -> Arc<MemoryCounter> {
        self.pool.borrow().counter.clone()
    }

    /// An unshared buffer of the pool, with arbitrary content.
    pub fn take(&self, bytes: usize) -> Result<Arc<Buffer>, DeviceError> {
        self.take_from(&self.pool, bytes)
    }

    fn take_from(&self, pool: &RefCell<Pool>, bytes: usize) -> Result<Arc<Buffer>, DeviceError> {
        let buffer = pool.borrow_mut().take(bytes)?;
        self.stream.acquire(&buffer)?;
        Ok(buffer)
    }

    /// A buffer that is freed, not pooled, after use.
    pub fn once(&self, bytes: usize) -> Result<Arc<Buffer>, DeviceError> {
        let mut buffer = self.stream.allocate(bytes)?;
        buffer.count_in(&self.pool.borrow().counter);
        Ok(Arc::new(buffer))
    }

    /// Returns a buffer to the pool that it comes from. Others may still read it or return it too.
    pub fn give(&self, buffer: Arc<Buffer>) {
        let pool = if self.staging.borrow().owns(&buffer) { &self.staging } else { &self.pool };
        pool.borrow_mut().give(buffer);
    }

    /// Returns a buffer after this stream's reads. Other workers may hold it, or its pool may be another worker's.
    pub fn give_shared(&self, buffer: Arc<Buffer>) -> Result<(), DeviceError> {
        self.stream.release(&buffer)?;
        self.give(buffer);
        Ok(())
    }

    /// Returns a received buffer after this stream's reads: its copy to the pool, or itself to its owner.
    pub fn give_foreign(&self, buffer: Arc<Buffer>) -> Result<(), DeviceError> {
        self.stream.release(&buffer)?;
        self.staging.borrow_mut().give(buffer);
        Ok(())
    }

    /// An unshared buffer for an operand of a collective, with arbitrary content.
    pub fn take_staging(&self, bytes: usize) -> Result<Arc<Buffer>, DeviceError> {
        self.take_from(&self.staging, bytes)
    }

    /// A copy in new memory.
    pub fn copy_of(&self, from: Region<'_>) -> Result<Buffer, DeviceError> {
        let mut copy = self.stream.allocate(from.len())?;
        self.stream.copy(from, copy.region_mut())?;
        Ok(copy)
    }

    /// The context of the calling thread on a device: this one, or one for work on another device, made on first use.
    pub fn on<T>(
        &self,
        device: &Arc<dyn Device>,
        work: impl FnOnce(&DeviceContext) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        if Arc::ptr_eq(device, &self.device) {
            return work(self);
        }
        let mut contexts = self.other_contexts.borrow_mut();
        let at = match contexts.iter().position(|other| Arc::ptr_eq(device, &other.device)) {
            Some(at) => at,
            None => {
                contexts.push(DeviceContext::new(device.clone(), Arc::default())?);
                contexts.len() - 1
            }
        };
        work(&contexts[at])
    }

    /// A copy of memory of this context for another context of the same thread, freed after use.
    pub fn send_to(&self, target: &DeviceContext, from: Region<'_>) -> Result<Buffer, DeviceError> {
        let mut copy = target.stream.allocate(from.len())?;
        if !self.device.can_copy(&copy) {
            let bytes = self.stream.begin_download(from)?.bytes()?;
            target.stream.upload(&bytes, copy.region_mut())?;
            return Ok(copy);
        }
        target.stream.release(&copy)?;
        self.stream.acquire(&copy)?;
        self.stream.copy(from, copy.region_mut())?;
        self.stream.release(&copy)?;
        target.stream.acquire(&copy)?;
        Ok(copy)
    }

    /// Copies a buffer of any device, through the host if need be.
    pub fn copy_from(&self, buffer: &Buffer, to: RegionMut<'_>) -> Result<(), DeviceError> {
        if !self.device.can_copy(buffer) {
            return self.stream.upload(&buffer.download()?, to);
        }
        self.stream.acquire(buffer)?;
        self.stream.copy(buffer.region(), to)?;
        self.stream.release(buffer)
    }

    /// Hands a buffer over to other threads.
    pub fn release(&self, buffer: &Buffer) -> Result<(), DeviceError> {
        self.stream.release(buffer)
    }

    /// The memory of a buffer that nobody else holds any more, after the reads of its earlier holders. `None` if it is
    /// shared.
    pub fn try_exclusive<'b>(&self, buffer: &'b mut Arc<Buffer>) -> Result<Option<RegionMut<'b>>, DeviceError> {
        let Some(exclusive) = Arc::get_mut(buffer) else { return Ok(None) };
        self.stream.acquire(exclusive)?;
        Ok(Some(exclusive.region_mut()))
    }

    /// Takes a buffer over from another thread: itself if the device can read it, else a copy on the device, through the
    /// host if need be. [`DeviceContext::give_foreign`] returns it.
    pub fn receive(&self, buffer: Arc<Buffer>) -> Result<Arc<Buffer>, DeviceError> {
        if self.device.can_access(&buffer) {
            self.stream.acquire(&buffer)?;
            return Ok(buffer);
        }
        let mut copy = self.take_staging(buffer.len())?;
        self.copy_from(&buffer, Buffer::exclusive(&mut copy))?;
        Ok(copy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::device::cpu;
    use std::sync::atomic::Ordering;

    #[test]
    fn what_is_used_once_is_counted_until_it_is_dropped() {
        let counter = Arc::<MemoryCounter>::default();
        let context = DeviceContext::new(cpu(), counter.clone()).unwrap();
        let counted = || counter.current.load(Ordering::Relaxed);
        let pooled = context.take(200).unwrap();
        let once = context.once(50).unwrap();
        assert_eq!(counted(), 250);
        drop(once);
        assert_eq!((counted(), counter.peak()), (200, 250));
        context.give(pooled);
    }
}
