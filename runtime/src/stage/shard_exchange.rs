//! The exchange of weight shards after an optimizer step (ZeRO).
//!
//! A step writes this replica's range of every sharded parameter. The other ranges arrive bucket by bucket, and nothing reads the
//! version before they do. A parameter without a gradient, or a skipped step, leaves the values unchanged on all replicas. With
//! ZeRO 3 buckets carry no data: they only signal that all replicas have stepped, and runs read from the `weight_shards`.

use crate::comm::all_reduce::{Addends, Collective, Parts};
use crate::comm::communicator::{PEER_LOST, Tensors};
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::layout::is_half;
use crate::exec::executor::Weights;
use crate::stage::stage_worker::StageWorker;
use std::sync::Arc;

/// Sequence number of the final gather to the first replica. Version 0 is never gathered, so 0 is free.
const LAST: u64 = 0;

impl StageWorker<'_> {
    /// Contributes this replica's shards of one bucket of a version.
    pub fn contribute_shards(&mut self, version: u32, bucket: u32) -> Result<(), DeviceError> {
        let Some(shard_comm) = self.comms.shard_comm.clone() else { return Ok(()) };
        let number = self.collective_number(version, bucket);
        if let Some(all_reduce) = &self.comms.all_reduce {
            let parts = self.weights_in_place(version, bucket)?;
            all_reduce.contribute(Collective::AllGather(number), self.shard.rank(), parts)?;
        }
        shard_comm.contribute(number, self.shard.rank(), Vec::new());
        Ok(())
    }

    /// The sharded parameters that the step to a version has written, in one bucket. None under ZeRO 3.
    fn stepped_parameters(&self, version: u32, bucket: u32) -> Vec<usize> {
        let stepped = self.stepped.get(&version).filter(|_| !self.shard.shards_weights);
        let parameters = stepped.iter().flat_map(|stepped| &stepped.parameters).copied();
        parameters.filter(|p| self.shard.is_sharded(*p) && self.round_gradients.bucket_of(*p) == bucket).collect()
    }

    /// Whole weights, of which the other replicas write their ranges.
    fn weights_in_place(&self, version: u32, bucket: u32) -> Result<Parts, DeviceError> {
        let mut parts: Parts = self.code.parameters.iter().map(|_| None).collect();
        for p in self.stepped_parameters(version, bucket) {
            let Some(weight) = self.versions.get(&version).and_then(|weights| weights.get(p)) else { continue };
            self.executor.device.release(weight)?;
            let dtype = self.code.parameters[p].fact.dtype;
            parts[p] = Some(Addends { dtype, sum: weight.clone(), has_term: false, is_whole: true });
        }
        Ok(parts)
    }

    /// Receives the other replicas' shards of one bucket of a version. Blocks. Returns true if the version is complete.
    pub fn receive_shards(&mut self, version: u32, bucket: u32) -> Result<bool, DeviceError> {
        let Some(shard_comm) = self.comms.shard_comm.clone() else { return Ok(false) };
        let number = self.collective_number(version, bucket);
        shard_comm.wait(number)?;
        if let Some(all_reduce) = &self.comms.all_reduce {
            all_reduce.wait(Collective::AllGather(number), self.shard.rank())?;
        }
        let weights = self.versions.get(&version).ok_or(PEER_LOST)?;
        let mut gathered = self.stepped_parameters(version, bucket).into_iter().filter_map(|p| weights.get(p));
        gathered.try_for_each(|weight| self.executor.device.stream.acquire(weight))?;
        let Some(stepped) = self.stepped.get_mut(&version) else { return Ok(false) };
        stepped.buckets = stepped.buckets.saturating_sub(1);
        let is_complete = stepped.buckets == 0;
        if is_complete {
            self.stepped.remove(&version);
            self.shard_stream.iter().for_each(|shard_stream| shard_stream.open(version));
        }
        Ok(is_complete)
    }

    /// Publishes this replica's shard of a version, under ZeRO 3.
    pub(super) fn publish_shards(&self, version: u32) -> Result<(), DeviceError> {
        match (&self.shard_stream, self.versions.get(&version)) {
            (Some(shard_stream), Some(weights)) => shard_stream.publish(version, weights, &self.executor.device),
            _ => Ok(()),
        }
    }

    /// Releases a version for this replica, under ZeRO 3.
    pub(super) fn release_version(&self, version: u32) {
        self.shard_stream.iter().for_each(|shard_stream| shard_stream.release(version));
    }

    /// Gathers all sharded parameters of a version.
    pub(super) fn gather_weights(&self, version: u32, weights: &Weights) -> Result<Weights, DeviceError> {
        let Some(shard_stream) = self.shard_stream.as_ref().filter(|_| self.shard.shards_weights) else {
            return Ok(weights.clone());
        };
        let gather = |(p, weight): (usize, &Arc<Buffer>)| {
            let is_share = self.shard.is_sharded(p) && weight.len() < self.code.parameters[p].bytes;
            match is_share {
                true => shard_stream.gather_parameter(self.code, (version, p), None, &self.executor.device),
                false => Ok(weight.clone()),
            }
        };
        weights.iter().enumerate().map(gather).collect()
    }

    /// True if a version is not gathered completely.
    pub fn is_incomplete(&self, version: u32) -> bool {
        self.stepped.contains_key(&version)
    }

    /// Gathers shards at the first replica at the end of a run, in the host's memory: masters (which then replace
    /// `weights`), ZeRO 3 weights, and the last step's `gradients`. The first replica blocks for the others.
    pub(super) fn gather_final_shards(
        &mut self,
        weights: &mut Weights,
        gradients: &mut [(usize, Buffer)],
    ) -> Result<(), DeviceError> {
        // Every group of replicas has all shards.
        let Some(shard_comm) = self.comms.shard_comm.clone().filter(|_| self.shard.group() == 0) else { return Ok(()) };
        let parameters = self.code.parameters.len();
        // Numbers from `parameters` on stand for gradients.
        let is_sharded = |p: &usize| self.shard.is_sharded(*p);
        let in_shares = |p: &usize| self.shard.shards_weights || is_half(self.code.parameters[*p].fact.dtype);
        let masters = (0..parameters).filter(|p| is_sharded(p) && in_shares(p));
        let mut shards: Tensors = masters.map(|p| (p, weights[p].clone())).collect();
        let copies = gradients.iter().filter(|(p, _)| is_sharded(p));
        for (p, shard) in copies {
            shards.push((parameters + p, Arc::new(self.executor.device.copy_of(shard.region())?)));
        }
        shards.iter().try_for_each(|(_, shard)| self.executor.device.release(shard))?;
        let numbers: Vec<usize> = shards.iter().map(|(number, _)| *number).collect();
        shard_comm.contribute(LAST, self.shard.rank(), shards);
        if !self.is_first {
            return Ok(());
        }
        let contributions = shard_comm.wait(LAST)?;
        for number in numbers {
            let parts = contributions.iter().map(|shards| shards.iter().find(|(shard, _)| *shard == number));
            let parts: Option<Vec<Arc<Buffer>>> = parts.map(|part| part.map(|(_, part)| part.clone())).collect();
            let parts = parts.ok_or(PEER_LOST)?;
            // Devices have no room for them.
            let bytes = parts.iter().map(|part| part.download()).collect::<Result<Vec<_>, _>>()?;
            let joined = Buffer::host_copy(&bytes.concat());
            match number.checked_sub(parameters) {
                None => weights[number] = Arc::new(joined),
                Some(p) => {
                    if let Some((_, gradient)) = gradients.iter_mut().find(|(parameter, _)| *parameter == p) {
                        *gradient = joined;
                    }
                }
            }
        }
        Ok(())
    }
}
