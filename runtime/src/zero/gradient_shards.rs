//! Sharded gradients (ZeRO 2): the replicas of a stage accumulate into each other's shards.
//!
//! A gradient goes to its owners as soon as the backward pass has produced it, so no replica holds all gradients of a
//! stage. The micro-batches of a round accumulate in order, so results are reproducible: each waits until its
//! predecessor has added or failed. Under a flush, owners allocate a round only after they have gathered its weights,
//! which every replica does before its first micro-batch.
//!
//! The owner of a shard is charged for its memory. If groups of replicas shard, each group has its own sums, of the
//! micro-batches of its replicas.
//!
//! A gradient for owners in another process is added there by the thread that receives it, or by the thread that has just
//! added its predecessor. A replica sends a gradient only once all processes have added its last one, so that neither
//! they nor the network hold more than one gradient per replica.

use crate::comm::communicator::PEER_LOST;
use crate::comm::members::{Members, encode};
use crate::comm::monitor::Monitor;
use crate::device::api::Device;
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::device::layout::accumulation_type;
use crate::device::memory_counter::MemoryCounter;
use crate::device::region::Region;
use crate::zero::shard::ShardRange;
use crate::zero::shard_message::{ShardMessage, Term};
use crate::zero::weight_shards::WeightShards;
use compiler::tensor::DType;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// A gradient is copied to its owner in at most this many chunks, of at least so many bytes.
const CHUNKS: usize = 32;
const LEAST_CHUNK: usize = 64 << 10;

/// The sum of a term: micro-batches added so far, and each owner's shard until the owner takes it.
#[derive(Default)]
struct Sum {
    added: u32,
    /// True while a thread adds a micro-batch, and holds the shards.
    is_adding: bool,
    shards: Vec<Option<Buffer>>,
    /// Gradients from other processes, by the number of predecessors.
    early: BTreeMap<u32, Arrival>,
}

impl Sum {
    /// Takes the shards, to add a micro-batch.
    fn begin(&mut self) -> Vec<Option<Buffer>> {
        self.is_adding = true;
        std::mem::take(&mut self.shards)
    }
}

/// A gradient from another process.
pub struct Arrival {
    pub from: usize,
    /// Element type of the sum.
    pub dtype: DType,
    /// Each with the replica that owns it.
    pub parts: Vec<(usize, Arc<Buffer>)>,
}

/// A replica that owns shards.
#[derive(Clone)]
struct Owner {
    device: Arc<dyn Device>,
    counter: Arc<MemoryCounter>,
}

struct State {
    /// By replica, those of this process that take part.
    owners: Vec<Option<Owner>>,
    /// The last round for which each replica has memory.
    last: Vec<Option<u32>>,
    /// Number of processes that have not added a replica's last gradient.
    unacknowledged: Vec<usize>,
    /// True while a gradient of a replica of another process has come and is not added.
    is_early: Vec<bool>,
    sums: HashMap<Term, Sum>,
}

/// The gradient shards of one stage.
pub struct GradientShards {
    /// Weight shards, under ZeRO 3.
    pub weights: WeightShards,
    replicas: Arc<Members>,
    state: Monitor<State>,
    /// Adds gradients from other processes.
    receiver: Mutex<Option<DeviceContext>>,
}

impl GradientShards {
    pub fn new(replicas: Members) -> GradientShards {
        let (count, replicas) = (replicas.count(), Arc::new(replicas));
        let state = State {
            owners: vec![None; count],
            last: vec![None; count],
            unacknowledged: vec![0; count],
            is_early: vec![false; count],
            sums: HashMap::new(),
        };
        let weights = WeightShards::new(replicas.clone());
        GradientShards { weights, replicas, state: Monitor::new(state), receiver: Mutex::new(None) }
    }

    /// Registers a replica of this process with its device, which will hold its shards, and its memory counter. It
    /// accepts gradients of rounds up to `last`.
    pub fn enter(&self, replica: usize, device: &Arc<dyn Device>, counter: &Arc<MemoryCounter>, last: u32) {
        self.state.with(|state| {
            if let Some(owner) = state.owners.get_mut(replica) {
                *owner = Some(Owner { device: device.clone(), counter: counter.clone() });
            }
        });
        self.open(replica, last);
    }

    /// A replica of this process accepts gradients of rounds up to `last`, after freeing earlier rounds.
    pub fn open(&self, replica: usize, last: u32) {
        self.open_remote(replica, last);
        self.replicas.send_to_all(replica, &encode(&ShardMessage::Open { last }), &[]);
    }

    /// A replica accepts gradients of rounds up to `last`.
    pub fn open_remote(&self, replica: usize, last: u32) {
        self.state.with(|state| {
            if let Some(newest) = state.last.get_mut(replica) {
                *newest = Some(last).max(*newest);
            }
        });
    }

    /// The memory counter of a replica of this process, once it takes part.
    pub fn counter(&self, replica: usize) -> Option<Arc<MemoryCounter>> {
        self.state.with(|state| state.owners.get(replica)?.as_ref().map(|owner| owner.counter.clone()))
    }

    /// Accumulates a micro-batch's term after `before` predecessors of its round. `parameter` and `dtype` describe the
    /// term's parameter, `shard` its shards.
    pub fn add(
        &self,
        term: Term,
        before: u32,
        gradient: &Arc<Buffer>,
        (parameter, dtype): (usize, DType),
        shard: &ShardRange,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        let (replica_number, processes) = (shard.rank(), self.replicas.others());
        // Only the micro-batch whose turn it is touches the sum, so others may change the state meanwhile.
        let (owners, mut shards) = self.state.wait(|state| {
            let sum = state.sums.entry(term).or_default();
            if sum.added > before {
                // Another process has added a gradient in the turn of this one.
                return Err(PEER_LOST);
            }
            let unacknowledged = state.unacknowledged.get_mut(replica_number);
            let is_free = state.last.iter().all(|last| last.is_some_and(|last| term.round <= last))
                && unacknowledged.as_ref().is_none_or(|count| **count == 0);
            if !is_free || sum.added < before || sum.is_adding {
                return Ok(None);
            }
            unacknowledged.into_iter().for_each(|count| *count = processes.len());
            Ok(Some((state.owners.clone(), sum.begin())))
        })?;
        let dtype = accumulation_type(dtype);
        let range = |replica: usize| shard.range_of(parameter, gradient.len(), dtype.size(), replica);
        if !processes.is_empty() {
            device.release(gradient)?;
        }
        for process in processes {
            let owned = self.replicas.of(Some(process));
            let parts = owned.map(|replica| Arc::new(Buffer::part(gradient.clone(), range(replica)))).collect();
            self.replicas.send(process, replica_number, &encode(&ShardMessage::Add { term, before }), parts);
        }
        shards.resize_with(owners.len(), || None);
        for (replica, (owner, sum)) in owners.iter().zip(&mut shards).enumerate() {
            let Some(owner) = owner else { continue };
            let part = gradient.region_of(range(replica));
            device.on(&owner.device, |on_owner| add_part(device, on_owner, dtype, part, sum, &owner.counter))?;
        }
        self.end(term, shards);
        self.add_early(term, device)
    }

    /// Returns the shards of a sum to which a micro-batch was added.
    fn end(&self, term: Term, shards: Vec<Option<Buffer>>) {
        self.state.with(|state| {
            if let Some(sum) = state.sums.get_mut(&term) {
                (sum.shards, sum.added, sum.is_adding) = (shards, sum.added + 1, false);
            }
        });
    }

    /// Adds gradients from other processes whose turn it is.
    fn add_early(&self, term: Term, device: &DeviceContext) -> Result<(), DeviceError> {
        loop {
            let next = self.state.with(|state| {
                let sum = state.sums.get_mut(&term).filter(|sum| !sum.is_adding)?;
                let arrival = sum.early.remove(&sum.added)?;
                Some((state.owners.clone(), arrival, sum.begin()))
            });
            let Some((owners, arrival, mut shards)) = next else { return Ok(()) };
            shards.resize_with(owners.len(), || None);
            let Arrival { from, dtype, parts } = arrival;
            for (replica, part) in parts {
                let owner = owners.get(replica).and_then(Option::as_ref).ok_or(PEER_LOST)?;
                device.on(&owner.device, |on_owner| {
                    let part = on_owner.receive(part)?;
                    add_part(on_owner, on_owner, dtype, part.region(), &mut shards[replica], &owner.counter)?;
                    on_owner.give_foreign(part)
                })?;
            }
            self.end(term, shards);
            self.state.with(|state| state.is_early.get_mut(from).into_iter().for_each(|is_early| *is_early = false));
            if let Some(local) = self.replicas.of(None).next() {
                self.replicas.send_to(local, from, &encode(&ShardMessage::Added { to: from }), Vec::new());
            }
        }
    }

    /// Takes a gradient from another process, after `before` predecessors of its round. Fails if it cannot be there.
    pub fn arrive(&self, term: Term, before: u32, arrival: Arrival) -> Result<(), DeviceError> {
        let device = self.state.with(|state| {
            let has_room = |(replica, _): &(usize, Arc<Buffer>)| {
                state.last.get(*replica).is_some_and(|last| Some(term.round) <= *last)
            };
            let has_room = arrival.parts.iter().all(has_room);
            // A replica sends its next gradient after this one was added.
            let is_early =
                state.is_early.get_mut(arrival.from).is_none_or(|is_early| std::mem::replace(is_early, true));
            let sum = state.sums.entry(term).or_default();
            let is_late = before < sum.added || (before == sum.added && sum.is_adding);
            if !has_room || is_early || is_late || sum.early.insert(before, arrival).is_some() {
                return Err(PEER_LOST);
            }
            Ok(state.owners.iter().flatten().next().map(|owner| owner.device.clone()))
        })?;
        let mut receiver = self.receiver.lock();
        if let (None, Some(device)) = (&*receiver, device) {
            *receiver = Some(DeviceContext::new(device, Arc::default())?);
        }
        receiver.as_ref().map_or(Ok(()), |receiver| self.add_early(term, receiver))
    }

    /// Another process has added a replica's last gradient.
    pub fn acknowledge(&self, replica: usize) {
        self.state.with(|state| {
            let count = state.unacknowledged.get_mut(replica);
            count.into_iter().for_each(|count| *count = count.saturating_sub(1));
        });
    }

    /// Takes a replica's shard of a finished sum; none if no micro-batch has added to it.
    pub fn take(&self, term: Term, replica: usize) -> Option<Buffer> {
        self.state.with(|state| {
            let sum = state.sums.get_mut(&term)?;
            let shard = sum.shards.get_mut(replica).and_then(Option::take);
            if sum.shards.iter().all(Option::is_none) {
                state.sums.remove(&term);
            }
            shard
        })
    }

    /// Fails all current and future waits, after a worker was lost.
    pub fn abandon(&self) {
        self.weights.abandon();
        self.state.abandon();
    }
}

/// Adds a gradient of a device to a sum on its owner's, or begins the sum. Copies between devices take the memory of a
/// chunk.
fn add_part(
    device: &DeviceContext,
    owner: &DeviceContext,
    dtype: DType,
    part: Region<'_>,
    sum: &mut Option<Buffer>,
    ledger: &Arc<MemoryCounter>,
) -> Result<(), DeviceError> {
    let is_here = Arc::ptr_eq(&device.device, &owner.device);
    let Some(sum) = sum else {
        let mut first = if is_here { owner.copy_of(part)? } else { device.send_to(owner, part)? };
        first.count_in(ledger);
        owner.release(&first)?;
        *sum = Some(first);
        return Ok(());
    };
    owner.stream.acquire(sum)?;
    if is_here {
        owner.stream.accumulate(dtype, part, sum.region_mut())?;
        return owner.release(sum);
    }
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
        let gradient_shards = GradientShards::new(Members::here(2));
        let ledgers = [Arc::<MemoryCounter>::default(), Arc::<MemoryCounter>::default()];
        let numbers = [[1e8f32, 1.0, 2.0], [1.0, 1.0, 1.0], [-1e8, 1.0, 0.5], [0.25, 1.0, 1.0]];
        let term = Term { round: 3, term: 0 };
        std::thread::scope(|scope| {
            for item in (0..4u32).rev() {
                let (gradient_shards, share) = (&gradient_shards, ShardRange::of(item as usize % 2, 2, vec![true]));
                let own = bytes(&numbers[item as usize]);
                scope.spawn(move || {
                    let device = DeviceContext::new(cpu(), Arc::default()).unwrap();
                    let own = Arc::new(Buffer::host_copy(&own));
                    gradient_shards.add(term, item, &own, (0, DType::F32), &share, &device).unwrap();
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
        assert!(gradient_shards.take(term, 0).is_none() && gradient_shards.state.with(|state| state.sums.is_empty()));
    }
}
