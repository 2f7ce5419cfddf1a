//! Buckets hold the gradient sums of a round until the replicas reduce them.

use crate::device::buffer::Buffer;
use crate::device::download::Download;
use crate::device::error::DeviceError;
use crate::exec::executor::{Executor, Item};
use crate::exec::moving_average::Samples;
use crate::exec::stage_code::{NamedTensor, StageCode};
use crate::stage::gradients::collect_sums;
use crate::zero::streaming::ShardStream;
use std::collections::HashMap;
use std::sync::Arc;

/// The gradients of a round, or of one of its buckets.
pub struct ReplicaGradients {
    /// Sum of each gradient term over micro-batches; none if there were none, or if the term is in another bucket.
    pub terms: Vec<Option<Arc<Buffer>>>,
    /// Moving-average samples, by micro-batch.
    pub samples: Vec<Samples>,
}

/// What a replica tells the others about a bucket whose gradients are all-reduced in place.
pub struct BucketContribution {
    /// The gradient terms that it has.
    pub has_terms: Vec<bool>,
    pub samples: Vec<Samples>,
}

/// One gradient bucket of a round, posted for reduction.
#[derive(Clone, Copy, Debug)]
pub struct PostedBucket {
    pub round: u32,
    pub bucket: u32,
    pub replica: usize,
    /// Number of micro-batches of this replica in the round.
    pub items: u64,
}

/// Gradient sums of one replica since its last step.
pub struct RoundGradients {
    /// Indexed by gradient term.
    pub terms: Vec<Option<Arc<Buffer>>>,
    /// Numbers of micro-batches, and their samples, one after another, on their way to the host.
    pub samples: Vec<(u32, Download)>,
    /// Bytes of each sample.
    sample_bytes: Vec<usize>,
    /// Number of micro-batches accumulated so far.
    pub(super) items: u64,
    /// Bucket of each term and of each parameter.
    pub(super) bucket_of: Vec<u32>,
    bucket_of_parameter: Vec<u32>,
    pub(super) buckets: u32,
    /// Buckets posted before the round's last backward.
    pub(super) due: Vec<PostedBucket>,
    /// Sums of collectives in flight that are reduced in place, by collective and gradient term.
    pub(super) reducing: HashMap<u64, Vec<Option<Arc<Buffer>>>>,
}

impl RoundGradients {
    pub fn new(code: &StageCode, buckets: u32) -> RoundGradients {
        let of_parameter = assign_buckets(code, buckets);
        RoundGradients {
            terms: vec![None; code.gradient_terms.len()],
            samples: Vec::new(),
            sample_bytes: code.state_updates.iter().map(|follow| follow.sample.bytes).collect(),
            items: 0,
            bucket_of: code.gradient_terms.iter().map(|term| of_parameter[term.parameter]).collect(),
            bucket_of_parameter: of_parameter,
            buckets,
            due: Vec::new(),
            reducing: HashMap::new(),
        }
    }

    pub fn bucket_of(&self, parameter: usize) -> u32 {
        self.bucket_of_parameter[parameter]
    }

    /// Accumulates the gradients of a micro-batch after its backward pass.
    pub fn add(
        &mut self,
        executor: &Executor<'_>,
        shard_stream: Option<&ShardStream>,
        item: &mut Item,
    ) -> Result<(), DeviceError> {
        collect_sums(&mut self.terms, executor, shard_stream, item)?;
        self.items += 1;
        Ok(())
    }

    /// Removes one bucket; the last one ends the round.
    pub(super) fn take(&mut self, bucket: u32) -> Result<ReplicaGradients, DeviceError> {
        let terms = self.terms.iter_mut().zip(&self.bucket_of);
        let terms = terms.map(|(sum, term_bucket)| if *term_bucket == bucket { sum.take() } else { None }).collect();
        let is_last = bucket + 1 >= self.buckets;
        let samples = if is_last { self.take_samples()? } else { Vec::new() };
        if is_last {
            self.items = 0;
        }
        Ok(ReplicaGradients { terms, samples })
    }

    /// Waits for the samples.
    pub(super) fn take_samples(&mut self) -> Result<Vec<Samples>, DeviceError> {
        let split = |bytes: Vec<u8>| {
            let mut remaining = &bytes[..];
            let next_sample = |count: &usize| remaining.split_off(..*count).unwrap_or_default().to_vec();
            self.sample_bytes.iter().map(next_sample).collect()
        };
        let samples = std::mem::take(&mut self.samples).into_iter();
        samples.map(|(item, copy)| Ok((item, split(copy.bytes()?)))).collect()
    }
}

fn assign_buckets(code: &StageCode, buckets: u32) -> Vec<u32> {
    if code.buckets.len() == buckets as usize {
        let bucket_of =
            (0..).zip(&code.buckets).flat_map(|(bucket, names)| names.iter().map(move |name| (name.as_str(), bucket)));
        let bucket_of: HashMap<&str, u32> = bucket_of.collect();
        code.parameters
            .iter()
            .map(|parameter| bucket_of.get(parameter.name.as_str()).copied().unwrap_or(buckets - 1))
            .collect()
    } else {
        let total = code.parameters.iter().map(|parameter| parameter.bytes as u64).sum::<u64>().max(1);
        let mut remaining = total;
        let bucket = |parameter: &NamedTensor| {
            remaining -= parameter.bytes as u64;
            ((u128::from(remaining) * u128::from(buckets) / u128::from(total)) as u32).min(buckets.saturating_sub(1))
        };
        code.parameters.iter().map(bucket).collect()
    }
}
