//! Byte buffers aligned for vector kernels, and a pool that hands them out again.

use compiler::pass::memory::ALIGNMENT;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The sizes of pages. Buffers of a large page and more lie on such pages where the system has them: to find the many small pages that a
/// kernel walks through takes as long as to read some of them. They do not begin with one, because buffers whose addresses are alike
/// drive each other from the caches.
const LARGE_PAGE: usize = 2 << 20;
const SMALL_PAGE: usize = 4096;

/// Bytes at an address that is a multiple of [`ALIGNMENT`].
pub struct Buffer {
    start: NonNull<u8>,
    bytes: usize,
    ledger: Option<Arc<MemoryCounter>>,
    lent: AtomicBool,
    /// The pool that made it.
    pool: Option<Arc<()>>,
}

/// How many bytes are held by the buffers that are written into it, wherever they are dropped.
///
/// Buffers of a pool come and go in places of their size, which are kept once they are made, as the pool keeps its buffers: an empty place
/// counts like a full one. Between devices what comes from others lies in such places too; here it is read where it was made.
#[derive(Default)]
pub struct MemoryCounter {
    now: AtomicU64,
    peak: AtomicU64,
    /// By size, the places that are taken and all there are.
    places: Mutex<HashMap<usize, Places>>,
}

#[derive(Clone, Copy, Default)]
struct Places {
    taken: usize,
    all: usize,
}

impl MemoryCounter {
    /// The most that was held at once.
    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// Counts bytes that are held from now on.
    pub fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    /// Counts bytes no longer.
    pub fn remove(&self, bytes: usize) {
        self.now.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    // Nothing under the lock can panic half way.
    fn places(&self) -> MutexGuard<'_, HashMap<usize, Places>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place of this size, which is made where none is free.
    pub fn take_place(&self, bytes: usize) {
        let mut all = self.places();
        let places = all.entry(bytes).or_default();
        places.taken += 1;
        if places.taken > places.all {
            places.all = places.taken;
            self.add(bytes);
        }
    }

    /// Leaves a place that was taken.
    pub fn leave_place(&self, bytes: usize) {
        if let Some(places) = self.places().get_mut(&bytes) {
            places.taken = places.taken.saturating_sub(1);
        }
    }
}

/// Bytes that are counted in a ledger until this is dropped, whoever they belong to.
pub struct CountedBytes {
    ledger: Arc<MemoryCounter>,
    bytes: usize,
}

impl CountedBytes {
    /// So many bytes.
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

// SAFETY: a buffer owns its bytes, as a boxed slice does.
unsafe impl Send for Buffer {}
// SAFETY: shared access is through `&[u8]` only.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A buffer of zeros.
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

    /// Counts the buffer in a ledger until it is dropped.
    pub fn count_in(&mut self, ledger: &Arc<MemoryCounter>) {
        ledger.add(self.bytes);
        self.ledger = Some(ledger.clone());
    }

    /// Leaves the buffer's place until its pool hands it out again, or counts it no longer where it has none: who made it is done with it,
    /// and who still reads it counts it for itself. Between devices each would hold a copy, and the maker's would be free.
    pub fn lend(&self) {
        if let (Some(ledger), false) = (&self.ledger, self.lent.swap(true, Ordering::Relaxed)) {
            match self.pool {
                Some(_) => ledger.leave_place(self.bytes),
                None => ledger.remove(self.bytes),
            }
        }
    }

    fn come_back(&self) {
        if let (Some(ledger), true) = (&self.ledger, self.lent.swap(false, Ordering::Relaxed)) {
            ledger.take_place(self.bytes);
        }
    }

    /// A buffer with a copy of these bytes.
    pub fn copy_of(bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::new(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `start` points at `bytes` initialised bytes that the buffer owns.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// The address of the first byte. Who writes through it sees to it that nobody else looks.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.lend();
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), layout(self.bytes)) }
    }
}

fn layout(bytes: usize) -> Layout {
    // An empty tensor still has an address.
    Layout::from_size_align(bytes.max(ALIGNMENT), ALIGNMENT).expect("sizes of tensors are addressable")
}

/// Before the bytes are first written, which is when the system chooses pages.
#[cfg(target_os = "linux")]
fn ask_for_large_pages(start: NonNull<u8>, bytes: usize) {
    let beyond = start.as_ptr() as usize % SMALL_PAGE;
    // SAFETY: the advice changes nothing of what is in memory, neither in these bytes nor in what shares their first and last page. Where it
    // is not taken pages stay small.
    unsafe { libc::madvise(start.as_ptr().sub(beyond).cast(), bytes + beyond, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn ask_for_large_pages(_: NonNull<u8>, _: usize) {}

/// Buffers that were given back, by size. A worker's steady state takes all its buffers from here.
#[derive(Default)]
pub struct Pool {
    free: HashMap<usize, Vec<Arc<Buffer>>>,
    /// What its buffers bear: it keeps no other, or two pools would hold a buffer for ever. An address would not tell, which is another
    /// buffer's when the first is gone.
    own: Arc<()>,
    /// What its buffers hold together.
    pub ledger: Arc<MemoryCounter>,
}

impl Pool {
    /// A buffer of this size that nobody else holds; its bytes are what was left in it.
    pub fn take(&mut self, bytes: usize) -> Arc<Buffer> {
        let free = self.free.entry(bytes).or_default();
        // A receiver may still hold what was sent to it; such a buffer is passed over until it is let go.
        let mut found = None;
        for (at, buffer) in free.iter_mut().enumerate() {
            // Who held it when it was given back has let go.
            if Arc::get_mut(buffer).is_some() {
                buffer.lend();
                found = found.or(Some(at));
            }
        }
        match found {
            Some(at) => {
                let buffer = free.swap_remove(at);
                buffer.come_back();
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

    /// A buffer of this size that is free when its last holder lets go of it.
    pub fn once(&self, bytes: usize) -> Arc<Buffer> {
        let mut buffer = Buffer::new(bytes);
        buffer.count_in(&self.ledger);
        Arc::new(buffer)
    }

    /// Gives a buffer back. Others may still read it, and others may give it back as well: it is listed once.
    pub fn give(&mut self, buffer: Arc<Buffer>) {
        if !buffer.pool.as_ref().is_some_and(|pool| Arc::ptr_eq(pool, &self.own)) {
            return;
        }
        let free = self.free.entry(buffer.len()).or_default();
        if !free.iter().any(|b| Arc::ptr_eq(b, &buffer)) {
            if Arc::strong_count(&buffer) == 1 {
                buffer.lend();
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
        buffer.lend();
        buffer.lend();
        pool.give(buffer);
        // Somebody reads it still: another buffer comes into its place, and a third needs one more.
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
        // Still read by somebody: a new one is made.
        assert!(!Arc::ptr_eq(&pool.take(100), &reader));
        let address = reader.start();
        drop(reader);
        assert_eq!(pool.take(100).start(), address);
        // One that comes to lie where a lost one did is another's.
        drop(pool.take(300));
        let others: Vec<Arc<Buffer>> = (0..100).map(|_| Arc::new(Buffer::new(300))).collect();
        others.into_iter().for_each(|other| pool.give(other));
        assert!(pool.free.get(&300).is_none_or(Vec::is_empty));
    }
}
