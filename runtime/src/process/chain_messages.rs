//! Messages of all-reduces and all-gathers between processes, in `Part` frames.

use crate::comm::all_reduce::{AllReduce, Collective};
use crate::comm::chain::{ChainHead, ChainMessage};
use crate::comm::members::Members;
use crate::comm::pipelined_all_reduce::PipelinedAllReduce;
use crate::process::fields::{Fields, check};
use crate::process::frame::FrameError;
use crate::process::recv_buffers::Ring;
use crate::process::router::GroupReceiver;
use std::sync::Arc;

/// Delivers the messages of other processes to the members of this one.
pub struct ChainMessages {
    all_reduce: Arc<PipelinedAllReduce>,
    members: usize,
    /// Upper bound of the sequence numbers.
    collectives: u64,
}

impl ChainMessages {
    /// The all-reduce of these members.
    pub fn open(members: Members, collectives: u64) -> (Arc<PipelinedAllReduce>, ChainMessages) {
        let (count, all_reduce) = (members.count(), Arc::new(PipelinedAllReduce::new(members)));
        (all_reduce.clone(), ChainMessages { all_reduce, members: count, collectives })
    }
}

impl GroupReceiver for ChainMessages {
    fn arrive(&self, from: usize, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<(), FrameError> {
        let invalid = |what| FrameError::Field { what };
        let head: ChainHead = fields.value("a message of a collective")?;
        let (direction, collective, chunk) = head;
        let (Collective::AllReduce(number) | Collective::AllGather(number)) = collective;
        check(number < self.collectives, "the number of a collective")?;
        let to = direction.neighbour(from, self.members).ok_or(invalid("a direction"))?;
        let mut part = None;
        if let Some((chunk, has_part)) = chunk {
            let expected = self.all_reduce.expected(to, direction, collective, chunk);
            let (bytes, largest) = expected.ok_or(invalid("a chunk"))?;
            part = has_part.then(|| ring.tensor_within(fields, bytes, largest, "a chunk")).transpose()?;
        }
        fields.end()?;
        let arrived = self.all_reduce.arrive(to, ChainMessage::of(head, part));
        arrived.map_err(|fault| FrameError::of(fault, "a chunk"))
    }

    fn abandon(&self) {
        self.all_reduce.abandon();
    }
}
