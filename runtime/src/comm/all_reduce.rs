//! Collectives in place: members sum their buffers, or gather shards of them, without copies of whole buffers.

use crate::comm::host_all_reduce::HostAllReduce;
use crate::comm::members::Members;
use crate::comm::pipelined_all_reduce::PipelinedAllReduce;
use crate::device::api::Device;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use compiler::tensor::DType;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// Limits of the bytes of a chunk. Otherwise a chunk is `1 / CHUNK_PART` of the bytes that a member reduces per round.
const LEAST_CHUNK: usize = 64 << 10;
const MOST_CHUNK: usize = 4 << 20;
const CHUNK_PART: usize = 128;

/// A member's part of one sum.
pub struct Addends {
    /// Element type.
    pub dtype: DType,
    /// Will hold the sum, or this member's range of it.
    pub sum: Arc<Buffer>,
    /// True if it holds the member's term.
    pub has_term: bool,
    /// False if every member keeps its own range only.
    pub is_whole: bool,
}

/// A collective with its sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Collective {
    AllReduce(u64),
    /// The members' ranges of `sum` are there already.
    AllGather(u64),
}

/// Parts of a collective's sums. All members list the same sums; those that do not exist are `None`.
pub type Parts = Vec<Option<Addends>>;

/// Collectives of a fixed group of members. Sums are bitwise those of one adder that adds the terms in member order.
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
    fn wait(&self, collective: Collective, member: usize) -> Result<(), DeviceError>;

    /// Fails all current and future waits, after a member was lost.
    fn abandon(&self);
}

/// Bytes of the chunks of a member that reduces `bytes` per round.
pub(super) fn chunk_bytes(bytes: usize) -> usize {
    (bytes / CHUNK_PART).clamp(LEAST_CHUNK, MOST_CHUNK).next_multiple_of(256)
}

/// The ranges of a sum, of at most `bytes` each. With the only member that needs it, or that has it.
pub(super) fn chunks(
    collective: Collective,
    part: &Addends,
    members: usize,
    bytes: usize,
) -> impl Iterator<Item = (Option<usize>, Range<usize>)> {
    let length = part.sum.len();
    let shards = match matches!(collective, Collective::AllReduce(_)) && part.is_whole {
        true => vec![(None, 0..length)],
        false => {
            let shard = |owner| (Some(owner), range(length, part.dtype.size(), owner, members));
            (0..members).map(shard).collect()
        }
    };
    shards.into_iter().flat_map(move |(owner, shard)| pieces(shard, bytes).map(move |piece| (owner, piece)))
}

/// A range in pieces of at most `bytes`.
pub(super) fn pieces(whole: Range<usize>, bytes: usize) -> impl Iterator<Item = Range<usize>> {
    whole.clone().step_by(bytes).map(move |start| start..whole.end.min(start + bytes))
}

/// Byte range of one of `members` shards.
pub fn range(bytes: usize, element: usize, member: usize, members: usize) -> Range<usize> {
    let element = element.max(1);
    let elements = (bytes / element) as u128;
    let edge = |member: usize| (elements * member as u128 / members.max(1) as u128) as usize * element;
    edge(member)..edge(member + 1)
}

/// The collectives of members on these devices, in one process. `None` for a member alone.
pub fn in_one_process(devices: &[Arc<dyn Device>]) -> Result<Option<Arc<dyn AllReduce>>, DeviceError> {
    if let Some(all_reduce) = HostAllReduce::new(devices)? {
        return Ok(Some(Arc::new(all_reduce)));
    }
    Ok((devices.len() > 1).then(|| Arc::new(PipelinedAllReduce::new(Members::here(devices.len()))) as _))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::device::context::DeviceContext;

    /// Sizes of the sums: less than a chunk, several chunks, and less than one element for each member.
    const COUNTS: [usize; 3] = [1000, 70_001, 2];

    fn values(member: usize, count: usize, number: u64) -> Vec<f32> {
        let seed = member * 101 + number as usize * 13;
        (0..count).map(|at| ((at * 37 + seed) % 997) as f32 * 1e-3 + 1e4 * (seed % 3) as f32).collect()
    }

    pub fn upload(context: &DeviceContext, values: &[f32]) -> Arc<Buffer> {
        let mut buffer = context.take(size_of_val(values)).unwrap();
        context.stream.upload(bytemuck::cast_slice(values), Buffer::exclusive(&mut buffer)).unwrap();
        context.release(&buffer).unwrap();
        buffer
    }

    pub fn download(context: &DeviceContext, buffer: &mut Arc<Buffer>) -> Vec<f32> {
        assert!(context.try_exclusive(buffer).unwrap().is_some(), "it is held by others");
        let mut got = vec![0f32; buffer.len() / 4];
        context.stream.download(buffer.region(), bytemuck::cast_slice_mut(&mut got)).unwrap();
        got
    }

    /// Members with these all-reduces sum and gather, each in a thread of its own. Some have no term.
    pub fn check(all_reduces: &[Arc<dyn AllReduce>], devices: &[Arc<dyn Device>], is_whole: bool) {
        let members = all_reduces.len();
        let run = |member: usize, all_reduce: &dyn AllReduce| {
            let context = DeviceContext::new(devices[member % devices.len()].clone(), Arc::default()).unwrap();
            all_reduce.enter(member, &context.device, 0, &Arc::default()).unwrap();
            for number in 0..4 {
                let has_term = |member: usize| number != 1 || member % 2 == 1;
                let part = |count: &usize| {
                    let sum = upload(&context, &values(member, *count, number));
                    Some(Addends { dtype: DType::F32, sum, has_term: has_term(member), is_whole })
                };
                let mut parts: Parts = COUNTS.iter().map(part).collect();
                parts.insert(1, None);
                let sums: Vec<_> = parts.iter().flatten().map(|part| part.sum.clone()).collect();
                all_reduce.contribute(Collective::AllReduce(number), member, parts).unwrap();
                all_reduce.wait(Collective::AllReduce(number), member).unwrap();
                for (mut sum, count) in sums.into_iter().zip(COUNTS) {
                    let terms = (0..members).filter(|member| has_term(*member));
                    let mut terms = terms.map(|member| values(member, count, number));
                    let mut want = terms.next().unwrap();
                    terms.for_each(|term| want.iter_mut().zip(term).for_each(|(sum, term)| *sum += term));
                    let shard = range(count, 1, member, members);
                    let range = if is_whole { 0..count } else { shard.clone() };
                    let got = download(&context, &mut sum);
                    assert!(got[range.clone()] == want[range], "member {member} of {members}, {count}");
                    // Only the own shard is left; the others come back.
                    let mut shards = vec![0f32; count];
                    shards[shard.clone()].copy_from_slice(&want[shard]);
                    let mut sum = upload(&context, &shards);
                    let part = Addends { dtype: DType::F32, sum: sum.clone(), has_term: false, is_whole: true };
                    let gather = Collective::AllGather(number * 10 + count as u64 % 10);
                    all_reduce.contribute(gather, member, vec![Some(part)]).unwrap();
                    all_reduce.wait(gather, member).unwrap();
                    assert!(download(&context, &mut sum) == want, "member {member} of {members} gathers");
                }
            }
        };
        std::thread::scope(|scope| {
            for (member, all_reduce) in all_reduces.iter().enumerate() {
                scope.spawn(move || run(member, &**all_reduce));
            }
        });
    }

    #[test]
    fn devices_with_other_memory_than_the_hosts_reduce_too() {
        use crate::device::{cpu::device::cpu, sanitizer::device::sanitizer};
        for members in [2, 5] {
            for is_whole in [true, false] {
                let all_reduce = in_one_process(&vec![sanitizer(); members]).unwrap().unwrap();
                check(&vec![all_reduce; members], &[sanitizer()], is_whole);
                let mixed: Vec<_> = [cpu(), sanitizer(), cpu()].into_iter().cycle().take(members).collect();
                let all_reduce = in_one_process(&mixed).unwrap().unwrap();
                check(&vec![all_reduce; members], &mixed, is_whole);
            }
        }
        assert!(in_one_process(&[cpu()]).unwrap().is_none() && in_one_process(&[sanitizer()]).unwrap().is_none());
    }

    #[test]
    fn shares_are_even_and_whole_elements() {
        for (elements, members) in [(10, 4), (3, 8), (0, 2), (1, 1), (1 << 20, 7)] {
            let mut end = 0;
            for member in 0..members {
                let shard = range(elements * 4, 4, member, members);
                assert_eq!((shard.start, shard.end % 4), (end, 0));
                assert!(shard.len() <= elements.div_ceil(members) * 4);
                end = shard.end;
            }
            assert_eq!(end, elements * 4);
        }
    }
}
