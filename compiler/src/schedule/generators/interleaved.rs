//! Interleaved 1F1B with flush over v stages on each of p ranks (Megatron-LM, Narayanan et al., SC 2021, section 2.2.2).
//!
//! Items go through a rank's stages in groups of p: the group's forwards at the first stage, then at the second, and so on;
//! backwards likewise from the last stage to the first. Rank r starts with w forwards, then does one forward and one
//! backward in turn:
//!
//!   w = min(2 (p - r - 1) + (v - 1) p, m v)        p - r - 1 where v = 1, which is plain 1F1B
//!
//! The bubble of a minibatch is (p - 1) (F + B) / v, of a rank's F and B together over its stages.
//!
//! The paper asks for whole groups. Here a last group may be short: the row is that of the next whole number of groups, without
//! the items that do not exist. Taking an item out of all rows leaves the order of the others, so what could run still runs.

use crate::plan::StageId;
use crate::schedule::action::{Phase, Work};
use crate::schedule::compute_table::follow;
use crate::schedule::semantics::StepCount;
use crate::schedule::shape::{looped, ranks};
use crate::schedule::{MicrobatchId, Pipeline, Program, RankId, Schedule, ScheduleError};

/// 1F1B over several stages on each rank, with a flush after every minibatch.
pub fn interleaved(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    looped(Schedule::Interleaved, pipeline)?;
    let (p, v) = (ranks(pipeline), pipeline.chunks());
    follow(Schedule::Interleaved, pipeline, count, |rank, items| row(p, v, rank, items))
}

fn row(p: u32, v: u32, rank: RankId, items: u32) -> Vec<Work> {
    let all = items.next_multiple_of(p) * v;
    let behind = p - rank.0 - 1;
    let warm_up = if v == 1 { behind } else { 2 * behind + (v - 1) * p }.min(all);
    // The k-th forward of the rank; the k-th backward is of the same item, at the stage as far from the end.
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
