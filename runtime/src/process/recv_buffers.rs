//! Receive buffers for messages from other processes, reused once their readers release them.

use crate::device::buffer::Buffer;
use crate::device::memory_counter::MemoryCounter;
use crate::device::tensor_link::{Role, TensorLink};
use crate::process::fields::Fields;
use crate::process::frame::FrameError;
use std::collections::HashMap;
use std::sync::Arc;

/// All buffers of one connection, by size. Their number is the maximum in use at once, which the program bounds.
#[derive(Default)]
pub struct Ring {
    buffers: HashMap<usize, Vec<Arc<Buffer>>>,
    /// Brings the tensors of the current frame, if they are not in it.
    pub link: Option<Arc<dyn TensorLink>>,
    /// What they are for.
    pub role: Role,
}

impl Ring {
    /// The next tensor of a frame.
    pub fn tensor(
        &mut self,
        fields: &mut Fields<'_>,
        bytes: usize,
        what: &'static str,
    ) -> Result<Arc<Buffer>, FrameError> {
        self.tensor_within(fields, bytes, bytes, what)
    }

    /// The next tensor of a frame, in a buffer of `capacity` bytes.
    pub fn tensor_within(
        &mut self,
        fields: &mut Fields<'_>,
        bytes: usize,
        capacity: usize,
        what: &'static str,
    ) -> Result<Arc<Buffer>, FrameError> {
        let buffer = match &self.link {
            Some(link) => link.receive(bytes, capacity, self.role).map_err(FrameError::device)?,
            None => self.copy_of(fields.bytes(bytes, what)?, capacity),
        };
        Ok(if capacity == bytes { buffer } else { Arc::new(Buffer::part(buffer, 0..bytes)) })
    }

    /// The next tensor of a frame. Host memory is counted by `counter` and freed after use; a link counts and keeps its own.
    pub fn once(
        &mut self,
        fields: &mut Fields<'_>,
        bytes: usize,
        what: &'static str,
        counter: &Arc<MemoryCounter>,
    ) -> Result<Arc<Buffer>, FrameError> {
        if self.link.is_some() {
            return self.tensor(fields, bytes, what);
        }
        let mut buffer = Buffer::host_copy(fields.bytes(bytes, what)?);
        buffer.count_in(counter);
        Ok(Arc::new(buffer))
    }

    /// A copy of these bytes in host memory, in a buffer of `capacity` bytes that only the ring and the caller hold.
    fn copy_of(&mut self, bytes: &[u8], capacity: usize) -> Arc<Buffer> {
        let buffers = self.buffers.entry(capacity).or_default();
        let free = buffers.iter_mut().position(|buffer| Arc::get_mut(buffer).is_some());
        // The least recently used buffer is the next to become free.
        let mut buffer = free.map_or_else(|| Arc::new(Buffer::host(capacity)), |index| buffers.remove(index));
        if let Some(buffer) = Arc::get_mut(&mut buffer) {
            buffer.fill_host(bytes);
        }
        buffers.push(buffer.clone());
        buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_reads_is_filled_again() {
        let mut ring = Ring::default();
        let first = ring.copy_of(b"abc", 3);
        let second = ring.copy_of(b"def", 3);
        let address = first.region().address();
        drop(first);
        let third = ring.copy_of(b"ghi", 3);
        let bytes = |buffer: &Buffer| buffer.download().unwrap().to_vec();
        assert_eq!((third.region().address(), bytes(&second), bytes(&third)), (address, b"def".into(), b"ghi".into()));
    }
}
