//! Lower bounds on the time of every plan.
//!
//! The bound is the largest of three: all compute spread over all devices; the slowest op at its best replica count;
//! and the bottleneck search on the relaxed cut space, which accounts for weight all-reduces, crossing tensors and
//! indivisible ops. On several levels a plan may or may not fill whole groups, so the bound is the smaller of the
//! bounds for both cases.

use crate::partition::bounds::bisect::BottleneckSearch;
use crate::partition::bounds::cut_space::CutSpace;
use crate::partition::bounds::min_cut_bytes::MinCutBytes;
use crate::partition::search::downsets::{DownSets, Growth};
use crate::partition::search::linear_search;
use crate::plan::problem::{CostModel, Objective, Problem};
use crate::plan::stage_cost::{self, LevelCost, StageCost, StageRange};
use crate::profile::cost_graph::OpCost;

/// Limits for enumerating all down-sets: their number, and their number times ops; about a second of work.
const MOST_SETS: usize = 400_000;
const MOST_FIGURES: usize = 120_000_000;

/// Steps for the minimum cut bytes; about half a second.
const CROSSING_STEPS: u64 = 100_000_000;

/// Steps for one bound; about two seconds.
const STEPS: u64 = 60_000_000;

pub struct Bounds<'a> {
    problem: &'a Problem,
    cost: StageCost,
    /// All down-sets, if there are few enough.
    pub space: Option<DownSets>,
    /// Cheap cuts, if there are too many down-sets.
    pub narrow: Option<MinCutBytes>,
    cut_space: CutSpace,
}

impl Bounds<'_> {
    pub fn of(problem: &Problem) -> Bounds<'_> {
        let graph = &problem.graph;
        let most = (MOST_FIGURES / graph.ops.len().max(1)).min(MOST_SETS);
        let space = DownSets::grow(graph, problem.cost, Growth::All, most);
        match space {
            Some(space) => {
                let cut_space = CutSpace::sets(&space, problem.cost);
                Bounds { problem, cost: StageCost::of(problem), space: Some(space), narrow: None, cut_space }
            }
            None => Bounds::relaxed(problem),
        }
    }

    /// Returns whether the bounds hold for a problem. Under cost model `pipec` they need 1F1B-RR: other schedules
    /// all-reduce less often or wait for flushes. The cut space also assumes equal devices.
    pub fn are_valid_for(problem: &Problem) -> bool {
        let steps_in_rounds = problem.schedule.is_round_robin();
        let is_flow = steps_in_rounds && problem.objective != Objective::Latency && !problem.cluster.is_mixed();
        problem.cost != CostModel::Pipec || is_flow
    }

    /// The relaxed bounds, without enumerating down-sets.
    fn relaxed(problem: &Problem) -> Bounds<'_> {
        let graph = &problem.graph;
        let relaxed = CutSpace::relaxed(graph, problem.cost);
        let orders = if charges_cuts(problem) { linear_search::orders(graph) } else { Vec::new() };
        let narrow = orders.first().and_then(|order| MinCutBytes::of(graph, order, relaxed.places(), CROSSING_STEPS));
        let cut_space = match narrow.as_ref().filter(|_| problem.cost == CostModel::Pipedream) {
            Some(crossing) => relaxed.crossed(graph, crossing),
            None => relaxed,
        };
        Bounds { problem, cost: StageCost::of(problem), space: None, narrow, cut_space }
    }

    /// Lower bound in microseconds on plans whose stages fill whole groups of these levels. Bounds above `known_us`,
    /// the time of a known plan, are not computed.
    pub fn least_us(&self, levels: &[LevelCost], known_us: f64) -> f64 {
        let devices: f64 = levels.iter().map(|level| f64::from(level.count)).product();
        let spread = self.problem.graph.total_us() / devices;
        let low = if levels.len() == 1 { slowest_op_us(self.problem, &levels[0]).max(spread) } else { spread };
        if low >= known_us {
            return low;
        }
        let bottleneck = BottleneckSearch::new(&self.cut_space, &self.cost, levels, STEPS);
        // Feasibility is only exact up to rounding.
        low.max(bottleneck.narrow(low, known_us).low_us * (1.0 - 1e-8))
    }

    /// Lower bound on every plan for the problem's cluster.
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

    /// Lower bound under cost model `pipec`, where a stage may be on any devices: assumes the fastest link everywhere.
    fn of_any_place(&self, known_us: f64) -> f64 {
        if !Bounds::are_valid_for(self.problem) {
            return 0.0;
        }
        let cluster = &self.problem.cluster;
        let bytes_per_us = cluster.levels.iter().map(|level| level.bandwidth.0 / 1e6).fold(0.0, f64::max);
        self.least_us(&[LevelCost { count: cluster.devices(), bytes_per_us, previous_count: 1 }], known_us)
    }

    /// All down-sets except those that no plan within `us` can cut at, because their cut bytes take too long on every
    /// link.
    pub fn sets_within(&self, levels: &[LevelCost], us: f64) -> Option<DownSets> {
        // The part after a cut has at most the units that the ops before it leave over. A part inside a replicated
        // group may take proportionally longer.
        let inner: f64 = levels[..levels.len() - 1].iter().map(|level| f64::from(level.count)).product();
        let capacity_us = us * inner;
        let crosses = |space: &DownSets, at: usize| {
            let mut above = 1.0;
            levels.iter().enumerate().rev().any(|(index, level)| {
                let before = if index + 1 == levels.len() { space.compute[at] / capacity_us } else { 0.0 };
                let left = f64::from(level.count) - (before * (1.0 - 1e-9)).ceil();
                let within = left >= 1.0 && self.cost.entry_us(level, space.cut[at], left as u32) <= us * above;
                above *= f64::from(level.count);
                within
            })
        };
        self.space.as_ref().map(|space| space.only(|at| crosses(space, at)))
    }
}

/// The slowest op on one level, at its best replica count.
pub fn slowest_op_us(problem: &Problem, level: &LevelCost) -> f64 {
    let cost = StageCost::of(problem);
    let alone = |op: &OpCost| {
        let part = |replicas| StageRange {
            is_first: true,
            is_last: true,
            replicas,
            inner_us: op.fwd_us + op.bwd_us,
            weight_bytes: op.param_bytes as f64,
            in_bytes: 0.0,
            out_bytes: 0.0,
        };
        (1..=level.count).map(|replicas| cost.part_us(level, &part(replicas))).fold(f64::INFINITY, f64::min)
    };
    problem.graph.ops.iter().map(alone).fold(0.0, f64::max)
}

fn charges_cuts(problem: &Problem) -> bool {
    match problem.cost {
        CostModel::Pipedream => problem.activation_compression.is_some(),
        CostModel::Paper => true,
        CostModel::Pipec | CostModel::Load | CostModel::Hybrid => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;
    use crate::partition::bounds::random::Random;
    use crate::partition::bounds::test_graphs::graph;
    use crate::partition::options::PlannerOptions;
    use crate::partition::partitioners::Partitioner;
    use crate::partition::planner::plan;

    fn problem(seed: u64) -> Problem {
        let mut random = Random(seed);
        let graph = graph(&mut random);
        let cluster = ["2:1GB/s", "4:1GB/s", "5:0.3GB/s", "3:4GB/s,2:1GB/s"][random.below(4) as usize];
        let cost = if random.below(4) > 0 { CostModel::Pipedream } else { CostModel::Paper };
        let mut problem = Problem::new(graph, levels(cluster).unwrap(), cost);
        problem.activation_compression = Some(1.0);
        problem
    }

    #[test]
    fn relaxed_cut_space_contains_every_down_set() {
        for seed in 0..350 {
            let problem = problem(seed);
            let bounds = Bounds::relaxed(&problem);
            let space = DownSets::grow(&problem.graph, problem.cost, Growth::All, 10_000).unwrap();
            for set in 1..space.len() - 1 {
                let (compute, weights, bytes) = (space.compute[set], space.weights[set], space.cut[set]);
                let is_there = bounds.cut_space.has_room(compute, weights, bytes);
                assert!(is_there, "seed {seed}: {compute} us, {weights} bytes of weights, {bytes} bytes");
            }
        }
    }

    #[test]
    fn relaxed_bound_is_below_every_plan() {
        let mut closed = 0.0;
        for seed in 1000..1200 {
            let problem = problem(seed);
            let with = |problem: &Problem| {
                let options = PlannerOptions { partitioner: Partitioner::Exhaustive, ..PlannerOptions::default() };
                plan(problem, &options).unwrap().plan.predicted.minibatch_us
            };
            let mut flat = problem.clone();
            flat.cluster = problem.cluster.flattened();
            let best = with(&problem).min(with(&flat));
            let bound = Bounds::relaxed(&problem).of_any_plan(best * 2.0);
            assert!(bound <= best * (1.0 + 1e-9), "seed {seed}: bound {bound} above the optimum {best}");
            closed += bound / best;
        }
        println!("bounds are {:.4} of the optimum", closed / 200.0);
        assert!(closed >= 0.9 * 200.0, "{closed}");
    }
}
