//! A channel between two workers: buffers by reference, in sending order.
//!
//! Within one process both ends share memory. For a worker in another process, the sender writes to the queue of that
//! connection, and the connection's reader delivers arriving messages.
//!
//! A message is available as soon as it is sent. The sender also sees each posted receive: a program bounds how far a
//! worker may run ahead of its receivers, because messages in flight need buffers that the plan must count.

use crate::device::buffer::Buffer;
use compiler::op::Value;
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::collections::HashMap;
use std::sync::Arc;

/// A tensor in a message.
pub struct TensorMessage {
    /// The value in the unpartitioned graph; for a gradient term, the value that it is the gradient of.
    pub value: Value,
    /// The reader group, for gradients; 0 for activations.
    pub group: usize,
    pub buffer: Arc<Buffer>,
}

/// The tensors of one micro-batch over one edge.
pub struct Message {
    pub item: u32,
    pub tensors: Vec<TensorMessage>,
}

/// The other end of the channel was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disconnected;

/// Hands something over to the other end, in this process or another.
pub type Send<T> = Box<dyn Fn(T) -> Result<(), Disconnected> + std::marker::Send>;

/// The sending end of a channel.
pub struct Outgoing {
    messages: Send<Message>,
    posted: Receiver<()>,
    /// Number of messages sent (`sent`) and of posted receives seen (`receives`).
    sent: u64,
    receives: u64,
}

/// The receiving end of a channel.
pub struct Incoming {
    messages: Receiver<Message>,
    posted: Send<()>,
    /// Messages that arrived before the one waited for.
    early: HashMap<u32, Message>,
}

/// Creates both ends of a local channel. Dropping one end wakes the other.
pub fn channel() -> (Outgoing, Incoming) {
    let (sender, messages) = unbounded();
    let (outgoing, posted) = outgoing(Box::new(move |message| sender.send(message).map_err(|_| Disconnected)));
    let post = Box::new(move |()| posted.send(()).map_err(|_| Disconnected));
    (outgoing, Incoming { messages, posted: post, early: HashMap::new() })
}

/// Creates the sending end of a channel, and the sender that reports the receives posted at its other end.
pub fn outgoing(messages: Send<Message>) -> (Outgoing, Sender<()>) {
    let (sender, posted) = unbounded();
    (Outgoing { messages, posted, sent: 0, receives: 0 }, sender)
}

/// Creates the receiving end of a channel, and the sender that delivers its messages.
pub fn incoming(posted: Send<()>) -> (Incoming, Sender<Message>) {
    let (sender, messages) = unbounded();
    (Incoming { messages, posted, early: HashMap::new() }, sender)
}

impl Outgoing {
    /// Sends a message and returns its number, from 1.
    pub fn send(&mut self, message: Message) -> Result<u64, Disconnected> {
        (self.messages)(message)?;
        self.sent += 1;
        Ok(self.sent)
    }

    /// Blocks until the receive for message `number` is posted.
    pub fn wait(&mut self, number: u64) -> Result<(), Disconnected> {
        while self.receives < number {
            self.posted.recv().map_err(|_| Disconnected)?;
            self.receives += 1;
        }
        Ok(())
    }
}

impl Incoming {
    pub fn post(&self) {
        // The sender may have finished.
        _ = (self.posted)(());
    }

    /// Blocks for the message of a micro-batch. Receives may complete in another order than they were posted.
    pub fn take(&mut self, item: u32) -> Result<Message, Disconnected> {
        if let Some(message) = self.early.remove(&item) {
            return Ok(message);
        }
        loop {
            let message = self.messages.recv().map_err(|_| Disconnected)?;
            if message.item == item {
                return Ok(message);
            }
            self.early.insert(message.item, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(item: u32) -> Message {
        Message { item, tensors: Vec::new() }
    }

    #[test]
    fn messages_are_found_by_their_item() {
        let (mut outgoing, mut incoming) = channel();
        for item in [4, 2, 7] {
            outgoing.send(message(item)).unwrap();
        }
        assert_eq!([2, 4, 7].map(|item| incoming.take(item).map(|message| message.item)), [Ok(2), Ok(4), Ok(7)]);
        drop(outgoing);
        assert_eq!(incoming.take(1).map(|message| message.item), Err(Disconnected));
    }

    #[test]
    fn who_sends_waits_for_as_many_receives() {
        let (mut outgoing, incoming) = channel();
        let numbers = [4, 2].map(|item| outgoing.send(message(item)).unwrap());
        assert_eq!(numbers, [1, 2]);
        incoming.post();
        assert_eq!(outgoing.wait(1), Ok(()));
        incoming.post();
        drop(incoming);
        assert_eq!((outgoing.wait(2), outgoing.wait(1)), (Ok(()), Ok(())));
        assert!(outgoing.send(message(9)).is_err());
        assert_eq!(outgoing.wait(3), Err(Disconnected));
    }
}
