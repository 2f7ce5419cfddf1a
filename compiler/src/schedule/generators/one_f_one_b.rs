//! 1F1B with a flush: alternates forwards and backwards; every update waits for all micro-batches of its minibatch.
//!
//! The gradient is exactly that of the unpipelined minibatch. On a straight pipeline of p stages, stage i starts with
//! min(p − i − 1, M) forwards. It holds at most p − i items (Megatron-LM, Narayanan et al., SC 2021, section 2.2.1).
//! The in-flight limits give the same, and also work for unequal replica counts.

use crate::plan::schedule::Schedule;
use crate::schedule::list_scheduler::{Choice, play};
use crate::schedule::lower::lower;
use crate::schedule::semantics::{Rule, StepCount};
use crate::schedule::shape::one_stage_each;
use crate::schedule::{Pipeline, Program, ScheduleError};

pub fn one_f_one_b(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    one_stage_each(Schedule::OneFOneB, pipeline)?;
    let rule = Rule::new(Schedule::OneFOneB, pipeline, count)?;
    let order = play(pipeline, &rule, Choice::Greedy)?;
    Ok(lower(pipeline, &rule, &order))
}
