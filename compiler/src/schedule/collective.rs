//! Collectives among the replicas of a stage. Each replica posts it; it completes for all when the last one has posted.
//!
//! Large stages all-reduce their gradients in buckets, which overlap with the rest of the backward. All buckets of a
//! round are posted before the round's last backward.
//!
//! ```text
//! all-reduce 0 round 0 #4
//! all-reduce 0 round 0 bucket 1 #5
//! 0B6
//! ```
//!
//! An all-reduce is a reduce-scatter plus an all-gather. ZeRO separates the two: each replica steps the shard whose
//! gradients it has, and the new version is all-gathered before use. Gradient buckets go in backward order, parameter
//! buckets in forward order. Under ZeRO 3 an all-gather moves no data. It only signals that every replica has its
//! shard; forward and backward then gather the weights op by op.
//!
//! ```text
//! reduce-scatter 0 round 0 #4
//! reduce-scatter 0 round 0 bucket 1 #5
//! 0B6
//! wait #4
//! wait #5
//! step 0 round 0 v0 => v1 mean 8
//! all-gather 0 v1 bucket 1 #6
//! all-gather 0 v1 #7
//! wait #6
//! wait #7
//! 0F8@v1
//! ```

use crate::plan::StageId;
use crate::schedule::{Instruction, Token};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Collective {
    AllReduce,
    ReduceScatter,
    AllGather,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct CollectiveId {
    pub kind: Collective,
    pub stage: StageId,
    pub number: u32,
    pub bucket: u32,
}

impl Instruction {
    /// The collective that it posts and its token; `None` for other instructions.
    pub fn meeting(&self) -> Option<(CollectiveId, Token)> {
        let (kind, stage, number, bucket, token) = match *self {
            Instruction::AllReduce { stage, round, bucket, token } => {
                (Collective::AllReduce, stage, round, bucket, token)
            }
            Instruction::ReduceScatter { stage, round, bucket, token } => {
                (Collective::ReduceScatter, stage, round, bucket, token)
            }
            Instruction::AllGather { stage, version, bucket, token } => {
                (Collective::AllGather, stage, version.0, bucket, token)
            }
            _ => return None,
        };
        Some((CollectiveId { kind, stage, number, bucket }, token))
    }
}
