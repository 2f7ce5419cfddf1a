//! Transfers of tensors between devices of different processes, without the host: see [`Device::transport`].
//!
//! A link has one direction, and transfers in order. Both ends queue each transfer in a stream of their own and do not
//! wait for it, so a pair of links in opposite directions cannot block each other.
//!
//! [`Device::transport`]: crate::device::api::Device::transport

use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use std::sync::Arc;

/// The end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEnd {
    Sending,
    Receiving,
}

/// What a received buffer is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// A tensor of another stage. The stage that reads it counts its memory.
    #[default]
    Message,
    /// An operand of a collective.
    Operand,
}

/// What connects a device to those of other processes.
pub trait Transport: Send + Sync {
    /// Equal for the same device and no other. A device has no link to itself.
    fn identity(&self) -> Vec<u8>;

    /// The id of a new link, for both of its ends.
    fn new_id(&self) -> Result<Vec<u8>, DeviceError>;

    /// Opens one end of a link. Waits until another process opens the other one. `operands` counts the buffers of
    /// received operands of collectives.
    fn open(&self, id: &[u8], end: LinkEnd, operands: &Arc<MemoryCounter>) -> Result<Arc<dyn TensorLink>, DeviceError>;
}

/// One end of a link.
pub trait TensorLink: Send + Sync {
    /// Queues a buffer of this device that was released.
    fn send(&self, buffer: &Buffer) -> Result<(), DeviceError>;

    /// Queues the next buffer that was sent, of `bytes` bytes, in one of `room` bytes. Readers acquire it.
    fn receive(&self, bytes: usize, room: usize, role: Role) -> Result<Arc<Buffer>, DeviceError>;

    /// The failure of the device or of the link, if there is one. Does not wait.
    fn check(&self) -> Result<(), DeviceError>;

    /// Ends all transfers, after the other process was lost.
    fn abort(&self);
}
