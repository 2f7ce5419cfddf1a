//! DualPipeV: a V of two stages per rank whose steady state pairs a forward of one with a backward of the other
//! (DeepSeek, DualPipe, 2025). Cutting DualPipe in half avoids duplicate weights.
//!
//! Rank r of p holds stage r (down) and stage 2p - 1 - r (up). The pairs allow a device to overlap the transfers of one
//! action with the compute of the other; a worker here runs them in sequence.
//!
//! | step | rank r does                           | times          |
//! | ---  | ---                                   | ---            |
//! | 1    | F down                                | 2 (p - r - 1)  |
//! | 2    | F down, F up                          | r + 1          |
//! | 3    | I up, W up, F up                      | p - r - 1      |
//! | 4    | F down, B up, F up, B down            | m - 2p + r + 1 |
//! | 5    | B up, F up, B down                    | p - r - 1      |
//! | 6    | B up, B down; from half way on only I | r + 1          |
//! | 7    | pending W, I down                     | p - r - 1      |
//! | 8    | pending W                             | r + 1          |
//!
//! With fewer than 2p items, the rows for 2p are used without the missing items.

use std::collections::VecDeque;

use crate::plan::StageId;
use crate::plan::schedule::Schedule;
use crate::schedule::action::{Phase, Work};
use crate::schedule::compute_table::follow;
use crate::schedule::semantics::StepCount;
use crate::schedule::shape::{folded, ranks};
use crate::schedule::{MicrobatchId, Pipeline, Program, RankId, ScheduleError};

pub fn dualpipev(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    folded(Schedule::DualPipeV, pipeline)?;
    let p = ranks(pipeline);
    follow(Schedule::DualPipeV, pipeline, count, |rank, items| row(p, rank, items))
}

const DOWN: usize = 0;
const UP: usize = 1;

struct Row {
    stages: [StageId; 2],
    forwards: [u32; 2],
    backwards: [u32; 2],
    left: VecDeque<Work>,
    work: Vec<Work>,
}

impl Row {
    fn forward(&mut self, way: usize) {
        let item = MicrobatchId(self.forwards[way]);
        self.forwards[way] += 1;
        self.work.push(Work { stage: self.stages[way], item, part: Phase::Forward });
    }

    fn backward(&mut self, way: usize, part: Phase) {
        let (stage, item) = (self.stages[way], MicrobatchId(self.backwards[way]));
        self.backwards[way] += 1;
        self.work.push(Work { stage, item, part });
        if part == Phase::BackwardInput {
            self.left.push_back(Work { stage, item, part: Phase::BackwardWeight });
        }
    }

    fn weight(&mut self) {
        self.work.extend(self.left.pop_front());
    }
}

fn row(p: u32, rank: RankId, items: u32) -> Vec<Work> {
    let (all, r) = (items.max(2 * p), rank.0);
    let stages = [StageId(r), StageId(2 * p - 1 - r)];
    let mut row = Row { stages, forwards: [0; 2], backwards: [0; 2], left: VecDeque::new(), work: Vec::new() };
    for _ in 0..2 * (p - r - 1) {
        row.forward(DOWN);
    }
    for _ in 0..=r {
        row.forward(DOWN);
        row.forward(UP);
    }
    for _ in r + 1..p {
        row.backward(UP, Phase::BackwardInput);
        row.weight();
        row.forward(UP);
    }
    for _ in 0..all - 2 * p + r + 1 {
        row.forward(DOWN);
        row.backward(UP, Phase::Backward);
        row.forward(UP);
        row.backward(DOWN, Phase::Backward);
    }
    for _ in r + 1..p {
        row.backward(UP, Phase::Backward);
        row.forward(UP);
        row.backward(DOWN, Phase::Backward);
    }
    // The second half defers W: on odd ranks from a whole pair on, on even ranks from the middle of one.
    let half = r.div_ceil(2);
    let part = |split: bool| if split { Phase::BackwardInput } else { Phase::Backward };
    for i in 0..=r {
        let odd = r % 2 == 1;
        row.backward(UP, part(i > half || (odd && i == half)));
        row.backward(DOWN, part(i >= half));
    }
    for _ in r + 1..p {
        row.weight();
        row.backward(DOWN, Phase::BackwardInput);
    }
    for _ in 0..=r {
        row.weight();
    }
    row.work.retain(|work| work.item.0 < items);
    row.work
}
