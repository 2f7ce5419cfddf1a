//! Interleaved 1F1B with a flush, v stages on each of p ranks (Megatron-LM, Narayanan et al., SC 2021, section 2.2.2).
//!
//! Items pass a rank's stages in groups of p: the group's forwards at the first stage, then at the second, and so on.
//! Backwards go from the last stage to the first. Rank r starts with w forwards, then alternates forwards and
//! backwards:
//!
//!   w = min(2 (p - r - 1) + (v - 1) p, m v)        p - r - 1 where v = 1, which is plain 1F1B
//!
//! The bubble of a minibatch is (p - 1) (F + B) / v, with F and B summed over a rank's stages.
//!
//! The paper requires whole groups. Here the last group may be short: the row for the next multiple of p is used
//! without the missing items. Removing an item from all rows keeps the order of the others, so no deadlock arises.

use crate::plan::StageId;
use crate::plan::schedule::Schedule;
use crate::schedule::action::{Phase, Work};
use crate::schedule::compute_table::follow;
use crate::schedule::semantics::StepCount;
use crate::schedule::shape::{looped, ranks};
use crate::schedule::{MicrobatchId, Pipeline, Program, RankId, ScheduleError};

pub fn interleaved(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    looped(Schedule::Interleaved, pipeline)?;
    let (p, v) = (ranks(pipeline), pipeline.chunks());
    follow(Schedule::Interleaved, pipeline, count, |rank, items| row(p, v, rank, items))
}

fn row(p: u32, v: u32, rank: RankId, items: u32) -> Vec<Work> {
    let all = items.next_multiple_of(p) * v;
    let behind = p - rank.0 - 1;
    let warm_up = if v == 1 { behind } else { 2 * behind + (v - 1) * p }.min(all);
    // The k-th forward of the rank. The k-th backward has the same item, at the mirrored chunk.
    let work = |k: u32, part: Phase| {
        let chunk = k / p % v;
        let chunk = if part == Phase::Forward { chunk } else { v - 1 - chunk };
        let item = k / (p * v) * p + k % p;
        Work { stage: StageId(chunk * p + rank.0), item: MicrobatchId(item), part }
    };
    let first = (0..warm_up).map(|k| work(k, Phase::Forward));
    let steady = (warm_up..all).flat_map(|k| [work(k, Phase::Forward), work(k - warm_up, Phase::Backward)]);
    let last = (all - warm_up..all).map(|k| work(k, Phase::Backward));
    first.chain(steady).chain(last).filter(|work| work.item.0 < items).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::fullest_moment;

    /// Chunks of all sizes, and short last groups.
    #[test]
    fn no_moment_of_a_row_is_fuller_than_the_fullest() {
        for (p, v, items) in [(2, 2, 1), (2, 2, 2), (2, 2, 7), (2, 3, 8), (3, 2, 8), (4, 3, 9), (4, 2, 40), (3, 5, 50)]
        {
            let bytes: Vec<u64> = (0..p * v).map(|at| 1 + u64::from(at * 7 % 5)).collect();
            for rank in 0..p {
                let own: Vec<u64> = (rank..p * v).step_by(p as usize).map(|at| bytes[at as usize]).collect();
                let (mut held, mut most) = (0, 0);
                for work in row(p, v, RankId(rank), items) {
                    match work.part {
                        Phase::Forward => held += bytes[work.stage.index()],
                        _ => held -= bytes[work.stage.index()],
                    }
                    most = held.max(most);
                }
                let counts = fullest_moment::of_rank((p, rank), items, &own);
                let found: u64 = counts.into_iter().zip(own).map(|(count, bytes)| u64::from(count) * bytes).sum();
                assert_eq!(found, most, "rank {rank} of {p}, {v} chunks, {items} micro-batches");
            }
        }
    }
}
