//! Sharded weights (ZeRO 3): the replicas of a stage read each other's shards.
//!
//! No replica holds a whole version. Each publishes its shard after its step, and a pass gathers what each of its steps reads
//! ([`streaming`](crate::zero::streaming)). A shard stays until every replica has released the version; its owner pays for its
//! memory. A read waits only for a shard that is about to be published, because programs gather a version before they use it.
//! A replica of another process is asked for its shard, which the reader holds until it has copied it.

use crate::comm::communicator::CollectiveError;
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::region::RegionMut;
use crate::exec::executor::Weights;
use crate::zero::remote_replicas::{RemoteReplicas, ShardMessage};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The shards of one version by replica, and the replicas that have released it.
struct Version {
    shares: Vec<Option<Weights>>,
    is_gone: Vec<bool>,
}

struct State {
    versions: HashMap<u32, Version>,
    /// What replicas of this process have asked replicas of others for, by reader and owner, and what has come.
    expected: HashMap<(usize, usize), Option<Arc<Buffer>>>,
    /// The version and parameter that a replica of another process waits for, by reader and owner.
    asked: HashMap<(usize, usize), (u32, usize)>,
    is_abandoned: bool,
}

/// The weight shards of one stage.
pub struct WeightShards {
    remote: Arc<RemoteReplicas>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Version {
    fn new(replicas: usize) -> Version {
        Version { shares: vec![None; replicas], is_gone: vec![false; replicas] }
    }
}

impl State {
    fn shard(&self, version: u32, parameter: usize, owner: usize) -> Option<Arc<Buffer>> {
        self.versions.get(&version)?.shares.get(owner)?.as_ref()?.get(parameter).cloned()
    }

    /// Releases a version for a replica. Returns false if it had done so.
    fn release(&mut self, version: u32, replica: usize) -> bool {
        let Some(known) = self.versions.get_mut(&version) else { return false };
        let Some(is_gone) = known.is_gone.get_mut(replica).filter(|is_gone| !**is_gone) else { return false };
        *is_gone = true;
        if known.is_gone.iter().all(|is_gone| *is_gone) {
            self.versions.remove(&version);
        }
        true
    }
}

impl WeightShards {
    pub fn new(remote: Arc<RemoteReplicas>) -> WeightShards {
        let (versions, expected, asked) = (HashMap::new(), HashMap::new(), HashMap::new());
        let state = State { versions, expected, asked, is_abandoned: false };
        WeightShards { remote, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn replicas(&self) -> usize {
        self.remote.processes.len()
    }

    // No code panics while it holds the lock with inconsistent state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a replica's shard of a version. Unsharded parameters are empty buffers.
    pub fn put(&self, version: u32, replica: usize, share: Weights) {
        let mut state = self.lock();
        let known = state.versions.entry(version).or_insert_with(|| Version::new(self.replicas()));
        if let Some(own) = known.shares.get_mut(replica) {
            *own = Some(share);
        }
        let due =
            |(at, of): (&(usize, usize), &(u32, usize))| (at.1 == replica && of.0 == version).then_some((*at, *of));
        let due: Vec<_> = state.asked.iter().filter_map(due).collect();
        for (at, (version, parameter)) in due {
            state.asked.remove(&at);
            self.answer(&state, at, version, parameter);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Sends a shard to a reader in another process. Returns false if it is not there.
    fn answer(&self, state: &State, (reader, owner): (usize, usize), version: u32, parameter: usize) -> bool {
        let Some(shard) = state.shard(version, parameter, owner) else { return false };
        self.remote.send_to(owner, reader, ShardMessage::Shard { to: reader, shard });
        true
    }

    /// A replica of another process asks for a shard, which it receives once it is published.
    pub fn request(&self, reader: usize, owner: usize, version: u32, parameter: usize) {
        let mut state = self.lock();
        if !self.answer(&state, (reader, owner), version, parameter) {
            state.asked.insert((reader, owner), (version, parameter));
        }
    }

    /// A shard that a replica has asked for has come. Returns false if none is expected.
    pub fn arrive(&self, reader: usize, owner: usize, shard: Arc<Buffer>) -> bool {
        match self.lock().expected.get_mut(&(reader, owner)) {
            Some(place @ None) => *place = Some(shard),
            _ => return false,
        }
        self.changed.notify_all();
        true
    }

    /// A replica of another process has released a version.
    pub fn release_remote(&self, version: u32, replica: usize) {
        let mut state = self.lock();
        state.versions.entry(version).or_insert_with(|| Version::new(self.replicas()));
        state.release(version, replica);
    }

    /// Releases a version for a replica. The last release frees it.
    pub fn release(&self, version: u32, replica: usize) {
        let is_new = self.lock().release(version, replica);
        if is_new {
            self.remote.send_to_all(replica, || ShardMessage::Release { version });
        }
    }

    /// Gathers a parameter of a version for a replica. Blocks until all shards are published.
    pub fn read(
        &self,
        reader: usize,
        (version, parameter): (u32, usize),
        mut to: RegionMut<'_>,
        device: &DeviceContext,
    ) -> Result<(), CollectiveError> {
        let is_there = |owner: &usize| self.remote.process(*owner).is_some();
        let there: Vec<usize> = (0..self.replicas()).filter(is_there).collect();
        let mut state = self.lock();
        for &of in &there {
            state.expected.insert((reader, of), None);
            self.remote.send_to(reader, of, ShardMessage::Read { version, parameter, of });
        }
        let shares: Vec<Arc<Buffer>> = loop {
            if state.is_abandoned {
                return Err(CollectiveError::PeerLost);
            }
            let of = |owner: usize| match is_there(&owner) {
                true => state.expected.get(&(reader, owner)).cloned().flatten(),
                false => state.shard(version, parameter, owner),
            };
            match (0..self.replicas()).map(of).collect() {
                Some(shares) => break shares,
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        };
        there.iter().for_each(|of| drop(state.expected.remove(&(reader, *of))));
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
        let weight_shards = WeightShards::new(Arc::new(RemoteReplicas::none(2)));
        weight_shards.put(3, 1, share(&[4, 5]));
        let device = DeviceContext::new(cpu(), Arc::default()).unwrap();
        let mut whole = Buffer::host(5);
        std::thread::scope(|scope| {
            scope.spawn(|| weight_shards.put(3, 0, share(&[1, 2, 3])));
            weight_shards.read(0, (3, 0), whole.region_mut(), &device).unwrap();
        });
        assert_eq!(whole.download().unwrap(), &[1, 2, 3, 4, 5][..]);
        weight_shards.release(3, 0);
        weight_shards.release(3, 0);
        weight_shards.read(0, (3, 0), whole.region_mut(), &device).unwrap();
        let refused = weight_shards.read(0, (3, 0), Buffer::host(4).region_mut(), &device);
        assert_eq!(refused, Err(CollectiveError::PeerLost));
        weight_shards.release(3, 1);
        assert!(weight_shards.lock().versions.is_empty());
    }

    #[test]
    fn nobody_waits_for_one_that_is_gone() {
        let weight_shards = WeightShards::new(Arc::new(RemoteReplicas::none(2)));
        weight_shards.put(0, 0, share(&[1]));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let device = DeviceContext::new(cpu(), Arc::default()).unwrap();
                weight_shards.read(1, (0, 0), Buffer::host(2).region_mut(), &device)
            });
            weight_shards.abandon();
            assert_eq!(waits.join().unwrap(), Err(CollectiveError::PeerLost));
        });
    }
}
