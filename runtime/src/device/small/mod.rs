//! The CPU with 1 GB of memory.

use crate::device::api::{Device, DeviceError, DeviceInfo, Kernel, Stream};
use crate::device::buffer::Buffer;
use crate::device::chain::Link;
use crate::device::cpu::device::cpu;
use crate::device::layout::TensorLayout;
use compiler::op::Op;
use compiler::tensor::fact::Fact;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub const NAME: &str = "cpu-small";

const LIMIT: u64 = 1 << 30;

pub struct SmallDevice {
    info: DeviceInfo,
    /// Bytes allocated so far.
    allocated: AtomicU64,
}

pub fn small() -> Arc<dyn Device> {
    let info = DeviceInfo { name: NAME.to_string(), model: "CPU with 1 GB".to_string() };
    Arc::new(SmallDevice { info, allocated: AtomicU64::new(0) })
}

impl Device for SmallDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn available_memory(&self) -> Option<u64> {
        Some(LIMIT.saturating_sub(self.allocated.load(Ordering::Relaxed)))
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        let (needed, free) = (bytes as u64, self.available_memory().unwrap_or(0));
        if needed > free {
            return Err(DeviceError::Memory { device: NAME.to_string(), needed, free });
        }
        self.allocated.fetch_add(needed, Ordering::Relaxed);
        cpu().allocate(bytes)
    }

    fn can_access(&self, buffer: &Buffer) -> bool {
        cpu().can_access(buffer)
    }

    fn kernel(&self, op: &Op, inputs: &[Fact], outputs: &[Fact]) -> Result<Arc<dyn Kernel>, DeviceError> {
        cpu().kernel(op, inputs, outputs)
    }

    fn chain(&self, links: &[Link], inputs: &[TensorLayout]) -> Option<Arc<dyn Kernel>> {
        cpu().chain(links, inputs)
    }

    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError> {
        cpu().stream()
    }
}
