//! Step time by simulating the schedule's program for a few minibatches.
//!
//! With a flush it is the time between the ends of two minibatches, overlap included; without one, the time per
//! minibatch in steady state.
//!
//! The work is bounded. Once a flushed pipeline is full, each further round of items takes equally long, so the time of
//! a large minibatch is extrapolated from two smaller ones. Still larger runs give `None`.

use crate::plan::schedule::Schedule;
use crate::schedule::Pipeline;
use crate::schedule::generators::schedule;
use crate::schedule::semantics::StepCount;
use crate::schedule::shape::common_multiple;
use crate::simulate::one_f_one_b_rr::Steady;
use crate::simulate::run::{Machine, simulate_ends};
use crate::simulate::steady_throughput::{MOST_WORK, Run, in_flight};
use crate::simulate::{SimulateError, Timeline};
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Most items times stages if extrapolation is impossible: unequal replica counts with a very large common multiple.
const MOST_ALONE: u64 = 8 * MOST_WORK;

/// Minibatches of a flushed run. The first two fill the pipeline and its all-reduces; the third is measured.
const FLUSHED: u32 = 3;

/// Minimum measurement window in items, with an error of a few per thousand; and that of a short run.
const WINDOW: u64 = 240;
const SHORT_WINDOW: u64 = 80;

/// Microseconds per minibatch, for inference per item; `None` if the simulation would take too long.
pub fn step_us(kind: Schedule, pipeline: &Pipeline, microbatches: u32) -> Result<Option<f64>, SimulateError> {
    pipeline.validate()?;
    if !kind.trains() {
        return even(kind, pipeline, 1, WINDOW);
    }
    let microbatches = microbatches.max(1);
    match kind.flushes() {
        true => flushed(kind, pipeline, microbatches),
        false => even(kind, pipeline, microbatches, WINDOW),
    }
}

/// As [`step_us`] when training; without a flush of fewer minibatches, to rank plans.
pub fn short_step_us(kind: Schedule, pipeline: &Pipeline, microbatches: u32) -> Result<Option<f64>, SimulateError> {
    pipeline.validate()?;
    match kind.flushes() {
        true => flushed(kind, pipeline, microbatches.max(1)),
        false => even(kind, pipeline, microbatches.max(1), SHORT_WINDOW),
    }
}

/// The work of [`short_step_us`], in items times stages.
pub fn short_work(kind: Schedule, pipeline: &Pipeline, microbatches: u32) -> u64 {
    let minibatches = match kind.flushes() {
        true => FLUSHED,
        false => minibatches(pipeline, microbatches.max(1), SHORT_WINDOW),
    };
    work(pipeline, u64::from(minibatches) * u64::from(microbatches)).min(MOST_WORK)
}

/// Steady state under 2BW with the pipeline's caps. The limiting stages are unknown, so all are marked.
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

/// Cost of a simulation, in units of [`Steady::pieces`]: an action of a program costs 40 times as much.
pub fn pieces(pipeline: &Pipeline, microbatches: u32) -> u64 {
    40 * work(pipeline, u64::from(minibatches(pipeline, microbatches, WINDOW)) * u64::from(microbatches))
}

fn work(pipeline: &Pipeline, items: u64) -> u64 {
    items.saturating_mul(pipeline.stages.len() as u64)
}

fn played(kind: Schedule, pipeline: &Pipeline, count: StepCount) -> Result<Timeline, SimulateError> {
    let program = schedule(kind, pipeline, count)?;
    simulate_ends(&program, pipeline, &Machine::of(pipeline))
}

/// One of several equal replicas, with the same time per step: each runs as many micro-batches, on ports of its own.
fn one_replica(pipeline: &Pipeline, microbatches: u32) -> Option<(Pipeline, u32)> {
    let replicas = pipeline.stages.first()?.replicas;
    let is_equal = pipeline.stages.iter().all(|stage| stage.replicas == replicas);
    if !is_equal || replicas < 2 || !microbatches.is_multiple_of(replicas) {
        return None;
    }
    let mut one = pipeline.clone();
    one.ports = pipeline.ports.of_first(replicas as usize)?;
    one.stages.iter_mut().for_each(|stage| (stage.replicas, stage.is_one_of_many) = (1, true));
    Some((one, microbatches / replicas))
}

/// A simulation that was run, with its result.
struct Known {
    kind: Schedule,
    pipeline: Pipeline,
    count: StepCount,
    us: Option<f64>,
}

/// The last simulations that took long. A search asks for the time of a large plan several times.
static KNOWN: Mutex<VecDeque<Known>> = Mutex::new(VecDeque::new());

/// Simulations that are kept, and the least work of one.
const KEPT: usize = 64;
const LEAST_KEPT: u64 = 2_000;

fn flushed(kind: Schedule, pipeline: &Pipeline, microbatches: u32) -> Result<Option<f64>, SimulateError> {
    if let Some((one, microbatches)) = one_replica(pipeline, microbatches) {
        return flushed(kind, &one, microbatches);
    }
    let count = StepCount { minibatches: FLUSHED, microbatches };
    if work(pipeline, u64::from(microbatches)) < LEAST_KEPT {
        return simulated(kind, pipeline, count);
    }
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let is_same = |one: &Known| (one.kind, one.count) == (kind, count) && one.pipeline == *pipeline;
    if let Some(us) = known().iter().find(|one| is_same(one)).map(|one| one.us) {
        return Ok(us);
    }
    let us = simulated(kind, pipeline, count)?;
    let mut known = known();
    known.truncate(KEPT - 1);
    known.push_front(Known { kind, pipeline: pipeline.clone(), count, us });
    Ok(us)
}

fn simulated(kind: Schedule, pipeline: &Pipeline, count: StepCount) -> Result<Option<f64>, SimulateError> {
    let StepCount { minibatches, microbatches } = count;
    let step = |microbatches: u32| -> Result<f64, SimulateError> {
        let count = StepCount { minibatches, microbatches };
        let ends = played(kind, pipeline, count)?.ends(microbatches);
        // The run is measured after its second minibatch.
        Ok(match (ends.get(1), ends.last()) {
            (Some(second), Some(last)) => (last - second) / (ends.len() - 2) as f64,
            _ => 0.0,
        })
    };
    let fits = |microbatches: u64, most: u64| work(pipeline, u64::from(minibatches) * microbatches) <= most;
    let all = u64::from(microbatches);
    if fits(all, MOST_WORK) {
        return step(microbatches).map(Some);
    }
    // Steady state repeats after a round of all replicas and, with chunks, after a group of items.
    let chunks = u64::from(pipeline.chunks().max(1));
    let ranks = pipeline.stages.len() as u64 / chunks;
    let repeat = common_multiple(ranks.max(1), pipeline.rounds());
    let depth = 2 * pipeline.stages.iter().map(|stage| u64::from(stage.replicas)).sum::<u64>() / chunks;
    let fewer = depth.div_ceil(repeat) * repeat + all % repeat;
    let most = MOST_WORK / work(pipeline, u64::from(minibatches)).max(1);
    let more = fewer + (most.saturating_sub(fewer) / repeat).max(1) * repeat;
    if more + fewer >= all || !fits(more, MOST_ALONE / 2) {
        return if fits(all, MOST_ALONE) { step(microbatches).map(Some) } else { Ok(None) };
    }
    let (low, high) = (step(fewer as u32)?, step(more as u32)?);
    Ok(Some(high + (high - low) * (all - more) as f64 / (more - fewer) as f64))
}

fn even(kind: Schedule, pipeline: &Pipeline, microbatches: u32, window: u64) -> Result<Option<f64>, SimulateError> {
    let count = StepCount { minibatches: minibatches(pipeline, microbatches, window), microbatches };
    if work(pipeline, u64::from(count.minibatches) * u64::from(microbatches)) > MOST_WORK {
        return Ok(None);
    }
    let machine = Machine::of(pipeline);
    let run = Run { pipeline, machine: &machine, microbatches, flushes: false, is_round_robin: kind.is_round_robin() };
    let timeline = simulate_ends(&schedule(kind, pipeline, count)?, pipeline, &machine)?;
    Ok(Some(run.step_of(&timeline)))
}

/// Minibatches of an unflushed run: half of them fill, an eighth drain.
fn minibatches(pipeline: &Pipeline, microbatches: u32, window: u64) -> u32 {
    let items = (8 * in_flight(pipeline)).max(3 * window);
    items.div_ceil(u64::from(microbatches)).clamp(16, 1 << 20) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;
    use crate::plan::{Edge as PlannedEdge, Stage, StageId, StageMemory};
    use crate::schedule::StageSpec;
    use crate::schedule::pipeline::pipeline_of;

    #[test]
    fn equal_replicas_take_the_time_of_one() {
        let levels = levels("4:1GB/s,4:0.5GB/s").unwrap().levels;
        for (schedule, chunks) in [(Schedule::OneFOneB, 1), (Schedule::ZbH1, 1), (Schedule::Interleaved, 2)] {
            let stage = |at: u32| {
                let first = at % 2 * 8;
                Stage {
                    id: StageId(at),
                    replicas: 8,
                    devices: (first..first + 8).collect(),
                    fwd_us: 100.0 + f64::from(at),
                    bwd_us: 210.0,
                    gradient_bytes: 80_000,
                    tied_us: 0.0,
                    ops: Vec::new(),
                    op_names: Vec::new(),
                    modules: Vec::new(),
                    tensor_degree: None,
                    tensor_parallel: None,
                    choices: Vec::new(),
                    recompute: false,
                    recomputed: None,
                    weight_grad_us: None,
                    buckets: Vec::new(),
                    zero: 0,
                    shard_degree: 0,
                    parameter_bytes: 0,
                    memory: StageMemory::default(),
                    hierarchy: Vec::new(),
                }
            };
            let stages: Vec<Stage> = (0..2 * chunks).map(stage).collect();
            let edge = |from: u32| PlannedEdge {
                from: StageId(from),
                to: StageId(from + 1),
                tensors: Vec::new(),
                bytes: 20_000,
            };
            let edges: Vec<PlannedEdge> = (0..2 * chunks - 1).map(edge).collect();
            let caps = vec![4; stages.len()];
            let whole = pipeline_of(&levels, &stages, &edges, &caps).unwrap();
            let (one, items) = one_replica(&whole, 64).unwrap();
            assert_eq!(items, 8);
            let ends = |pipeline: &Pipeline, microbatches| {
                let count = StepCount { minibatches: FLUSHED, microbatches };
                played(schedule, pipeline, count).unwrap().ends(microbatches)
            };
            for (left, right) in ends(&whole, 64).iter().zip(ends(&one, 8)) {
                assert!((left / right - 1.0).abs() < 1e-9, "{schedule:?}: {left} {right}");
            }
            assert!(one_replica(&whole, 60).is_none(), "60 micro-batches on 8 replicas");
        }
    }

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
        // 3, 5, 7 and 11 replicas have such a large common multiple that the whole must be simulated.
        let uneven =
            [3, 5, 7, 11].map(|replicas| StageSpec::new(replicas, f64::from(replicas), 2.0 * f64::from(replicas)));
        let uneven = Pipeline::chain(uneven.to_vec());
        let most = (MOST_WORK / (4 * u64::from(FLUSHED))) as u32;
        let [all, more] = [most, most + 400].map(|items| us(Schedule::OneFOneB, &uneven, items));
        assert!(((more - all) / 400.0 / (all / f64::from(most)) - 1.0).abs() < 0.25, "{all} and {more}");
        // A thousand stages are too large to simulate.
        assert_eq!(step_us(Schedule::OneFOneB, &Pipeline::balanced(&[1; 1000], 2.0), 100_000), Ok(None));
    }
}
