//! 1F1B-RR without weight stashing: forward and backward each use the newest version. It is the baseline of PipeDream
//! (Narayanan et al., SOSP 2019, section 3.3) and the order of SpecTrain and PipeMare.
//!
//! One version suffices because the order of a worker is fixed: cap − 1 forwards, then alternating forwards and
//! backwards. The forward of round k runs between the updates of rounds k − c and k − c + 1. Its backward runs after
//! the update of round k − 1. The versions are max(0, k − (c − 1)) and k, independent of the times.
//!
//! Caps are lowered to the number of items that the earlier stages allow.

use crate::plan::StageId;
use crate::plan::schedule::Schedule;
use crate::schedule::action::{Phase, Work};
use crate::schedule::list_scheduler::{Choice, Layout, play};
use crate::schedule::lower::lower;
use crate::schedule::semantics::{Rule, StepCount};
use crate::schedule::shape::one_stage_each;
use crate::schedule::{MicrobatchId, Pipeline, Program, ScheduleError};

pub fn one_f_one_b_rr_newest(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    let schedule = Schedule::OneFOneBRrNewest;
    one_stage_each(schedule, pipeline)?;
    pipeline.validate()?;
    let pipeline = pipeline.clone().with_caps(&caps(pipeline));
    let rule = Rule::new(schedule, &pipeline, count)?;
    let lists = lists(&rule);
    let order = play(&pipeline, &rule, Choice::Fixed(&lists))?;
    Ok(lower(&pipeline, &rule, &order))
}

/// Before the backward of item b, a stage of r replicas has started items up to b + (c − 1)·r at most. The next round
/// waits for an earlier one. Later stages cannot have more in flight.
fn caps(pipeline: &Pipeline) -> Vec<u32> {
    let mut ahead = u64::MAX;
    let lowered = pipeline.stages.iter().map(|stage| {
        let replicas = u64::from(stage.replicas);
        let more = u64::from(stage.cap - 1).min(ahead / replicas);
        ahead = ahead.min(more * replicas);
        more as u32 + 1
    });
    lowered.collect()
}

fn lists(rule: &Rule) -> Vec<Vec<Work>> {
    let mut lists = vec![Vec::new(); Layout::new(&rule.stages).workers()];
    let layout = Layout::new(&rule.stages);
    for (stage, of) in (0..).map(StageId).zip(&rule.stages) {
        for replica in 0..of.replicas {
            let list = &mut lists[layout.worker(stage, replica).index()];
            let items: Vec<MicrobatchId> = rule.share(stage, replica).collect();
            let ahead = (of.cap as usize - 1).min(items.len());
            let forward = |&item: &MicrobatchId| Work { stage, item, part: Phase::Forward };
            let backward = |&item: &MicrobatchId| Work { stage, item, part: Phase::Backward };
            list.extend(items[..ahead].iter().map(forward));
            for (next, last) in items[ahead..].iter().zip(&items) {
                list.extend([forward(next), backward(last)]);
            }
            list.extend(items[items.len() - ahead..].iter().map(backward));
        }
    }
    lists
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::check::verify::check;
    use crate::schedule::{Instruction, published_caps};

    /// All programs pass the checker, and every step but the first overwrites the only version.
    #[test]
    fn one_version_is_enough() {
        for replicas in
            [&[1][..], &[1, 1, 1, 1], &[2, 1], &[3, 1], &[1, 2], &[1, 3, 1], &[4, 2, 1], &[1, 2, 2, 1], &[2, 3]]
        {
            for extra in [0, 1, 3] {
                for minibatches in [1, 2, 7, 24] {
                    let caps: Vec<u32> = published_caps(replicas).iter().map(|c| c + extra).collect();
                    let pipeline = Pipeline::balanced(replicas, 2.0).with_caps(&caps);
                    let program = one_f_one_b_rr_newest(&pipeline, StepCount::minibatches(minibatches)).unwrap();
                    check(&program).unwrap();
                    for instruction in program.workers.iter().flat_map(|worker| &worker.instructions) {
                        match instruction {
                            Instruction::Step { in_place, .. } => assert!(in_place, "{replicas:?} + {extra}"),
                            Instruction::Drop { .. } => panic!("{replicas:?} + {extra}: a second version"),
                            _ => {}
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn caps_are_lowered_to_what_the_stages_before_let_through() {
        let pipeline = Pipeline::balanced(&[2, 4, 2, 1], 2.0);
        for given in [[1, 4, 4, 2], [2, 1, 3, 6], [3, 3, 3, 3], [4, 2, 1, 5], [6, 6, 6, 6]] {
            let pipeline = pipeline.clone().with_caps(&given);
            for minibatches in [1, 5, 13, 30] {
                check(&one_f_one_b_rr_newest(&pipeline, StepCount::minibatches(minibatches)).unwrap()).unwrap();
            }
        }
        assert_eq!(caps(&pipeline.with_caps(&[1, 4, 4, 2])), [1, 1, 1, 1]);
    }
}
