//! Conversion between shardings: the collective for each pair.
//!
//! | from | to | op | bytes that each device sends, of a tensor of n bytes on t devices |
//! | --- | --- | --- | --- |
//! | partial | replicated | all-reduce | `2 (t - 1) / t · n` |
//! | partial | split | reduce-scatter | `(t - 1) / t · n` |
//! | split | replicated | all-gather | `(t - 1) / t · n` |
//! | split | another split | all-to-all | `(t - 1) / t² · n` |
//! | replicated | split | local slice | none |
//!
//! No conversion yields partial sums.

use crate::op::{AllGather, AllReduce, AllToAll, Op, ReduceKind, ReduceScatter, Shard, Sharding};

/// The op that converts one sharding to a different one; `None` if there is none.
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
