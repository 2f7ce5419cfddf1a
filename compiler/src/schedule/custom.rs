//! An order of work of one's own: what each rank computes of a minibatch, in which order.
//!
//! Whoever implements [`OrderOfWork`] says that and nothing more. Which weights an item sees, what is sent when, and when gradients are
//! summed and applied follow as under every schedule that flushes, and the checker proves the programs before they run. A table in a
//! file, [`Table`](crate::schedule::formats::csv::Table), is one order; `examples/my_schedule.rs` of this package is another.
//!
//! ```
//! use compiler::plan::StageId;
//! use compiler::schedule::custom::{OrderOfWork, program};
//! use compiler::schedule::semantics::StepCount;
//! use compiler::schedule::action::{Phase, Work};
//! use compiler::schedule::{MicrobatchId, Pipeline, RankId, formats::csv::csv};
//!
//! /// One item after the other: nothing overlaps, and nothing is kept for longer than it takes.
//! struct OneByOne;
//!
//! impl OrderOfWork for OneByOne {
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

use crate::schedule::action::Work;
use crate::schedule::compute_table::follow;
use crate::schedule::semantics::StepCount;
use crate::schedule::{Pipeline, Program, RankId, Schedule, ScheduleError};

/// What ranks compute in which order.
pub trait OrderOfWork {
    /// What the rank computes of one minibatch of `items` items, which are counted from 0: at each of its stages every item once forward and
    /// then once backward, whole or in two parts.
    ///
    /// Where ranks have replicas, every replica is asked for the items that it is dealt, so there may be fewer than the minibatch has.
    fn work(&self, pipeline: &Pipeline, rank: RankId, items: u32) -> Vec<Work>;
}

/// The program in which every worker follows the order, minibatch after minibatch.
pub fn program(order: &dyn OrderOfWork, pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    follow(Schedule::Csv, pipeline, count, |rank, items| order.work(pipeline, rank, items))
}
