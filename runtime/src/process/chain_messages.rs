//! Messages of all-reduces and all-gathers between processes: `Part` frames with the number of the collective.

use crate::comm::all_reduce::AllReduce;
use crate::comm::all_reduce::{Collective, MOST_CHUNK};
use crate::comm::chain::{ChainMessage, Content, Direction, Refused};
use crate::comm::pipelined_all_reduce::PipelinedAllReduce;
use crate::device::buffer::Buffer;
use crate::process::fields::Fields;
use crate::process::frame::FrameError;
use crate::process::recv_buffers::Ring;
use crate::process::router::ContributionSink;
use std::sync::Arc;

/// Appends a message to `head`, and its chunk to `bodies`. Returns the number of the collective.
pub fn pack(message: ChainMessage, head: &mut Vec<u8>, bodies: &mut Vec<Arc<Buffer>>) -> u64 {
    let (collective, number) = match message.collective {
        Collective::AllReduce(number) => (0, number),
        Collective::AllGather(number) => (1, number),
    };
    head.extend([collective, message.direction as u8]);
    match message.content {
        Content::Ready => head.push(0),
        Content::Chunk { chunk, part } => {
            head.push(if part.is_some() { 2 } else { 1 });
            head.extend((chunk as u32).to_le_bytes());
            bodies.extend(part);
        }
    }
    number
}

/// Delivers the messages of other processes to the members of this one.
pub struct ChainMessages {
    pub all_reduce: Arc<PipelinedAllReduce>,
    pub members: usize,
    /// Upper bound of the sequence numbers.
    pub collectives: u64,
}

impl ContributionSink for ChainMessages {
    fn arrive(&self, number: u64, from: usize, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<(), FrameError> {
        let invalid = |what| FrameError::Field { what };
        if number >= self.collectives {
            return Err(invalid("the number of a collective"));
        }
        let collective = match fields.below_byte(2, "a collective")? {
            0 => Collective::AllReduce(number),
            _ => Collective::AllGather(number),
        };
        let direction = if fields.below_byte(2, "a direction")? == 0 { Direction::Up } else { Direction::Down };
        let to = direction.neighbour(from, self.members).ok_or(invalid("a direction"))?;
        let content = match fields.below_byte(3, "a message of a collective")? {
            0 => Content::Ready,
            kind => {
                let chunk = fields.u32("a chunk")? as usize;
                let expected = self.all_reduce.expected(to, direction, collective, chunk);
                let (bytes, largest) = expected.ok_or(invalid("a chunk"))?;
                let part = (kind == 2).then(|| ring.tensor_within(fields, bytes, largest, "a chunk"));
                Content::Chunk { chunk, part: part.transpose()? }
            }
        };
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
