//! 1F1B-RR: 1F1B with items round-robin over the replicas, weight stashing and no flush (PipeDream, Narayanan et al.,
//! SOSP 2019, section 3.2), optionally with vertical sync (section 3.3).
//!
//! The paper starts each stage with a closed-form number of warm-up forwards. With unequal replica counts that starves
//! the pipeline (1-3-1 reaches half of the ideal throughput). Here the order comes from the list scheduler,
//! work-conserving and with an in-flight limit per stage. The cap is part of the semantics: it determines the versions
//! (see [`semantics`](crate::schedule::semantics)). With [`published_caps`](crate::schedule::published_caps), a
//! straight pipeline gets exactly the published program.

use crate::plan::schedule::Schedule;
use crate::schedule::list_scheduler::{Choice, play};
use crate::schedule::lower::lower;
use crate::schedule::semantics::{Rule, StepCount};
use crate::schedule::shape::one_stage_each;
use crate::schedule::{Pipeline, Program, ScheduleError};

pub fn one_f_one_b_rr(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    generate(Schedule::OneFOneBRr, pipeline, count)
}

pub fn one_f_one_b_rr_vsync(pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    generate(Schedule::OneFOneBRrVsync, pipeline, count)
}

fn generate(schedule: Schedule, pipeline: &Pipeline, count: StepCount) -> Result<Program, ScheduleError> {
    one_stage_each(schedule, pipeline)?;
    let rule = Rule::new(schedule, pipeline, count)?;
    let order = play(pipeline, &rule, Choice::Greedy)?;
    Ok(lower(pipeline, &rule, &order))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::StageId;
    use crate::plan::in_flight::{StageInFlight, synced};
    use crate::schedule::check::verify::check;
    use crate::schedule::{Instruction, published_caps};

    /// Peak number of versions per worker of each stage.
    fn held(program: &Program) -> Vec<u32> {
        let mut most = vec![1; program.stages.len()];
        for worker in &program.workers {
            let mut now = vec![1; program.stages.len()];
            for instruction in &worker.instructions {
                match *instruction {
                    Instruction::Step { stage: StageId(stage), in_place: false, .. } => now[stage as usize] += 1,
                    Instruction::Drop { stage: StageId(stage), .. } => now[stage as usize] -= 1,
                    _ => {}
                }
                most.iter_mut().zip(&now).for_each(|(most, now)| *most = (*most).max(*now));
            }
        }
        most
    }

    /// Vertical sync never needs more versions than planned, and exactly as many if the stage has one replica. With
    /// equal replica counts that is the first stage's cap.
    #[test]
    fn versions_are_those_that_are_planned() {
        let mut alone = 0;
        for seed in 0..160u32 {
            println!("seed {seed}");
            let mut state = seed.wrapping_mul(0x9e37_79b9).wrapping_add(1);
            let mut below = |n: u32| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 16) % n
            };
            let equal = (seed % 4 == 0).then(|| 1 + below(3));
            let replicas: Vec<u32> = (0..2 + below(3)).map(|_| equal.unwrap_or(1 + below(5))).collect();
            let extra = below(3);
            let caps: Vec<u32> = published_caps(&replicas).iter().map(|cap| cap + extra).collect();
            let first = StageInFlight { replicas: replicas[0], in_flight: caps[0] };
            let pipeline = Pipeline::balanced(&replicas, 2.0).with_caps(&caps);
            let program = one_f_one_b_rr_vsync(&pipeline, StepCount::minibatches(120)).unwrap();
            check(&program).unwrap();
            for (&own, held) in replicas.iter().zip(held(&program)) {
                let planned = synced(own, first);
                assert!(
                    held <= planned,
                    "{replicas:?} caps {caps:?}: {held} held at {own} replicas, {planned} planned"
                );
                if own == replicas[0] {
                    assert_eq!(planned, caps[0], "{replicas:?} caps {caps:?}");
                }
                // While replicas wait for each other's gradients, one may already be past the items of the oldest
                // versions.
                if own == 1 {
                    assert_eq!(held, planned, "{replicas:?} caps {caps:?}");
                    alone += 1;
                }
            }
        }
        assert!(alone > 60, "{alone} stages of one replica");
    }
}
