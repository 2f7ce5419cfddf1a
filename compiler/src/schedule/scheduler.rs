//! Generates a program for any schedule.

use crate::plan::schedule::Schedule;
use crate::schedule::generators::bfs::bfs;
use crate::schedule::generators::dualpipev::dualpipev;
use crate::schedule::generators::gpipe::gpipe;
use crate::schedule::generators::inference::inference;
use crate::schedule::generators::interleaved::interleaved;
use crate::schedule::generators::one_f_one_b::one_f_one_b;
use crate::schedule::generators::one_f_one_b_rr::{one_f_one_b_rr, one_f_one_b_rr_vsync};
use crate::schedule::generators::one_f_one_b_rr_newest::one_f_one_b_rr_newest;
use crate::schedule::generators::two_bw::two_bw;
use crate::schedule::generators::zbv::zbv;
use crate::schedule::generators::zero_bubble::{zb_h1, zb_h2};
use crate::schedule::semantics::StepCount;
use crate::schedule::{Pipeline, Program, ScheduleError};

/// Builds the program that runs `count` minibatches, with the pipeline's in-flight limits if the schedule uses caps.
pub fn schedule(schedule: Schedule, pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    match schedule {
        Schedule::Gpipe => gpipe(pipeline, count),
        Schedule::OneFOneB => one_f_one_b(pipeline, count),
        Schedule::Interleaved => interleaved(pipeline, count),
        Schedule::Bfs => bfs(pipeline, count),
        Schedule::ZbH1 => zb_h1(pipeline, count),
        Schedule::ZbH2 => zb_h2(pipeline, count),
        Schedule::Zbv => zbv(pipeline, count),
        Schedule::DualPipeV => dualpipev(pipeline, count),
        Schedule::OneFOneBRr => one_f_one_b_rr(pipeline, count),
        Schedule::OneFOneBRrVsync => one_f_one_b_rr_vsync(pipeline, count),
        Schedule::OneFOneBRrNewest => one_f_one_b_rr_newest(pipeline, count),
        Schedule::TwoBw => two_bw(pipeline, count),
        Schedule::Inference => inference(pipeline, count),
        Schedule::Csv => Err(ScheduleError::NoTable),
    }
}
