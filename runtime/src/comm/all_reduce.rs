//! Collectives in place: members sum their buffers, or gather shards of them, without copies of whole buffers.
//!
//! A member learns from a [`Communicator`](crate::comm::communicator::Communicator), to which it contributes afterwards,
//! that all have contributed.

use crate::comm::communicator::CollectiveError;
use crate::comm::device_all_reduce::DeviceAllReduce;
use crate::comm::host_all_reduce::HostAllReduce;
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

/// The collectives of members on these devices, in one process. `None` if the memory of some is the host's and of others
/// is not, or if the devices cannot copy each other's.
pub fn in_one_process(devices: &[Arc<dyn Device>]) -> Result<Option<Arc<dyn AllReduce>>, DeviceError> {
    if let Some(all_reduce) = HostAllReduce::new(devices)? {
        return Ok(Some(Arc::new(all_reduce)));
    }
    Ok(DeviceAllReduce::new(devices)?.map(|all_reduce| Arc::new(all_reduce) as Arc<dyn AllReduce>))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::comm::communicator::Communicator;
    use crate::device::context::DeviceContext;

    const COUNT: usize = 70_001;

    fn values(seed: usize) -> Vec<f32> {
        (0..COUNT).map(|at| ((at * 37 + seed * 101) % 997) as f32 * 1e-3 + 1e4 * (seed % 3) as f32).collect()
    }

    fn buffer(context: &DeviceContext, values: &[f32]) -> Arc<Buffer> {
        let mut buffer = context.take(size_of_val(values)).unwrap();
        context.stream.upload(bytemuck::cast_slice(values), Buffer::exclusive(&mut buffer)).unwrap();
        buffer
    }

    fn content(context: &DeviceContext, buffer: &mut Arc<Buffer>) -> Vec<f32> {
        assert!(context.try_exclusive(buffer).unwrap().is_some());
        let mut got = vec![0f32; COUNT];
        context.stream.download(buffer.region(), bytemuck::cast_slice_mut(&mut got)).unwrap();
        got
    }

    /// Calls `run` for each member, in a thread of its own.
    fn of_members(
        all_reduce: &Arc<dyn AllReduce>,
        device: fn() -> Arc<dyn Device>,
        members: usize,
        run: impl Fn(usize, &DeviceContext, &Communicator<()>) + Sync,
    ) {
        let communicator = Communicator::new(members);
        std::thread::scope(|scope| {
            for member in 0..members {
                let (communicator, run) = (&communicator, &run);
                scope.spawn(move || {
                    let (context, counter) = (DeviceContext::new(device(), Arc::default()).unwrap(), Arc::default());
                    all_reduce.enter(member, &context.device, 0, &counter).unwrap();
                    run(member, &context, communicator);
                });
            }
        });
    }

    /// Every member has the terms of these ranks.
    pub fn check_sums(
        new_all_reduce: impl Fn(usize) -> Arc<dyn AllReduce>,
        device: fn() -> Arc<dyn Device>,
        ranks: &[&[usize]],
        is_whole: bool,
    ) {
        let (all_reduce, members) = (new_all_reduce(ranks.len()), ranks.len());
        let mut order: Vec<usize> = ranks.iter().flat_map(|ranks| ranks.iter().copied()).collect();
        order.sort_unstable();
        let mut want = values(order[0]);
        for &rank in &order[1..] {
            want.iter_mut().zip(values(rank)).for_each(|(sum, term)| *sum += term);
        }
        of_members(&all_reduce, device, members, |member, context, communicator| {
            for number in 0..5 {
                let terms: Vec<_> = ranks[member].iter().map(|&rank| (rank, buffer(context, &values(rank)))).collect();
                let first = terms.first().map(|(_, term)| term.clone());
                let mut sum = first.unwrap_or_else(|| context.take(COUNT * 4).unwrap());
                terms.iter().for_each(|(_, term)| context.release(term).unwrap());
                context.release(&sum).unwrap();
                let other_terms: Vec<_> = terms.iter().skip(1).map(|(_, term)| term.clone()).collect();
                let part = Addends { dtype: DType::F32, terms, sum: sum.clone(), is_whole };
                all_reduce.contribute(Collective::AllReduce(number), member, vec![None, Some(part)]).unwrap();
                communicator.contribute(number, member, ());
                communicator.wait(number).unwrap();
                all_reduce.wait(Collective::AllReduce(number), member).unwrap();
                let range = if is_whole { 0..COUNT } else { range(COUNT, 1, member, members) };
                let got = content(context, &mut sum);
                assert!(got[range.clone()] == want[range], "member {member} of {members}");
                [other_terms, vec![sum]].into_iter().flatten().for_each(|buffer| context.give(buffer));
            }
        });
    }

    /// Every member has its range.
    pub fn check_gathers(
        new_all_reduce: impl Fn(usize) -> Arc<dyn AllReduce>,
        device: fn() -> Arc<dyn Device>,
        members: usize,
    ) {
        let (all_reduce, want) = (new_all_reduce(members), values(1));
        of_members(&all_reduce, device, members, |member, context, communicator| {
            for number in 0..5 {
                let shard = range(COUNT, 1, member, members);
                let mut part = vec![0f32; COUNT];
                part[shard.clone()].copy_from_slice(&want[shard]);
                let mut sum = buffer(context, &part);
                context.release(&sum).unwrap();
                let part = Addends { dtype: DType::F32, terms: Vec::new(), sum: sum.clone(), is_whole: true };
                all_reduce.contribute(Collective::AllGather(number), member, vec![Some(part), None]).unwrap();
                communicator.contribute(number, member, ());
                communicator.wait(number).unwrap();
                all_reduce.wait(Collective::AllGather(number), member).unwrap();
                assert!(content(context, &mut sum) == want, "member {member} of {members}");
                context.give(sum);
            }
        });
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
