//! The gradients of one round: accumulated over micro-batches, all-reduced over replicas in buckets.
//!
//! A bucket holds whole parameters. The plan may assign parameters to buckets; the rest go with the last one. Without a plan's
//! assignment, buckets are about equally large, from the stage's last parameter to its first. Bucketing does not change any sum.

use crate::comm::all_reduce::{Addends, Collective};
use crate::comm::communicator::PEER_LOST;
use crate::device::buffer::Buffer;
use crate::device::error::DeviceError;
use crate::exec::moving_average::Samples;
use crate::exec::stage_code::GradientTerm;
use crate::stage::gradient_buckets::{BucketContribution, PostedBucket, ReplicaGradients};
use crate::stage::gradients::{GradientTerms, allocate_sum, is_streamed};
use crate::stage::stage_worker::StageWorker;
use std::sync::Arc;

impl StageWorker<'_> {
    /// Posts one bucket of a round. It is contributed to the all-reduce once all backward passes of the round are done.
    pub fn reduce(&mut self, posting: PostedBucket) -> Result<(), DeviceError> {
        if self.round_gradients.items < posting.items {
            self.round_gradients.due.push(posting);
            return Ok(());
        }
        self.contribute(posting)
    }

    /// Retries buckets that were posted early, after a backward pass.
    pub fn contribute_due(&mut self) -> Result<(), DeviceError> {
        for posting in std::mem::take(&mut self.round_gradients.due) {
            self.reduce(posting)?;
        }
        Ok(())
    }

    fn contribute(&mut self, PostedBucket { round, bucket, replica, .. }: PostedBucket) -> Result<(), DeviceError> {
        let ReplicaGradients { mut terms, samples } = self.round_gradients.take(bucket)?;
        if bucket + 1 >= self.round_gradients.buckets {
            self.shard_stream.iter().for_each(|shard_stream| shard_stream.end_round(round));
        }
        self.contribute_tied(round, Some(bucket), &mut terms)?;
        let number = self.collective_number(round, bucket);
        let has_terms = self.reduce_in_place((number, bucket), terms)?;
        self.comms.replicas.contribute(number, replica, BucketContribution { has_terms, samples });
        Ok(())
    }

    /// Sequence number of the collective for one bucket of a round or version.
    pub(super) fn collective_number(&self, round: u32, bucket: u32) -> u64 {
        u64::from(round) * u64::from(self.round_gradients.buckets) + u64::from(bucket)
    }

    /// Blocks until the all-reduce of one bucket is done.
    pub fn finish_reduce(&mut self, round: u32, bucket: u32) -> Result<(), DeviceError> {
        let number = self.collective_number(round, bucket);
        let contributions = self.comms.replicas.wait(number)?;
        if let Some(all_reduce) = &self.comms.all_reduce {
            all_reduce.wait(Collective::AllReduce(number), self.shard.rank())?;
        }
        let sums = self.round_gradients.reducing.remove(&number).ok_or(PEER_LOST)?;
        let mut terms = self.finish_reduce_in_place(sums, &contributions)?;
        let mut samples: Vec<Samples> = contributions.iter().flat_map(|c| c.samples.iter().cloned()).collect();
        samples.sort_by_key(|(item, _)| *item);
        self.take_sums(round, bucket, &mut terms);
        self.reduce_across_groups((number, bucket), &mut terms, &contributions)?;
        match self.reduced.get_mut(&round) {
            None => _ = self.reduced.insert(round, ReplicaGradients { terms, samples }),
            Some(reduced) => {
                reduced.samples.extend(samples);
                reduced
                    .terms
                    .iter_mut()
                    .zip(terms)
                    .filter(|(_, sum)| sum.is_some())
                    .for_each(|(term, sum)| *term = sum);
            }
        }
        Ok(())
    }

    /// Takes this replica's shards of sums that were accumulated during the backward passes.
    fn take_sums(&self, round: u32, bucket: u32, terms: &mut [Option<Arc<Buffer>>]) {
        let Some(shard_stream) = &self.shard_stream else { return };
        let terms = self.code.gradient_terms.iter().zip(terms).enumerate();
        let terms = terms.filter(|(index, (term, _))| {
            self.round_gradients.bucket_of[*index] == bucket && shard_stream.is_streamed(term.parameter)
        });
        terms.for_each(|(index, (_, sum))| *sum = shard_stream.sum(round, index));
    }

    /// Sums this replica's shards over the groups that shard. A group without micro-batches in the round receives them.
    fn reduce_across_groups(
        &self,
        (number, bucket): (u64, u32),
        terms: &mut [Option<Arc<Buffer>>],
        contributions: &[BucketContribution],
    ) -> Result<(), DeviceError> {
        let Some(across_groups) = &self.comms.across_groups else { return Ok(()) };
        let (device, degree) = (&self.executor.device, self.shard.degree);
        let group = contributions.chunks(degree).nth(self.shard.group()).unwrap_or_default();
        let mut parts = Vec::new();
        for (index, (term, sum)) in self.code.gradient_terms.iter().zip(terms.iter_mut()).enumerate() {
            let named = &self.code.parameters[term.parameter];
            let (dtype, bytes) = named.gradient();
            let is_streamed = is_streamed(self.shard_stream.as_deref(), term);
            let has_term = match is_streamed {
                true => sum.is_some(),
                false => group.iter().any(|contribution| contribution.has_terms[index]),
            };
            if sum.is_none() && is_streamed && self.round_gradients.bucket_of[index] == bucket {
                let shard = self.shard.own(term.parameter, bytes, dtype.size());
                *sum = Some(device.once(shard.len())?);
            }
            sum.iter().try_for_each(|sum| device.release(sum))?;
            parts.push(sum.clone().map(|sum| Addends { dtype, sum, has_term, is_whole: true }));
        }
        across_groups.contribute(Collective::AllReduce(number), self.shard.group(), parts)?;
        across_groups.wait(Collective::AllReduce(number), self.shard.group())?;
        terms.iter().flatten().try_for_each(|sum| device.stream.acquire(sum))
    }

    /// The gradients since the last step, for a stage without replicas.
    pub fn contribution(&mut self, round: u32) -> Result<ReplicaGradients, DeviceError> {
        let terms = self.round_gradients.terms.iter_mut().map(Option::take).collect();
        let samples = self.round_gradients.take_samples()?;
        let mut gradients = ReplicaGradients { terms, samples };
        self.round_gradients.items = 0;
        self.contribute_tied(round, None, &mut gradients.terms)?;
        Ok(gradients)
    }

    /// Contributes a bucket to an all-reduce in place. Returns which terms this replica has.
    fn reduce_in_place(
        &mut self,
        (number, bucket): (u64, u32),
        terms: Vec<Option<Arc<Buffer>>>,
    ) -> Result<Vec<bool>, DeviceError> {
        let (mut parts, mut sums, mut has_terms) = (Vec::new(), Vec::new(), Vec::new());
        let is_late = |p: usize| self.tied.iter().any(|tied| tied.parameter == p && !tied.holders.is_empty());
        for ((term, sum), term_bucket) in
            self.code.gradient_terms.iter().zip(terms).zip(&self.round_gradients.bucket_of)
        {
            let (p, has_term) = (term.parameter, sum.is_some());
            has_terms.push(has_term);
            // A replica without micro-batches in this round receives the sum.
            let sum = match sum {
                None if *term_bucket == bucket && !is_late(p) && !is_streamed(self.shard_stream.as_deref(), term) => {
                    Some(allocate_sum(&self.executor, term)?)
                }
                sum => sum,
            };
            sum.iter().try_for_each(|sum| self.executor.device.release(sum))?;
            let (dtype, _) = self.code.parameters[p].gradient();
            let is_whole = !self.shard.is_sharded(p);
            parts.push(sum.clone().map(|sum| Addends { dtype, sum, has_term, is_whole }));
            sums.push(sum);
        }
        self.round_gradients.reducing.insert(number, sums);
        if let Some(all_reduce) = &self.comms.all_reduce {
            all_reduce.contribute(Collective::AllReduce(number), self.shard.rank(), parts)?;
        }
        Ok(has_terms)
    }

    /// This replica's sums of an all-reduce in place, or its shards of them.
    fn finish_reduce_in_place(
        &self,
        sums: Vec<Option<Arc<Buffer>>>,
        contributions: &[BucketContribution],
    ) -> Result<Vec<Option<Arc<Buffer>>>, DeviceError> {
        let device = &self.executor.device;
        let finish_term = |(index, (term, sum)): (usize, (&GradientTerm, Option<Arc<Buffer>>))| {
            let Some(sum) = sum else { return Ok(None) };
            if !contributions.iter().any(|part| part.has_terms[index]) {
                device.give(sum);
                return Ok(None);
            }
            device.stream.acquire(&sum)?;
            let (p, element) = (term.parameter, self.code.parameters[term.parameter].gradient().0.size());
            let is_sharded = self.shard.is_sharded(p);
            let range = self.shard.own(p, sum.len(), element);
            Ok(Some(if is_sharded { Arc::new(Buffer::part(sum, range)) } else { sum }))
        };
        self.code.gradient_terms.iter().zip(sums).enumerate().map(finish_term).collect()
    }

    /// Contributes terms of tied parameters whose stages step at different times, as soon as all are there. Other
    /// workers may need them before this worker steps. `bucket` limits it to one bucket.
    fn contribute_tied(
        &mut self,
        round: u32,
        bucket: Option<u32>,
        terms: &mut [Option<Arc<Buffer>>],
    ) -> Result<(), DeviceError> {
        for tied in self.tied.iter().filter(|tied| !tied.holders.is_empty()) {
            let is_in_bucket = |term_bucket: &u32| bucket.is_none_or(|bucket| *term_bucket == bucket);
            let buckets = &self.round_gradients.bucket_of;
            let terms = self.code.gradient_terms.iter().zip(terms.iter_mut()).zip(buckets);
            let terms: Vec<_> =
                terms.filter(|((term, _), bucket)| term.parameter == tied.parameter && is_in_bucket(bucket)).collect();
            // A tied parameter without a gradient is in no bucket: contribute an empty list with the last bucket.
            let has_terms = self.code.gradient_terms.iter().any(|term| term.parameter == tied.parameter);
            let is_last = bucket.is_none_or(|bucket| bucket + 1 == self.round_gradients.buckets);
            if terms.is_empty() && (has_terms || !is_last) {
                continue;
            }
            let terms: GradientTerms =
                terms.into_iter().filter_map(|((term, sum), _)| Some((term.rank, sum.take()?))).collect();
            tied.contribute(u64::from(round) + 1, terms, true, &self.executor.device)?;
        }
        Ok(())
    }
}
