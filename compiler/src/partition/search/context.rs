//! What a search is given: the problem over fused ops, its budget, and its share of the work.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::options::PlannerOptions;
use crate::partition::search::build_plan;
use crate::partition::search::fused_graph::FusedGraph;
use crate::partition::search::result::PlanCandidate;
use crate::plan::problem::Problem;

/// Down-sets to explore if `--budget` is not set.
pub const DEFAULT_BUDGET: u64 = 10_000;

/// A problem with the options of its search.
#[derive(Clone, Copy)]
pub struct SearchContext<'a> {
    /// The problem before ops were fused.
    pub full: &'a Problem,
    /// The problem over fused ops.
    pub problem: &'a Problem,
    pub joined: &'a FusedGraph<'a>,
    pub options: &'a PlannerOptions<'a>,
    pub among: SearchLimits,
}

/// Limits for one of several searches over different device orders.
#[derive(Clone, Copy, Debug)]
pub struct SearchLimits {
    /// Number of device orders that share the work.
    pub orders: u32,
    /// A time that some plan is known to reach, or infinity.
    pub known_us: f64,
    pub depth: Depth,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// One coarse linear order, to rank device orders.
    Glance,
    /// All down-sets, with tables only; their bounds prune device orders.
    Tables,
    /// Coarse linear orders, and all down-sets of small graphs, to rank problems.
    Draft,
    Whole,
}

impl SearchLimits {
    /// A single search without a known plan.
    pub const ALONE: SearchLimits = SearchLimits { orders: 1, known_us: f64::INFINITY, depth: Depth::Whole };

    pub fn is_alone(&self) -> bool {
        self.orders == 1 && self.known_us.is_infinite() && matches!(self.depth, Depth::Draft | Depth::Whole)
    }
}

impl<'a> SearchContext<'a> {
    /// The whole search for a problem.
    pub fn new(
        full: &'a Problem,
        problem: &'a Problem,
        joined: &'a FusedGraph<'a>,
        options: &'a PlannerOptions<'a>,
    ) -> SearchContext<'a> {
        SearchContext { full, problem, joined, options, among: SearchLimits::ALONE }
    }

    /// The same search for another problem over the same fused ops.
    pub fn about<'b>(&'b self, problem: &'b Problem) -> SearchContext<'b> {
        SearchContext { problem, ..*self }
    }

    /// Prices a shape whose stages are placed side by side.
    pub fn candidate(&self, name: &'static str, shape: Shape) -> PlanCandidate {
        let spots = build_plan::side_by_side(self.problem, &shape);
        self.placed(name, shape, spots)
    }

    /// Prices a shape with the given stage positions.
    pub fn placed(&self, name: &'static str, shape: Shape, spots: Vec<build_plan::StagePosition>) -> PlanCandidate {
        let caps = build_plan::caps(self.problem, &shape.replicas());
        self.placed_with_limits(name, shape, spots, caps)
    }

    /// Prices a shape with the given stage positions and in-flight limits.
    pub fn placed_with_limits(
        &self,
        name: &'static str,
        shape: Shape,
        spots: Vec<build_plan::StagePosition>,
        caps: Vec<u32>,
    ) -> PlanCandidate {
        let pending_weight_grads = build_plan::pending_weight_grads(self.problem, &shape.replicas(), &caps);
        self.priced(name, shape, spots, caps, pending_weight_grads)
    }

    /// Prices a shape whose in-flight limits and pending weight gradients are those of a schedule.
    pub fn priced(
        &self,
        name: &'static str,
        shape: Shape,
        spots: Vec<build_plan::StagePosition>,
        caps: Vec<u32>,
        pending_weight_grads: Vec<u32>,
    ) -> PlanCandidate {
        let problem = self.problem;
        let holdings = build_plan::holdings(problem, &shape);
        let memory = build_plan::memory(problem, &shape, &spots, &holdings, &caps, &pending_weight_grads);
        let fits = build_plan::fits(problem, &shape, &spots, &memory);
        let minibatch_us = build_plan::minibatch_us(problem, &shape, &spots, &caps);
        PlanCandidate { name, shape, minibatch_us, caps, pending_weight_grads, spots, memory, fits }
    }
}
