//! Custom schedules: the compute order of each rank within one minibatch.
//!
//! An implementation of [`ComputeOrder`] gives only this order. Weight versions, transfers, all-reduces and steps follow
//! as in every schedule with a flush, and the checker verifies the program before it runs.
//! [`ComputeTable`](crate::schedule::formats::csv::ComputeTable) implements it for a file, `examples/my_schedule.rs` of
//! this package in Rust.
//!
//! ```
//! use compiler::plan::StageId;
//! use compiler::schedule::custom::{ComputeOrder, program};
//! use compiler::schedule::semantics::StepCount;
//! use compiler::schedule::action::{Phase, Work};
//! use compiler::schedule::{MicrobatchId, Pipeline, RankId, formats::csv::csv};
//!
//! /// One item after the other: nothing overlaps, and nothing is kept for longer than it takes.
//! struct OneByOne;
//!
//! impl ComputeOrder for OneByOne {
//!     fn work(&self, _: &Pipeline, rank: RankId, items: u32) -> Vec<Work> {
//!         let parts = [Phase::Forward, Phase::Backward];
//!         let of = |item| parts.map(|part| Work { stage: StageId(rank.0), item: MicrobatchId(item), part });
//!         (0..items).flat_map(of).collect()
//!     }
//! }
//!
//! let count = StepCount { minibatches: 1, microbatches: 2 };
//! let program = program(&OneByOne, &Pipeline::balanced(&[1, 1], 2.0), count).unwrap();
//! assert_eq!(csv(&program), "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n");
//! ```

use crate::plan::schedule::Schedule;
use crate::schedule::action::Work;
use crate::schedule::compute_table::follow;
use crate::schedule::semantics::StepCount;
use crate::schedule::{Pipeline, Program, RankId, ScheduleError};

/// A custom schedule: the compute order of every rank.
pub trait ComputeOrder {
    /// The actions of a rank for one minibatch of `items` items, counted from 0. Each of its stages runs every item
    /// once forward and then once backward, whole or split.
    ///
    /// It is called per replica, so `items` may be less than the micro-batches of the minibatch.
    fn work(&self, pipeline: &Pipeline, rank: RankId, items: u32) -> Vec<Work>;
}

/// The program in which every worker follows the order, minibatch after minibatch.
pub fn program(order: &dyn ComputeOrder, pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    follow(Schedule::Csv, pipeline, count, |rank, items| order.work(pipeline, rank, items))
}
