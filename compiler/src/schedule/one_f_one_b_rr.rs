//! 1F1B-RR: one forward, one backward, items round-robin over the replicas, weights stashed, never a flush (PipeDream,
//! Narayanan et al., SOSP 2019, section 3.2), and the same with vertical sync (section 3.3).
//!
//! The paper starts each stage with a closed-form number of warm-up forwards. Where replicas differ from stage to stage
//! that starves the pipeline (1-3-1 reaches half of the ideal throughput), so here the order is played, work-conserving,
//! under an in-flight cap of each stage. The cap is part of the meaning: it fixes the versions (see
//! [`rule`](crate::schedule::rule)). With the published caps, [`published_caps`](crate::schedule::published_caps),
//! a straight pipeline gets exactly the published program.

use crate::schedule::lower::lower;
use crate::schedule::order::{Choice, play};
use crate::schedule::rule::{Rule, StepCount};
use crate::schedule::shape::one_stage_each;
use crate::schedule::{Pipeline, Program, Schedule, ScheduleError};

/// 1F1B-RR with weight stashing.
pub fn one_f_one_b_rr(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    generate(Schedule::OneFOneBRr, pipeline, count)
}

/// 1F1B-RR with vertical sync: every stage runs an item with weights that have seen what stage 0's have.
pub fn one_f_one_b_rr_vsync(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    generate(Schedule::OneFOneBRrVsync, pipeline, count)
}

fn generate(schedule: Schedule, pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    one_stage_each(schedule, pipeline)?;
    let rule = Rule::new(schedule, pipeline, count)?;
    let order = play(pipeline, &rule, Choice::Greedy)?;
    Ok(lower(pipeline, &rule, &order))
}
