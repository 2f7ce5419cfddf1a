//! Numbers the channels of a program in the order in which its workers first use them.

use std::collections::BTreeMap;

use crate::schedule::{EdgeId, Payload, WorkerId};

/// A FIFO for one payload kind on one edge between two workers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Channel {
    pub from: WorkerId,
    pub to: WorkerId,
    pub edge: EdgeId,
    pub kind: Payload,
}

/// Assigns channel numbers. Each worker has few channels, so its own list is searched before the global map.
pub struct Channels {
    /// Per worker, its channels in ascending order.
    own: Vec<Vec<(Channel, u32)>>,
    numbers: BTreeMap<Channel, u32>,
    list: Vec<Channel>,
}

impl Channels {
    pub fn new(workers: usize) -> Self {
        Self { own: vec![Vec::new(); workers], numbers: BTreeMap::new(), list: Vec::new() }
    }

    /// The number of a channel of this worker; new channels get the next number.
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

    pub fn channel(&self, number: u32) -> Channel {
        self.list[number as usize]
    }

    pub fn all(&self) -> impl Iterator<Item = (Channel, u32)> + '_ {
        self.numbers.iter().map(|(&channel, &number)| (channel, number))
    }
}
