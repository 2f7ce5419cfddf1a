//! What replicas in different processes send each other under ZeRO 2 and 3.
//!
//! Every process receives the gradients of its own replicas' shards and adds them there. A weight shard is sent to a
//! replica that asks for it.

use serde::{Deserialize, Serialize};

/// A gradient term of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Term {
    pub round: u32,
    /// Index into [`crate::exec::stage_code::StageCode::gradient_terms`].
    pub term: usize,
}

/// A message of one replica, without its tensors.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum ShardMessage {
    /// It accepts gradients of rounds up to `last`.
    Open { last: u32 },
    /// A micro-batch's term, after `before` others of its round: the parts of the receiving process's replicas, in
    /// order.
    Add { term: Term, before: u32 },
    /// A term of replica `to` was added.
    Added { to: usize },
    /// It asks for the shard that replica `of` has of a parameter.
    Read { version: u32, parameter: usize, of: usize },
    /// The shard that replica `to` asked for.
    Shard { to: usize, bytes: usize },
    /// It does not read a version any more.
    Release { version: u32 },
}
