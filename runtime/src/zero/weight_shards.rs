//! Sharded weights (ZeRO 3): the replicas of a stage read each other's shards.
//!
//! No replica holds a whole version. Each publishes its shard after its step, and a pass gathers what each of its steps reads
//! ([`streaming`](crate::zero::streaming)). A shard stays until every replica has released the version; its owner pays for its
//! memory. A read waits only for a shard that is about to be published, because programs gather a version before they use it.

use crate::comm::communicator::CollectiveError;
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::region::RegionMut;
use crate::exec::executor::Weights;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The shards of one version by replica, and the replicas that have released it.
struct Version {
    shares: Vec<Option<Weights>>,
    is_gone: Vec<bool>,
}

struct State {
    versions: HashMap<u32, Version>,
    is_abandoned: bool,
}

/// The weight shards of one stage.
pub struct WeightShards {
    replicas: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl WeightShards {
    pub fn new(replicas: usize) -> WeightShards {
        let state = State { versions: HashMap::new(), is_abandoned: false };
        WeightShards { replicas, state: Mutex::new(state), changed: Condvar::new() }
    }

    // No code panics while it holds the lock with inconsistent state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a replica's shard of a version. Unsharded parameters are empty buffers.
    pub fn put(&self, version: u32, replica: usize, share: Weights) {
        let none = || Version { shares: vec![None; self.replicas], is_gone: vec![false; self.replicas] };
        if let Some(own) = self.lock().versions.entry(version).or_insert_with(none).shares.get_mut(replica) {
            *own = Some(share);
        }
        self.changed.notify_all();
    }

    /// Releases a version for a replica. The last release frees it.
    pub fn let_go(&self, version: u32, replica: usize) {
        let mut state = self.lock();
        let Some(known) = state.versions.get_mut(&version) else { return };
        known.is_gone.get_mut(replica).into_iter().for_each(|is_gone| *is_gone = true);
        if known.is_gone.iter().all(|is_gone| *is_gone) {
            state.versions.remove(&version);
        }
    }

    /// Gathers a parameter of a version. Blocks until all shards are published.
    pub fn read(
        &self,
        version: u32,
        parameter: usize,
        mut to: RegionMut<'_>,
        device: &DeviceContext,
    ) -> Result<(), CollectiveError> {
        let mut state = self.lock();
        let shares: Vec<Arc<Buffer>> = loop {
            if state.is_abandoned {
                return Err(CollectiveError::PeerLost);
            }
            let shares = state.versions.get(&version).map(|known| known.shares.iter());
            let of = |share: &Option<Weights>| share.as_ref().and_then(|share| share.get(parameter)).cloned();
            match shares.and_then(|mut shares| shares.by_ref().map(of).collect()) {
                Some(shares) => break shares,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(state);
        // A wrong shard length means that the shard is not of this parameter.
        if shares.iter().map(|share| share.len()).sum::<usize>() != to.len() {
            return Err(CollectiveError::PeerLost);
        }
        let mut end = 0;
        for share in shares {
            let start = end;
            end += share.len();
            device.copy_from(&share, to.reborrow().slice(start..end))?;
        }
        Ok(())
    }

    /// Fails all current and future waits, after a worker was lost.
    pub fn abandon(&self) {
        self.lock().is_abandoned = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::device::cpu;

    fn share(bytes: &[u8]) -> Weights {
        vec![Arc::new(Buffer::host_copy(bytes))]
    }

    #[test]
    fn a_version_is_read_until_all_have_let_it_go() {
        let weight_shards = WeightShards::new(2);
        weight_shards.put(3, 1, share(&[4, 5]));
        let device = DeviceContext::new(cpu(), Arc::default()).unwrap();
        let mut whole = Buffer::host(5);
        std::thread::scope(|scope| {
            scope.spawn(|| weight_shards.put(3, 0, share(&[1, 2, 3])));
            weight_shards.read(3, 0, whole.region_mut(), &device).unwrap();
        });
        assert_eq!(whole.download().unwrap(), &[1, 2, 3, 4, 5][..]);
        weight_shards.let_go(3, 0);
        weight_shards.let_go(3, 0);
        weight_shards.read(3, 0, whole.region_mut(), &device).unwrap();
        let refused = weight_shards.read(3, 0, Buffer::host(4).region_mut(), &device);
        assert_eq!(refused, Err(CollectiveError::PeerLost));
        weight_shards.let_go(3, 1);
        assert!(weight_shards.lock().versions.is_empty());
    }

    #[test]
    fn nobody_waits_for_one_that_is_gone() {
        let weight_shards = WeightShards::new(2);
        weight_shards.put(0, 0, share(&[1]));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let device = DeviceContext::new(cpu(), Arc::default()).unwrap();
                weight_shards.read(0, 0, Buffer::host(2).region_mut(), &device)
            });
            weight_shards.abandon();
            assert_eq!(waits.join().unwrap(), Err(CollectiveError::PeerLost));
        });
    }
}
