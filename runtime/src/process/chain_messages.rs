//! Messages of all-reduces and all-gathers between processes, in `Part` frames.

use crate::comm::all_reduce::{AllReduce, Collective, MOST_CHUNK};
use crate::comm::chain::{ChainMessage, Content, Direction, Refused};
use crate::comm::pipelined_all_reduce::PipelinedAllReduce;
use crate::device::buffer::Buffer;
use crate::process::fields::{Fields, check, encode};
use crate::process::frame::FrameError;
use crate::process::recv_buffers::Ring;
use crate::process::router::ContributionSink;
use std::sync::Arc;

/// A message without the chunk itself: the number of the chunk, and whether it has a sum.
type Head = (Direction, Collective, Option<(usize, bool)>);

/// The content of a message, and its chunk.
pub fn pack(message: ChainMessage) -> (Vec<u8>, Option<Arc<Buffer>>) {
    let (chunk, part) = match message.content {
        Content::Ready => (None, None),
        Content::Chunk { chunk, part } => (Some((chunk, part.is_some())), part),
    };
    let head: Head = (message.direction, message.collective, chunk);
    (encode(&head), part)
}

/// Delivers the messages of other processes to the members of this one.
pub struct ChainMessages {
    pub all_reduce: Arc<PipelinedAllReduce>,
    pub members: usize,
    /// Upper bound of the sequence numbers.
    pub collectives: u64,
}

impl ContributionSink for ChainMessages {
    fn arrive(&self, from: usize, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<(), FrameError> {
        let invalid = |what| FrameError::Field { what };
        let (direction, collective, chunk): Head = fields.value("a message of a collective")?;
        check(collective.number() < self.collectives, "the number of a collective")?;
        let to = direction.neighbour(from, self.members).ok_or(invalid("a direction"))?;
        let mut content = Content::Ready;
        if let Some((chunk, has_part)) = chunk {
            let expected = self.all_reduce.expected(to, direction, collective, chunk);
            let (bytes, largest) = expected.ok_or(invalid("a chunk"))?;
            let part = has_part.then(|| ring.tensor_within(fields, bytes, largest, "a chunk")).transpose()?;
            content = Content::Chunk { chunk, part };
        }
        fields.end()?;
        let message = ChainMessage { direction, collective, content };
        self.all_reduce.arrive(to, message).map_err(|refused| match refused {
            Refused::Unexpected => invalid("a chunk"),
            Refused::Device(fault) => FrameError::device(fault),
        })
    }

    fn most(&self) -> usize {
        MOST_CHUNK.saturating_add(32)
    }

    fn abandon(&self) {
        self.all_reduce.abandon();
    }
}
