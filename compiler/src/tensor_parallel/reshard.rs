//! From one layout to another: the op that devices do for it.
//!
//! | from | to | op | bytes that each device sends, of a tensor of n on t devices |
//! | --- | --- | --- | --- |
//! | terms of a sum | whole | all-reduce | `2 (t - 1) / t · n` |
//! | terms of a sum | split | reduce-scatter | `(t - 1) / t · n` |
//! | split | whole | all-gather | `(t - 1) / t · n` |
//! | split | split otherwise | all-to-all | `(t - 1) / t² · n` |
//! | whole | split | a slice of one's own | none |
//!
//! Nothing becomes a sum of terms that was none.

use crate::op::{AllGather, AllReduce, AllToAll, Op, ReduceKind, ReduceScatter, Shard, Sharding};

/// The op between two layouts that differ; nothing where there is none.
pub fn op(from: Sharding, to: Sharding, devices: usize) -> Option<Op> {
    Some(match (from, to) {
        (Sharding::Partial, Sharding::Replicated) => Op::AllReduce(AllReduce { kind: ReduceKind::Sum, devices }),
        (Sharding::Partial, Sharding::Split(cut)) => Op::ReduceScatter(ReduceScatter { cut, devices }),
        (Sharding::Split(cut), Sharding::Replicated) => Op::AllGather(AllGather { cut, devices }),
        (Sharding::Split(from), Sharding::Split(to)) => Op::AllToAll(AllToAll { from, to, devices }),
        (Sharding::Replicated, Sharding::Split(cut)) => Op::Shard(Shard { cut, devices }),
        (_, Sharding::Partial) | (Sharding::Replicated, Sharding::Replicated) => return None,
    })
}
