//! How long a step takes: the schedule's own program is made for a few minibatches and played.
//!
//! Under a flush that is the time from the end of one minibatch to the end of the next, with what the next may begin before it. Without
//! one it is what a minibatch takes in the midst of a run, away from filling and draining.
//!
//! The work is bounded. Once a flushed pipeline is full, every further round of items takes as long as the one before, so the time of a
//! minibatch of very many items follows from two of fewer. What is too large even so has no answer here.

use crate::schedule::scheduler::schedule;
use crate::schedule::semantics::StepCount;
use crate::schedule::shape::common_multiple;
use crate::schedule::{Pipeline, Schedule};
use crate::simulate::one_f_one_b_rr::Steady;
use crate::simulate::run::{Machine, simulate};
use crate::simulate::steady_throughput::{MOST_WORK, Run, in_flight};
use crate::simulate::{SimulateError, Timeline};

/// The same of a play whose answer follows from nothing shorter: replicas of many different counts meet again after very many items.
const MOST_ALONE: u64 = 8 * MOST_WORK;

/// Minibatches of a flushed run, and the one after whose end the time is taken.
const FLUSHED: u32 = 4;
const SETTLED: usize = 1;

/// The fewest items of an even run over which the time is taken: a few per thousand near what a longer run would tell.
const WINDOW: u64 = 240;

/// Microseconds from one minibatch to the next, for inference from one item to the next; `None` where playing would take long.
pub fn step_us(kind: Schedule, pipeline: &Pipeline, microbatches: u32) -> Result<Option<f64>, SimulateError> {
    pipeline.validate()?;
    if !kind.trains() {
        return even(kind, pipeline, 1);
    }
    let microbatches = microbatches.max(1);
    if kind.flushes() { flushed(kind, pipeline, microbatches) } else { even(kind, pipeline, microbatches) }
}

/// How a pipeline runs under 2BW with its caps, as `steady` tells it of 1F1B-RR. Which caps hold it back is not known: any may.
pub fn double_buffered(pipeline: &Pipeline, microbatches: u32) -> Result<Option<Steady>, SimulateError> {
    let Some(us) = step_us(Schedule::TwoBw, pipeline, microbatches)? else { return Ok(None) };
    let dealt = |replicas: u32| f64::from(microbatches.div_ceil(replicas.max(1)).max(1));
    let stages = pipeline.stages.iter().map(|stage| {
        let reduce = if stage.replicas > 1 { stage.all_reduce } else { 0.0 };
        (dealt(stage.replicas) * (stage.forward + stage.backward) + stage.step).max(reduce)
    });
    let ideal = stages.fold(0.0, f64::max);
    let share = if us > 0.0 { (ideal / us).min(1.0) } else { 1.0 };
    Ok(Some(Steady { share, held: vec![true; pipeline.stages.len()], pieces: pieces(pipeline, microbatches) }))
}

/// What playing an even run costs, in pieces of a play of the rule alone: a piece of a program takes as long as many of those.
pub fn pieces(pipeline: &Pipeline, microbatches: u32) -> u64 {
    40 * work(pipeline, u64::from(minibatches(pipeline, microbatches)) * u64::from(microbatches))
}

fn work(pipeline: &Pipeline, items: u64) -> u64 {
    items.saturating_mul(pipeline.stages.len() as u64)
}

fn played(kind: Schedule, pipeline: &Pipeline, count: StepCount) -> Result<Timeline, SimulateError> {
    let program = schedule(kind, pipeline, count)?;
    simulate(&program, pipeline, &Machine::of(pipeline))
}

fn flushed(kind: Schedule, pipeline: &Pipeline, microbatches: u32) -> Result<Option<f64>, SimulateError> {
    let step = |microbatches: u32| -> Result<f64, SimulateError> {
        let count = StepCount { minibatches: FLUSHED, microbatches };
        let ends = played(kind, pipeline, count)?.ends(microbatches);
        Ok(match (ends.get(SETTLED), ends.last()) {
            (Some(first), Some(last)) => (last - first) / (ends.len() - 1 - SETTLED) as f64,
            _ => 0.0,
        })
    };
    let most = (MOST_WORK / work(pipeline, u64::from(FLUSHED)).max(1)) as u32;
    if microbatches <= most {
        return step(microbatches).map(Some);
    }
    // An even run repeats after a round of all replicas, and after a group of items where they go through the chunks in groups.
    let ranks = pipeline.stages.len() as u64 / u64::from(pipeline.chunks().max(1));
    let repeat = common_multiple(ranks.max(1), pipeline.rounds());
    let rest = u64::from(microbatches) % repeat;
    let (most, depth) =
        (u64::from(most), 2 * pipeline.stages.iter().map(|stage| u64::from(stage.replicas)).sum::<u64>());
    let fewer = depth.div_ceil(repeat) * repeat + rest;
    let more = fewer + most.saturating_sub(fewer) / repeat * repeat;
    if more <= fewer || more > most {
        let is_small = work(pipeline, u64::from(FLUSHED) * u64::from(microbatches)) <= MOST_ALONE;
        return if is_small { step(microbatches).map(Some) } else { Ok(None) };
    }
    let (low, high) = (step(fewer as u32)?, step(more as u32)?);
    Ok(Some(high + (high - low) * (u64::from(microbatches) - more) as f64 / (more - fewer) as f64))
}

fn even(kind: Schedule, pipeline: &Pipeline, microbatches: u32) -> Result<Option<f64>, SimulateError> {
    let count = StepCount { minibatches: minibatches(pipeline, microbatches), microbatches };
    if work(pipeline, u64::from(count.minibatches) * u64::from(microbatches)) > MOST_WORK {
        return Ok(None);
    }
    let machine = Machine::of(pipeline);
    let run = Run { pipeline, machine: &machine, microbatches, flushes: false, is_round_robin: kind.is_round_robin() };
    let timeline = simulate(&schedule(kind, pipeline, count)?, pipeline, &machine)?;
    Ok(Some(run.step_of(&timeline)))
}

/// Minibatches of an even run: half to fill, an eighth to drain, and enough between.
fn minibatches(pipeline: &Pipeline, microbatches: u32) -> u32 {
    let items = (8 * in_flight(pipeline)).max(3 * WINDOW);
    items.div_ceil(u64::from(microbatches)).clamp(16, 1 << 20) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::StageSpec;

    fn us(kind: Schedule, pipeline: &Pipeline, microbatches: u32) -> f64 {
        step_us(kind, pipeline, microbatches).unwrap().unwrap()
    }

    #[test]
    fn steps_are_the_published_ones() {
        let pipeline = Pipeline::balanced(&[1; 4], 2.0);
        assert_eq!(us(Schedule::Gpipe, &pipeline, 8), 33.0);
        assert_eq!(us(Schedule::OneFOneB, &pipeline, 8), 33.0);
        assert_eq!(us(Schedule::ZbH1, &pipeline, 8), 27.0);
        assert_eq!(us(Schedule::Interleaved, &Pipeline::balanced(&[1; 8], 2.0).looped(4), 8), 48.0 + 9.0);
        assert_eq!(us(Schedule::OneFOneBRr, &pipeline, 1), 3.0);
        assert_eq!(us(Schedule::TwoBw, &pipeline, 8), 24.0);
        assert_eq!(us(Schedule::Inference, &pipeline, 8), 1.0);
    }

    #[test]
    fn many_items_follow_from_fewer() {
        let stages = [(1, 1.0), (2, 3.0), (1, 1.2)].map(|(replicas, us)| StageSpec::new(replicas, us, 2.0 * us));
        let pipeline = Pipeline::chain(stages.to_vec());
        let most = (MOST_WORK / (3 * u64::from(FLUSHED))) as u32;
        for kind in [Schedule::Gpipe, Schedule::OneFOneB, Schedule::ZbH1] {
            let [few, all, more] = [most - 2000, most, most + 4000].map(|items| us(kind, &pipeline, items));
            let [before, after] = [(all - few) / 2000.0, (more - all) / 4000.0];
            assert!((after / before - 1.0).abs() < 1e-2, "{kind}: {before} and {after} an item");
        }
        // Three, five, seven and eleven replicas meet again after so many items that only the whole tells.
        let uneven =
            [3, 5, 7, 11].map(|replicas| StageSpec::new(replicas, f64::from(replicas), 2.0 * f64::from(replicas)));
        let uneven = Pipeline::chain(uneven.to_vec());
        let most = (MOST_WORK / (4 * u64::from(FLUSHED))) as u32;
        let [all, more] = [most, most + 400].map(|items| us(Schedule::OneFOneB, &uneven, items));
        assert!(((more - all) / 400.0 / (all / f64::from(most)) - 1.0).abs() < 0.25, "{all} and {more}");
        // A thousand stages are too much for any play.
        assert_eq!(step_us(Schedule::OneFOneB, &Pipeline::balanced(&[1; 1000], 2.0), 100_000), Ok(None));
    }
}
