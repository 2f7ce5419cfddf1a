//! Simulates a part of a plan's schedule that shows fill, steady state and drain.

use crate::export::report::Played;
use crate::plan::Plan;
use crate::schedule::generators::schedule;
use crate::schedule::pipeline::{generated, pipeline};
use crate::schedule::semantics::StepCount;
use crate::schedule::{Pipeline, Program};
use crate::simulate::SimulateError;
use crate::simulate::run::{Machine, simulate};

/// Maximum number of simulated computations.
const MOST: u64 = 200_000;

/// Simulates a few minibatches of the plan on its devices.
pub fn play(plan: &Plan) -> Result<Played, SimulateError> {
    let kind = generated(plan.schedule.kind)?;
    let pipeline = pipeline(plan)?;
    let count = StepCount { minibatches: minibatches(plan), microbatches: plan.schedule.microbatches };
    play_program(plan, &pipeline, schedule(kind, &pipeline, count)?)
}

pub fn play_program(plan: &Plan, pipeline: &Pipeline, program: Program) -> Result<Played, SimulateError> {
    let minibatches = program.items / program.microbatches.max(1);
    let mut machine = Machine::of(pipeline);
    machine.cores = plan.cluster.device.cores;
    let shared_cores = machine.cores.filter(|cores| (*cores as usize) < program.workers.len());
    let timeline = simulate(&program, pipeline, &machine)?;
    Ok(Played { program, timeline, minibatches, shared_cores })
}

/// Number of minibatches that covers fill, steady state and drain; under a flush each minibatch does.
pub fn minibatches(plan: &Plan) -> u32 {
    let schedule = &plan.schedule;
    let depth = plan.stages.iter().zip(&schedule.in_flight);
    let depth = depth.map(|(stage, cap)| u64::from(stage.replicas) * u64::from(*cap)).max().unwrap_or(1);
    let per_minibatch = u64::from(schedule.microbatches.max(1));
    let items = match schedule.kind.is_continuous() {
        true => (2 * depth + 8).max(12).max(2 * per_minibatch),
        false => 2 * per_minibatch,
    };
    let max_items = (MOST / (2 * plan.stages.len() as u64).max(1)).max(1);
    let minibatches = items.min(max_items).div_ceil(per_minibatch).max(1);
    u32::try_from(minibatches).unwrap_or(u32::MAX)
}
