//! Zero bubble on a V (Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024; schedule V-ZB).
//!
//! Rank r of p holds stage r (down) and stage 2p - 1 - r (up). The last forward of an item is on the rank of its first,
//! so the first backward starts early. Every rank saves the activations of p items. If F = I = W there is no bubble.
//!
//! | phase   | rank r does                                                  | times        |
//! | ---     | ---                                                          | ---          |
//! | fill    | F down                                                       | 2 (p - r) - 1 |
//! |         | F up, F down                                                 | r            |
//! |         | F up, I and W up                                             | p - r        |
//! | steady  | F, I, W down, then F, I, W up, as long as there is a forward | the rest     |
//! | drain   | I down, I up                                                 | r            |
//! |         | I down, W down                                               | p - r        |
//! |         | W up, then W down, all that are pending                      |              |
//!
//! With fewer than 2p - 1 items, the rows for 2p - 1 are used without the missing items.

use crate::plan::StageId;
use crate::plan::schedule::Schedule;
use crate::schedule::action::{Phase, Work};
use crate::schedule::compute_table::follow;
use crate::schedule::semantics::StepCount;
use crate::schedule::shape::{folded, ranks};
use crate::schedule::{MicrobatchId, Pipeline, Program, RankId, ScheduleError};

pub fn zbv(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    folded(Schedule::Zbv, pipeline)?;
    let p = ranks(pipeline);
    follow(Schedule::Zbv, pipeline, count, |rank, items| row(p, rank, items))
}

/// One direction of the V on a rank, and the next item of each phase.
struct VDirection {
    stage: StageId,
    forward: u32,
    input: u32,
    weight: u32,
}

impl VDirection {
    fn forward(&mut self) -> Work {
        self.forward += 1;
        Work { stage: self.stage, item: MicrobatchId(self.forward - 1), part: Phase::Forward }
    }

    fn input(&mut self) -> Work {
        self.input += 1;
        Work { stage: self.stage, item: MicrobatchId(self.input - 1), part: Phase::BackwardInput }
    }

    fn weight(&mut self) -> Work {
        self.weight += 1;
        Work { stage: self.stage, item: MicrobatchId(self.weight - 1), part: Phase::BackwardWeight }
    }
}

fn row(p: u32, rank: RankId, items: u32) -> Vec<Work> {
    let all = items.max(2 * p - 1);
    let r = rank.0;
    let way = |stage: u32| VDirection { stage: StageId(stage), forward: 0, input: 0, weight: 0 };
    let (mut down, mut up) = (way(r), way(2 * p - 1 - r));
    let mut row: Vec<Work> = (0..2 * (p - r) - 1).map(|_| down.forward()).collect();
    for _ in 0..r {
        row.extend([up.forward(), down.forward()]);
    }
    for _ in r..p {
        row.extend([up.forward(), up.input(), up.weight()]);
    }
    while up.forward < all {
        if down.forward < all {
            row.push(down.forward());
        }
        row.extend([down.input(), down.weight(), up.forward(), up.input(), up.weight()]);
    }
    for _ in 0..r {
        row.extend([down.input(), up.input()]);
    }
    for _ in r..p {
        row.extend([down.input(), down.weight()]);
    }
    while up.weight < all {
        row.push(up.weight());
    }
    while down.weight < all {
        row.push(down.weight());
    }
    row.retain(|work| work.item.0 < items);
    row
}
