//! Collectives in place: members sum their buffers, or gather shards of them, without copies of whole buffers.
//!
//! A member learns from a [`Communicator`](crate::comm::communicator::Communicator), to which it contributes afterwards,
//! that all have contributed.

use crate::comm::communicator::CollectiveError;
use crate::device::api::Device;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use compiler::tensor::DType;
use std::ops::Range;
use std::sync::Arc;

/// Limits of the bytes of a chunk. Otherwise a chunk is `1 / CHUNK_PART` of the bytes that a member reduces per round.
const LEAST_CHUNK: usize = 64 << 10;
pub const MOST_CHUNK: usize = 4 << 20;
const CHUNK_PART: usize = 128;

/// A member's part of one sum.
pub struct Addends {
    /// Element type.
    pub dtype: DType,
    /// Each with its rank in the sum.
    pub terms: Vec<(usize, Arc<Buffer>)>,
    /// Will hold the sum, or this member's range of it.
    pub sum: Arc<Buffer>,
    /// False if every member keeps its own range only.
    pub is_whole: bool,
}

/// A collective with its sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    AllReduce(u64),
    /// The members' ranges of `sum` are there already.
    AllGather(u64),
}

/// Parts of a collective's sums. All members list the same sums; those that do not exist are `None`.
pub type Parts = Vec<Option<Addends>>;

/// Collectives of a fixed group of members. Sums are bitwise those of one adder that adds the terms in rank order.
pub trait AllReduce: Send + Sync {
    /// Registers a member of this process, before it contributes. It reduces `bytes` per round. `ledger` counts staging
    /// memory.
    fn enter(
        &self,
        member: usize,
        device: &Arc<dyn Device>,
        bytes: usize,
        ledger: &Arc<MemoryCounter>,
    ) -> Result<(), DeviceError>;

    /// Contributes buffers that the member's stream has released. Does not wait for other members.
    fn contribute(&self, collective: Collective, member: usize, parts: Parts) -> Result<(), DeviceError>;

    /// Blocks until the member's part of a collective is queued on its device, after all members have contributed. The
    /// member is then the only holder of its buffers, and acquires them before use.
    fn wait(&self, collective: Collective, member: usize) -> Result<(), CollectiveError>;

    /// Fails all current and future waits, after a member was lost.
    fn abandon(&self);
}

/// Bytes of the chunks of a member that reduces `bytes` per round.
pub(super) fn chunk_bytes(bytes: usize) -> usize {
    (bytes / CHUNK_PART).clamp(LEAST_CHUNK, MOST_CHUNK).next_multiple_of(256)
}

/// Byte range of one of `members` shards.
pub fn range(bytes: usize, element: usize, member: usize, members: usize) -> Range<usize> {
    let element = element.max(1);
    let elements = (bytes / element) as u128;
    let edge = |member: usize| (elements * member as u128 / members.max(1) as u128) as usize * element;
    edge(member)..edge(member + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_even_and_whole_elements() {
        for (elements, members) in [(10, 4), (3, 8), (0, 2), (1, 1), (1 << 20, 7)] {
            let mut end = 0;
            for member in 0..members {
                let of = range(elements * 4, 4, member, members);
                assert_eq!((of.start, of.end % 4), (end, 0));
                assert!(of.len() <= elements.div_ceil(members) * 4);
                end = of.end;
            }
            assert_eq!(end, elements * 4);
        }
    }
}
