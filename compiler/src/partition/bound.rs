//! What no plan can beat.
//!
//! Three bounds, of which the greatest counts: all compute on all devices at once; the op that is slowest however often it is
//! replicated; and the time in which a pipeline gets along the relaxed terrain of the graph, which knows of weights that must be
//! summed, of tensors that must cross, of ops that cannot be split, and of memory that the weights of a stage take.
//!
//! On several levels a plan takes whole groups or it does not, so the bound is the lesser of the two kinds' bounds.

use crate::partition::reach::Reach;
use crate::partition::terrain::Terrain;
use crate::plan::problem::Problem;
use crate::plan::stage_cost::{self, LevelCost, Part, StageCost};
use crate::profile::cost_graph::OpCost;

/// Steps for one bound, about two seconds.
const STEPS: u64 = 60_000_000;

/// The relaxed terrain of a problem and what is bounded on it.
pub struct Bounds<'a> {
    problem: &'a Problem,
    cost: StageCost,
    terrain: Terrain,
}

impl Bounds<'_> {
    /// Prepares the bounds of a problem.
    pub fn of(problem: &Problem) -> Bounds<'_> {
        let terrain = Terrain::relaxed(&problem.graph, problem.cost);
        Bounds { problem, cost: StageCost::of(problem), terrain }
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
        let within_groups = self.least_us(&stage_cost::levels(cluster), known_us);
        if cluster.levels.len() == 1 {
            return within_groups;
        }
        within_groups.min(self.least_us(&stage_cost::levels(&cluster.flattened()), within_groups))
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
