//! The channels of a program, numbered as its workers come to them.

use std::collections::BTreeMap;

use crate::schedule::{EdgeId, Payload, WorkerId};

/// One way for one kind of tensors between two workers, first in, first out.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Channel {
    /// Who sends.
    pub from: WorkerId,
    /// Who receives.
    pub to: WorkerId,
    /// The edge.
    pub edge: EdgeId,
    /// The direction on it.
    pub kind: Payload,
}

/// Numbers for channels. A worker has few of them, so it finds one of its own again without asking among all.
pub struct Channels {
    /// For each worker, those that it has come to, in order.
    own: Vec<Vec<(Channel, u32)>>,
    numbers: BTreeMap<Channel, u32>,
    list: Vec<Channel>,
}

impl Channels {
    /// None yet, of so many workers.
    pub fn new(workers: usize) -> Self {
        Self { own: vec![Vec::new(); workers], numbers: BTreeMap::new(), list: Vec::new() }
    }

    /// The number of a channel, one of whose ends is this worker: those before have lower ones.
    pub fn number(&mut self, worker: WorkerId, channel: Channel) -> u32 {
        let own = &mut self.own[worker.index()];
        match own.binary_search_by(|(known, _)| known.cmp(&channel)) {
            Ok(place) => own[place].1,
            Err(place) => {
                let list = &mut self.list;
                let number = *self.numbers.entry(channel).or_insert_with(|| {
                    list.push(channel);
                    list.len() as u32 - 1
                });
                own.insert(place, (channel, number));
                number
            }
        }
    }

    /// The channel with this number, which was given here.
    pub fn channel(&self, number: u32) -> Channel {
        self.list[number as usize]
    }

    /// All channels in order, with their numbers.
    pub fn all(&self) -> impl Iterator<Item = (Channel, u32)> + '_ {
        self.numbers.iter().map(|(&channel, &number)| (channel, number))
    }
}
