//! Looped breadth-first: each stage of a rank runs all forwards of a minibatch, then each stage all backwards
//! (Lamy-Poirier, MLSys 2023).
//!
//! It is GPipe on a loop. The bubble shrinks with the number of stages per rank and gradients of a stage are complete
//! early, but all activations of the minibatch are saved. The paper does not order the backwards; here they are in item
//! order, so that gradient sums match those of other schedules.

use crate::plan::StageId;
use crate::plan::schedule::Schedule;
use crate::schedule::action::{Phase, Work};
use crate::schedule::compute_table::follow;
use crate::schedule::semantics::StepCount;
use crate::schedule::shape::{looped, ranks};
use crate::schedule::{MicrobatchId, Pipeline, Program, RankId, ScheduleError};

pub fn bfs(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    looped(Schedule::Bfs, pipeline)?;
    let (p, v) = (ranks(pipeline), pipeline.chunks());
    follow(Schedule::Bfs, pipeline, count, |rank, items| row(p, v, rank, items))
}

fn row(p: u32, v: u32, rank: RankId, items: u32) -> Vec<Work> {
    let all = |chunk: u32, part: Phase| {
        let stage = StageId(chunk * p + rank.0);
        (0..items).map(move |item| Work { stage, item: MicrobatchId(item), part })
    };
    let forwards = (0..v).flat_map(|chunk| all(chunk, Phase::Forward));
    forwards.chain((0..v).rev().flat_map(|chunk| all(chunk, Phase::Backward))).collect()
}
