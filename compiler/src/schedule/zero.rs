//! Placement of ZeRO steps such that no worker deadlocks.
//!
//! Without ZeRO a replica steps when its own work needs the update. With ZeRO other replicas may need its shard
//! earlier. A replica therefore steps and posts its all-gather before its first action that starts after the round is
//! complete. Everything before that action, except its own Recvs, counts as happening when the round completes. It
//! only waits for the round's reduce-scatter, which all replicas have posted by then. If groups of replicas shard, it
//! then also sums its shard with the other groups: all replicas do so at this moment, bucket by bucket in the same
//! order. A gather is waited for before the first action that uses its version, which `order` started later.
//!
//! Reduce-scatters are in the same order on all replicas, and so are all-gathers. The two kinds are ordered
//! independently, because a replica may complete the next round before it steps this one.

use crate::plan::StageId;
use crate::schedule::action::Work;
use crate::schedule::list_scheduler::{Layout, WorkOrder};
use crate::schedule::semantics::Rule;
use crate::schedule::{RankId, Token, Version};

/// By rank and round, for ranks with ZeRO stages: the start order of the round's last backward.
pub fn complete(rule: &Rule, order: &WorkOrder, layout: &Layout) -> Vec<Vec<u32>> {
    let of_rank = |rank: RankId| {
        let mut moments = Vec::new();
        if !rule.stages.iter().any(|stage| stage.rank == rank && stage.zero > 0) {
            return moments;
        }
        for worker in layout.replicas(rank) {
            let work = order.work[worker.index()].iter().zip(&order.started[worker.index()]);
            for (&Work { stage, item, .. }, &started) in work.filter(|(work, _)| work.part.ends()) {
                let round = rule.round(stage, item) as usize;
                if moments.len() <= round {
                    moments.resize(round + 1, 0);
                }
                moments[round] = started.max(moments[round]);
            }
        }
        // A short last round may complete before the previous one; updates go in order.
        let mut before = 0;
        for moment in &mut moments {
            before = before.max(*moment);
            *moment = before;
        }
        moments
    };
    layout.ranks().map(of_rank).collect()
}

pub struct Gathering {
    pub stage: StageId,
    pub version: Version,
    /// One token per bucket.
    pub tokens: Vec<Token>,
}
