//! Forward only, items round-robin over the replicas. The in-flight limit bounds outputs that are not received yet.

use crate::plan::schedule::Schedule;
use crate::schedule::list_scheduler::{Choice, play};
use crate::schedule::lower::lower;
use crate::schedule::semantics::{Rule, StepCount};
use crate::schedule::shape::one_stage_each;
use crate::schedule::{Pipeline, Program, ScheduleError};

pub fn inference(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    one_stage_each(Schedule::Inference, pipeline)?;
    let rule = Rule::new(Schedule::Inference, pipeline, count)?;
    let order = play(pipeline, &rule, Choice::Greedy)?;
    Ok(lower(pipeline, &rule, &order))
}
