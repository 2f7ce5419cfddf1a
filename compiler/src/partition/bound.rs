//! What no plan can beat.
//!
//! Three bounds, of which the greatest counts: all compute on all devices at once; the op that is slowest however often it is
//! replicated; and the time in which a pipeline gets along the relaxed terrain of the graph, which knows of weights that must be
//! summed, of tensors that must cross, and of ops that cannot be split.
//!
//! On several levels a plan takes whole groups or it does not, so the bound is the lesser of the two kinds' bounds.

use crate::partition::reach::Reach;
use crate::partition::states::{Growth, Space};
use crate::partition::terrain::Terrain;
use crate::plan::ScheduleKind;
use crate::plan::problem::{CostModel, Objective, Problem};
use crate::plan::stage_cost::{self, LevelCost, Part, StageCost};
use crate::profile::cost_graph::OpCost;

/// Closed sets up to which the terrain has a spot for each, and up to which times the ops of the graph, about a second of work.
const MOST_SETS: usize = 400_000;
const MOST_FIGURES: usize = 120_000_000;

/// Steps for one bound, about two seconds.
const STEPS: u64 = 60_000_000;

/// The relaxed terrain of a problem and what is bounded on it.
pub struct Bounds<'a> {
    problem: &'a Problem,
    cost: StageCost,
    /// All closed sets, where they are not too many.
    pub space: Option<Space>,
    terrain: Terrain,
}

impl Bounds<'_> {
    /// Prepares the bounds of a problem.
    pub fn of(problem: &Problem) -> Bounds<'_> {
        let graph = &problem.graph;
        let most = (MOST_FIGURES / graph.ops.len().max(1)).min(MOST_SETS);
        let space = Space::grow(graph, problem.cost, Growth::All, most);
        let terrain = match &space {
            Some(space) => Terrain::sets(space, problem.cost),
            None => Terrain::relaxed(graph, problem.cost),
        };
        Bounds { problem, cost: StageCost::of(problem), space, terrain }
    }

    /// A time in microseconds that no plan with groups of these levels beats. Bounds above `known_us`, which some plan
    /// reaches, are not looked for.
    pub fn least_us(&self, levels: &[LevelCost], known_us: f64) -> f64 {
        let devices: f64 = levels.iter().map(|level| f64::from(level.count)).product();
        let spread = self.problem.graph.total_us() / devices;
        let low = if levels.len() == 1 { self.slowest_op_us(&levels[0]).max(spread) } else { spread };
        if low >= known_us {
            return low;
        }
        let reach = Reach::new(&self.terrain, &self.cost, levels, STEPS);
        // What is reached is told apart from what is not up to rounding.
        low.max(reach.narrow(low, known_us, |us| us).low_us * (1.0 - 1e-8))
    }

    /// The same for any plan on the problem's cluster.
    pub fn of_any_plan(&self, known_us: f64) -> f64 {
        let cluster = &self.problem.cluster;
        if self.problem.cost == CostModel::Pipec {
            return self.of_any_place(known_us);
        }
        let within_groups = self.least_us(&stage_cost::levels(cluster), known_us);
        if cluster.levels.len() == 1 {
            return within_groups;
        }
        within_groups.min(self.least_us(&stage_cost::levels(&cluster.flattened()), within_groups))
    }

    /// The same under cost `pipec`, where a stage may stand anywhere: as if every link were the fastest. Other schedules than
    /// 1F1B-RR reduce more rarely or wait for each other, and are not bounded here.
    fn of_any_place(&self, known_us: f64) -> f64 {
        let Problem { cluster, schedule, objective, .. } = self.problem;
        let steps_in_rounds = matches!(schedule, ScheduleKind::RoundRobin | ScheduleKind::RoundRobinVsync);
        // The terrain knows one speed.
        if !steps_in_rounds || *objective == Objective::Latency || cluster.is_mixed() {
            return 0.0;
        }
        let bytes_per_us = cluster.levels.iter().map(|level| level.bandwidth.0 / 1e6).fold(0.0, f64::max);
        self.least_us(&[LevelCost { count: cluster.devices(), bytes_per_us, previous_count: 1 }], known_us)
    }

    /// All closed sets but those that no plan within `us` is cut at, because more crosses than the fastest link takes.
    pub fn sets_within(&self, levels: &[LevelCost], us: f64) -> Option<Space> {
        // The part after a cut has the units that the ops before it leave. Inside a group that is replicated a part may take as
        // many times longer.
        let crosses = |space: &Space, at: usize| {
            let mut above = 1.0;
            levels.iter().enumerate().rev().any(|(index, level)| {
                let before = if index + 1 == levels.len() { space.compute[at] / self.of_one(levels, us) } else { 0.0 };
                let left = f64::from(level.count) - (before * (1.0 - 1e-9)).ceil();
                let within = left >= 1.0 && self.cost.entry_us(level, space.cut[at], left as u32) <= us * above;
                above *= f64::from(level.count);
                within
            })
        };
        self.space.as_ref().map(|space| space.only(|at| crosses(space, at)))
    }

    /// What one unit of the outermost level computes within a time.
    fn of_one(&self, levels: &[LevelCost], us: f64) -> f64 {
        let inner: f64 = levels[..levels.len() - 1].iter().map(|level| f64::from(level.count)).product();
        us * inner
    }

    fn slowest_op_us(&self, level: &LevelCost) -> f64 {
        let alone = |op: &OpCost| {
            let part = |replicas| Part {
                is_first: true,
                is_last: true,
                replicas,
                inner_us: op.fwd_us + op.bwd_us,
                weight_bytes: op.param_bytes as f64,
                in_bytes: 0.0,
                out_bytes: 0.0,
            };
            (1..=level.count).map(|replicas| self.cost.part_us(level, &part(replicas))).fold(f64::INFINITY, f64::min)
        };
        self.problem.graph.ops.iter().map(alone).fold(0.0, f64::max)
    }
}
