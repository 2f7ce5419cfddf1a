//! PipeDream-2BW: double-buffered weights (Narayanan et al., ICML 2021, section 3.1).
//!
//!   W(t+1) = W(t) − ν ∇f(W(t−1))
//!
//! A minibatch of M micro-batches makes one update, from gradients of the version before the newest. The next minibatch
//! can start before the previous one ends: no flush, and at most two versions. The paper requires M ≥ p; smaller M is
//! correct but stalls.

use crate::plan::schedule::Schedule;
use crate::schedule::list_scheduler::{Choice, play};
use crate::schedule::lower::lower;
use crate::schedule::semantics::{Rule, StepCount};
use crate::schedule::shape::one_stage_each;
use crate::schedule::{Pipeline, Program, ScheduleError};

pub fn two_bw(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    one_stage_each(Schedule::TwoBw, pipeline)?;
    let rule = Rule::new(Schedule::TwoBw, pipeline, count)?;
    let order = play(pipeline, &rule, Choice::Greedy)?;
    Ok(lower(pipeline, &rule, &order))
}
