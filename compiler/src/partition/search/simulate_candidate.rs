//! What a candidate takes when its own program runs: its in-flight caps are chosen, and the program is played.
//!
//! The searches compare plans by the equations of the cost model, which can be summed stage by stage. Those leave out that caps may
//! keep the busiest stage waiting, and take filling and draining of every flush as that of 1F1B over equal stages. Here the caps are
//! chosen, the program is made and played, and what it takes is what a plan predicts.
//!
//! ```text
//! never flushed   T = the equations, or the program where it takes longer by more than caps are allowed to cost
//! flushed         T = the program
//! ```

use crate::partition::dp::nested_partition::Shape;
use crate::partition::search::build_plan;
use crate::partition::search::build_plan::StagePosition;
use crate::partition::search::in_flight;
use crate::partition::search::in_flight::Efficiency;
use crate::plan::problem::{CostModel, InFlight, Problem};
use crate::plan::{Edge, ScheduleKind, Stage};
use crate::schedule::pipeline::{pipeline_of, schedule_of};
use crate::schedule::{Pipeline, Schedule};
use crate::simulate::inference;
use crate::simulate::one_f_one_b_rr::Steady;
use crate::simulate::step_time;

/// How the bottleneck is told where caps keep the busiest stage waiting.
const HELD: &str = "the in-flight caps";

/// The same where transfers do, which begin when the buffers of those before are free.
const WAITS: &str = "waiting for transfers";

/// Whether a bottleneck was told from what was played, and not by the judge.
pub fn tells(bottleneck: &str) -> bool {
    bottleneck.starts_with(HELD) || bottleneck.starts_with(WAITS)
}

/// Caps, and what the stages take with them.
#[derive(Clone, Debug, PartialEq)]
pub struct Played {
    /// In-flight caps of each stage.
    pub caps: Vec<u32>,
    /// Microseconds of one minibatch.
    pub minibatch_us: f64,
    /// What keeps the busiest stage waiting, if anything does.
    pub held: Option<String>,
    /// What the reader should know of it.
    pub warning: Option<String>,
    /// Whether caps were left lower than would have helped, for want of memory.
    pub lacks_memory: bool,
}

/// What stages take that the equations give `objective_us`, with the caps of their schedule's rule, or better ones. Nothing is played
/// without `efficiency`.
pub fn played(
    problem: &Problem,
    shape: &Shape,
    spots: &[StagePosition],
    caps: &[u32],
    objective_us: f64,
    efficiency: Option<&Efficiency<'_>>,
) -> Played {
    let (caps, minibatch_us) = (caps.to_vec(), objective_us);
    let mut played = Played { caps, minibatch_us, held: None, warning: None, lacks_memory: false };
    let Some(efficiency) = efficiency else { return played };
    let own = |stages: &[Stage], edges: &[Edge], caps: &[u32]| own_steady(problem, stages, edges, caps);
    let efficiency: &Efficiency<'_> = match problem.schedule {
        ScheduleKind::TwoBw | ScheduleKind::Inference => &own,
        _ => efficiency,
    };
    let is_auto = problem.in_flight == InFlight::Auto;
    let mut share = 1.0;
    // Chunks are worked on in a fixed order, which says how many items are in flight.
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
        // Those equations are compared with the literature, whose links are others than the program's.
        if is_starved && played.lacks_memory {
            played.minibatch_us = by_steady;
            played.warning = Some(told("within memory the", percent(by_steady)));
            played.held = Some(format!("{HELD}, which memory does not let rise"));
        } else if is_starved {
            let reached = if is_auto { "" } else { ", which the predicted figures assume" };
            played.warning = Some(told(if is_auto { "the" } else { "these" }, share * 100.0) + reached);
        }
        return played;
    }
    let Some(pipeline) = pipeline(problem, shape, spots, &played.caps) else { return played };
    // One stage on its own has no other chunk to take turns with.
    let is_whole = pipeline.stages.len() == 1 && problem.schedule.has_chunks();
    let program = if is_whole { Some(Schedule::OneFOneB) } else { schedule_of(problem.schedule).ok() };
    let program = program.and_then(|kind| step_time::step_us(kind, &pipeline, problem.microbatches).ok().flatten());
    if !problem.schedule.is_continuous() {
        if let Some(us) = program {
            played.minibatch_us = us;
        }
        return played;
    }
    // A pipeline that is too large for its program is taken as its rule was played.
    let mut us = program.unwrap_or(by_steady);
    if is_auto && !is_starved && program.is_some() && objective_us < in_flight::ENOUGH * us {
        // The program waits where the rule alone did not: it may need more.
        let programmed = |_: &[Stage], _: &[Edge], caps: &[u32]| programmed(problem, &pipeline, objective_us, caps);
        let more = in_flight::more(problem, shape, spots, &played.caps, &programmed);
        if more.share > 0.0 {
            us = us.min(objective_us / more.share);
        }
        (played.caps, played.lacks_memory) = (more.caps, more.lacks_memory);
    }
    if objective_us < in_flight::ENOUGH * us {
        played.minibatch_us = us;
        if is_starved || played.lacks_memory {
            let (which, why) = match (is_auto, played.lacks_memory) {
                (true, true) => ("within memory the", ", which memory does not let rise"),
                (true, false) => ("the", ""),
                (false, _) => ("these", ", which are given"),
            };
            played.warning = Some(told(which, percent(us)));
            played.held = Some(format!("{HELD}{why}"));
        } else {
            // A program has fewer buffers than a play of the rule alone, which has one for each transfer.
            let percent = percent(us);
            let what = "waiting for transfers lets this plan reach";
            played.warning = Some(format!("{what} {percent:.0} % of what its busiest stage or link would let it"));
            played.held = Some(WAITS.to_string());
        }
    }
    played
}

fn told(which: &str, percent: f64) -> String {
    format!("{which} in-flight caps reach {percent:.0} % of the ideal throughput")
}

fn pipeline(problem: &Problem, shape: &Shape, spots: &[StagePosition], caps: &[u32]) -> Option<Pipeline> {
    let memory = build_plan::memory(
        problem,
        shape,
        spots,
        &build_plan::holdings(problem, shape),
        caps,
        &build_plan::apart(problem, shape, caps),
    );
    let stages = build_plan::stages(problem, shape, spots, &memory);
    let edges = build_plan::edges(problem, shape);
    pipeline_of(&problem.cluster.levels, &stages, &edges, caps).ok()
}

/// The steady state of schedules whose rule is not 1F1B's. One that cannot be played is taken as never waiting.
fn own_steady(problem: &Problem, stages: &[Stage], edges: &[Edge], caps: &[u32]) -> Steady {
    let pipeline = pipeline_of(&problem.cluster.levels, stages, edges, caps).ok();
    let steady = pipeline.and_then(|pipeline| match problem.schedule {
        ScheduleKind::TwoBw => step_time::double_buffered(&pipeline, problem.microbatches).ok().flatten(),
        _ => inference::steady(&pipeline).ok(),
    });
    steady.unwrap_or_else(|| Steady { share: 1.0, held: vec![false; stages.len()], pieces: 0 })
}

/// How the program runs under caps. Which of them hold it back is not known: any may.
fn programmed(problem: &Problem, pipeline: &Pipeline, objective_us: f64, caps: &[u32]) -> Steady {
    let held = vec![true; caps.len()];
    let pipeline = pipeline.clone().with_caps(caps);
    let us = schedule_of(problem.schedule)
        .ok()
        .and_then(|kind| step_time::step_us(kind, &pipeline, problem.microbatches).ok()?);
    // A program is many times as long as a play of the rule alone, and never shorter than a few hundred items.
    let pieces = 40 * 720 * caps.len() as u64;
    Steady { share: us.map_or(0.0, |us| if us > 0.0 { objective_us / us } else { 1.0 }), held, pieces }
}
