//! The replicas of a stage in other processes: what ZeRO 2 and 3 send them.
//!
//! Every process receives the gradients of its own replicas' shards and adds them there. A weight shard is sent to a
//! replica that asks for it.

use crate::device::buffer::Buffer;
use crate::zero::gradient_shards::Term;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A message of one replica, without its tensors.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum ShardMessage {
    /// It accepts gradients of rounds up to `last`.
    Open { last: u32 },
    /// A micro-batch's term, after `before` others of its round: the parts of the receiving process's replicas, in order.
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

/// Sends a replica's message and its tensors to a process.
pub type SendMessage = Box<dyn Fn(usize, usize, ShardMessage, Vec<Arc<Buffer>>) + Send + Sync>;

/// Where the replicas of a stage are.
pub struct RemoteReplicas {
    /// The process of each replica; `None` for this one.
    pub processes: Vec<Option<usize>>,
    pub send: SendMessage,
}

impl RemoteReplicas {
    /// All replicas are in this process.
    pub fn none(replicas: usize) -> RemoteReplicas {
        RemoteReplicas { processes: vec![None; replicas], send: Box::new(|_, _, _, _| {}) }
    }

    /// The other processes.
    pub fn processes(&self) -> BTreeSet<usize> {
        self.processes.iter().flatten().copied().collect()
    }

    /// The process of a replica, if it is another one.
    pub fn process(&self, replica: usize) -> Option<usize> {
        self.processes.get(replica).copied().flatten()
    }

    /// True if the replica exists, in this process.
    pub fn is_here(&self, replica: usize) -> bool {
        self.processes.get(replica).is_some_and(Option::is_none)
    }

    /// Sends a message to all other processes.
    pub fn send_to_all(&self, from: usize, message: ShardMessage) {
        self.processes().into_iter().for_each(|process| (self.send)(process, from, message, Vec::new()));
    }

    /// Sends a message to the process of a replica.
    pub fn send_to(&self, from: usize, to: usize, message: ShardMessage, tensors: Vec<Arc<Buffer>>) {
        if let Some(process) = self.process(to) {
            (self.send)(process, from, message, tensors);
        }
    }
}
