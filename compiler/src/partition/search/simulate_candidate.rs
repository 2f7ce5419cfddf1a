//! Simulates a candidate: chooses its in-flight limits and runs its schedule.
//!
//! The searches compare plans with the closed-form cost model. It ignores that caps may keep the busiest stage waiting,
//! and it assumes the fill and drain time of 1F1B with equal stages. The predicted time T of a plan is therefore:
//!
//! ```text
//! without flushes   the closed form, or the simulated time if it is larger by more than 1 - ENOUGH
//! with flushes      the simulated time
//! ```

use crate::partition::dp::nested_partition::Shape;
use crate::partition::search::build_plan::{self, StagePosition};
use crate::partition::search::in_flight::{self, Efficiency};
use crate::plan::problem::{CostModel, InFlight, Problem};
use crate::plan::schedule::{Schedule, UpdateRule};
use crate::plan::{Edge, Stage, StageMemory};
use crate::schedule::Pipeline;
use crate::schedule::pipeline::{generated, pipeline_of};
use crate::simulate::inference;
use crate::simulate::one_f_one_b_rr::Steady;
use crate::simulate::step_time;

/// Text of the bottleneck if in-flight limits keep the busiest stage waiting.
const HELD: &str = "the in-flight limits";

/// Text of the bottleneck if transfers do; a transfer waits until the buffer of an earlier one is free.
const WAITS: &str = "waiting for transfers";

/// Part of the warning about in-flight limits.
const EFFICIENCY: &str = "of the ideal throughput";

/// Part of the warning about links that need more than the predicted time.
pub const LINKS: &str = "of the predicted time for their traffic";

/// Returns whether a bottleneck comes from the simulation and not from the plan checker.
pub fn is_from_simulation(bottleneck: &str) -> bool {
    bottleneck.starts_with(HELD) || bottleneck.starts_with(WAITS)
}

/// Returns whether a warning of a plan states figures of its simulation or of its links.
pub fn is_of_figures(warning: &str) -> bool {
    [EFFICIENCY, WAITS, LINKS].iter().any(|part| warning.contains(part))
}

#[derive(Clone, Debug, PartialEq)]
pub struct Played {
    pub caps: Vec<u32>,
    pub minibatch_us: f64,
    /// The reason why the busiest stage waits, if it does.
    pub held: Option<String>,
    pub warning: Option<String>,
    /// True if higher caps would help but do not fit in memory.
    pub lacks_memory: bool,
}

/// Simulates a candidate whose closed-form time is `objective_us`, with chosen caps or the given ones. Returns the closed
/// form if `efficiency` is `None`.
pub fn played(
    problem: &Problem,
    shape: &Shape,
    spots: &[StagePosition],
    caps: &[u32],
    objective_us: f64,
    efficiency: Option<&Efficiency<'_>>,
) -> Played {
    let minibatch_us = objective_us;
    let mut played = Played { caps: caps.to_vec(), minibatch_us, held: None, warning: None, lacks_memory: false };
    let Some(efficiency) = efficiency else { return played };
    let own = |stages: &[Stage], edges: &[Edge], caps: &[u32]| steady_state_of_schedule(problem, stages, edges, caps);
    let efficiency: &Efficiency<'_> = match problem.schedule.update() {
        UpdateRule::DoubleBuffered | UpdateRule::None => &own,
        _ => efficiency,
    };
    let is_auto = problem.in_flight == InFlight::Auto;
    let mut share = 1.0;
    // Interleaved schedules have a fixed order, which determines the in-flight counts.
    if in_flight::matters(problem) && is_auto && problem.chunks == 1 {
        let chosen = in_flight::choose(problem, shape, spots, efficiency);
        (played.caps, share, played.lacks_memory) = (chosen.caps, chosen.share, chosen.lacks_memory);
    } else if in_flight::matters(problem) {
        share = in_flight::reached(problem, shape, spots, &played.caps, efficiency);
    }
    let is_starved = share < in_flight::ENOUGH;
    let by_steady = if is_starved && share > 0.0 { objective_us / share } else { objective_us };
    let percent = |us: f64| if us > 0.0 { objective_us / us * 100.0 } else { 100.0 };
    if problem.cost != CostModel::Pipec {
        // The models `paper` and `pipedream` assume other links than the simulation and are compared with the
        // literature.
        if is_starved && played.lacks_memory {
            played.minibatch_us = by_steady;
            played.warning = Some(efficiency_warning("with this memory limit, the", percent(by_steady)));
            played.held = Some(format!("{HELD}, which memory keeps low"));
        } else if is_starved {
            let reached = if is_auto { "" } else { ", which the predicted figures assume" };
            played.warning = Some(efficiency_warning(if is_auto { "the" } else { "these" }, share * 100.0) + reached);
        }
        return played;
    }
    let Some(pipeline) = pipeline(problem, shape, spots, &played.caps) else { return played };
    let program = program(problem, &pipeline);
    let program = program.and_then(|kind| step_time::step_us(kind, &pipeline, problem.microbatches).ok().flatten());
    if !problem.schedule.is_continuous() {
        if let Some(us) = program {
            played.minibatch_us = us;
        }
        return played;
    }
    // A pipeline too large for a full simulation uses the steady-state result.
    let mut us = program.unwrap_or(by_steady);
    if is_auto && !is_starved && program.is_some() && objective_us < in_flight::ENOUGH * us {
        // The schedule waits although the steady state did not; higher limits may help.
        let programmed = |_: &[Stage], _: &[Edge], caps: &[u32]| programmed(problem, &pipeline, objective_us, caps);
        let more = in_flight::more(problem, shape, spots, &played.caps, &programmed);
        if more.share > 0.0 {
            us = us.min(objective_us / more.share);
        }
        (played.caps, played.lacks_memory) = (more.caps, more.lacks_memory);
    }
    let published = build_plan::published_caps(problem, &shape.replicas());
    let fits = || build_plan::fits(problem, shape, spots, &memory(problem, shape, spots, caps));
    if is_auto && program.is_some() && ![&published[..], &played.caps].contains(&caps) && fits() {
        // Limits of a search by whole simulations.
        let of_search = programmed(problem, &pipeline, objective_us, caps).share;
        if of_search > share_of(objective_us, us) {
            (played.caps, us) = (caps.to_vec(), objective_us / of_search);
        }
    }
    if is_auto && program.is_some() && problem.schedule.trains() {
        // The steady state may have raised limits that the schedule has no use for.
        let programmed = |caps: &[u32]| programmed(problem, &pipeline, objective_us, caps);
        let share = share_of(objective_us, us);
        played.lacks_memory = played.lacks_memory && in_flight::would_help(&played.caps, share, &programmed);
        if let Some((caps, share)) = in_flight::fewer(&published, &played.caps, share, &programmed) {
            played.caps = caps;
            us = if share > 0.0 { objective_us / share } else { us };
        }
    }
    if objective_us < in_flight::ENOUGH * us {
        played.minibatch_us = us;
        if is_starved || played.lacks_memory {
            let (which, why) = match (is_auto, played.lacks_memory) {
                (true, true) => ("with this memory limit, the", ", restricted by memory"),
                (true, false) => ("the", ""),
                (false, _) => ("these", ", set by `--in-flight`"),
            };
            played.warning = Some(efficiency_warning(which, percent(us)));
            played.held = Some(format!("{HELD}{why}"));
        } else {
            // The schedule has fewer transfer buffers than the steady-state simulation, which has one per transfer.
            let percent = percent(us);
            let what = "waiting for transfers limits this plan to";
            played.warning = Some(format!("{what} {percent:.0} % of the throughput of its busiest stage or link"));
            played.held = Some(WAITS.to_string());
        }
    }
    played
}

/// The time of a minibatch in microseconds by a short simulation. `None` if it cannot be simulated.
pub fn short_us(problem: &Problem, shape: &Shape, spots: &[StagePosition], caps: &[u32]) -> Option<f64> {
    let pipeline = pipeline(problem, shape, spots, caps)?;
    step_time::short_step_us(program(problem, &pipeline)?, &pipeline, problem.microbatches).ok().flatten()
}

/// The schedule whose program runs.
fn program(problem: &Problem, pipeline: &Pipeline) -> Option<Schedule> {
    // A single stage has no other chunk to alternate with.
    let is_whole = pipeline.stages.len() == 1 && problem.schedule.has_chunks();
    if is_whole { Some(Schedule::OneFOneB) } else { generated(problem.schedule).ok() }
}

fn efficiency_warning(which: &str, percent: f64) -> String {
    format!("{which} in-flight limits reach {percent:.0} % {EFFICIENCY}")
}

fn memory(problem: &Problem, shape: &Shape, spots: &[StagePosition], caps: &[u32]) -> Vec<StageMemory> {
    let holdings = build_plan::holdings(problem, shape);
    let pending = build_plan::pending_weight_grads(problem, &shape.replicas(), caps);
    build_plan::memory(problem, shape, spots, &holdings, caps, &pending)
}

fn pipeline(problem: &Problem, shape: &Shape, spots: &[StagePosition], caps: &[u32]) -> Option<Pipeline> {
    let stages = build_plan::stages(problem, shape, spots, &memory(problem, shape, spots, caps));
    let edges = build_plan::edges(problem, shape);
    pipeline_of(&problem.cluster.levels, &stages, &edges, caps).ok()
}

/// Steady state of schedules that do not follow 1F1B; assumed free of waits if it cannot be simulated.
fn steady_state_of_schedule(problem: &Problem, stages: &[Stage], edges: &[Edge], caps: &[u32]) -> Steady {
    let pipeline = pipeline_of(&problem.cluster.levels, stages, edges, caps).ok();
    let steady = pipeline.and_then(|pipeline| match problem.schedule.update() {
        UpdateRule::DoubleBuffered => step_time::double_buffered(&pipeline, problem.microbatches).ok().flatten(),
        _ => inference::steady(&pipeline).ok(),
    });
    steady.unwrap_or_else(|| Steady { share: 1.0, held: vec![false; stages.len()], pieces: 0 })
}

/// Efficiency of the full schedule under these caps. The limiting caps are unknown, so all are marked as held.
fn programmed(problem: &Problem, pipeline: &Pipeline, objective_us: f64, caps: &[u32]) -> Steady {
    let held = vec![true; caps.len()];
    let pipeline = pipeline.clone().with_caps(caps);
    let us = generated(problem.schedule)
        .ok()
        .and_then(|kind| step_time::step_us(kind, &pipeline, problem.microbatches).ok()?);
    // A full schedule costs many times a steady-state simulation, at least that of a few hundred micro-batches.
    let pieces = 40 * 720 * caps.len() as u64;
    Steady { share: us.map_or(0.0, |us| share_of(objective_us, us)), held, pieces }
}

/// The share of the ideal throughput of a schedule that takes `us`.
fn share_of(objective_us: f64, us: f64) -> f64 {
    if us > 0.0 { objective_us / us } else { 1.0 }
}
