//! 1F1B with flush: one forward, one backward, and every update waits for all microbatches of its minibatch.
//!
//! The gradient is exactly that of the unpipelined minibatch. On a straight pipeline of p stages, stage i starts with
//! min(p − i − 1, M) forwards and never holds more than p − i items (Megatron-LM, Narayanan et al., SC 2021, section
//! 2.2.1); the in-flight caps of the pipeline say the same, and also serve stages that differ in replicas.

use crate::schedule::list_scheduler::{Choice, play};
use crate::schedule::lower::lower;
use crate::schedule::semantics::{Rule, StepCount};
use crate::schedule::shape::one_stage_each;
use crate::schedule::{Pipeline, Program, Schedule, ScheduleError};

/// 1F1B with a flush after every minibatch.
pub fn one_f_one_b(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    one_stage_each(Schedule::OneFOneB, pipeline)?;
    let rule = Rule::new(Schedule::OneFOneB, pipeline, count)?;
    let order = play(pipeline, &rule, Choice::Greedy)?;
    Ok(lower(pipeline, &rule, &order))
}
