//! The compute-only table that torch's pipeline runtime reads: a row for each worker, a cell for each piece of work.
//!
//! ```text
//! 0F0,0F1,0B0,0B1
//! 1F0,1B0,1F1,1B1
//! ```
//!
//! It says neither versions nor transfers, so it carries a synchronous schedule whole and an asynchronous one only in order.

use crate::schedule::{Instruction, Program};

/// The table, one line for each worker.
pub fn csv(program: &Program) -> String {
    let mut text = String::new();
    for worker in &program.workers {
        let work = worker.instructions.iter().filter_map(Instruction::work);
        let cells = work.map(|(work, ..)| work.to_string());
        text += &cells.collect::<Vec<_>>().join(",");
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::rule::StepCount;
    use crate::schedule::scheduler::schedule;
    use crate::schedule::{Pipeline, Schedule};

    #[test]
    fn one_row_for_each_worker() {
        let count = StepCount { minibatches: 1, microbatches: 3 };
        let pipeline = Pipeline::balanced(&[1, 1], 1.0);
        let fill_drain = schedule(Schedule::Gpipe, &pipeline, count).unwrap();
        assert_eq!(csv(&fill_drain), "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n");
        let flush = schedule(Schedule::OneFOneB, &pipeline, count).unwrap();
        assert_eq!(csv(&flush), "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
    }
}
