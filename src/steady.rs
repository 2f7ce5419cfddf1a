//! What a minibatch takes when a program has long been running: a run of its own, as long as that takes, whatever run was asked for.
//!
//! Without a flush replicas and links take turns in patterns that need not repeat: the time between two ends depends on which two. So gaps
//! between ends are averaged with weights that fade in and out, which leaves next to nothing of anything that comes and goes (weighted
//! Birkhoff averages; Das, Saiki, Sander and Yorke, Nonlinearity 30, 2017):
//!
//! ```text
//! T  =  sum of w(k/n) (e_k+1 - e_k)  /  sum of w(k/n),        w(t) = exp(-1 / (t (1 - t)))
//! ```

use compiler::plan::{Plan, ScheduleKind};
use compiler::schedule::{Pipeline, Program};
use compiler::simulate::Timeline;
use compiler::simulate::run::{Machine, simulate};
use compiler::simulate::steady::ideal_us;

/// Items times stages of a run at most: about half a second.
const MOST_WORK: u64 = 60_000;

/// Items of a run without a flush, times what is in flight, and rounds of all replicas, at least.
const ITEMS: u64 = 2400;
const DEPTHS: u64 = 16;
const ROUNDS: u64 = 24;

/// Minibatches of a run that flushes: each is as those before it.
const FLUSHED: u64 = 16;

/// A run whose pace is asked for.
pub struct Run<'a> {
    /// What runs, with its caps.
    pub pipeline: &'a Pipeline,
    /// On what.
    pub machine: &'a Machine,
    /// Items of a minibatch.
    pub microbatches: u32,
    /// The order of work.
    pub kind: ScheduleKind,
}

impl<'a> Run<'a> {
    /// That of a plan's own programs.
    pub fn of(plan: &Plan, pipeline: &'a Pipeline, machine: &'a Machine) -> Run<'a> {
        Run { pipeline, machine, microbatches: plan.schedule.microbatches, kind: plan.schedule.kind }
    }

    /// Minibatches after which the pace is known; fewer where that would take long.
    pub fn minibatches(&self) -> u32 {
        let items = u64::from(self.microbatches.max(1));
        let wanted = match self.kind.is_continuous() {
            false => FLUSHED,
            true => {
                let rounds = if items == 1 { self.pipeline.rounds().saturating_mul(ROUNDS) } else { 0 };
                (ITEMS.max(DEPTHS * in_flight(self.pipeline)).div_ceil(items)).max(rounds)
            }
        };
        let most = MOST_WORK / (items * self.pipeline.stages.len().max(1) as u64);
        wanted.min(most).max(1) as u32
    }

    /// Microseconds of a minibatch when the program for so many runs evenly; nothing where it cannot be played.
    pub fn step_us(&self, program: &Program) -> Option<f64> {
        Some(self.step_of(&simulate(program, self.pipeline, self.machine).ok()?))
    }

    /// The same of a run that was played.
    pub fn step_of(&self, timeline: &Timeline) -> f64 {
        let ends = timeline.ends(self.microbatches);
        let count = ends.len();
        let (before, behind) = if self.kind.is_continuous() { (count / 2, count / 8) } else { (count / 4, count / 4) };
        // A run that hardly fills its workers tells no pace but its own.
        let is_short = self.kind.is_continuous() && (count as u64) < 4 * in_flight(self.pipeline);
        let middle = ends.get(before..count - behind).filter(|middle| middle.len() > 1 && !is_short);
        let step = middle.map_or(timeline.makespan / count.max(1) as f64, even);
        // Nothing is faster for long than its busiest worker or link. What is left below that is how exactly a pace can be told.
        let is_bounded = self.kind.is_round_robin() && self.microbatches == 1 && self.machine.jitter.is_none();
        if is_bounded && 2 * in_flight(self.pipeline) < count as u64 { step.max(ideal_us(self.pipeline)) } else { step }
    }
}

/// The most items that are in flight at a stage.
pub fn in_flight(pipeline: &Pipeline) -> u64 {
    pipeline.stages.iter().map(|stage| u64::from(stage.replicas) * u64::from(stage.cap)).max().unwrap_or(0)
}

/// The mean of the gaps between ends, with weights that fade in and out.
fn even(ends: &[f64]) -> f64 {
    let gaps = (ends.len() - 1) as f64;
    let (mut sum, mut weights) = (0.0, 0.0);
    for (at, pair) in ends.windows(2).enumerate() {
        let t = (at as f64 + 0.5) / gaps;
        let weight = (-1.0 / (t * (1.0 - t))).exp();
        sum += weight * (pair[1] - pair[0]);
        weights += weight;
    }
    sum / weights
}

#[cfg(test)]
mod tests {
    use super::*;
    use compiler::schedule::rule::StepCount;
    use compiler::schedule::scheduler::schedule;
    use compiler::schedule::{Schedule, StageShape};

    /// Ends that come in bursts of three and sway besides: one every 10.
    #[test]
    fn what_comes_and_goes_leaves_nothing() {
        let ends = |count: u32| -> Vec<f64> {
            let end = |at: u32| f64::from(at / 3) * 30.0 + 7.0 * (f64::from(at) * 0.7).sin();
            (0..count).map(end).collect()
        };
        for count in [400, 401, 555, 1000] {
            let told = even(&ends(count));
            assert!((told - 10.0).abs() < 1e-3, "{count}: {told}");
        }
    }

    /// Two replicas before one, at times without a common measure: never faster than the busiest, and equal for every length.
    #[test]
    fn a_pace_does_not_depend_on_the_length_of_the_run() {
        for (forward, reduce) in [(57.31, 0.0), (61.07, 13.7), (70.9, 41.3)] {
            let replicated = StageShape { all_reduce: reduce, ..StageShape::new(2, 1.37 * forward, 2.61 * forward) };
            let pipeline = Pipeline::chain(vec![replicated, StageShape::new(1, 0.67 * forward, 1.29 * forward)]);
            let machine = Machine::of(&pipeline);
            let run = Run { pipeline: &pipeline, machine: &machine, microbatches: 1, kind: ScheduleKind::RoundRobin };
            let at = |minibatches| {
                let program = schedule(Schedule::OneFOneBRr, &pipeline, StepCount::minibatches(minibatches)).unwrap();
                run.step_us(&program).unwrap()
            };
            let told: Vec<f64> = [1000, 1103, 1709, run.minibatches()].into_iter().map(at).collect();
            for us in &told {
                assert!((us / told[0] - 1.0).abs() < 1e-3 && *us >= ideal_us(&pipeline), "{told:?}");
            }
        }
    }
}
