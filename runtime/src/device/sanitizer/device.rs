//! A CPU that behaves like a GPU, to test what is above devices.
//!
//! The host cannot dereference its memory: buffers have invented addresses. Its streams count their calls with vector
//! clocks, and an access to a buffer fails if a conflicting access of another stream is not ordered before it by an
//! event or a wait of the host. So a missing [`Stream::acquire`], [`Stream::release`] or
//! [`Stream::finish`] is found in every run, whatever the timing. Verbs execute at once, with the kernels of the CPU.

use super::clock::{Access, Clock, History};
use super::stream::SanitizerStream;
use crate::device::api::{Device, DeviceInfo, Kernel, Stream};
use crate::device::buffer::{Buffer, DeviceMemory};
use crate::device::chain::Link;
use crate::device::cpu::device::cpu;
use crate::device::error::DeviceError;
use crate::device::layout::TensorLayout;
use crate::device::region::{Region, RegionMut};
use compiler::op::Op;
use compiler::pass::memory::ALIGNMENT;
use compiler::tensor::fact::Fact;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, LazyLock, Weak};

/// The name of the device.
pub const NAME: &str = "cpu-sanitizer";

/// The first invented address, which no host memory has.
const FIRST: u64 = 1 << 60;

pub struct SanitizerDevice {
    info: DeviceInfo,
    shared: Arc<Mutex<Shared>>,
}

/// State shared by the streams and buffers of the device.
pub struct Shared {
    next_address: u64,
    next_stream: u64,
    memories: BTreeMap<u64, Weak<Memory>>,
    /// Work for which the host has waited.
    done: Clock,
}

impl Shared {
    /// The host has waited for this work.
    pub fn finish(&mut self, clock: &Clock) {
        self.done.merge(clock);
    }

    pub fn is_done(&self, clock: &Clock) -> bool {
        self.done.has_all(clock)
    }

    /// The buffer and range at an address.
    fn find(&self, address: u64, bytes: usize) -> Option<(Arc<Memory>, Range<usize>)> {
        let memory = self.memories.range(..=address).next_back()?.1.upgrade()?;
        let start = usize::try_from(address - memory.address).ok()?;
        (start + bytes <= memory.host.len()).then_some((memory, start..start + bytes))
    }

    /// Looks up a range and adds an access of a stream, which fails if it is not ordered after earlier ones.
    pub fn access(
        &mut self,
        (address, bytes): (u64, usize),
        (stream, count, clock): (u64, u64, &Clock),
        is_write: bool,
    ) -> Result<CheckedRange, DeviceError> {
        if bytes == 0 {
            return Ok(CheckedRange { memory: EMPTY.clone(), range: 0..0 });
        }
        let (memory, range) = self.find(address, bytes).ok_or(DeviceError::Foreign { what: "memory" })?;
        let access = Access { stream, count, range: range.clone(), is_write };
        let conflict = memory.history.lock().add(&access, &[clock, &self.done]);
        match conflict {
            None => Ok(CheckedRange { memory, range }),
            Some(old) => Err(DeviceError::Failed {
                device: NAME.to_string(),
                what: format!(
                    "stream {stream} {} bytes {range:?} of a buffer that stream {} {} without an event in between",
                    if is_write { "writes" } else { "reads" },
                    old.stream,
                    if old.is_write { "writes" } else { "reads" }
                ),
            }),
        }
    }
}

/// A buffer with an invented address.
pub struct Memory {
    address: u64,
    host: Buffer,
    history: Mutex<History>,
    shared: Arc<Mutex<Shared>>,
}

/// A buffer of the device, as the shared pointer that [`Buffer`] holds.
struct Handle(Arc<Memory>);

impl DeviceMemory for Handle {
    fn address(&self) -> u64 {
        self.0.address
    }

    fn bytes(&self) -> usize {
        self.0.host.len()
    }

    fn download(&self, start: usize, to: &mut [u8]) -> Result<(), DeviceError> {
        let range = start..start + to.len();
        // Locked in the order of `Shared::access`.
        let shared = self.0.shared.lock();
        let unfinished = self.0.history.lock().unfinished_write(&range, &shared.done);
        drop(shared);
        if let Some(write) = unfinished {
            let what = format!("the host reads a buffer before stream {} has written it", write.stream);
            return Err(DeviceError::Failed { device: NAME.to_string(), what });
        }
        to.copy_from_slice(self.0.host.region_of(range).host()?);
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.shared.lock().memories.remove(&self.address);
    }
}

static DEVICE: LazyLock<Arc<SanitizerDevice>> = LazyLock::new(|| {
    let shared = Shared { next_address: FIRST, next_stream: 0, memories: BTreeMap::new(), done: Clock::default() };
    let info = DeviceInfo { name: NAME.into(), model: "CPU with checks of streams".into(), ..DeviceInfo::default() };
    Arc::new(SanitizerDevice { info, shared: Arc::new(Mutex::new(shared)) })
});

/// No memory.
static EMPTY: LazyLock<Arc<Memory>> = LazyLock::new(|| {
    let (host, history, shared) = (Buffer::empty(), Mutex::default(), DEVICE.shared.clone());
    Arc::new(Memory { address: 0, host, history, shared })
});

pub fn sanitizer() -> Arc<dyn Device> {
    DEVICE.clone()
}

/// A range of a buffer for the duration of a call.
pub struct CheckedRange {
    memory: Arc<Memory>,
    range: Range<usize>,
}

impl CheckedRange {
    pub fn region(&self) -> Region<'_> {
        self.memory.host.region_of(self.range.clone())
    }

    /// # Safety
    ///
    /// The range was given as a [`RegionMut`].
    pub unsafe fn region_mut(&self) -> RegionMut<'_> {
        // SAFETY: the given region is exclusive.
        unsafe { self.region().assume_exclusive() }
    }
}

impl Device for SanitizerDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn available_memory(&self) -> Option<u64> {
        cpu().available_memory()
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let host = Buffer::host(bytes);
        let mut shared = self.shared.lock();
        let address = shared.next_address;
        shared.next_address += bytes.max(1).next_multiple_of(ALIGNMENT) as u64;
        let memory = Arc::new(Memory { address, host, history: Mutex::default(), shared: self.shared.clone() });
        shared.memories.insert(address, Arc::downgrade(&memory));
        Ok(Buffer::device(Arc::new(Handle(memory))))
    }

    fn can_access(&self, buffer: &Buffer) -> bool {
        buffer.is_empty() || self.shared.lock().find(buffer.region().address(), buffer.len()).is_some()
    }

    fn kernel(&self, op: &Op, inputs: &[Fact], outputs: &[Fact]) -> Result<Arc<dyn Kernel>, DeviceError> {
        cpu().kernel(op, inputs, outputs)
    }

    fn chain(&self, links: &[Link], inputs: &[TensorLayout]) -> Option<Arc<dyn Kernel>> {
        cpu().chain(links, inputs)
    }

    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError> {
        let number = {
            let mut shared = self.shared.lock();
            shared.next_stream += 1;
            shared.next_stream
        };
        Ok(Box::new(SanitizerStream::new(number, self.shared.clone())))
    }
}
