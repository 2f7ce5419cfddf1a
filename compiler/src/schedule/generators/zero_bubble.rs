//! Zero bubble with one stage per rank: 1F1B with a backward split into I (input gradients) and W (weight gradients); W
//! fills the bubbles (Qi et al., ICLR 2024, section 2; schedules H1 and H2).
//!
//! Rank r of p starts with d (p - r - 1) forwards, then alternates F and I. It starts with W when d r of its I are
//! done:
//!
//! | d | name | bubble of a minibatch   | in flight    |
//! | - | ---  | ---                     | ---          |
//! | 1 | H1   | (p - 1) (F + I - W)     | p            |
//! | 2 | H2   | (p - 1) (F + I - 2 W)   | 2 p - 1      |
//!
//! H2 has no bubble if F = I = W: ranks start and end staggered, so the next minibatch follows without a gap. The paper
//! steps optimistically and rolls back after a global check. Here a stage's step needs only its own gradients, so
//! nothing is rolled back.
//!
//! Unequal replica counts use the list scheduler: I before F before W, with a total cap of d p - d + 1 items over p
//! workers, divided by the replicas. W comes first once as many are pending as in the row of a rank at that position.

use crate::plan::StageId;
use crate::plan::in_flight;
use crate::plan::in_flight::ScheduleFlow;
use crate::plan::schedule::Schedule;
use crate::schedule::action::{Phase, Work};
use crate::schedule::compute_table::follow;
use crate::schedule::list_scheduler::{Choice, play};
use crate::schedule::lower::lower;
use crate::schedule::semantics::{Rule, StepCount};
use crate::schedule::shape::{one_stage_each, ranks};
use crate::schedule::{MicrobatchId, Pipeline, Program, RankId, ScheduleError};

/// H1: no more activations than on 1F1B's first rank.
pub fn zb_h1(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    zero_bubble(Schedule::ZbH1, 1, pipeline, count)
}

/// H2: nearly twice the activations, without a bubble.
pub fn zb_h2(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    zero_bubble(Schedule::ZbH2, 2, pipeline, count)
}

fn zero_bubble(
    schedule: Schedule,
    depth: u32,
    pipeline: &Pipeline,
    count: StepCount,
) -> Result<Program, ScheduleError> {
    one_stage_each(schedule, pipeline)?;
    let p = ranks(pipeline);
    let replicas = pipeline.stages[0].replicas;
    if pipeline.stages.iter().all(|stage| stage.replicas == replicas) {
        return follow(schedule, pipeline, count, |rank, items| row(depth, p, rank, items));
    }
    let mut rule = Rule::new(schedule, pipeline, count)?;
    let workers: u32 = pipeline.stages.iter().map(|stage| stage.replicas).sum();
    for stage in &mut rule.stages {
        stage.cap = (depth * workers - depth + 1).div_ceil(stage.replicas);
    }
    // The same limit as in the plan's memory model.
    let kind = if depth == 1 { Schedule::ZbH1 } else { Schedule::ZbH2 };
    let flow = ScheduleFlow { schedule: kind, microbatches: rule.microbatches, chunks: 1, workers, room: 0 };
    let (replicas, most): (Vec<u32>, Vec<u32>) = rule.stages.iter().map(|stage| (stage.replicas, stage.cap)).unzip();
    let pending_weight_grads = in_flight::pending_weight_grads(&flow, &replicas, &most);
    let order = play(pipeline, &rule, Choice::GreedySplit(&pending_weight_grads))?;
    Ok(lower(pipeline, &rule, &order))
}

fn row(depth: u32, p: u32, rank: RankId, items: u32) -> Vec<Work> {
    let work = |item: u32, part: Phase| Work { stage: StageId(rank.0), item: MicrobatchId(item), part };
    let warm_up = (depth * (p - rank.0 - 1)).min(items);
    let late = (depth * rank.0).min(items);
    let mut row: Vec<Work> = (0..warm_up).map(|item| work(item, Phase::Forward)).collect();
    for item in 0..items {
        if item + warm_up < items {
            row.push(work(item + warm_up, Phase::Forward));
        }
        row.push(work(item, Phase::BackwardInput));
        if item >= late {
            row.push(work(item - late, Phase::BackwardWeight));
        }
    }
    row.extend((items - late..items).map(|item| work(item, Phase::BackwardWeight)));
    row
}
