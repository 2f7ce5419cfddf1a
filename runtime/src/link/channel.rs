//! Messages between two workers of one process: references to buffers, first in, first out.

use crate::buffer::Buffer;
use compiler::op::Value;
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::sync::Arc;

/// A tensor under way.
pub struct Parcel {
    /// The value in the whole graph that it is, or is a gradient term of.
    pub value: Value,
    /// Which group of readers, for gradients.
    pub group: usize,
    /// The bytes.
    pub buffer: Arc<Buffer>,
}

/// The tensors of one item over one edge.
pub struct Message {
    /// The item.
    pub item: u32,
    /// The tensors.
    pub parcels: Vec<Parcel>,
}

/// Both ends of a channel. A receiver whose sender is gone learns it at once, so no worker waits for a dead one.
pub fn channel() -> (Sender<Message>, Receiver<Message>) {
    unbounded()
}
