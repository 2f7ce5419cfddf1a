//! The result of a partitioner: groups of ops nested by cluster level, with a replica count for each group.
//!
//! On one level a shape is a list of stages. On two, each outer group takes whole servers, and every server of the
//! group runs the same pipeline of inner groups.

use crate::cluster::Cluster;
use crate::partition::search::build_plan;
use crate::plan::LevelPlacement;
use crate::plan::cut_bytes::CutBytes;
use crate::plan::problem::Problem;
use crate::plan::stage_cost::{self, LevelCost, StageCost, StageRange};
use std::borrow::Cow;

/// Consecutive ops assigned to some units of one level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Number of units that process minibatches in turn.
    pub replicas: u32,
    pub body: StageBody,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StageBody {
    Groups(Vec<Group>),
    /// Innermost level: op ids, ascending.
    Ops(Vec<u32>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Groups of the outermost level, in topological order.
    pub groups: Vec<Group>,
    /// True if stages do not fill whole groups; the cluster then counts as one level at its slowest bandwidth.
    pub is_flat: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageGroup<'a> {
    pub ops: &'a [u32],
    /// Product of the replica counts of all levels.
    pub replicas: u32,
    /// Innermost level first.
    pub hierarchy: Vec<LevelPlacement>,
}

impl Shape {
    /// A single level of stages, given as ops and replicas.
    pub fn flat(stages: Vec<(Vec<u32>, u32)>, is_flat: bool) -> Shape {
        let groups = stages.into_iter().map(|(ops, replicas)| Group { replicas, body: StageBody::Ops(ops) }).collect();
        Shape { groups, is_flat }
    }

    /// The cluster as this shape uses it: flattened if `is_flat`.
    pub fn cluster<'a>(&self, cluster: &'a Cluster) -> Cow<'a, Cluster> {
        let flattens = self.is_flat && cluster.levels.len() > 1;
        if flattens { Cow::Owned(cluster.flattened()) } else { Cow::Borrowed(cluster) }
    }

    pub fn leaves(&self) -> Vec<StageGroup<'_>> {
        let mut leaves = Vec::new();
        descend(&self.groups, &mut Vec::new(), &mut leaves);
        leaves
    }

    pub fn replicas(&self) -> Vec<u32> {
        self.leaves().iter().map(|leaf| leaf.replicas).collect()
    }

    /// Microseconds of the slowest stage or link for one minibatch, under the problem's cost model.
    pub fn minibatch_us(&self, problem: &Problem) -> f64 {
        self.on_levels_us(problem, &stage_cost::levels(&self.cluster(&problem.cluster)))
    }

    pub fn on_levels_us(&self, problem: &Problem, levels: &[LevelCost]) -> f64 {
        let leaves = self.leaves();
        let stage_of = build_plan::stage_of(problem, self);
        let cost = StageCost::of(problem);
        let charged = CutBytes::new(problem.cost, &problem.graph);
        let cut = |stage: usize| charged.at(|op| (stage_of[op] as usize) < stage);
        let cuts: Vec<f64> = (0..=leaves.len()).map(cut).collect();
        let mut compute = vec![0.0; leaves.len()];
        let mut weights = vec![0.0; leaves.len()];
        for (op, &stage) in problem.graph.ops.iter().zip(&stage_of) {
            compute[stage as usize] += op.fwd_us + op.bwd_us;
            weights[stage as usize] += op.param_bytes as f64;
        }
        let timed = Timed { cost, levels, cuts: &cuts, compute: &compute, weights: &weights };
        let mut next = 0;
        timed.span(levels.len().saturating_sub(1), &self.groups, &mut next)
    }
}

fn descend<'a>(groups: &'a [Group], above: &mut Vec<LevelPlacement>, leaves: &mut Vec<StageGroup<'a>>) {
    for (at, group) in groups.iter().enumerate() {
        above.push(LevelPlacement { group: at as u32, replicas: group.replicas });
        match &group.body {
            StageBody::Groups(inner) => descend(inner, above, leaves),
            StageBody::Ops(ops) => {
                let replicas = above.iter().fold(1u32, |product, place| product.saturating_mul(place.replicas));
                leaves.push(StageGroup { ops, replicas, hierarchy: above.iter().rev().copied().collect() });
            }
        }
        above.pop();
    }
}

struct Timed<'a> {
    cost: StageCost,
    levels: &'a [LevelCost],
    cuts: &'a [f64],
    compute: &'a [f64],
    weights: &'a [f64],
}

impl Timed<'_> {
    fn span(&self, level: usize, groups: &[Group], next: &mut usize) -> f64 {
        let mut worst: f64 = 0.0;
        for (at, group) in groups.iter().enumerate() {
            let start = *next;
            let inner_us = match &group.body {
                StageBody::Groups(inner) => self.span(level.saturating_sub(1), inner, next),
                StageBody::Ops(_) => {
                    *next += 1;
                    self.compute[start]
                }
            };
            let part = StageRange {
                is_first: at == 0,
                is_last: *next == self.compute.len(),
                replicas: group.replicas,
                inner_us,
                weight_bytes: self.weights[start..*next].iter().sum(),
                in_bytes: self.cuts[start],
                out_bytes: self.cuts[*next],
            };
            worst = worst.max(self.cost.part_us(&self.levels[level], &part));
        }
        worst
    }
}
