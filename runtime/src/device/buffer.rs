//! Byte buffers aligned for vector kernels, and a pool that reuses them.

use compiler::pass::memory::ALIGNMENT;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Page sizes. Buffers of at least a large page use huge pages if available: TLB misses on small pages take as long as
/// the reads of some kernels. Buffers do not start on a page boundary, because equal low address bits would cause cache
/// conflicts.
const LARGE_PAGE: usize = 2 << 20;
const SMALL_PAGE: usize = 4096;

/// Bytes aligned to [`ALIGNMENT`].
pub struct Buffer {
    start: NonNull<u8>,
    bytes: usize,
    ledger: Option<Arc<MemoryCounter>>,
    lent: AtomicBool,
    pool: Option<Arc<()>>,
}

/// Counts the bytes of buffers, independent of the thread that drops them.
///
/// Pooled buffers count in slots by size. A slot stays allocated when its buffer is returned, like the pool's buffers,
/// so a free slot counts like a used one. On separate devices a received message would occupy such a slot too; in one
/// process it is read from the sender's buffer.
#[derive(Default)]
pub struct MemoryCounter {
    now: AtomicU64,
    peak: AtomicU64,
    /// Used and allocated slots, by size.
    places: Mutex<HashMap<usize, Places>>,
}

#[derive(Clone, Copy, Default)]
struct Places {
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
    fn places(&self) -> MutexGuard<'_, HashMap<usize, Places>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Occupies a slot of this size; allocates one if none is free.
    pub fn take_place(&self, bytes: usize) {
        let mut all = self.places();
        let places = all.entry(bytes).or_default();
        places.taken += 1;
        if places.taken > places.all {
            places.all = places.taken;
            self.add(bytes);
        }
    }

    /// Frees a slot.
    pub fn leave_place(&self, bytes: usize) {
        if let Some(places) = self.places().get_mut(&bytes) {
            places.taken = places.taken.saturating_sub(1);
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

// SAFETY: a buffer owns its bytes, like a boxed slice.
unsafe impl Send for Buffer {}
// SAFETY: shared access is only through `&[u8]`.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A zero-filled buffer.
    pub fn new(bytes: usize) -> Buffer {
        let layout = layout(bytes);
        // SAFETY: the layout has at least one cache line.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        if bytes >= LARGE_PAGE {
            ask_for_large_pages(start, bytes);
        }
        // SAFETY: the bytes have just been allocated.
        unsafe { start.as_ptr().write_bytes(0, layout.size()) };
        Buffer { start, bytes, ledger: None, lent: AtomicBool::new(false), pool: None }
    }

    /// Counts the buffer in `ledger` until it is dropped.
    pub fn count_in(&mut self, ledger: &Arc<MemoryCounter>) {
        ledger.add(self.bytes);
        self.ledger = Some(ledger.clone());
    }

    /// Stops counting the buffer until its pool reuses it: the producer is done, and a remaining reader counts it. On
    /// separate devices each would hold a copy, and the producer's would be free.
    pub fn release_slot(&self) {
        if let (Some(ledger), false) = (&self.ledger, self.lent.swap(true, Ordering::Relaxed)) {
            match self.pool {
                Some(_) => ledger.leave_place(self.bytes),
                None => ledger.remove(self.bytes),
            }
        }
    }

    fn reclaim_slot(&self) {
        if let (Some(ledger), true) = (&self.ledger, self.lent.swap(false, Ordering::Relaxed)) {
            ledger.take_place(self.bytes);
        }
    }

    pub fn copy_of(bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::new(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `start` points at `bytes` initialised bytes that the buffer owns.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// Address of the first byte. The caller must ensure exclusive access for writes through it.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.release_slot();
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), layout(self.bytes)) }
    }
}

fn layout(bytes: usize) -> Layout {
    // An empty tensor still needs an address.
    Layout::from_size_align(bytes.max(ALIGNMENT), ALIGNMENT).expect("sizes of tensors are addressable")
}

/// Must run before the first write, when the system chooses pages.
#[cfg(target_os = "linux")]
fn ask_for_large_pages(start: NonNull<u8>, bytes: usize) {
    let beyond = start.as_ptr() as usize % SMALL_PAGE;
    // SAFETY: the advice changes no memory content, neither in these bytes nor in the rest of the outer pages. If it
    // fails, pages stay small.
    unsafe { libc::madvise(start.as_ptr().sub(beyond).cast(), bytes + beyond, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn ask_for_large_pages(_: NonNull<u8>, _: usize) {}

/// Reuses buffers, by size. In steady state a worker allocates none.
#[derive(Default)]
pub struct Pool {
    free: HashMap<usize, Vec<Arc<Buffer>>>,
    /// Identity of the pool. It takes back only its own buffers; otherwise two pools would exchange and keep buffers
    /// forever. An address is no identity, since it is reused after a free.
    own: Arc<()>,
    /// Counts the pool's buffers.
    pub ledger: Arc<MemoryCounter>,
}

impl Pool {
    /// An unshared buffer with arbitrary content.
    pub fn take(&mut self, bytes: usize) -> Arc<Buffer> {
        let free = self.free.entry(bytes).or_default();
        // A receiver may still read a returned buffer; it is skipped until released.
        let mut found = None;
        for (at, buffer) in free.iter_mut().enumerate() {
            // The last reader since its return has released it.
            if Arc::get_mut(buffer).is_some() {
                buffer.release_slot();
                found = found.or(Some(at));
            }
        }
        match found {
            Some(at) => {
                let buffer = free.swap_remove(at);
                buffer.reclaim_slot();
                buffer
            }
            None => {
                let mut buffer = Buffer::new(bytes);
                self.ledger.take_place(bytes);
                (buffer.ledger, buffer.pool) = (Some(self.ledger.clone()), Some(self.own.clone()));
                Arc::new(buffer)
            }
        }
    }

    /// A buffer that is freed, not pooled, after use.
    pub fn once(&self, bytes: usize) -> Arc<Buffer> {
        let mut buffer = Buffer::new(bytes);
        buffer.count_in(&self.ledger);
        Arc::new(buffer)
    }

    /// Returns a buffer. Others may still read it or return it too; it is listed once.
    pub fn give(&mut self, buffer: Arc<Buffer>) {
        if !buffer.pool.as_ref().is_some_and(|pool| Arc::ptr_eq(pool, &self.own)) {
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

    #[test]
    fn the_place_of_what_is_lent_is_taken_again() {
        let mut pool = Pool::default();
        let buffer = pool.take(100);
        let reader = buffer.clone();
        let held = |pool: &Pool| pool.ledger.now.load(Ordering::Relaxed);
        buffer.release_slot();
        buffer.release_slot();
        pool.give(buffer);
        // A reader remains: a second buffer takes its slot, and a third needs a new slot.
        let other = pool.take(100);
        assert_eq!(held(&pool), 100);
        let third = pool.take(100);
        assert_eq!(held(&pool), 200);
        [other, third].into_iter().for_each(|buffer| pool.give(buffer));
        drop(reader);
        pool.ledger.take_place(100);
        let again = pool.take(100);
        assert_eq!((held(&pool), pool.ledger.peak()), (200, 200));
        pool.ledger.leave_place(100);
        drop(again);
        let once = pool.once(50);
        assert_eq!(held(&pool), 250);
        drop(once);
        assert_eq!((held(&pool), pool.ledger.peak()), (200, 250));
    }

    #[test]
    fn a_pool_lists_what_it_made_once_and_nothing_else() {
        let mut pool = Pool::default();
        let buffer = pool.take(100);
        assert_eq!(buffer.start() as usize % ALIGNMENT, 0);
        let reader = buffer.clone();
        pool.give(buffer.clone());
        pool.give(buffer);
        pool.give(Arc::new(Buffer::new(100)));
        // Still in use: a new one is allocated.
        assert!(!Arc::ptr_eq(&pool.take(100), &reader));
        let address = reader.start();
        drop(reader);
        assert_eq!(pool.take(100).start(), address);
        // A buffer at the address of a freed one belongs to somebody else.
        drop(pool.take(300));
        let others: Vec<Arc<Buffer>> = (0..100).map(|_| Arc::new(Buffer::new(300))).collect();
        others.into_iter().for_each(|other| pool.give(other));
        assert!(pool.free.get(&300).is_none_or(Vec::is_empty));
    }
}
