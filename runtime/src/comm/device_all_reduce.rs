//! All-reduce and all-gather in place between devices whose memory is not the host's.
//!
//! Every member brings terms and a buffer for the sum, which may be one of the terms. Each owns one range of the sum. A
//! stream on its device adds the terms of that range in rank order, so sums are bitwise those of one adder, and copies
//! the range to the other members: a reduce-scatter, then an all-gather. Each member receives and sends
//! `(n - 1) / n` of the bytes. A range is accessed by one stream alone, in all buffers, so no other order is needed.
//! Terms of other devices pass through a chunk of staging memory. An all-gather is the second half alone.
//!
//! The last member to come queues the work of all, so nobody waits here.

use crate::comm::all_reduce::{Addends, AllReduce, Collective, Parts, chunk_bytes, range};
use crate::comm::communicator::CollectiveError;
use crate::device::api::{Device, Stream};
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::memory_counter::MemoryCounter;
use crate::device::region::{Region, RegionMut};
use compiler::tensor::DType;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A member's device, with a stream for the ranges that it owns.
struct Member {
    device: Arc<dyn Device>,
    stream: Box<dyn Stream>,
    counter: Arc<MemoryCounter>,
    chunk: usize,
    /// A term of another device, and the sum of the terms before this member's. Allocated on first use.
    staging: [Option<Buffer>; 2],
}

struct State {
    members: Vec<Option<Member>>,
    contributions: HashMap<Collective, Vec<Option<Parts>>>,
}

/// Collectives of a fixed group of members.
pub struct DeviceAllReduce {
    state: Mutex<State>,
}

impl DeviceAllReduce {
    /// For members on these devices; `None` unless each can copy the memory of all, and the host cannot read it.
    pub fn new(devices: &[Arc<dyn Device>]) -> Result<Option<DeviceAllReduce>, DeviceError> {
        if devices.len() < 2 {
            return Ok(None);
        }
        let probes = devices.iter().map(|device| device.allocate(1)).collect::<Result<Vec<_>, _>>()?;
        let can_copy = |device: &Arc<dyn Device>| probes.iter().all(|probe| device.can_copy(probe));
        if probes.iter().any(Buffer::is_host) || !devices.iter().all(can_copy) {
            return Ok(None);
        }
        let members = devices.iter().map(|_| None).collect();
        Ok(Some(DeviceAllReduce { state: Mutex::new(State { members, contributions: HashMap::new() }) }))
    }

    // No code panics while it holds the lock with inconsistent state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AllReduce for DeviceAllReduce {
    fn enter(
        &self,
        member: usize,
        device: &Arc<dyn Device>,
        bytes: usize,
        counter: &Arc<MemoryCounter>,
    ) -> Result<(), DeviceError> {
        let (device, stream, counter) = (device.clone(), device.stream()?, counter.clone());
        let entry = Member { device, stream, counter, chunk: chunk_bytes(bytes), staging: [None, None] };
        if let Some(slot) = self.lock().members.get_mut(member) {
            *slot = Some(entry);
        }
        Ok(())
    }

    fn contribute(&self, collective: Collective, member: usize, parts: Parts) -> Result<(), DeviceError> {
        // Streams are used by one thread at a time: the one that holds the lock.
        let mut state = self.lock();
        let State { members, contributions } = &mut *state;
        let member_parts = contributions.entry(collective).or_insert_with(|| members.iter().map(|_| None).collect());
        if let Some(slot) = member_parts.get_mut(member) {
            *slot = Some(parts);
        }
        if member_parts.iter().any(Option::is_none) {
            return Ok(());
        }
        let member_parts: Vec<Parts> = contributions.remove(&collective).into_iter().flatten().flatten().collect();
        members.iter_mut().enumerate().try_for_each(|(index, member)| match member {
            Some(member) => member.run(collective, index, &member_parts),
            None => Ok(()),
        })
    }

    /// Has nothing to wait for after all members have contributed.
    fn wait(&self, _: Collective, _: usize) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn abandon(&self) {}
}

impl Member {
    /// Queues the sums of the ranges of member `index`, and their copies to the others.
    fn run(&mut self, collective: Collective, index: usize, member_parts: &[Parts]) -> Result<(), DeviceError> {
        let parts = || member_parts.iter().flatten().flatten();
        let buffers = || parts().flat_map(|part| part.terms.iter().map(|(_, term)| term).chain([&part.sum]));
        buffers().try_for_each(|buffer| self.stream.acquire(buffer))?;
        for part_index in 0..member_parts.iter().map(Vec::len).min().unwrap_or(0) {
            let addends: Vec<&Addends> = member_parts.iter().filter_map(|parts| parts[part_index].as_ref()).collect();
            if let Some(part) = addends.get(index).filter(|_| addends.len() == member_parts.len()) {
                let (sum, range) = (&part.sum, range(part.sum.len(), part.dtype.size(), index, member_parts.len()));
                let adds = matches!(collective, Collective::AllReduce(_));
                if adds && !self.add(part.dtype, &sorted_terms(&addends), sum, range.clone())? {
                    continue;
                }
                for other in addends.iter().filter(|other| other.is_whole && !Arc::ptr_eq(&other.sum, sum)) {
                    self.stream.copy(sum.region_of(range.clone()), exclusive(&other.sum, range.clone()))?;
                }
            }
        }
        let event = self.stream.record()?;
        buffers().for_each(|buffer| buffer.add_event(event.clone()));
        Ok(())
    }

    /// Adds a range of the terms in order. Returns false without terms.
    fn add(
        &mut self,
        dtype: DType,
        terms: &[&Arc<Buffer>],
        sum: &Arc<Buffer>,
        range: Range<usize>,
    ) -> Result<bool, DeviceError> {
        let position = terms.iter().position(|term| Arc::ptr_eq(term, sum));
        let (before, after) = match position {
            Some(position) => (&terms[..position], &terms[position + 1..]),
            None => (&[][..], terms),
        };
        let mut start = range.start;
        while start < range.end {
            let chunk = start..range.end.min(start + self.chunk);
            start = chunk.end;
            let mut to = exclusive(sum, chunk.clone());
            let mut after = after;
            match (before, position) {
                ([], Some(_)) => {}
                // A sum of two numbers is the same in either order.
                ([first], _) => self.accumulate(dtype, first, &chunk, to.reborrow())?,
                ([first, rest @ ..], _) => {
                    let mut partial = self.take(1)?;
                    let mut sum = partial.region_mut().slice(0..chunk.len());
                    self.stream.copy(first.region_of(chunk.clone()), sum.reborrow())?;
                    rest.iter().try_for_each(|term| self.accumulate(dtype, term, &chunk, sum.reborrow()))?;
                    self.stream.accumulate(dtype, sum.as_region(), to.reborrow())?;
                    self.staging[1] = Some(partial);
                }
                ([], None) => {
                    let Some((first, rest)) = after.split_first() else { return Ok(false) };
                    self.stream.copy(first.region_of(chunk.clone()), to.reborrow())?;
                    after = rest;
                }
            }
            after.iter().try_for_each(|term| self.accumulate(dtype, term, &chunk, to.reborrow()))?;
        }
        Ok(!terms.is_empty())
    }

    /// Adds a chunk of a term.
    fn accumulate(
        &mut self,
        dtype: DType,
        term: &Arc<Buffer>,
        chunk: &Range<usize>,
        sum: RegionMut<'_>,
    ) -> Result<(), DeviceError> {
        let term_region: Region<'_> = term.region_of(chunk.clone());
        if self.device.can_access(term) {
            return self.stream.accumulate(dtype, term_region, sum);
        }
        let mut copy = self.take(0)?;
        self.stream.copy(term_region, copy.region_mut().slice(0..chunk.len()))?;
        self.stream.accumulate(dtype, copy.region_of(0..chunk.len()), sum)?;
        self.staging[0] = Some(copy);
        Ok(())
    }

    /// A staging buffer.
    fn take(&mut self, index: usize) -> Result<Buffer, DeviceError> {
        if let Some(buffer) = self.staging[index].take() {
            return Ok(buffer);
        }
        let mut buffer = self.device.allocate(self.chunk)?;
        buffer.count_in(&self.counter);
        Ok(buffer)
    }
}

/// The terms of all members by rank, then by member.
fn sorted_terms<'a>(parts: &[&'a Addends]) -> Vec<&'a Arc<Buffer>> {
    let mut terms: Vec<&(usize, Arc<Buffer>)> = parts.iter().flat_map(|part| &part.terms).collect();
    terms.sort_by_key(|(rank, _)| *rank);
    terms.into_iter().map(|(_, term)| term).collect()
}

/// A range of a buffer that other members hold too, and do not access.
fn exclusive(buffer: &Buffer, range: Range<usize>) -> RegionMut<'_> {
    // SAFETY: the memory is a device's, which the host cannot dereference. Members neither read nor write the buffers
    // that they have contributed before the events of all owners, and one owner's stream alone accesses the range.
    unsafe { buffer.region_of(range).assume_exclusive() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::all_reduce::tests::{check_gathers, check_sums};
    use crate::device::cpu::device::cpu;
    use crate::device::sanitizer::device::sanitizer;

    #[test]
    fn sums_are_those_of_one_adder() {
        let new_all_reduce = |members: usize| -> Arc<dyn AllReduce> {
            Arc::new(DeviceAllReduce::new(&vec![sanitizer(); members]).unwrap().unwrap())
        };
        for is_whole in [true, false] {
            check_sums(new_all_reduce, sanitizer, &[&[0], &[1]], is_whole);
            check_sums(new_all_reduce, sanitizer, &[&[0], &[1], &[2], &[3], &[4]], is_whole);
        }
        check_sums(new_all_reduce, sanitizer, &[&[3, 0], &[], &[1, 2]], true);
        check_gathers(new_all_reduce, sanitizer, 3);
    }

    #[test]
    fn the_hosts_memory_is_not_reduced_in_place() {
        assert!(DeviceAllReduce::new(&[cpu(), cpu()]).unwrap().is_none());
        assert!(DeviceAllReduce::new(&[sanitizer(), cpu()]).unwrap().is_none());
        assert!(DeviceAllReduce::new(&[sanitizer()]).unwrap().is_none());
    }
}
