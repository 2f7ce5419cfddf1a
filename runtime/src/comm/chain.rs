//! The messages and chunks of an all-reduce along a chain: see [`super::pipelined_all_reduce`].

use crate::comm::all_reduce;
use crate::comm::all_reduce::{Addends, Collective, Parts};
use crate::device::buffer::Buffer;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Along the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Direction {
    /// To the next member.
    Up,
    /// To the previous member.
    Down,
}

use Direction::{Down, Up};

impl Direction {
    /// The neighbour of a member, if there is one.
    pub fn neighbour(self, member: usize, members: usize) -> Option<usize> {
        match self {
            Up => Some(member + 1).filter(|next| *next < members),
            Down => member.checked_sub(1),
        }
    }

    pub fn opposite(self) -> Direction {
        if self == Up { Down } else { Up }
    }
}

/// A message to a neighbour.
pub enum Content {
    /// The sender has contributed.
    Ready,
    /// A chunk of a sum, `None` if no member so far has a term.
    Chunk { chunk: usize, part: Option<Arc<Buffer>> },
}

/// A message along the chain.
pub struct ChainMessage {
    pub direction: Direction,
    pub collective: Collective,
    pub content: Content,
}

/// A message between processes, without the chunk itself: the number of the chunk, and whether it has a sum.
pub type ChainHead = (Direction, Collective, Option<(usize, bool)>);

impl ChainMessage {
    pub fn head(&self) -> ChainHead {
        let chunk = match &self.content {
            Content::Ready => None,
            Content::Chunk { chunk, part } => Some((*chunk, part.is_some())),
        };
        (self.direction, self.collective, chunk)
    }

    pub fn of((direction, collective, chunk): ChainHead, part: Option<Arc<Buffer>>) -> ChainMessage {
        let content = chunk.map_or(Content::Ready, |(chunk, _)| Content::Chunk { chunk, part });
        ChainMessage { direction, collective, content }
    }
}

/// A range of one sum.
pub(super) struct Chunk {
    pub index: usize,
    pub range: Range<usize>,
    /// The only member that needs it, or that has it.
    pub owner: Option<usize>,
    /// True once this member's buffer holds a sum of terms.
    pub has_sum: bool,
    /// What was received, in each direction.
    pub received: [bool; 2],
    /// The window that was sent up.
    pub sent_up: Option<Arc<Buffer>>,
}

/// A collective of one member.
pub(super) struct OpenCollective {
    pub parts: Vec<Option<Addends>>,
    pub chunks: Vec<Chunk>,
    /// Neighbours that have contributed, by direction, and the chunks to send there.
    pub ready: [bool; 2],
    pub waiting: [VecDeque<usize>; 2],
    /// Messages still to be sent or received.
    pub remaining: usize,
    /// Windows that were sent; those that others hold wait to be sent, or to be read.
    pub sent: Vec<Arc<Buffer>>,
}

impl Chunk {
    /// True if a member receives the chunk from the opposite of `direction`.
    pub fn is_received(&self, collective: Collective, direction: Direction, member: usize, members: usize) -> bool {
        match (collective, direction) {
            (Collective::AllReduce(_), Up) => member > 0,
            (Collective::AllReduce(_), Down) => member + 1 < members && self.owner.is_none_or(|owner| owner <= member),
            (Collective::AllGather(_), Up) => self.owner.is_some_and(|owner| owner < member),
            (Collective::AllGather(_), Down) => self.owner.is_some_and(|owner| owner > member),
        }
    }

    /// True if a member sends the chunk in `direction`: if its neighbour receives it.
    pub fn is_sent(&self, collective: Collective, direction: Direction, member: usize, members: usize) -> bool {
        let neighbour = direction.neighbour(member, members);
        neighbour.is_some_and(|to| self.is_received(collective, direction, to, members))
    }
}

impl OpenCollective {
    pub fn new(collective: Collective, parts: Parts, chunk: usize, member: usize, members: usize) -> OpenCollective {
        let mut chunks = Vec::new();
        for (index, part) in parts.iter().enumerate() {
            let Some(part) = part else { continue };
            chunks.extend(all_reduce::chunks(collective, part, members, chunk).map(|(owner, range)| Chunk {
                index,
                range,
                owner,
                has_sum: match collective {
                    Collective::AllReduce(_) => part.has_term,
                    Collective::AllGather(_) => owner == Some(member),
                },
                received: [false; 2],
                sent_up: None,
            }));
        }
        let message_count = |chunk: &Chunk| {
            let messages_in = |direction| {
                usize::from(chunk.is_received(collective, direction, member, members))
                    + usize::from(chunk.is_sent(collective, direction, member, members))
            };
            messages_in(Up) + messages_in(Down)
        };
        let neighbours = [Up, Down].iter().filter(|direction| direction.neighbour(member, members).is_some()).count();
        let remaining = chunks.iter().map(message_count).sum::<usize>() + neighbours;
        OpenCollective { parts, chunks, ready: [false; 2], waiting: Default::default(), remaining, sent: Vec::new() }
    }

    /// Drops the windows that nobody else holds. Returns true if none are left.
    pub fn drop_sent(&mut self) -> bool {
        self.sent.retain_mut(|window| Arc::get_mut(window).is_none());
        self.sent.is_empty()
    }
}
