//! Counters add up the memory of buffers.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the bytes of buffers, independent of the thread that drops them.
///
/// Pooled buffers count in slots by size. A slot stays allocated when its buffer is returned, like the pool's buffers,
/// so a free slot counts like a used one. On separate devices a received message would occupy such a slot too; in one
/// process it is read from the sender's buffer.
#[derive(Default)]
pub struct MemoryCounter {
    pub(super) current: AtomicU64,
    peak: AtomicU64,
    /// Used and allocated slots, by size.
    slots: Mutex<HashMap<usize, Slots>>,
}

#[derive(Clone, Copy, Default)]
struct Slots {
    used: usize,
    allocated: usize,
}

impl MemoryCounter {
    /// Maximum bytes at any time.
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    pub fn add(&self, bytes: usize) {
        let current = self.current.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.peak.fetch_max(current, Ordering::Relaxed);
    }

    pub fn remove(&self, bytes: usize) {
        self.current.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    /// Occupies a slot of this size; allocates one if none is free.
    pub fn reserve_slot(&self, bytes: usize) {
        let mut slots = self.slots.lock();
        let slot = slots.entry(bytes).or_default();
        slot.used += 1;
        if slot.used > slot.allocated {
            slot.allocated = slot.used;
            self.add(bytes);
        }
    }

    /// Frees a slot.
    pub fn free_slot(&self, bytes: usize) {
        if let Some(slot) = self.slots.lock().get_mut(&bytes) {
            slot.used = slot.used.saturating_sub(1);
        }
    }
}

/// Bytes counted until this is dropped.
pub struct CountedBytes {
    counter: Arc<MemoryCounter>,
    bytes: usize,
}

impl CountedBytes {
    pub fn new(counter: &Arc<MemoryCounter>, bytes: usize) -> CountedBytes {
        counter.add(bytes);
        CountedBytes { counter: counter.clone(), bytes }
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.counter.remove(self.bytes);
    }
}
