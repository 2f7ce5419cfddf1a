//! A pool reuses the buffers of a device.

use crate::device::api::Device;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use std::collections::HashMap;
use std::sync::Arc;

/// Reuses buffers of a device, by size. In steady state a worker allocates none.
pub struct Pool {
    device: Arc<dyn Device>,
    free: HashMap<usize, Vec<Arc<Buffer>>>,
    /// Identity of the pool. It takes back only its own buffers; otherwise two pools would exchange and keep buffers
    /// forever. An address is no identity, since it is reused after a free.
    identity: Arc<()>,
    /// Counts the pool's buffers.
    pub counter: Arc<MemoryCounter>,
}

impl Pool {
    pub fn new(device: Arc<dyn Device>, counter: Arc<MemoryCounter>) -> Pool {
        Pool { device, free: HashMap::new(), identity: Arc::default(), counter }
    }

    /// An unshared buffer with arbitrary content. The stream that writes it acquires it first.
    pub fn take(&mut self, bytes: usize) -> Result<Arc<Buffer>, DeviceError> {
        let free = self.free.entry(bytes).or_default();
        // A receiver may still read a returned buffer; it is skipped until released.
        let mut free_index = None;
        for (at, buffer) in free.iter_mut().enumerate() {
            // The last reader since its return has released it.
            if Arc::get_mut(buffer).is_some() {
                buffer.release_slot();
                free_index = free_index.or(Some(at));
            }
        }
        match free_index {
            Some(at) => {
                let buffer = free.swap_remove(at);
                buffer.reclaim_slot();
                Ok(buffer)
            }
            None => {
                let mut buffer = self.device.allocate(bytes)?;
                self.counter.reserve_slot(bytes);
                (buffer.counter, buffer.pool) = (Some(self.counter.clone()), Some(self.identity.clone()));
                Ok(Arc::new(buffer))
            }
        }
    }

    /// True if the buffer comes from this pool.
    pub fn owns(&self, buffer: &Buffer) -> bool {
        let buffer = buffer.whole().map_or(buffer, |whole| whole);
        buffer.pool.as_ref().is_some_and(|pool| Arc::ptr_eq(pool, &self.identity))
    }

    /// Returns a buffer, or the one that it is a part of. Others may still read it or return it too; it is listed once.
    pub fn give(&mut self, mut buffer: Arc<Buffer>) {
        if let Some(whole) = buffer.whole().cloned() {
            buffer = whole;
        }
        if !self.owns(&buffer) {
            return;
        }
        let free = self.free.entry(buffer.len()).or_default();
        if !free.iter().any(|b| Arc::ptr_eq(b, &buffer)) {
            if Arc::strong_count(&buffer) == 1 {
                buffer.release_slot();
            }
            free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::device::cpu;
    use compiler::pass::memory::ALIGNMENT;
    use std::sync::atomic::Ordering;

    #[test]
    fn the_place_of_what_is_lent_is_taken_again() {
        let mut pool = Pool::new(cpu(), Arc::default());
        let buffer = pool.take(100).unwrap();
        let reader = buffer.clone();
        let counted = |pool: &Pool| pool.counter.current.load(Ordering::Relaxed);
        buffer.release_slot();
        buffer.release_slot();
        pool.give(buffer);
        // A reader remains: a second buffer takes its slot, and a third needs a new slot.
        let second = pool.take(100).unwrap();
        assert_eq!(counted(&pool), 100);
        let third = pool.take(100).unwrap();
        assert_eq!(counted(&pool), 200);
        [second, third].into_iter().for_each(|buffer| pool.give(buffer));
        drop(reader);
        pool.counter.reserve_slot(100);
        let reused = pool.take(100).unwrap();
        assert_eq!((counted(&pool), pool.counter.peak()), (200, 200));
        pool.counter.free_slot(100);
        drop(reused);
        assert_eq!((counted(&pool), pool.counter.peak()), (200, 200));
    }

    #[test]
    fn a_pool_lists_what_it_made_once_and_nothing_else() {
        let mut pool = Pool::new(cpu(), Arc::default());
        let buffer = pool.take(100).unwrap();
        assert_eq!(buffer.region().address() as usize % ALIGNMENT, 0);
        let reader = buffer.clone();
        pool.give(buffer.clone());
        pool.give(buffer);
        pool.give(Arc::new(Buffer::host(100)));
        // Still in use: a new one is allocated.
        assert!(!Arc::ptr_eq(&pool.take(100).unwrap(), &reader));
        let address = reader.region().address();
        drop(reader);
        assert_eq!(pool.take(100).unwrap().region().address(), address);
        // A buffer at the address of a freed one belongs to somebody else.
        drop(pool.take(300).unwrap());
        let others: Vec<Arc<Buffer>> = (0..100).map(|_| Arc::new(Buffer::host(300))).collect();
        others.into_iter().for_each(|other| pool.give(other));
        assert!(pool.free.get(&300).is_none_or(Vec::is_empty));
    }
}
