//! A channel between two workers: buffers by reference, in the order they were sent.
//!
//! Within one process both ends share memory. For a worker in another process, the sender writes to the queue of that
//! [`connection`](crate::process::connection), and the connection's reader delivers what arrives.
//!
//! A message is available as soon as it is sent. The sender also sees each posted receive: a program bounds how far a worker
//! may run ahead of its readers, because more messages in flight need more buffers than the plan counts.

use crate::device::buffer::Buffer;
use crate::process::connection::Outbound;
use crate::process::frame::Kind;
use compiler::op::Value;
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::collections::HashMap;
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

/// The other end of a channel is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

/// Where the other end of a channel is.
enum End<T> {
    /// In this process.
    Here(Sender<T>),
    /// In another one, which has this number for the channel.
    There { queue: Sender<Outbound>, channel: u32 },
}

/// Where messages go in.
pub struct Outgoing {
    messages: End<Message>,
    posted: Receiver<()>,
    /// Messages sent, and receives that are known to be posted.
    sent: u64,
    known: u64,
}

/// Where they come out.
pub struct Incoming {
    messages: Receiver<Message>,
    posted: End<()>,
    /// Those that came before one that was waited for.
    early: HashMap<u32, Message>,
}

/// Both ends of a channel. An end whose other end is gone learns it at once, so no worker waits for a dead one.
pub fn channel() -> (Outgoing, Incoming) {
    let ((to, messages), (posted, told)) = (unbounded(), unbounded());
    let incoming = Incoming { messages, posted: End::Here(posted), early: HashMap::new() };
    (Outgoing { messages: End::Here(to), posted: told, sent: 0, known: 0 }, incoming)
}

/// The end for messages to another process, and where it is told of receives that are posted there.
pub fn outgoing(queue: Sender<Outbound>, channel: u32) -> (Outgoing, Sender<()>) {
    let (posted, told) = unbounded();
    (Outgoing { messages: End::There { queue, channel }, posted: told, sent: 0, known: 0 }, posted)
}

/// The end for messages from another process, and where they are handed in.
pub fn incoming(queue: Sender<Outbound>, channel: u32) -> (Incoming, Sender<Message>) {
    let (to, messages) = unbounded();
    (Incoming { messages, posted: End::There { queue, channel }, early: HashMap::new() }, to)
}

impl Outgoing {
    /// Sends a message and gives its number.
    pub fn send(&mut self, message: Message) -> Result<u64, Gone> {
        match &self.messages {
            End::Here(messages) => messages.send(message).map_err(|_| Gone)?,
            End::There { queue, channel } => {
                let head = [channel.to_le_bytes(), message.item.to_le_bytes()].concat();
                let bodies = message.parcels.into_iter().map(|parcel| parcel.buffer).collect();
                queue.send(Outbound { kind: Kind::Message, head, bodies }).map_err(|_| Gone)?;
            }
        }
        self.sent += 1;
        Ok(self.sent)
    }

    /// Waits until the receive for the message with that number is posted.
    pub fn wait(&mut self, number: u64) -> Result<(), Gone> {
        while self.known < number {
            self.posted.recv().map_err(|_| Gone)?;
            self.known += 1;
        }
        Ok(())
    }
}

impl Incoming {
    /// Tells that a receive is posted.
    pub fn post(&self) {
        // Who sends may be at its end already.
        match &self.posted {
            End::Here(posted) => _ = posted.send(()),
            End::There { queue, channel } => {
                _ = queue.send(Outbound::of(Kind::Posted, channel.to_le_bytes().to_vec()));
            }
        }
    }

    /// Waits for the message of an item. Receives may be waited for in another order than they were posted in.
    pub fn take(&mut self, item: u32) -> Result<Message, Gone> {
        if let Some(message) = self.early.remove(&item) {
            return Ok(message);
        }
        loop {
            let message = self.messages.recv().map_err(|_| Gone)?;
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
        Message { item, parcels: Vec::new() }
    }

    #[test]
    fn messages_are_found_by_their_item() {
        let (mut out, mut into) = channel();
        for item in [4, 2, 7] {
            out.send(message(item)).unwrap();
        }
        assert_eq!([2, 4, 7].map(|item| into.take(item).map(|message| message.item)), [Ok(2), Ok(4), Ok(7)]);
        drop(out);
        assert_eq!(into.take(1).map(|message| message.item), Err(Gone));
    }

    #[test]
    fn who_sends_waits_for_as_many_receives() {
        let (mut out, into) = channel();
        let numbers = [4, 2].map(|item| out.send(message(item)).unwrap());
        assert_eq!(numbers, [1, 2]);
        into.post();
        assert_eq!(out.wait(1), Ok(()));
        into.post();
        drop(into);
        assert_eq!((out.wait(2), out.wait(1)), (Ok(()), Ok(())));
        assert!(out.send(message(9)).is_err());
        assert_eq!(out.wait(3), Err(Gone));
    }
}
