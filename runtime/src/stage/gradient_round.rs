//! The gradients of one round: accumulated over micro-batches, all-reduced over replicas in buckets.
//!
//! A bucket holds whole parameters. The plan may assign parameters to buckets; the rest go with the last one. Without a plan's
//! assignment, buckets are about equally large, from the stage's last parameter to its first. Bucketing does not change any sum.

use crate::comm::all_reduce::{Addends, AllReduce, Collective};
use crate::comm::communicator::CollectiveError;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::device::layout::accumulation_type;
use crate::exec::moving_average::Samples;
use crate::exec::stage_code::GradientTerm;
use crate::stage::gradient_buckets::{PostedBucket, ReplicaGradients};
use crate::stage::gradients::{GradientTerms, allocate_sum, is_streamed, reduced};
use crate::stage::stage_worker::StageWorker;
use std::sync::Arc;

impl StageWorker<'_> {
    /// Posts one bucket of a round. It is contributed to the all-reduce once all backward passes of the round are done.
    pub fn reduce(&mut self, posting: PostedBucket) -> Result<(), DeviceError> {
        if self.gathered.items < posting.items {
            self.gathered.due.push(posting);
            return Ok(());
        }
        self.bring(posting)
    }

    /// Retries buckets that were posted early, after a backward pass.
    pub fn bring_due(&mut self) -> Result<(), DeviceError> {
        for posting in std::mem::take(&mut self.gathered.due) {
            self.reduce(posting)?;
        }
        Ok(())
    }

    fn bring(&mut self, PostedBucket { round, bucket, replica, .. }: PostedBucket) -> Result<(), DeviceError> {
        self.gathered.replica = replica;
        let mut part = self.gathered.take(bucket)?;
        if bucket + 1 >= self.gathered.buckets {
            self.shard_stream.iter().for_each(|shard_stream| shard_stream.end_round(round));
        }
        self.contribute_tied(round, Some(bucket), &mut part.terms)?;
        let number = self.meeting(round, bucket);
        match self.all_reduce.clone() {
            Some(all_reduce) => part.terms = self.reduce_in_place(&*all_reduce, (number, bucket), part.terms)?,
            None => part.terms.iter().flatten().try_for_each(|term| self.executor.device.release(term))?,
        }
        self.replicas.bring(number, replica, part);
        Ok(())
    }

    /// Sequence number of the collective for one bucket of a round or version.
    pub(super) fn meeting(&self, round: u32, bucket: u32) -> u64 {
        u64::from(round) * u64::from(self.gathered.buckets) + u64::from(bucket)
    }

    /// Blocks until the all-reduce of one bucket is done.
    pub fn reduced(&mut self, round: u32, bucket: u32) -> Result<(), CollectiveError> {
        let number = self.meeting(round, bucket);
        let all = self.replicas.meet(number)?;
        let mut terms = match (self.gathered.reducing.remove(&number), &self.all_reduce) {
            (Some(own), Some(all_reduce)) => {
                all_reduce.wait(Collective::AllReduce(number), self.gathered.replica)?;
                self.reduced_in_place(own, &all)?
            }
            _ => self.sum(&all)?,
        };
        let mut samples: Vec<Samples> = all.iter().flat_map(|c| c.samples.iter().cloned()).collect();
        samples.sort_by_key(|(item, _)| *item);
        self.take_sums(round, bucket, &mut terms);
        // Without an all-reduce in place, other replicas may still read this contribution: each would have a copy on
        // separate devices.
        for own in all.get(self.gathered.replica).into_iter().flat_map(|own| own.terms.iter().flatten()) {
            own.release_slot();
            self.executor.device.give(own.clone());
        }
        match self.reduced.get_mut(&round) {
            None => _ = self.reduced.insert(round, ReplicaGradients { terms, samples }),
            Some(whole) => {
                whole.samples.extend(samples);
                whole.terms.iter_mut().zip(terms).filter(|(_, sum)| sum.is_some()).for_each(|(of, sum)| *of = sum);
            }
        }
        Ok(())
    }

    /// Takes this replica's shards of sums that were accumulated during the backward passes.
    fn take_sums(&self, round: u32, bucket: u32, terms: &mut [Option<Arc<Buffer>>]) {
        let Some(shard_stream) = &self.shard_stream else { return };
        let own = self.code.gradient_terms.iter().zip(terms).enumerate();
        let own =
            own.filter(|(at, (term, _))| self.gathered.bucket_of[*at] == bucket && shard_stream.takes(term.parameter));
        own.for_each(|(at, (_, sum))| *sum = shard_stream.sum(round, at));
    }

    /// The gradients since the last step, for a stage without replicas.
    pub fn contribution(&mut self, round: u32) -> Result<ReplicaGradients, DeviceError> {
        let terms = self.gathered.terms.iter_mut().map(Option::take).collect();
        let samples = self.gathered.take_samples()?;
        let mut own = ReplicaGradients { terms, samples };
        self.gathered.items = 0;
        self.contribute_tied(round, None, &mut own.terms)?;
        Ok(own)
    }

    /// Sums this replica's shard over all replicas, in replica order; samples are in micro-batch order.
    fn sum(&mut self, all: &[ReplicaGradients]) -> Result<Vec<Option<Arc<Buffer>>>, DeviceError> {
        let code = self.code;
        // With streaming, only sums shared with other stages pass here; their buffers are freed rather than pooled.
        let stays = self.shard_stream.is_none();
        let mut terms = Vec::new();
        for (i, term) in code.gradient_terms.iter().enumerate() {
            let dtype = code.parameters[term.parameter].fact.dtype;
            let parts = all.iter().filter_map(|c| c.terms[i].as_ref());
            let element = accumulation_type(dtype).size();
            let own = |bytes: usize| self.share.own(term.parameter, bytes, element);
            terms.push(reduced((&self.executor.device, stays), dtype, parts, own)?);
        }
        Ok(terms)
    }

    /// Contributes a bucket to an all-reduce in place. Returns which terms this replica has, without their memory.
    fn reduce_in_place(
        &mut self,
        all_reduce: &dyn AllReduce,
        (number, bucket): (u64, u32),
        terms: Vec<Option<Arc<Buffer>>>,
    ) -> Result<Vec<Option<Arc<Buffer>>>, DeviceError> {
        let (mut parts, mut own, mut present) = (Vec::new(), Vec::new(), Vec::new());
        let (replica, elsewhere) = (self.gathered.replica, Arc::new(Buffer::empty()));
        let is_late = |p: usize| self.tied.iter().any(|tied| tied.parameter == p && !tied.holders.is_empty());
        for ((term, sum), of) in self.code.gradient_terms.iter().zip(terms).zip(&self.gathered.bucket_of) {
            let p = term.parameter;
            present.push(sum.as_ref().map(|_| elsewhere.clone()));
            let terms: GradientTerms = sum.iter().map(|sum| (replica, sum.clone())).collect();
            // A replica without micro-batches in this round receives the sum.
            let sum = match sum {
                None if *of == bucket && !is_late(p) && !is_streamed(self.shard_stream.as_deref(), term) => {
                    Some(allocate_sum(&self.executor, term)?)
                }
                sum => sum,
            };
            sum.iter().try_for_each(|sum| self.executor.device.release(sum))?;
            let (dtype, _) = self.code.parameters[p].gradient();
            let is_whole = !self.share.is_sharded(p);
            parts.push(sum.clone().map(|sum| Addends { dtype, terms, sum, is_whole }));
            own.push(sum);
        }
        self.gathered.reducing.insert(number, own);
        all_reduce.contribute(Collective::AllReduce(number), replica, parts)?;
        Ok(present)
    }

    /// This replica's sums of an all-reduce in place, or its shards of them.
    fn reduced_in_place(
        &self,
        own: Vec<Option<Arc<Buffer>>>,
        all: &[ReplicaGradients],
    ) -> Result<Vec<Option<Arc<Buffer>>>, DeviceError> {
        let device = &self.executor.device;
        let of = |(at, (term, sum)): (usize, (&GradientTerm, Option<Arc<Buffer>>))| {
            let Some(sum) = sum else { return Ok(None) };
            if all.iter().all(|part| part.terms[at].is_none()) {
                device.give(sum);
                return Ok(None);
            }
            device.stream.acquire(&sum)?;
            let (p, element) = (term.parameter, self.code.parameters[term.parameter].gradient().0.size());
            let is_sharded = self.share.is_sharded(p);
            let range = self.share.own(p, sum.len(), element);
            Ok(Some(if is_sharded { Arc::new(Buffer::part(sum, range)) } else { sum }))
        };
        self.code.gradient_terms.iter().zip(own).enumerate().map(of).collect()
    }

    /// Contributes terms of tied parameters whose stages step at different times, as soon as all are there. Other
    /// workers may need them before this worker steps. `bucket` limits it to one bucket.
    fn contribute_tied(
        &mut self,
        round: u32,
        bucket: Option<u32>,
        terms: &mut [Option<Arc<Buffer>>],
    ) -> Result<(), DeviceError> {
        for tied in self.tied.iter_mut().filter(|tied| !tied.holders.is_empty()) {
            let is_here = |of: &u32| bucket.is_none_or(|bucket| *of == bucket);
            let buckets = &self.gathered.bucket_of;
            let own = self.code.gradient_terms.iter().zip(terms.iter_mut()).zip(buckets);
            let own: Vec<_> = own.filter(|((term, _), of)| term.parameter == tied.parameter && is_here(of)).collect();
            // A tied parameter without a gradient is in no bucket: contribute an empty list with the last bucket.
            let has_terms = self.code.gradient_terms.iter().any(|term| term.parameter == tied.parameter);
            let is_last = bucket.is_none_or(|bucket| bucket + 1 == self.gathered.buckets);
            if own.is_empty() && (has_terms || !is_last) {
                continue;
            }
            let own: GradientTerms =
                own.into_iter().filter_map(|((term, sum), _)| Some((term.rank, sum.take()?))).collect();
            let of = self.code.parameters[tied.parameter].gradient();
            tied.bring(u64::from(round) + 1, (own, true), of, &self.executor.device)?;
        }
        Ok(())
    }
}
