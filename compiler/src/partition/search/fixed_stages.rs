//! The best plan with a fixed number of stages, for users who fix replicas, cuts or in-flight limits.
//!
//! ```text
//! H(t, i, w) = min over j, m of  max( T(i..j, m) if it fits,  H(t - 1, j, w - m) )
//! ```
//!
//! t counts stages from the end, so the workers after a stage, and hence its in-flight limit and memory, are known.
//! Stages need not fill whole groups; a cluster of several levels counts as one level at its slowest bandwidth.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::search::downsets::DownSets;
use crate::partition::search::fused_graph::FusedGraph;
use crate::partition::search::linear_order::{self, LinearOrder};
use crate::partition::search::numbers::largest;
use crate::partition::search::{build_plan, constraints, linear_search};
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::in_flight::{First, Position, StageInFlight};
use crate::plan::problem::{Problem, ProblemError};
use crate::plan::stage_cost::{self, LevelCost, StageCost};

/// The best shapes that obey the constraints, one per linear order; empty if nothing fits.
///
/// The problem is over the fused ops of `joined`. `least_memory` minimises memory and ignores the limit.
pub fn shapes(problem: &Problem, joined: &FusedGraph<'_>, least_memory: bool) -> Result<Vec<Shape>, ProblemError> {
    let (graph, cost) = (&problem.graph, StageCost::of(problem));
    let flattened = problem.cluster.flattened();
    let level = stage_cost::levels(&flattened)[0];
    let replicas = problem.constraints.replicas.as_deref();
    let units = u64::from(level.count);
    let fixed =
        problem.constraints.cut_after.as_ref().map(|names| constraints::resolve(graph, joined, names)).transpose()?;
    let stages = constraints::stages(problem)?.unwrap_or(1);
    let steps = |places: usize| {
        let choices = if replicas.is_some() { 1.0 } else { (units * units) as f64 / 2.0 };
        (places * places) as f64 / 2.0 * stages as f64 * choices
    };
    let least_places = stages + 1;
    if steps(least_places) > 2e10 {
        let (limit, found) = (512, stages as u64);
        return Err(ProblemError::TooLarge { method: "pinned", what: "stages", limit, found });
    }
    let limit = largest((graph.ops.len() + 1).min(1200), |places| steps(places) <= 3e8).max(least_places);
    let lines = match fixed {
        Some(line) => vec![line],
        None => {
            let with_ends = |order: Vec<u32>| {
                let each = replicas.map_or_else(|| vec![1; stages], <[u32]>::to_vec);
                let ends = linear_order::ends_for(graph, cost.model, &order, limit - 1, &each);
                (order, ends)
            };
            linear_search::orders(graph).into_iter().map(with_ends).collect()
        }
    };
    let passing = GradientBuffers::of(&problem.cluster);
    let solve = |(order, ends): (Vec<u32>, Vec<usize>)| {
        let line = LinearOrder::over(graph, DownSets::chain(graph, cost.model, order, ends), passing);
        pinned(&Pinned { problem, line: &line, level, stages, least_memory })
    };
    Ok(lines.into_iter().filter_map(solve).collect())
}

#[derive(Clone, Copy, Debug)]
struct Pinned<'a> {
    problem: &'a Problem,
    line: &'a LinearOrder,
    level: LevelCost,
    stages: usize,
    /// Minimises the peak stage memory instead of the time.
    least_memory: bool,
}

#[derive(Clone, Copy)]
struct Entry {
    value: f64,
    end: usize,
    replicas: usize,
}

/// The shape with the least time or memory; `None` if nothing fits.
fn pinned(settings: &Pinned<'_>) -> Option<Shape> {
    let space = &settings.line.space;
    let places = space.len();
    let given = settings.problem.constraints.replicas.as_deref();
    let units = settings.level.count as usize;
    let width = units + 1;
    if settings.stages == 0 || settings.stages > units || settings.stages >= places {
        return None;
    }
    let none = Entry { value: f64::INFINITY, end: 0, replicas: 0 };
    let mut tables: Vec<Vec<Entry>> = vec![vec![none; places * width]];
    tables[0][(places - 1) * width].value = 0.0;
    for after in 0..settings.stages {
        let stage = settings.stages - 1 - after;
        let mut table = vec![none; places * width];
        let choices = match given {
            Some(replicas) => replicas[stage] as usize..=replicas[stage] as usize,
            None => 1..=units,
        };
        // A stage needs at least one place per earlier stage before it and one per later stage after it.
        let starts = if stage == 0 { 0..1 } else { stage..places - 1 - after };
        // Given replicas also fix the number of workers in later stages.
        let rests = match given {
            Some(replicas) => {
                let rest = replicas[stage + 1..].iter().fold(0usize, |sum, &one| sum.saturating_add(one as usize));
                rest..rest.saturating_add(1)
            }
            None => 0..units,
        };
        for from in starts {
            for end in from + 1..places - after {
                for rest in rests.clone().take_while(|&rest| rest < units) {
                    let tail = tables[after][end * width + rest].value;
                    if tail.is_infinite() {
                        continue;
                    }
                    for replicas in choices.clone().take_while(|replicas| replicas + rest <= units) {
                        let entry = &mut table[from * width + rest + replicas];
                        if tail < entry.value {
                            let value = value(settings, stage, from, end, replicas as u32, rest as u32).max(tail);
                            if value < entry.value {
                                *entry = Entry { value, end, replicas };
                            }
                        }
                    }
                }
            }
        }
        tables.push(table);
    }
    let last = &tables[settings.stages];
    let (best, mut left) = (1..=units).map(|used| (last[used].value, used)).min_by(|a, b| a.0.total_cmp(&b.0))?;
    if !best.is_finite() {
        return None;
    }
    let mut stages = Vec::with_capacity(settings.stages);
    let mut at = 0;
    for table in tables[1..].iter().rev() {
        let Entry { end, replicas, .. } = table[at * width + left];
        stages.push((space.between(at, end), replicas as u32));
        at = end;
        left -= replicas;
    }
    Some(Shape::flat(stages, true))
}

fn value(settings: &Pinned<'_>, stage: usize, from: usize, end: usize, replicas: u32, workers_after: u32) -> f64 {
    let Pinned { problem, line, level, least_memory, .. } = settings;
    let (given_caps, given_replicas) = (problem.in_flight.given(), problem.constraints.replicas.as_deref());
    let flow = build_plan::flow(problem, level.count);
    let position = Position { replicas, workers_after };
    let rule = || flow.in_flight(position);
    let in_flight = given_caps.map_or_else(rule, |caps| caps[stage]);
    let own = StageInFlight { replicas, in_flight };
    let first = match (given_caps, given_replicas) {
        _ if from == 0 => First::Known(own),
        (Some(caps), Some(replicas)) => First::Known(StageInFlight { replicas: replicas[0], in_flight: caps[0] }),
        (Some(caps), None) => First::Capped(caps[0]),
        (None, Some(replicas)) => {
            let workers_after = replicas[1..].iter().fold(0u32, |sum, &one| sum.saturating_add(one));
            let in_flight = flow.in_flight(Position { replicas: replicas[0], workers_after });
            First::Known(StageInFlight { replicas: replicas[0], in_flight })
        }
        (None, None) => First::Unknown,
    };
    let multiples = build_plan::multiples_at(problem, &flow, position, in_flight, first);
    let total = line.holdings(from, end).held(&multiples).total;
    if *least_memory {
        return total as f64;
    }
    if problem.memory_limit.is_some_and(|limit| total > limit.0) {
        return f64::INFINITY;
    }
    let space = &line.space;
    let part = space.range(from, end, replicas, from == 0, space.compute[end] - space.compute[from]);
    StageCost::of(problem).part_us(level, &part)
}
