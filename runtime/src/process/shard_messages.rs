//! Messages of ZeRO 2 and 3 between processes: `Part` frames whose sequence number is 0.

use crate::comm::communicator::CollectiveError;
use crate::device::buffer::Buffer;
use crate::device::layout::{accumulation_bytes, accumulation_type};
use crate::exec::stage_code::StageCode;
use crate::process::fields::Fields;
use crate::process::frame::FrameError;
use crate::process::recv_buffers::Ring;
use crate::process::router::ContributionSink;
use crate::zero::gradient_shards::{Arrival, GradientShards, Term};
use crate::zero::remote_replicas::ShardMessage;
use crate::zero::shard::ShardRange;
use compiler::tensor::DType;
use std::sync::Arc;

/// Appends a message to `head`, and its tensors to `bodies`.
pub fn pack(message: ShardMessage, head: &mut Vec<u8>, bodies: &mut Vec<Arc<Buffer>>) {
    let mut put = |kind: u8, numbers: &[u32]| {
        head.push(kind);
        numbers.iter().for_each(|number| head.extend(number.to_le_bytes()));
    };
    match message {
        ShardMessage::Open { last } => put(0, &[last]),
        ShardMessage::Add { term, before, parts } => {
            put(1, &[term.round, term.term as u32, before]);
            bodies.extend(parts);
        }
        ShardMessage::Added { to } => put(2, &[to as u32]),
        ShardMessage::Read { version, parameter, of } => put(3, &[version, parameter as u32, of as u32]),
        ShardMessage::Shard { to, shard } => {
            put(4, &[to as u32]);
            head.extend((shard.len() as u64).to_le_bytes());
            bodies.push(shard);
        }
        ShardMessage::Release { version } => put(5, &[version]),
    }
}

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
    /// `shard` is that of any replica.
    pub fn new(
        shards: Arc<GradientShards>,
        local_replicas: Vec<usize>,
        shard: ShardRange,
        code: &StageCode,
        rounds: u32,
    ) -> ShardMessages {
        let term = |term: &crate::exec::stage_code::GradientTerm| {
            let dtype = code.parameters[term.parameter].fact.dtype;
            let bytes = accumulation_bytes(dtype, term.address.bytes);
            TermForm { parameter: term.parameter, dtype: accumulation_type(dtype), bytes }
        };
        let terms = code.gradient_terms.iter().map(term).collect();
        let parameters = code.parameters.iter().map(|named| named.bytes).collect();
        ShardMessages { shards, local_replicas, shard, terms, parameters, rounds }
    }

    /// A replica of this process.
    fn local_replica(&self, fields: &mut Fields<'_>) -> Result<usize, FrameError> {
        let replica = fields.u32("a replica")? as usize;
        let is_here = self.local_replicas.contains(&replica);
        if is_here { Ok(replica) } else { Err(FrameError::Field { what: "a replica" }) }
    }

    fn tensor(
        &self,
        replica: usize,
        bytes: usize,
        fields: &mut Fields<'_>,
        ring: &mut Ring,
    ) -> Result<Arc<Buffer>, FrameError> {
        let counter = self.shards.counter(replica).ok_or(FrameError::Field { what: "a replica" })?;
        ring.once(fields, bytes, "a shard", &counter)
    }
}

impl ContributionSink for ShardMessages {
    fn arrive(&self, _: u64, from: usize, fields: &mut Fields<'_>, ring: &mut Ring) -> Result<(), FrameError> {
        let invalid = |what| FrameError::Field { what };
        match fields.below_byte(6, "a message of shards")? {
            0 => {
                let last = fields.u32("a round")?;
                fields.end()?;
                self.shards.open_remote(from, last);
            }
            1 => {
                let round = fields.below(self.rounds, "a round")?;
                let term = fields.below(self.terms.len() as u32, "a gradient")? as usize;
                let before = fields.below(self.rounds, "a micro-batch")?;
                let form = &self.terms[term];
                if !self.shard.is_sharded(form.parameter) {
                    return Err(invalid("a gradient"));
                }
                let mut part = |&replica: &usize| {
                    let range = self.shard.range_of(form.parameter, form.bytes, form.dtype.size(), replica);
                    Ok((replica, self.tensor(replica, range.len(), fields, ring)?))
                };
                let parts = self.local_replicas.iter().map(&mut part).collect::<Result<_, FrameError>>()?;
                fields.end()?;
                let arrival = Arrival { from, dtype: form.dtype, parts };
                self.shards.arrive(Term { round, term }, before, arrival).map_err(|error| match error {
                    CollectiveError::PeerLost => invalid("a gradient"),
                    CollectiveError::Device(fault) => FrameError::device(fault),
                })?;
            }
            2 => {
                let to = self.local_replica(fields)?;
                fields.end()?;
                self.shards.acknowledge(to);
            }
            3 => {
                let version = fields.below(self.rounds, "a version")?;
                let parameter = fields.below(self.parameters.len() as u32, "a parameter")? as usize;
                let owner = self.local_replica(fields)?;
                fields.end()?;
                self.shards.weights.request(from, owner, version, parameter);
            }
            4 => {
                let to = self.local_replica(fields)?;
                let bytes = fields.u64("a shard")?;
                let largest = self.parameters.iter().copied().max().unwrap_or(0);
                if bytes > largest as u64 {
                    return Err(invalid("a shard"));
                }
                let shard = self.tensor(to, bytes as usize, fields, ring)?;
                fields.end()?;
                if !self.shards.weights.arrive(to, from, shard) {
                    return Err(invalid("a shard"));
                }
            }
            _ => {
                let version = fields.below(self.rounds, "a version")?;
                fields.end()?;
                self.shards.weights.release_remote(version, from);
            }
        }
        Ok(())
    }

    fn most(&self) -> usize {
        let gradients = self.terms.iter().map(|term| term.bytes);
        gradients.chain(self.parameters.iter().copied()).max().unwrap_or(0).saturating_add(32)
    }

    fn abandon(&self) {
        self.shards.abandon();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::device::cpu;
    use crate::zero::remote_replicas::RemoteReplicas;

    fn shards() -> ShardMessages {
        let remote = RemoteReplicas { processes: vec![None, Some(1)], send: Box::new(|_, _, _| {}) };
        let shards = Arc::new(GradientShards::new(remote));
        shards.enter(0, &cpu(), &Arc::default(), 2);
        let terms = vec![TermForm { parameter: 0, dtype: DType::F32, bytes: 12 }];
        let shard = ShardRange::of(0, 2, vec![true]);
        ShardMessages { shards, local_replicas: vec![0], shard, terms, parameters: vec![12], rounds: 5 }
    }

    fn arrive(messages: &ShardMessages, bytes: &[u8]) -> Result<(), FrameError> {
        messages.arrive(0, 1, &mut Fields::of(bytes), &mut Ring::default())
    }

    fn packed(message: ShardMessage) -> Vec<u8> {
        let (mut head, mut bodies) = (Vec::new(), Vec::new());
        pack(message, &mut head, &mut bodies);
        bodies.iter().for_each(|body| head.extend(&*body.download().unwrap()));
        head
    }

    fn add(round: u32, before: u32, number: f32) -> Vec<u8> {
        let parts = vec![Arc::new(Buffer::host_copy(&number.to_ne_bytes()))];
        packed(ShardMessage::Add { term: Term { round, term: 0 }, before, parts })
    }

    #[test]
    fn cut_and_wrong_messages_are_refused() {
        let valid = [
            packed(ShardMessage::Open { last: 3 }),
            add(1, 0, 2.5),
            packed(ShardMessage::Added { to: 0 }),
            packed(ShardMessage::Read { version: 2, parameter: 0, of: 0 }),
            packed(ShardMessage::Release { version: 2 }),
        ];
        for bytes in valid {
            let messages = shards();
            assert!(bytes.len() <= messages.most());
            assert!((0..bytes.len()).all(|length| arrive(&messages, &bytes[..length]).is_err()));
            assert_eq!(arrive(&messages, &bytes), Ok(()));
        }
        let wrong = [
            add(3, 0, 1.0),
            add(5, 0, 1.0),
            packed(ShardMessage::Added { to: 1 }),
            packed(ShardMessage::Read { version: 2, parameter: 1, of: 0 }),
            packed(ShardMessage::Shard { to: 0, shard: Arc::new(Buffer::host(4)) }),
            packed(ShardMessage::Shard { to: 0, shard: Arc::new(Buffer::host(16)) }),
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
