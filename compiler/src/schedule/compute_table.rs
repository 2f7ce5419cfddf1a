//! Turns compute tables into programs: one row per rank lists its compute actions for one minibatch, in order.
//!
//! Rows use items counted from 0 within the minibatch. All ranks have equally many replicas, so the k-th replicas of
//! all ranks form an independent pipeline apart from the all-reduce. Each replica follows its rank's row for its number
//! of items. Minibatches run one after the other in the same order. The program's caps are the peaks of the table, not
//! the pipeline's caps.

use std::collections::{BTreeMap, BTreeSet};

use crate::plan::StageId;
use crate::plan::schedule::Schedule;
use crate::schedule::action::{Phase, Work};
use crate::schedule::list_scheduler::{Choice, Layout, play};
use crate::schedule::lower::lower;
use crate::schedule::semantics::{Rule, StepCount, dealt};
use crate::schedule::{MicrobatchId, Pipeline, Program, RankId, ScheduleError};

/// Builds the program; `row(rank, items)` is called with `items` at least 1. Fails if replica counts differ, if a row
/// is incomplete, or if rows deadlock.
pub fn follow(
    schedule: Schedule,
    pipeline: &Pipeline,
    count: StepCount,
    row: impl Fn(RankId, u32) -> Vec<Work>,
) -> Result<Program, ScheduleError> {
    let mut rule = Rule::new(schedule, pipeline, count)?;
    let replicas = equal_replicas(schedule, pipeline)?;
    let layout = Layout::new(&rule.stages);
    // Replicas have equally many items, or one fewer.
    let dealt = |replica: u32| dealt(rule.microbatches, replicas, replica) as u32;
    let mut rows: BTreeMap<(RankId, u32), Vec<Work>> = BTreeMap::new();
    for rank in layout.ranks() {
        for items in BTreeSet::from([dealt(0), dealt(replicas - 1)]) {
            let row = if items == 0 { Vec::new() } else { row(rank, items) };
            check_row(pipeline, rank, items, &row)?;
            rows.insert((rank, items), row);
        }
    }
    let mut lists = Vec::with_capacity(layout.workers());
    for rank in layout.ranks() {
        for replica in 0..replicas {
            let row = &rows[&(rank, dealt(replica))];
            let at = |start: u32, work: &Work| Work {
                item: MicrobatchId(start * rule.microbatches + work.item.0 * replicas + replica),
                ..*work
            };
            lists.push((0..count.minibatches).flat_map(|n| row.iter().map(move |work| at(n, work))).collect());
        }
    }
    for (stage, shape) in (0..).map(StageId).zip(&mut rule.stages) {
        shape.cap = peak(stage, &rows[&(shape.rank, dealt(0))]);
    }
    let order = play(pipeline, &rule, Choice::Fixed(&lists))?;
    Ok(lower(pipeline, &rule, &order))
}

/// The replica count of all ranks; an error if they differ.
pub fn equal_replicas(schedule: Schedule, pipeline: &Pipeline) -> Result<u32, ScheduleError> {
    let replicas = pipeline.stages[0].replicas;
    if pipeline.stages.iter().all(|stage| stage.replicas == replicas) {
        return Ok(replicas);
    }
    let all: Vec<String> = pipeline.stages.iter().map(|stage| stage.replicas.to_string()).collect();
    Err(ScheduleError::UnequalReplicas { schedule, replicas: all.join("-") })
}

/// Peak number of items in flight at a stage in a row.
fn peak(stage: StageId, row: &[Work]) -> u32 {
    let (mut now, mut most) = (0u32, 1);
    for work in row.iter().filter(|work| work.stage == stage) {
        now += u32::from(work.part == Phase::Forward);
        most = most.max(now);
        now -= u32::from(work.part.ends());
    }
    most
}

/// Checks that a row runs each item once forward and once backward at each stage of its rank, in a valid order.
fn check_row(pipeline: &Pipeline, rank: RankId, items: u32, row: &[Work]) -> Result<(), ScheduleError> {
    let wrong = |what: String| Err(ScheduleError::Table { what: format!("rank {}: {what}", rank.0) });
    let mut done: BTreeSet<Work> = BTreeSet::new();
    for &work in row {
        let Work { stage, item, part } = work;
        if pipeline.ranks.get(stage.index()) != Some(&rank) {
            return wrong(format!("{work} is of a stage on another rank"));
        }
        if item.0 >= items {
            return wrong(format!("{work} exceeds the {items} micro-batches of the minibatch"));
        }
        let has = |part| done.contains(&Work { part, ..work });
        let fits = match part {
            Phase::Forward => true,
            Phase::Backward => has(Phase::Forward) && !has(Phase::BackwardInput),
            Phase::BackwardInput => has(Phase::Forward) && !has(Phase::Backward),
            Phase::BackwardWeight => has(Phase::BackwardInput),
        };
        if !fits {
            return wrong(format!("{work} precedes the work it needs, or duplicates work that includes it"));
        }
        if !done.insert(work) {
            return wrong(format!("{work} is a duplicate"));
        }
    }
    let stages = (0..).map(StageId).zip(&pipeline.ranks).filter(|(_, of)| **of == rank).map(|(stage, _)| stage);
    for stage in stages {
        for item in (0..items).map(MicrobatchId) {
            let has = |part| done.contains(&Work { stage, item, part });
            if !has(Phase::Backward) && !has(Phase::BackwardWeight) {
                let missing =
                    Work { stage, item, part: if has(Phase::Forward) { Phase::Backward } else { Phase::Forward } };
                return wrong(format!("{missing} is missing"));
            }
        }
    }
    Ok(())
}
