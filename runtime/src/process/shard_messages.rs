//! Messages of ZeRO 2 and 3 between processes, in `Part` frames.

use crate::comm::members::Members;
use crate::device::buffer::Buffer;
use crate::device::layout::{accumulation_bytes, accumulation_type};
use crate::exec::stage_code::{GradientTerm, StageCode};
use crate::process::fields::{Fields, check};
use crate::process::frame::FrameError;
use crate::process::recv_buffers::Ring;
use crate::process::router::GroupReceiver;
use crate::zero::gradient_shards::{Arrival, GradientShards};
use crate::zero::shard::ShardRange;
use crate::zero::shard_message::ShardMessage;
use compiler::tensor::DType;
use std::sync::Arc;

/// A gradient term: its parameter, the type and bytes of its sum.
struct TermForm {
    parameter: usize,
    dtype: DType,
    bytes: usize,
}

/// Delivers the messages of other processes to the shards of a stage.
pub struct ShardMessages {
    shards: Arc<GradientShards>,
    /// The replicas of this process.
    local_replicas: Vec<usize>,
    shard: ShardRange,
    terms: Vec<TermForm>,
    /// Bytes of each parameter.
    parameters: Vec<usize>,
    /// Upper bound of rounds, versions and micro-batches.
    rounds: u32,
}

impl ShardMessages {
    /// The shards of these replicas. `shard` is that of any replica.
    pub fn open(
        replicas: Members,
        shard: ShardRange,
        code: &StageCode,
        rounds: u32,
    ) -> (Arc<GradientShards>, ShardMessages) {
        let local_replicas = replicas.of(None).collect();
        let shards = Arc::new(GradientShards::new(replicas));
        let term = |term: &GradientTerm| {
            let dtype = code.parameters[term.parameter].fact.dtype;
            let bytes = accumulation_bytes(dtype, term.address.bytes);
            TermForm { parameter: term.parameter, dtype: accumulation_type(dtype), bytes }
        };
        let terms = code.gradient_terms.iter().map(term).collect();
        let parameters = code.parameters.iter().map(|named| named.bytes).collect();
        (shards.clone(), ShardMessages { shards, local_replicas, shard, terms, parameters, rounds })
    }

    /// Checks that a replica is in this process.
    fn check_here(&self, replica: usize) -> Result<(), FrameError> {
        check(self.local_replicas.contains(&replica), "a replica")
    }

    /// Reads a tensor, counted as memory of replica `to` of this process.
    fn tensor(
        &self,
        to: usize,
        bytes: usize,
        fields: &mut Fields<'_>,
        ring: &mut Ring,
    ) -> Result<Arc<Buffer>, FrameError> {
        let counter = self.shards.counter(to).ok_or(FrameError::Field { what: "a replica" })?;
        ring.once(fields, bytes, "a shard", &counter)
    }
}

impl GroupReceiver for ShardMessages {
    fn arrive(&self, from: usize, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<(), FrameError> {
        let message = fields.value("a message of shards")?;
        match message {
            ShardMessage::Open { last } => self.shards.open_remote(from, last),
            ShardMessage::Add { term, before } => {
                check(term.round < self.rounds && before < self.rounds, "a round")?;
                let form = self.terms.get(term.term).filter(|form| self.shard.is_sharded(form.parameter));
                let form = form.ok_or(FrameError::Field { what: "a gradient" })?;
                let mut part = |&replica: &usize| {
                    let range = self.shard.range_of(form.parameter, form.bytes, form.dtype.size(), replica);
                    Ok((replica, self.tensor(replica, range.len(), fields, ring)?))
                };
                let parts = self.local_replicas.iter().map(&mut part).collect::<Result<_, FrameError>>()?;
                let arrival = Arrival { from, dtype: form.dtype, parts };
                let added = self.shards.arrive(term, before, arrival);
                added.map_err(|fault| FrameError::of(fault, "a gradient"))?;
            }
            ShardMessage::Added { to } => {
                self.check_here(to)?;
                self.shards.acknowledge(to);
            }
            ShardMessage::Read { version, parameter, of } => {
                check(version < self.rounds && parameter < self.parameters.len(), "a version")?;
                self.check_here(of)?;
                self.shards.weights.request(from, of, version, parameter);
            }
            ShardMessage::Shard { to, bytes } => {
                self.check_here(to)?;
                check(self.parameters.iter().any(|whole| bytes <= *whole), "a shard")?;
                let shard = self.tensor(to, bytes, fields, ring)?;
                check(self.shards.weights.arrive(to, from, shard), "a shard")?;
            }
            ShardMessage::Release { version } => {
                check(version < self.rounds, "a version")?;
                self.shards.weights.release_remote(version, from);
            }
        }
        fields.end()
    }

    fn abandon(&self) {
        self.shards.abandon();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::members::encode;
    use crate::device::cpu::device::cpu;
    use crate::zero::shard_message::Term;

    fn shards() -> ShardMessages {
        let replicas = Members::new(vec![None, Some(1)], Box::new(|_, _, _, _| {}));
        let shards = Arc::new(GradientShards::new(replicas));
        shards.enter(0, &cpu(), &Arc::default(), 2);
        let terms = vec![TermForm { parameter: 0, dtype: DType::F32, bytes: 12 }];
        let shard = ShardRange::of(0, 2, vec![true]);
        ShardMessages { shards, local_replicas: vec![0], shard, terms, parameters: vec![12], rounds: 5 }
    }

    fn arrive(messages: &ShardMessages, bytes: &[u8]) -> Result<(), FrameError> {
        messages.arrive(1, &mut Fields::of(bytes), &mut Ring::default())
    }

    fn add(round: u32, before: u32, number: f32) -> Vec<u8> {
        let message = ShardMessage::Add { term: Term { round, term: 0 }, before };
        [&encode(&message)[..], &number.to_ne_bytes()].concat()
    }

    fn shard(bytes: usize) -> Vec<u8> {
        [encode(&ShardMessage::Shard { to: 0, bytes }), vec![0; bytes]].concat()
    }

    #[test]
    fn cut_and_wrong_messages_are_refused() {
        let valid = [
            encode(&ShardMessage::Open { last: 3 }),
            add(1, 0, 2.5),
            encode(&ShardMessage::Added { to: 0 }),
            encode(&ShardMessage::Read { version: 2, parameter: 0, of: 0 }),
            encode(&ShardMessage::Release { version: 2 }),
        ];
        for bytes in valid {
            let messages = shards();
            assert!((0..bytes.len()).all(|length| arrive(&messages, &bytes[..length]).is_err()));
            assert_eq!(arrive(&messages, &bytes), Ok(()));
        }
        let wrong = [
            add(3, 0, 1.0),
            add(5, 0, 1.0),
            encode(&ShardMessage::Added { to: 1 }),
            encode(&ShardMessage::Read { version: 2, parameter: 1, of: 0 }),
            shard(4),
            shard(16),
        ];
        wrong.iter().for_each(|bytes| assert!(arrive(&shards(), bytes).is_err()));
    }

    #[test]
    fn gradients_of_another_process_add_in_their_turn() {
        let (messages, term) = (shards(), Term { round: 1, term: 0 });
        assert_eq!(arrive(&messages, &add(1, 0, 2.5)), Ok(()));
        assert!(arrive(&messages, &add(1, 0, 2.5)).is_err(), "it has come already");
        let messages = shards();
        assert_eq!(arrive(&messages, &add(1, 1, 2.5)), Ok(()));
        assert!(arrive(&messages, &add(1, 2, 1.0)).is_err(), "its last one is not added");
        assert!(messages.shards.take(term, 0).is_none());
    }
}
