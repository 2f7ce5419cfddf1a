//! Sharded gradients (ZeRO 2): the replicas of a stage accumulate into each other's shards.
//!
//! A gradient goes to its owners as soon as the backward pass has produced it, so no replica holds all gradients of a
//! stage. The micro-batches of a round accumulate in order, so results are reproducible: each waits until its
//! predecessor has added or failed. Under a flush, owners allocate a round only after they have gathered its weights,
//! which every replica does before its first micro-batch.
//!
//! The owner of a shard is charged for its memory.

use crate::comm::communicator::CollectiveError;
use crate::device::api::Device;
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::device::layout::accumulation_type;
use crate::device::memory_counter::MemoryCounter;
use crate::device::region::Region;
use crate::zero::shard::ShardRange;
use crate::zero::weight_shards::WeightShards;
use compiler::tensor::DType;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A gradient is copied to its owner in at most this many chunks, of at least so many bytes.
const CHUNKS: usize = 32;
const LEAST_CHUNK: usize = 64 << 10;

/// A gradient term of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Term {
    pub round: u32,
    /// Index into [`crate::exec::stage_code::StageCode::gradient_terms`].
    pub term: usize,
}

/// The sum of a term: micro-batches added so far, and each owner's shard until the owner takes it.
#[derive(Default)]
struct Sum {
    added: u32,
    shares: Vec<Option<Buffer>>,
}

/// A replica that owns shards.
#[derive(Clone)]
struct Owner {
    device: Arc<dyn Device>,
    ledger: Arc<MemoryCounter>,
    /// The last round for which it has memory.
    last: u32,
}

struct State {
    owners: Vec<Option<Owner>>,
    sums: HashMap<Term, Sum>,
    is_abandoned: bool,
}

/// The gradient shards of one stage.
pub struct GradientShards {
    /// Weight shards, under ZeRO 3.
    pub weights: WeightShards,
    state: Mutex<State>,
    changed: Condvar,
}

impl GradientShards {
    pub fn new(replicas: usize) -> GradientShards {
        let state = State { owners: vec![None; replicas], sums: HashMap::new(), is_abandoned: false };
        GradientShards { weights: WeightShards::new(replicas), state: Mutex::new(state), changed: Condvar::new() }
    }

    // No code panics while it holds the lock with inconsistent state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a replica with its device, which will hold its shards, and its memory counter. It accepts gradients of
    /// rounds up to `last`.
    pub fn enter(&self, replica: usize, device: &Arc<dyn Device>, ledger: &Arc<MemoryCounter>, last: u32) {
        if let Some(own) = self.lock().owners.get_mut(replica) {
            *own = Some(Owner { device: device.clone(), ledger: ledger.clone(), last });
        }
        self.changed.notify_all();
    }

    /// A replica accepts gradients of rounds up to `last`, after freeing earlier rounds.
    pub fn open(&self, replica: usize, last: u32) {
        if let Some(Some(own)) = self.lock().owners.get_mut(replica) {
            own.last = last.max(own.last);
        }
        self.changed.notify_all();
    }

    /// Accumulates a micro-batch's term after `before` predecessors of its round. `parameter` and `dtype` describe the
    /// term's parameter, `share` its shards.
    pub fn add(
        &self,
        term: Term,
        before: u32,
        gradient: Region<'_>,
        (parameter, dtype): (usize, DType),
        share: &ShardRange,
        device: &DeviceContext,
    ) -> Result<(), CollectiveError> {
        let mut state = self.lock();
        let owners = loop {
            if state.is_abandoned {
                return Err(CollectiveError::PeerLost);
            }
            let with_room = |owner: &Option<Owner>| owner.clone().filter(|owner| term.round <= owner.last);
            let owners: Option<Vec<Owner>> = state.owners.iter().map(with_room).collect();
            match owners {
                Some(owners) if state.sums.entry(term).or_default().added == before => break owners,
                _ => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        // Only the micro-batch whose turn it is touches the sum, so the lock can be released.
        let mut shares = state.sums.get_mut(&term).map(|sum| std::mem::take(&mut sum.shares)).unwrap_or_default();
        drop(state);
        let dtype = accumulation_type(dtype);
        shares.resize_with(owners.len(), || None);
        for (replica, (owner, sum)) in owners.iter().zip(&mut shares).enumerate() {
            let part = gradient.slice(share.range_of(parameter, gradient.len(), dtype.size(), replica));
            device.on(&owner.device, |on_owner| {
                if Arc::ptr_eq(&owner.device, &device.device) {
                    return add_part(on_owner, dtype, part, sum, &owner.ledger);
                }
                send_part(device, on_owner, dtype, part, sum, &owner.ledger)
            })?;
        }
        if let Some(sum) = self.lock().sums.get_mut(&term) {
            (sum.shares, sum.added) = (shares, before + 1);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Takes a replica's shard of a finished sum; none if no micro-batch has added to it.
    pub fn take(&self, term: Term, replica: usize) -> Option<Buffer> {
        let mut state = self.lock();
        let sum = state.sums.get_mut(&term)?;
        let own = sum.shares.get_mut(replica).and_then(Option::take);
        if sum.shares.iter().all(Option::is_none) {
            state.sums.remove(&term);
        }
        own
    }

    /// Fails all current and future waits, after a worker was lost.
    pub fn abandon(&self) {
        self.weights.abandon();
        self.lock().is_abandoned = true;
        self.changed.notify_all();
    }
}

/// Adds a gradient to a sum, or begins the sum, on the device that holds both.
fn add_part(
    device: &DeviceContext,
    dtype: DType,
    part: Region<'_>,
    sum: &mut Option<Buffer>,
    ledger: &Arc<MemoryCounter>,
) -> Result<(), DeviceError> {
    if let Some(sum) = sum {
        device.stream.acquire(sum)?;
        device.stream.accumulate(dtype, part, sum.region_mut())?;
        return device.release(sum);
    }
    let mut first = device.copy_of(part)?;
    first.count_in(ledger);
    device.release(&first)?;
    *sum = Some(first);
    Ok(())
}

/// Like [`add_part`], for a gradient of another device. Its copies take the memory of a chunk.
fn send_part(
    device: &DeviceContext,
    owner: &DeviceContext,
    dtype: DType,
    part: Region<'_>,
    sum: &mut Option<Buffer>,
    ledger: &Arc<MemoryCounter>,
) -> Result<(), DeviceError> {
    let Some(sum) = sum else {
        let mut first = device.send_to(owner, part)?;
        first.count_in(ledger);
        owner.release(&first)?;
        *sum = Some(first);
        return Ok(());
    };
    owner.stream.acquire(sum)?;
    let (mut start, bytes) = (0, part.len().div_ceil(CHUNKS).max(LEAST_CHUNK).next_multiple_of(256));
    while start < part.len() {
        let chunk = start..part.len().min(start + bytes);
        start = chunk.end;
        let sent = device.send_to(owner, part.slice(chunk.clone()))?;
        owner.stream.accumulate(dtype, sent.region(), sum.region_mut().slice(chunk))?;
        owner.release(&sent)?;
    }
    owner.release(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::device::cpu;

    fn bytes(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
    }

    /// Arrival order must not matter; rounding would reveal a different order of addition.
    #[test]
    fn items_add_in_order() {
        let gradient_shards = GradientShards::new(2);
        let ledgers = [Arc::<MemoryCounter>::default(), Arc::<MemoryCounter>::default()];
        let numbers = [[1e8f32, 1.0, 2.0], [1.0, 1.0, 1.0], [-1e8, 1.0, 0.5], [0.25, 1.0, 1.0]];
        let term = Term { round: 3, term: 0 };
        std::thread::scope(|scope| {
            for item in (0..4u32).rev() {
                let (gradient_shards, share) = (&gradient_shards, ShardRange::of(item as usize % 2, 2, vec![true]));
                let own = bytes(&numbers[item as usize]);
                scope.spawn(move || {
                    let device = DeviceContext::new(cpu(), Arc::default()).unwrap();
                    let own = Buffer::host_copy(&own);
                    gradient_shards.add(term, item, own.region(), (0, DType::F32), &share, &device).unwrap();
                });
            }
            ledgers.iter().enumerate().for_each(|(replica, ledger)| gradient_shards.enter(replica, &cpu(), ledger, 2));
            (0..2).for_each(|replica| gradient_shards.open(replica, 3));
        });
        let sum =
            |at: usize| numbers.iter().fold(None, |sum: Option<f32>, of| Some(sum.map_or(of[at], |sum| sum + of[at])));
        let expected: Vec<f32> = (0..3).filter_map(sum).collect();
        let [first, second] = [0, 1].map(|replica| gradient_shards.take(term, replica).unwrap());
        assert_eq!([first.download().unwrap(), second.download().unwrap()].concat(), bytes(&expected));
        assert_eq!(ledgers.each_ref().map(|ledger| ledger.peak()), [4, 8]);
        assert!(gradient_shards.take(term, 0).is_none() && gradient_shards.lock().sums.is_empty());
    }

    #[test]
    fn nobody_waits_for_one_that_is_gone() {
        let gradient_shards = GradientShards::new(1);
        let share = ShardRange::of(0, 1, vec![true]);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let device = DeviceContext::new(cpu(), Arc::default()).unwrap();
                let (term, own) = (Term { round: 0, term: 0 }, Buffer::host_copy(&bytes(&[1.0])));
                gradient_shards.add(term, 1, own.region(), (0, DType::F32), &share, &device)
            });
            gradient_shards.abandon();
            assert_eq!(waits.join().unwrap(), Err(CollectiveError::PeerLost));
        });
    }
}
