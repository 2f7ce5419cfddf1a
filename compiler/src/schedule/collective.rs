//! What the replicas of a stage do together: each posts it, and it ends for all when the last has.
//!
//! An all-reduce is a reduce-scatter and an all-gather. Where the optimizer's state is dealt to the replicas, the two stand apart:
//! every replica steps the share of the parameters whose gradients it has, and the new version is gathered before it is used.
//!
//! ```text
//! reduce-scatter 0 round 0 #4
//! wait #4
//! step 0 round 0 v0 => v1 mean 8
//! all-gather 0 v1 #5
//! wait #5
//! ```

use crate::plan::StageId;
use crate::schedule::{Instruction, Token};

/// The kinds of collectives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Collective {
    /// The sum of a round's gradients, for every replica.
    AllReduce,
    /// The same, of which every replica gets its share.
    ReduceScatter,
    /// The shares of a version of the weights, for every replica.
    AllGather,
}

/// One collective of one stage.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Meeting {
    /// Its kind.
    pub kind: Collective,
    /// The stage whose replicas meet.
    pub stage: StageId,
    /// The round, or the version that is gathered.
    pub number: u32,
}

impl Instruction {
    /// The collective that it posts, and the token to wait for, if it posts one.
    pub fn meeting(&self) -> Option<(Meeting, Token)> {
        let (kind, stage, number, token) = match *self {
            Instruction::AllReduce { stage, round, token } => (Collective::AllReduce, stage, round, token),
            Instruction::ReduceScatter { stage, round, token } => (Collective::ReduceScatter, stage, round, token),
            Instruction::AllGather { stage, version, token } => (Collective::AllGather, stage, version.0, token),
            _ => return None,
        };
        Some((Meeting { kind, stage, number }, token))
    }
}
