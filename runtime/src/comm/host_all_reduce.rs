//! All-reduce and all-gather in place between workers whose buffers are in the memory of one host.
//!
//! The buffers are divided into chunks. After all members have contributed, one that waits takes chunks until none is left:
//! it adds the terms of a chunk in the order of members, and copies the sum to all members. So every byte is read and written once
//! by some member, and members that wait at the same time share the work. None waits for others to come and share it.

use crate::comm::all_reduce;
use crate::comm::all_reduce::{AllReduce, Collective, Parts, pieces};
use crate::comm::communicator::PEER_LOST;
use crate::device::api::{Device, Elementwise, Stream};
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use crate::device::region::RegionMut;
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Bytes that a member adds before it copies their sum: they stay in the first-level cache.
const BLOCK: usize = 16 << 10;
/// Bytes that a member takes at a time.
const CHUNK: usize = 16 * BLOCK;

/// A range of one sum.
struct Chunk {
    index: usize,
    range: Range<usize>,
    /// The only member that needs the sum, or the member that has it.
    owner: Option<usize>,
}

/// A collective to which all members have contributed.
struct Work {
    collective: Collective,
    contributions: Vec<Parts>,
    chunks: Vec<Chunk>,
}

/// A collective until its last chunk is done.
struct Open {
    contributions: Vec<Option<Parts>>,
    /// `None` until all have contributed.
    work: Option<Arc<Work>>,
    /// The next chunk to take, and the number of chunks that are not done.
    next: usize,
    remaining: usize,
    /// A member failed at a chunk.
    failed: Option<DeviceError>,
}

#[derive(Default)]
struct State {
    open: HashMap<Collective, Open>,
    is_abandoned: bool,
}

/// Collectives of a fixed group of members.
pub struct HostAllReduce {
    members: usize,
    /// Adds and copies. Any member's device can.
    device: Arc<dyn Device>,
    state: Mutex<State>,
    changed: Condvar,
}

impl HostAllReduce {
    /// For members on these devices; `None` unless the memory of all is the host's.
    pub fn new(devices: &[Arc<dyn Device>]) -> Result<Option<HostAllReduce>, DeviceError> {
        let probes = devices.iter().map(|device| device.allocate(1)).collect::<Result<Vec<_>, _>>()?;
        let (Some(device), true) = (devices.first(), devices.len() > 1 && probes.iter().all(Buffer::is_host)) else {
            return Ok(None);
        };
        let (state, changed) = Default::default();
        Ok(Some(HostAllReduce { members: devices.len(), device: device.clone(), state, changed }))
    }

    /// Takes a chunk, or waits for those that others have taken. `None` at the end of the collective.
    fn take(&self, collective: Collective) -> Result<Option<(Arc<Work>, usize)>, DeviceError> {
        let mut state = self.state.lock();
        loop {
            let is_abandoned = state.is_abandoned;
            // A member waits after its own contribution, so a collective that is gone is done.
            let Some(open) = state.open.get_mut(&collective) else { return Ok(None) };
            if let Some(error) = &open.failed {
                return Err(error.clone());
            }
            match &open.work {
                Some(work) if open.next < work.chunks.len() => {
                    let claim = (work.clone(), open.next);
                    open.next += 1;
                    return Ok(Some(claim));
                }
                None if is_abandoned => return Err(PEER_LOST),
                _ => self.changed.wait(&mut state),
            }
        }
    }

    /// Ends a chunk. After the last one, nobody holds the buffers but their members.
    fn end(&self, collective: Collective, outcome: Result<(), DeviceError>) {
        let mut state = self.state.lock();
        let Some(open) = state.open.get_mut(&collective) else { return };
        open.remaining -= 1;
        match outcome {
            Err(error) => open.failed = Some(error),
            Ok(()) if open.remaining == 0 && open.failed.is_none() => drop(state.open.remove(&collective)),
            Ok(()) => return,
        }
        self.changed.notify_all();
    }
}

impl AllReduce for HostAllReduce {
    /// Nothing to do: a member holds one block more than its buffers, and only while it adds.
    fn enter(&self, _: usize, _: &Arc<dyn Device>, _: usize, _: &Arc<MemoryCounter>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn contribute(&self, collective: Collective, member: usize, parts: Parts) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        let open = state.open.entry(collective).or_insert_with(|| Open {
            contributions: (0..self.members).map(|_| None).collect(),
            work: None,
            next: 0,
            remaining: 0,
            failed: None,
        });
        if let Some(slot) = open.contributions.get_mut(member) {
            *slot = Some(parts);
        }
        if open.contributions.iter().any(Option::is_none) {
            return Ok(());
        }
        let work = Work::new(collective, open.contributions.drain(..).flatten().collect());
        open.remaining = work.chunks.len();
        open.work = Some(Arc::new(work));
        if open.remaining == 0 {
            state.open.remove(&collective);
        }
        self.changed.notify_all();
        Ok(())
    }

    fn wait(&self, collective: Collective, _: usize) -> Result<(), DeviceError> {
        let mut tools = None;
        while let Some((work, chunk)) = self.take(collective)? {
            let mut claim = Claim { all_reduce: self, collective, outcome: Err(PEER_LOST) };
            let outcome = match &mut tools {
                Some(tools) => work.run(chunk, tools),
                none => Tools::new(&*self.device).and_then(|new| work.run(chunk, none.insert(new))),
            };
            // The last claim to end makes the members the only holders of their buffers.
            drop(work);
            claim.outcome = outcome;
        }
        Ok(())
    }

    fn abandon(&self) {
        self.state.lock().is_abandoned = true;
        self.changed.notify_all();
    }
}

/// A chunk that a member has taken. It fails if the member panics.
struct Claim<'a> {
    all_reduce: &'a HostAllReduce,
    collective: Collective,
    outcome: Result<(), DeviceError>,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.all_reduce.end(self.collective, std::mem::replace(&mut self.outcome, Ok(())));
    }
}

/// What a member adds with.
struct Tools {
    stream: Box<dyn Stream>,
    /// The sum of one block.
    block: Buffer,
}

impl Tools {
    fn new(device: &dyn Device) -> Result<Tools, DeviceError> {
        Ok(Tools { stream: device.stream()?, block: device.allocate(BLOCK)? })
    }
}

impl Work {
    fn new(collective: Collective, contributions: Vec<Parts>) -> Work {
        let mut chunks = Vec::new();
        for index in 0..contributions.iter().map(Vec::len).min().unwrap_or(0) {
            let mut lengths = contributions.iter().map(|parts| parts[index].as_ref().map(|part| part.sum.len()));
            let (Some(part), Some(Some(bytes))) = (&contributions[0][index], lengths.next()) else { continue };
            if lengths.any(|length| length != Some(bytes)) {
                continue;
            }
            let ranges = all_reduce::chunks(collective, part, contributions.len(), CHUNK);
            chunks.extend(ranges.map(|(owner, range)| Chunk { index, range, owner }));
        }
        Work { collective, contributions, chunks }
    }

    /// Reads and writes a chunk of all buffers.
    fn run(&self, chunk: usize, tools: &mut Tools) -> Result<(), DeviceError> {
        let Chunk { index, range, owner } = &self.chunks[chunk];
        let parts: Vec<_> = self.contributions.iter().filter_map(|parts| parts[*index].as_ref()).collect();
        let Some(dtype) = parts.first().map(|part| part.dtype) else { return Ok(()) };
        if let (Collective::AllGather(_), Some(owner)) = (self.collective, owner) {
            let source = &parts[*owner].sum;
            let others = parts.iter().filter(|part| part.is_whole && !Arc::ptr_eq(&part.sum, source));
            return others
                .map(|part| &part.sum)
                .try_for_each(|sum| tools.stream.copy(source.region_of(range.clone()), exclusive(sum, range.clone())));
        }
        let terms: Vec<&Buffer> = parts.iter().filter(|part| part.has_term).map(|part| &*part.sum).collect();
        let Some((first, rest)) = terms.split_first() else { return Ok(()) };
        for block in pieces(range.clone(), BLOCK) {
            let mut sum = tools.block.region_mut().slice(0..block.len());
            match rest {
                [] => tools.stream.copy(first.region_of(block.clone()), sum.reborrow())?,
                [second, ..] => {
                    let operands = [first.region_of(block.clone()), second.region_of(block.clone())];
                    tools.stream.elementwise(Elementwise::Add, dtype, &operands, sum.reborrow())?
                }
            }
            rest.iter()
                .skip(1)
                .try_for_each(|term| tools.stream.accumulate(dtype, term.region_of(block.clone()), sum.reborrow()))?;
            let receivers = parts.iter().enumerate().filter(|(member, _)| owner.is_none_or(|owner| owner == *member));
            for (_, part) in receivers {
                tools.stream.copy(sum.as_region(), exclusive(&part.sum, block.clone()))?;
            }
        }
        Ok(())
    }
}

/// A range of a buffer that other members hold too, and do not access.
fn exclusive(buffer: &Buffer, range: Range<usize>) -> RegionMut<'_> {
    // SAFETY: members neither read nor write the buffers that they have contributed before `wait` returns, which is after
    // all chunks are done. The member that has taken the chunk alone accesses its range, in all buffers, and no region
    // that it reads is alive when it writes the same buffer.
    unsafe { buffer.region_of(range).assume_exclusive() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::all_reduce::Addends;
    use crate::comm::all_reduce::tests::check;
    use crate::device::cpu::device::cpu;
    use compiler::tensor::DType;

    fn new_all_reduce(members: usize) -> Arc<dyn AllReduce> {
        Arc::new(HostAllReduce::new(&vec![cpu(); members]).unwrap().unwrap())
    }

    #[test]
    fn sums_are_those_of_one_adder() {
        for members in [2, 3, 5] {
            for is_whole in [true, false] {
                check(&vec![new_all_reduce(members); members], &[cpu()], is_whole);
            }
        }
    }

    #[test]
    fn a_member_that_waits_alone_does_all() {
        let all_reduce = new_all_reduce(2);
        let sums: Vec<Arc<Buffer>> =
            [1f32, 2.0].map(|x| Buffer::host_copy(bytemuck::cast_slice(&[x; 100_000]))).map(Arc::new).into();
        for (member, sum) in sums.iter().enumerate() {
            let part = Addends { dtype: DType::F32, sum: sum.clone(), has_term: true, is_whole: true };
            all_reduce.contribute(Collective::AllReduce(0), member, vec![Some(part)]).unwrap();
        }
        all_reduce.wait(Collective::AllReduce(0), 1).unwrap();
        for sum in sums {
            assert!(bytemuck::cast_slice::<u8, f32>(&sum.download().unwrap()).iter().all(|x| *x == 3.0));
            assert_eq!(Arc::strong_count(&sum), 1);
        }
        all_reduce.wait(Collective::AllReduce(0), 0).unwrap();
    }

    #[test]
    fn a_lost_member_fails_the_others() {
        let all_reduce = new_all_reduce(2);
        all_reduce.contribute(Collective::AllReduce(7), 0, vec![None]).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| all_reduce.wait(Collective::AllReduce(7), 0));
            all_reduce.abandon();
            assert_eq!(waits.join().unwrap(), Err(PEER_LOST));
        });
    }

    /// A term with half an element makes the member that adds it panic.
    #[test]
    fn a_member_that_panics_fails_the_others() {
        let all_reduce = new_all_reduce(2);
        for member in 0..2 {
            let sum = Arc::new(Buffer::host(62));
            let part = Addends { dtype: DType::F32, sum, has_term: true, is_whole: true };
            all_reduce.contribute(Collective::AllReduce(0), member, vec![Some(part)]).unwrap();
        }
        std::thread::scope(|scope| {
            assert!(scope.spawn(|| all_reduce.wait(Collective::AllReduce(0), 0)).join().is_err())
        });
        assert_eq!(all_reduce.wait(Collective::AllReduce(0), 1), Err(PEER_LOST));
    }
}
