//! The members of a group, and the link to those in other processes.

use crate::device::buffer::Buffer;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Sends a member's message and its tensors to a process.
pub type Link = Box<dyn Fn(usize, usize, &[u8], Vec<Arc<Buffer>>) + Send + Sync>;

/// Where the members of a group are.
pub struct Members {
    /// The process of each member; `None` for this one.
    processes: Vec<Option<usize>>,
    link: Link,
}

impl Members {
    pub fn new(processes: Vec<Option<usize>>, link: Link) -> Members {
        Members { processes, link }
    }

    /// All are in this process.
    pub fn here(count: usize) -> Members {
        Members::new(vec![None; count], Box::new(|_, _, _, _| {}))
    }

    pub fn count(&self) -> usize {
        self.processes.len()
    }

    /// The process of a member, if it is another one.
    pub fn process(&self, member: usize) -> Option<usize> {
        self.processes.get(member).copied().flatten()
    }

    /// True if the member exists, in this process.
    pub fn is_here(&self, member: usize) -> bool {
        self.processes.get(member).is_some_and(Option::is_none)
    }

    /// The members in this process, or in another one.
    pub fn of(&self, process: Option<usize>) -> impl Iterator<Item = usize> + '_ {
        (0..self.count()).filter(move |member| self.processes[*member] == process)
    }

    /// The other processes.
    pub fn others(&self) -> BTreeSet<usize> {
        self.processes.iter().flatten().copied().collect()
    }

    /// Sends a message of member `from` to a process.
    pub fn send(&self, process: usize, from: usize, message: &[u8], tensors: Vec<Arc<Buffer>>) {
        (self.link)(process, from, message, tensors);
    }

    /// Sends a message to all other processes.
    pub fn send_to_all(&self, from: usize, message: &[u8], tensors: &[Arc<Buffer>]) {
        self.others().into_iter().for_each(|process| self.send(process, from, message, tensors.to_vec()));
    }

    /// Sends a message to the process of a member, if it is another one.
    pub fn send_to(&self, from: usize, to: usize, message: &[u8], tensors: Vec<Arc<Buffer>>) {
        if let Some(process) = self.process(to) {
            self.send(process, from, message, tensors);
        }
    }
}

/// The bytes of a message.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    postcard::to_allocvec(message).expect("messages have a known length")
}
