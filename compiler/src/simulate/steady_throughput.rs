//! Steady-state minibatch time from the minibatch end times of a simulated run.
//!
//! Without a flush the end times may repeat with the common round of all replicas; then the result is the time of such
//! rounds. Otherwise gaps are averaged with weights that fade in and out, which suppresses all oscillations (weighted
//! Birkhoff averages; Das, Saiki, Sander and Yorke, Nonlinearity 30, 2017):
//!
//! ```text
//! T  =  sum of w(k/n) (e_k+1 - e_k)  /  sum of w(k/n),        w(t) = exp(-1 / (t (1 - t)))
//! ```

use crate::plan::schedule::Schedule;
use crate::schedule::{Pipeline, Program};
use crate::simulate::Timeline;
use crate::simulate::one_f_one_b_rr::ideal_us;
use crate::simulate::run::{Machine, simulate};

/// Most items times stages of one simulation; about half a second.
pub const MOST_WORK: u64 = 60_000;

/// Lower limits of a run without a flush: items, multiples of the in-flight items, common rounds of all replicas.
const ITEMS: u64 = 2400;
const DEPTHS: u64 = 16;
const ROUNDS: u64 = 24;

const FLUSHED: u64 = 16;

/// Relative difference up to which gaps are equal.
const SAME: f64 = 1e-6;

pub struct Run<'a> {
    pub pipeline: &'a Pipeline,
    pub machine: &'a Machine,
    pub microbatches: u32,
    /// True if the pipeline drains after every minibatch.
    pub flushes: bool,
    /// True if every item is a minibatch, assigned round-robin to the replicas, in training.
    pub is_round_robin: bool,
}

impl<'a> Run<'a> {
    /// A run under a plan's schedule.
    pub fn of(kind: Schedule, pipeline: &'a Pipeline, machine: &'a Machine, microbatches: u32) -> Run<'a> {
        let (flushes, is_round_robin) = (!kind.is_continuous(), kind.is_round_robin());
        Run { pipeline, machine, microbatches, flushes, is_round_robin }
    }

    /// Minibatches needed to measure the time, limited by `MOST_WORK`.
    pub fn minibatches(&self) -> u32 {
        let items = u64::from(self.microbatches.max(1));
        let wanted = match self.flushes {
            true => FLUSHED,
            false => {
                let rounds = if items == 1 { self.pipeline.rounds().saturating_mul(ROUNDS) } else { 0 };
                (ITEMS.max(DEPTHS * in_flight(self.pipeline)).div_ceil(items)).max(rounds)
            }
        };
        let most = MOST_WORK / (items * self.pipeline.stages.len().max(1) as u64);
        wanted.min(most).max(1) as u32
    }

    /// True if a run of `minibatches` hardly fills the pipeline, so that it only gives its own average.
    pub fn is_short(&self, minibatches: u32) -> bool {
        let items = u64::from(minibatches) * u64::from(self.microbatches.max(1));
        !self.flushes && items < 4 * in_flight(self.pipeline)
    }

    /// Microseconds per minibatch in the program's steady state; `None` if it cannot be simulated.
    pub fn step_us(&self, program: &Program) -> Option<f64> {
        Some(self.step_of(&simulate(program, self.pipeline, self.machine).ok()?))
    }

    /// [`Run::step_us`] of a simulated timeline.
    pub fn step_of(&self, timeline: &Timeline) -> f64 {
        let ends = timeline.ends(self.microbatches);
        let count = ends.len();
        let (before, behind) = if self.flushes { (count / 4, count / 4) } else { (count / 2, count / 8) };
        let is_short = self.is_short(u32::try_from(count).unwrap_or(u32::MAX));
        let middle = ends.get(before..count - behind).filter(|middle| middle.len() > 1 && !is_short);
        // Single items go round all replicas; a minibatch of several starts with the first replica.
        let round = if self.microbatches == 1 { self.pipeline.rounds() } else { 1 };
        let step = middle.map_or(timeline.makespan / count.max(1) as f64, |ends| even(ends, round));
        // Steady state cannot be faster than the busiest worker or link; smaller results are measurement error.
        let is_bounded = self.is_round_robin && self.microbatches == 1 && self.machine.jitter.is_none();
        if is_bounded && 2 * in_flight(self.pipeline) < count as u64 { step.max(ideal_us(self.pipeline)) } else { step }
    }
}

/// The most items in flight at any stage.
pub fn in_flight(pipeline: &Pipeline) -> u64 {
    pipeline.stages.iter().map(|stage| u64::from(stage.replicas) * u64::from(stage.cap)).max().unwrap_or(0)
}

/// Time between ends: the mean over the last rounds if two successive spans of rounds have equal gaps, else the
/// weighted mean of all gaps.
fn even(ends: &[f64], round: u64) -> f64 {
    let last = ends.len() - 1;
    let span = usize::try_from(last as u64 / 2 / round.max(1) * round).unwrap_or(0);
    let gap = |at: usize| ends[at + 1] - ends[at];
    let took = ends[last] - ends[last - span];
    // Equal span lengths could be a coincidence, so all gaps are compared.
    let near = SAME * took / span.max(1) as f64;
    if span > 0 && (last - span..last).all(|at| (gap(at) - gap(at - span)).abs() <= near) {
        return took / span as f64;
    }
    let (mut sum, mut weights) = (0.0, 0.0);
    for at in 0..last {
        let t = (at as f64 + 0.5) / last as f64;
        let weight = (-1.0 / (t * (1.0 - t))).exp();
        sum += weight * gap(at);
        weights += weight;
    }
    sum / weights
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::schedule::Schedule;
    use crate::schedule::StageSpec;
    use crate::schedule::generators::schedule;
    use crate::schedule::semantics::StepCount;
    use crate::simulate::step_time::step_us;

    #[test]
    fn double_buffering_keeps_its_busiest_stage_at_work() {
        for (stages, microbatches) in [(16, 16), (32, 64), (8, 64)] {
            let pipeline = Pipeline::balanced(&vec![1; stages], 2.0);
            let machine = Machine::of(&pipeline);
            let run = Run::of(Schedule::TwoBw, &pipeline, &machine, microbatches);
            for minibatches in [4 * stages as u32, run.minibatches()] {
                let program = schedule(Schedule::TwoBw, &pipeline, StepCount { minibatches, microbatches }).unwrap();
                let us = run.step_us(&program).unwrap();
                assert_eq!(us, 3.0 * f64::from(microbatches), "{stages} stages, {minibatches} minibatches");
            }
            assert_eq!(step_us(Schedule::TwoBw, &pipeline, microbatches), Ok(Some(3.0 * f64::from(microbatches))));
        }
    }

    /// Ends in bursts of three with an oscillation, one per 10 us on average.
    #[test]
    fn what_comes_and_goes_leaves_nothing() {
        let ends = |count: u32| -> Vec<f64> {
            let end = |at: u32| f64::from(at / 3) * 30.0 + 7.0 * (f64::from(at) * 0.7).sin();
            (0..count).map(end).collect()
        };
        for count in [400, 401, 555, 1000] {
            let rate = even(&ends(count), 1);
            assert!((rate - 10.0).abs() < 1e-3, "{count}: {rate}");
        }
    }

    /// Three replicas end at once: one round per 30 us.
    #[test]
    fn repeating_rounds_give_exact_times() {
        let ends: Vec<f64> = (0..100).map(|at| f64::from(at / 3) * 30.0).collect();
        assert_eq!(even(&ends, 3), 10.0);
    }

    /// Two replicas before one, at incommensurable times: never faster than the busiest, and equal for every length.
    #[test]
    fn a_pace_does_not_depend_on_the_length_of_the_run() {
        for (forward, reduce) in [(57.31, 0.0), (61.07, 13.7), (70.9, 41.3)] {
            let replicated = StageSpec { all_reduce: reduce, ..StageSpec::new(2, 1.37 * forward, 2.61 * forward) };
            let pipeline = Pipeline::chain(vec![replicated, StageSpec::new(1, 0.67 * forward, 1.29 * forward)]);
            let machine = Machine::of(&pipeline);
            let run = Run::of(Schedule::OneFOneBRr, &pipeline, &machine, 1);
            let at = |minibatches| {
                let program = schedule(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(minibatches)).unwrap();
                run.step_us(&program).unwrap()
            };
            let values: Vec<f64> = [1000, 1103, 1709, run.minibatches()].into_iter().map(at).collect();
            for us in &values {
                assert!((us / values[0] - 1.0).abs() < 1e-3 && *us >= ideal_us(&pipeline), "{values:?}");
            }
        }
    }
}
