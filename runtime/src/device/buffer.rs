//! Buffers of device memory. Host memory is aligned for vector kernels.

use crate::device::error::DeviceError;
use crate::device::event::Event;
use crate::device::memory_counter::MemoryCounter;
use crate::device::region::{Region, RegionMut};
use compiler::pass::memory::ALIGNMENT;
use parking_lot::Mutex;
use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::any::Any;
use std::borrow::Cow;
use std::ops::Range;
use std::ptr::{NonNull, without_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Page sizes. Buffers of at least a large page use huge pages if available: TLB misses on small pages take as long as
/// the reads of some kernels. Buffers do not start on a page boundary, because equal low address bits would cause cache
/// conflicts.
const LARGE_PAGE: usize = 2 << 20;
const SMALL_PAGE: usize = 4096;

/// Memory of a device. Only the device dereferences it; others name it by its [`Region`] and read it on the host
/// through [`Buffer::download`].
pub struct Buffer {
    memory: Memory,
    bytes: usize,
    pub(super) counter: Option<Arc<MemoryCounter>>,
    slot_released: AtomicBool,
    pub(super) pool: Option<Arc<()>>,
    /// Work of other streams that may not be done: see [`Stream::release`](crate::device::api::Stream::release).
    events: Mutex<Vec<Event>>,
}

enum Memory {
    Host(HostMemory),
    Device(Arc<dyn DeviceMemory>),
    /// A range of another buffer, from this byte on.
    Part(Arc<Buffer>, usize),
    /// The same, with events of its own.
    Window(Arc<Buffer>, usize),
}

/// An allocation that the host cannot dereference.
pub trait DeviceMemory: Any + Send + Sync {
    /// Address in the device's address space.
    fn address(&self) -> u64;

    fn bytes(&self) -> usize;

    /// Copies the bytes from `start` on to the host, and waits. Earlier work on them is done. Panics if there are fewer.
    fn download(&self, start: usize, to: &mut [u8]) -> Result<(), DeviceError>;

    /// The memory will be freed after these events, which streams of other devices may record. The default waits on the
    /// host. After a failure there is nothing to wait for.
    fn free_after(&self, events: &[Event]) {
        events.iter().for_each(|event| drop(event.synchronize()));
    }
}

/// Host bytes aligned to [`ALIGNMENT`].
struct HostMemory {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its bytes, like a boxed slice.
unsafe impl Send for HostMemory {}
// SAFETY: shared access reads. Writes through a shared buffer go through `Region::assume_exclusive`, whose caller excludes
// all other access to those bytes.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Zeroed memory.
    fn new(bytes: usize) -> HostMemory {
        let layout = layout(bytes);
        // SAFETY: the layout has at least one cache line.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        if bytes >= LARGE_PAGE {
            advise_large_pages(start, bytes);
        }
        // SAFETY: the bytes have just been allocated.
        unsafe { start.as_ptr().write_bytes(0, layout.size()) };
        HostMemory { start, bytes }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start.as_ptr(), layout(self.bytes)) }
    }
}

impl Buffer {
    fn of(memory: Memory, bytes: usize) -> Buffer {
        let (slot_released, events) = (AtomicBool::new(false), Mutex::default());
        Buffer { memory, bytes, counter: None, slot_released, pool: None, events }
    }

    /// A zeroed buffer in host memory.
    pub fn host(bytes: usize) -> Buffer {
        Buffer::of(Memory::Host(HostMemory::new(bytes)), bytes)
    }

    /// A copy in host memory.
    pub fn host_copy(bytes: &[u8]) -> Buffer {
        let mut buffer = Buffer::host(bytes.len());
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    /// A buffer in the memory of a device that the host cannot dereference.
    pub fn device(memory: Arc<dyn DeviceMemory>) -> Buffer {
        let bytes = memory.bytes();
        Buffer::of(Memory::Device(memory), bytes)
    }

    /// A range of a buffer. Only the holder of the part may write it, and nobody the rest.
    pub fn part(whole: Arc<Buffer>, range: Range<usize>) -> Buffer {
        let bytes = whole.region_of(range.clone()).len();
        Buffer::of(Memory::Part(whole, range.start), bytes)
    }

    /// A range of a buffer, with events of its own. So streams that acquire it do not wait for work on other ranges. The
    /// buffer gets these events when the window is dropped.
    pub fn window(whole: Arc<Buffer>, range: Range<usize>) -> Buffer {
        let bytes = whole.region_of(range.clone()).len();
        Buffer::of(Memory::Window(whole, range.start), bytes)
    }

    /// The buffer that this is a range of.
    pub fn whole(&self) -> Option<&Arc<Buffer>> {
        match &self.memory {
            Memory::Part(whole, _) | Memory::Window(whole, _) => Some(whole),
            Memory::Host(_) | Memory::Device(_) => None,
        }
    }

    /// The buffer that has the events of this one.
    fn event_owner(&self) -> &Buffer {
        match &self.memory {
            Memory::Part(whole, _) => whole.event_owner(),
            _ => self,
        }
    }

    /// No memory: stands for a tensor that is elsewhere.
    pub fn empty() -> Buffer {
        Buffer::host(0)
    }

    pub fn is_host(&self) -> bool {
        match &self.memory {
            Memory::Host(_) => true,
            Memory::Device(_) => false,
            Memory::Part(whole, _) | Memory::Window(whole, _) => whole.is_host(),
        }
    }

    /// The device's memory; `None` for host memory.
    pub fn device_memory(&self) -> Option<&Arc<dyn DeviceMemory>> {
        match &self.memory {
            Memory::Device(memory) => Some(memory),
            Memory::Part(whole, _) | Memory::Window(whole, _) => whole.device_memory(),
            Memory::Host(_) => None,
        }
    }

    /// Counts the buffer in `counter` until it is dropped.
    pub fn count_in(&mut self, counter: &Arc<MemoryCounter>) {
        counter.add(self.bytes);
        self.counter = Some(counter.clone());
    }

    /// Stops counting the buffer until its pool reuses it: the producer is done, and a remaining reader counts it. On
    /// separate devices each would hold a copy, and the producer's would be free.
    pub fn release_slot(&self) {
        if let (Some(counter), false) = (&self.counter, self.slot_released.swap(true, Ordering::Relaxed)) {
            match self.pool {
                Some(_) => counter.free_slot(self.bytes),
                None => counter.remove(self.bytes),
            }
        }
    }

    pub(super) fn reclaim_slot(&self) {
        if let (Some(counter), true) = (&self.counter, self.slot_released.swap(false, Ordering::Relaxed)) {
            counter.reserve_slot(self.bytes);
        }
    }

    pub fn len(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub fn region(&self) -> Region<'_> {
        let (start, is_host) = match &self.memory {
            Memory::Part(whole, start) | Memory::Window(whole, start) => {
                return whole.region_of(*start..*start + self.bytes);
            }
            Memory::Host(memory) => (memory.start.as_ptr(), true),
            Memory::Device(memory) => (without_provenance_mut(memory.address() as usize), false),
        };
        // SAFETY: the buffer owns this initialised memory, and is borrowed.
        unsafe { Region::new(start, self.bytes, is_host) }
    }

    /// Panics if the range is not within the buffer.
    pub fn region_of(&self, range: Range<usize>) -> Region<'_> {
        self.region().slice(range)
    }

    pub fn region_mut(&mut self) -> RegionMut<'_> {
        // SAFETY: the buffer is borrowed exclusively.
        unsafe { self.region().assume_exclusive() }
    }

    /// The memory of a buffer that nobody else holds, such as one just taken from a pool. Panics if it is shared.
    pub fn exclusive(buffer: &mut Arc<Buffer>) -> RegionMut<'_> {
        Arc::get_mut(buffer).expect("a buffer from the pool is held by its taker alone").region_mut()
    }

    /// The bytes on the host, after the work with which streams have released the buffer: the memory itself, or a copy
    /// of a device's.
    pub fn download(&self) -> Result<Cow<'_, [u8]>, DeviceError> {
        self.events().iter().try_for_each(Event::synchronize)?;
        self.copy_of(0..self.bytes)
    }

    fn copy_of(&self, range: Range<usize>) -> Result<Cow<'_, [u8]>, DeviceError> {
        match &self.memory {
            Memory::Host(_) => Ok(Cow::Borrowed(self.region_of(range).host()?)),
            Memory::Part(whole, start) | Memory::Window(whole, start) => {
                whole.copy_of(start + range.start..start + range.end)
            }
            Memory::Device(memory) => {
                let mut copy = vec![0; range.len()];
                memory.download(range.start, &mut copy)?;
                Ok(Cow::Owned(copy))
            }
        }
    }

    /// Adds work to those that [`Buffer::events`] returns. Of the work of a stream, the latest stays. Work that is done is
    /// dropped.
    pub fn add_event(&self, event: Event) {
        let mut events = self.event_owner().events.lock();
        if !events.iter().any(|e| e.includes(&event)) {
            events.retain(|e| !event.includes(e) && !e.has_occurred());
            events.push(event);
        }
    }

    pub fn events(&self) -> Vec<Event> {
        self.event_owner().events.lock().clone()
    }

    /// Overwrites the start of a host buffer. Panics for other memory, or if it is shorter.
    pub fn fill_host(&mut self, bytes: &[u8]) {
        self.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    }

    /// The bytes of a host buffer. Panics for other memory.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.region_mut().host().expect("the buffer is in host memory")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.release_slot();
        match &self.memory {
            Memory::Device(memory) => memory.free_after(&self.events()),
            Memory::Window(whole, _) => self.events().into_iter().for_each(|event| whole.add_event(event)),
            Memory::Host(_) | Memory::Part(..) => {}
        }
    }
}

fn layout(bytes: usize) -> Layout {
    // An empty tensor still needs an address.
    Layout::from_size_align(bytes.max(ALIGNMENT), ALIGNMENT).expect("sizes of tensors are addressable")
}

/// Must run before the first write, when the system chooses pages.
#[cfg(target_os = "linux")]
fn advise_large_pages(start: NonNull<u8>, bytes: usize) {
    let page_offset = start.as_ptr() as usize % SMALL_PAGE;
    // SAFETY: the advice changes no memory content, neither in these bytes nor in the rest of the outer pages. If it
    // fails, pages stay small.
    unsafe { libc::madvise(start.as_ptr().sub(page_offset).cast(), bytes + page_offset, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_large_pages(_: NonNull<u8>, _: usize) {}
