//! Generators: one file per schedule, which orders the compute actions of every worker. To add one: its module and its
//! row here, and a variant and a row in `plan/schedule.rs`.

pub mod bfs;
pub mod dualpipev;
pub mod gpipe;
pub mod inference;
pub mod interleaved;
pub mod one_f_one_b;
pub mod one_f_one_b_rr;
pub mod one_f_one_b_rr_newest;
pub mod two_bw;
pub mod zbv;
pub mod zero_bubble;

use self::bfs::bfs;
use self::dualpipev::dualpipev;
use self::gpipe::gpipe;
use self::inference::inference;
use self::interleaved::interleaved;
use self::one_f_one_b::one_f_one_b;
use self::one_f_one_b_rr::{one_f_one_b_rr, one_f_one_b_rr_vsync};
use self::one_f_one_b_rr_newest::one_f_one_b_rr_newest;
use self::two_bw::two_bw;
use self::zbv::zbv;
use self::zero_bubble::{zb_h1, zb_h2};
use crate::plan::schedule::Schedule;
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
