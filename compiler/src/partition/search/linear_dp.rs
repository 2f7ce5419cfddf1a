//! Best cuts of linear orders: exact for short orders, by bottleneck search for long ones.

use crate::partition::bounds::bisect::BottleneckSearch;
use crate::partition::bounds::cut_space::CutSpace;
use crate::partition::dp::nested_partition::Shape;
use crate::partition::dp::pipedream;
use crate::partition::search::downsets::DownSets;
use crate::partition::search::linear_order;
use crate::partition::search::linear_search;
use crate::partition::search::numbers::{largest, running_sums, same};
use crate::partition::search::op_sets::insert;
use crate::plan::cut_bytes::CutBytes;
use crate::plan::problem::Problem;
use crate::plan::stage_cost::{LevelCost, StageCost};

/// Largest number of cuts that are solved exactly. Each is priced over the whole graph, which is too slow for more.
const MAX_PLACES: usize = 2000;

/// Largest order length with exact cut bytes in the bottleneck search.
const MOST_PRICED: usize = 6000;

/// Steps per order; about a second.
const STEPS: u64 = 30_000_000;

pub struct Lines<'a> {
    problem: &'a Problem,
    cost: StageCost,
    levels: &'a [LevelCost],
    orders: Vec<Vec<u32>>,
    places: usize,
}

impl Lines<'_> {
    pub fn of<'a>(problem: &'a Problem, levels: &'a [LevelCost]) -> Lines<'a> {
        let ops = problem.graph.ops.len();
        let places = largest((ops + 1).min(MAX_PLACES), |sets| {
            let (steps, bytes) = pipedream::effort(levels, sets);
            steps <= 1e8 && bytes <= 3e8
        });
        Lines { problem, cost: StageCost::of(problem), levels, orders: linear_search::orders(&problem.graph), places }
    }

    /// Returns whether the exact search may cut after every op.
    pub fn are_whole(&self) -> bool {
        self.places > self.problem.graph.ops.len()
    }

    /// All prefixes of all orders, as bit sets; empty if the graph is too large.
    pub fn sets(&self) -> Vec<Vec<u64>> {
        let ops = self.problem.graph.ops.len();
        if ops >= MAX_PLACES {
            return Vec::new();
        }
        let mut sets = Vec::with_capacity(self.orders.len() * ops);
        for order in &self.orders {
            let mut set = vec![0u64; ops.div_ceil(64)];
            for &op in order {
                insert(&mut set, op as usize);
                sets.push(set.clone());
            }
        }
        sets
    }

    /// The best exact cut, and the number of sets explored. Each order is solved coarsely first, and each solution
    /// bounds the next search.
    pub fn exact(&self, may_leave_units: bool) -> (Option<pipedream::Solution>, u64) {
        let (graph, model) = (&self.problem.graph, self.cost.model);
        let (mut best, mut states): (Option<pipedream::Solution>, u64) = (None, 0);
        let coarse = self.places.min(64);
        for (order, places) in self.orders.iter().flat_map(|order| [(order, coarse), (order, self.places)]) {
            let ends = linear_order::ends(graph, model, order, places.max(2) - 1);
            let space = DownSets::chain(graph, model, order.clone(), ends);
            let known = best.as_ref().map_or(f64::INFINITY, |solution| solution.minibatch_us);
            let solution = pipedream::solve(&space, &self.cost, self.levels, may_leave_units, known);
            states += space.len() as u64;
            best = [best, solution].into_iter().flatten().reduce(|best, new| {
                let better = new.minibatch_us < best.minibatch_us && !same(new.minibatch_us, best.minibatch_us);
                if better { new } else { best }
            });
        }
        (best, states)
    }

    /// Bottleneck search on long orders; returns a result only if it is faster than `known_us`. `low_us` is a lower
    /// bound.
    pub fn far(&self, low_us: f64, known_us: f64) -> (Option<(Shape, f64)>, u64) {
        let (mut best, mut known, mut states) = (None, known_us, 0);
        for order in &self.orders {
            states += order.len() as u64 + 1;
            if let Some(found) = self.walk(order, low_us, known) {
                known = found.1;
                best = Some(found);
            }
        }
        (best, states)
    }

    /// A better shape along an order, and its time.
    fn walk(&self, order: &[u32], low_us: f64, known_us: f64) -> Option<(Shape, f64)> {
        let graph = &self.problem.graph;
        let op = |&op: &u32| &graph.ops[op as usize];
        let compute = running_sums(order, |sum, at| sum + op(at).fwd_us + op(at).bwd_us);
        let weights = running_sums(order, |sum, at| sum + op(at).param_bytes as f64);
        let charged = CutBytes::new(self.cost.model, graph);
        let cut = if order.len() <= MOST_PRICED {
            let mut place = vec![0usize; order.len()];
            order.iter().enumerate().for_each(|(at, &op)| place[op as usize] = at);
            (0..=order.len()).map(|end| charged.at(|op| place[op] < end)).collect()
        } else {
            charged.estimates(order)
        };
        let cut_space = CutSpace::line(compute, weights, cut);
        let bottleneck = BottleneckSearch::new(&cut_space, &self.cost, self.levels, STEPS);
        let bracket = bottleneck.narrow(low_us, known_us);
        if bracket.high_us >= known_us {
            return None;
        }
        let between = |from: usize, to: usize| {
            let mut ops = order[from..to].to_vec();
            ops.sort_unstable();
            ops
        };
        let shape = Shape { groups: bottleneck.groups(bracket.high_us, &between)?, is_flat: false };
        let us = shape.on_levels_us(self.problem, self.levels);
        (us < known_us && !same(us, known_us)).then_some((shape, us))
    }
}
