//! When replicas that share what a stage holds step their shares of a version, so that nobody waits for ever for all of it.
//!
//! Without shares a replica steps when its own work needs the update. With them others may need its share before that: it steps, and gives
//! what it made, before its first work that comes after the round is complete. Let everything in front of that work, the work's own
//! Recvs aside, happen at the moment when the round is complete: it waits for nothing but the round's reduce-scatter, which all have
//! posted by then. A gather is waited for before the first work that uses its version, which `order` let start later than that.
//!
//! Reduce-scatters come in one order on all replicas, and gathers in one; the two kinds go beside each other, because a replica may be
//! done with the next round before it steps this one.

use crate::plan::StageId;
use crate::schedule::action::Work;
use crate::schedule::list_scheduler::{Layout, WorkOrder};
use crate::schedule::semantics::Rule;
use crate::schedule::{RankId, Token, Version};

/// For each rank that has stages with shares, by round: the moment of the witness at which the last backward of the round has begun.
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
        // A short last round may be complete before the one before it; updates go in order.
        let mut before = 0;
        for moment in &mut moments {
            before = before.max(*moment);
            *moment = before;
        }
        moments
    };
    layout.ranks().map(of_rank).collect()
}

/// A version of a stage that is being gathered, with what is to be waited for.
pub struct Gathering {
    /// The stage.
    pub stage: StageId,
    /// The version.
    pub version: Version,
    /// A token for each bucket.
    pub tokens: Vec<Token>,
}
