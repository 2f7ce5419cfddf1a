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

use crate::op::{AllGather, AllReduce, AllToAll, Layout, Op, ReduceKind, ReduceScatter, Shard};

/// The op between two layouts that differ; nothing where there is none.
pub fn op(from: Layout, to: Layout, devices: usize) -> Option<Op> {
    Some(match (from, to) {
        (Layout::Partial, Layout::Replicated) => Op::AllReduce(AllReduce { kind: ReduceKind::Sum, devices }),
        (Layout::Partial, Layout::Split(cut)) => Op::ReduceScatter(ReduceScatter { cut, devices }),
        (Layout::Split(cut), Layout::Replicated) => Op::AllGather(AllGather { cut, devices }),
        (Layout::Split(from), Layout::Split(to)) => Op::AllToAll(AllToAll { from, to, devices }),
        (Layout::Replicated, Layout::Split(cut)) => Op::Shard(Shard { cut, devices }),
        (_, Layout::Partial) | (Layout::Replicated, Layout::Replicated) => return None,
    })
}
