//! Sharded weights (ZeRO 3): the replicas of a stage read each other's shards.
//!
//! No replica holds a whole version. Each publishes its shard after its step, and a pass gathers what each of its steps reads
//! ([`streaming`](crate::zero::streaming)). A shard stays until every replica has released the version; its owner pays for its
//! memory. A read waits only for a shard that is about to be published, because programs gather a version before they use it.
//! A replica of another process is asked for its shard, which the reader holds until it has copied it.

use crate::comm::communicator::PEER_LOST;
use crate::comm::members::{Members, encode};
use crate::comm::monitor::Monitor;
use crate::device::buffer::Buffer;
use crate::device::context::DeviceContext;
use crate::device::error::DeviceError;
use crate::device::region::RegionMut;
use crate::exec::executor::Weights;
use crate::zero::shard_message::ShardMessage;
use std::collections::HashMap;
use std::sync::Arc;

/// The shards of one version by replica, and the replicas that have released it.
struct Version {
    shards: Vec<Option<Weights>>,
    is_released: Vec<bool>,
}

#[derive(Default)]
struct State {
    versions: HashMap<u32, Version>,
    /// What replicas of this process have asked replicas of others for, by reader and owner, and what has come.
    expected: HashMap<(usize, usize), Option<Arc<Buffer>>>,
    /// The version and parameter that a replica of another process waits for, by reader and owner.
    requests: HashMap<(usize, usize), (u32, usize)>,
}

/// The weight shards of one stage.
pub struct WeightShards {
    replicas: Arc<Members>,
    state: Monitor<State>,
}

impl Version {
    fn new(replicas: usize) -> Version {
        Version { shards: vec![None; replicas], is_released: vec![false; replicas] }
    }
}

impl State {
    fn shard(&self, version: u32, parameter: usize, owner: usize) -> Option<Arc<Buffer>> {
        self.versions.get(&version)?.shards.get(owner)?.as_ref()?.get(parameter).cloned()
    }

    /// Releases a version for a replica. Returns false if it had done so.
    fn release(&mut self, version: u32, replica: usize) -> bool {
        let Some(entry) = self.versions.get_mut(&version) else { return false };
        let Some(is_released) = entry.is_released.get_mut(replica).filter(|is_released| !**is_released) else {
            return false;
        };
        *is_released = true;
        if entry.is_released.iter().all(|is_released| *is_released) {
            self.versions.remove(&version);
        }
        true
    }
}

impl WeightShards {
    pub fn new(replicas: Arc<Members>) -> WeightShards {
        WeightShards { replicas, state: Monitor::default() }
    }

    /// Publishes a replica's shard of a version. Unsharded parameters are empty buffers.
    pub fn publish(&self, version: u32, replica: usize, shard: Weights) {
        self.state.with(|state| {
            let entry = state.versions.entry(version).or_insert_with(|| Version::new(self.replicas.count()));
            if let Some(slot) = entry.shards.get_mut(replica) {
                *slot = Some(shard);
            }
            let is_for = |key: &(usize, usize), of: &(u32, usize)| key.1 == replica && of.0 == version;
            let ready: Vec<_> = state.requests.extract_if(|key, of| is_for(key, of)).collect();
            for (key, (version, parameter)) in ready {
                self.answer(state, key, version, parameter);
            }
        });
    }

    /// Sends a shard to a reader in another process. Returns false if it is not there.
    fn answer(&self, state: &State, (reader, owner): (usize, usize), version: u32, parameter: usize) -> bool {
        let Some(shard) = state.shard(version, parameter, owner) else { return false };
        let message = ShardMessage::Shard { to: reader, bytes: shard.len() };
        self.replicas.send_to(owner, reader, &encode(&message), vec![shard]);
        true
    }

    /// A replica of another process asks for a shard, which it receives once it is published.
    pub fn request(&self, reader: usize, owner: usize, version: u32, parameter: usize) {
        self.state.with(|state| {
            if !self.answer(state, (reader, owner), version, parameter) {
                state.requests.insert((reader, owner), (version, parameter));
            }
        });
    }

    /// A shard that a replica has asked for has come. Returns false if none is expected.
    pub fn arrive(&self, reader: usize, owner: usize, shard: Arc<Buffer>) -> bool {
        self.state.with(|state| match state.expected.get_mut(&(reader, owner)) {
            Some(slot @ None) => {
                *slot = Some(shard);
                true
            }
            _ => false,
        })
    }

    /// A replica of another process has released a version.
    pub fn release_remote(&self, version: u32, replica: usize) {
        self.state.with(|state| {
            state.versions.entry(version).or_insert_with(|| Version::new(self.replicas.count()));
            state.release(version, replica);
        });
    }

    /// Releases a version for a replica. The last release frees it.
    pub fn release(&self, version: u32, replica: usize) {
        let is_new = self.state.with(|state| state.release(version, replica));
        if is_new {
            self.replicas.send_to_all(replica, &encode(&ShardMessage::Release { version }), &[]);
        }
    }

    /// Gathers a parameter of a version for a replica. Blocks until all shards are published.
    pub fn read(
        &self,
        reader: usize,
        (version, parameter): (u32, usize),
        mut to: RegionMut<'_>,
        device: &DeviceContext,
    ) -> Result<(), DeviceError> {
        let is_remote = |owner: &usize| self.replicas.process(*owner).is_some();
        let remote_owners: Vec<usize> = (0..self.replicas.count()).filter(is_remote).collect();
        for &owner in &remote_owners {
            self.state.with(|state| state.expected.insert((reader, owner), None));
            let message = ShardMessage::Read { version, parameter, of: owner };
            self.replicas.send_to(reader, owner, &encode(&message), Vec::new());
        }
        let shards: Vec<Arc<Buffer>> = self.state.wait(|state| {
            let shard_of = |owner: usize| match is_remote(&owner) {
                true => state.expected.get(&(reader, owner)).cloned().flatten(),
                false => state.shard(version, parameter, owner),
            };
            let shards: Option<Vec<_>> = (0..self.replicas.count()).map(shard_of).collect();
            if shards.is_some() {
                state.expected.retain(|(of, _), _| *of != reader);
            }
            Ok(shards)
        })?;
        // A wrong shard length means that the shard is not of this parameter.
        if shards.iter().map(|shard| shard.len()).sum::<usize>() != to.len() {
            return Err(PEER_LOST);
        }
        let mut end = 0;
        for shard in shards {
            let start = end;
            end += shard.len();
            device.copy_from(&shard, to.reborrow().slice(start..end))?;
        }
        Ok(())
    }

    /// Fails all current and future waits, after a worker was lost.
    pub fn abandon(&self) {
        self.state.abandon();
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
        let weight_shards = WeightShards::new(Arc::new(Members::here(2)));
        weight_shards.publish(3, 1, share(&[4, 5]));
        let device = DeviceContext::new(cpu(), Arc::default()).unwrap();
        let mut whole = Buffer::host(5);
        std::thread::scope(|scope| {
            scope.spawn(|| weight_shards.publish(3, 0, share(&[1, 2, 3])));
            weight_shards.read(0, (3, 0), whole.region_mut(), &device).unwrap();
        });
        assert_eq!(whole.download().unwrap(), &[1, 2, 3, 4, 5][..]);
        weight_shards.release(3, 0);
        weight_shards.release(3, 0);
        weight_shards.read(0, (3, 0), whole.region_mut(), &device).unwrap();
        let refused = weight_shards.read(0, (3, 0), Buffer::host(4).region_mut(), &device);
        assert_eq!(refused, Err(PEER_LOST));
        weight_shards.release(3, 1);
        assert!(weight_shards.state.with(|state| state.versions.is_empty()));
    }
}
