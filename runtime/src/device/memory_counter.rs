//! Counters add up the memory of buffers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counts the bytes of buffers, independent of the thread that drops them.
///
/// Pooled buffers count in slots by size. A slot stays allocated when its buffer is returned, like the pool's buffers,
/// so a free slot counts like a used one. On separate devices a received message would occupy such a slot too; in one
/// process it is read from the sender's buffer.
#[derive(Default)]
pub struct MemoryCounter {
    pub(super) now: AtomicU64,
    peak: AtomicU64,
    /// Used and allocated slots, by size.
    slots: Mutex<HashMap<usize, Slots>>,
}

#[derive(Clone, Copy, Default)]
struct Slots {
    taken: usize,
    all: usize,
}

impl MemoryCounter {
    /// Maximum bytes at any time.
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    pub fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    pub fn remove(&self, bytes: usize) {
        self.now.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    // No code panics while it holds the lock with inconsistent state.
    fn slots(&self) -> MutexGuard<'_, HashMap<usize, Slots>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Occupies a slot of this size; allocates one if none is free.
    pub fn reserve_slot(&self, bytes: usize) {
        let mut all = self.slots();
        let slots = all.entry(bytes).or_default();
        slots.taken += 1;
        if slots.taken > slots.all {
            slots.all = slots.taken;
            self.add(bytes);
        }
    }

    /// Frees a slot.
    pub fn free_slot(&self, bytes: usize) {
        if let Some(slots) = self.slots().get_mut(&bytes) {
            slots.taken = slots.taken.saturating_sub(1);
        }
    }
}

/// Bytes counted until this is dropped.
pub struct CountedBytes {
    ledger: Arc<MemoryCounter>,
    bytes: usize,
}

impl CountedBytes {
    pub fn new(ledger: &Arc<MemoryCounter>, bytes: usize) -> CountedBytes {
        ledger.add(bytes);
        CountedBytes { ledger: ledger.clone(), bytes }
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        self.ledger.remove(self.bytes);
    }
}
