//! Enumerates the choices outside the integer program: number of stages, replicas per stage, and recomputed stages.
//!
//! Times scale with 1/m, memory depends on the replicas of later stages, and an all-reduce exists or not. With these
//! fixed everything else is linear, so each choice has its own program. d devices allow 2^d - 1 replica lists; those
//! that cannot do the work within the known time are skipped.

use crate::cluster::class;
use crate::partition::search::build_plan;
use crate::plan::in_flight;
use crate::plan::problem::{CostModel, Problem, Recomputation};
use std::ops::Range;

pub const MOST_CHOICES: usize = 1200;

const MOST_STEPS: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    pub replicas: Vec<u32>,
    pub recompute: Vec<bool>,
    /// Micro-batches in flight per replica of each stage.
    pub caps: Vec<u32>,
    /// Relative speed of the slowest device of each stage.
    pub paces: Vec<f64>,
}

impl Choice {
    /// The devices of a stage; stages are side by side from device 0.
    pub fn devices(&self, stage: usize) -> Range<u32> {
        let first = self.replicas[..stage].iter().sum();
        first..first + self.replicas[stage]
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Exact number of stages, if cuts are given.
    pub stages: Option<usize>,
    /// Smallest number of stages, if ops are pinned.
    pub least_stages: usize,
    /// Upper bound on the plan's time, in microseconds.
    pub within_us: f64,
}

/// All choices, those with the most devices first; `None` if there are more than [`MOST_CHOICES`].
pub fn choices(problem: &Problem, asked: &Asked) -> Option<Vec<Choice>> {
    let constraints = &problem.constraints;
    let devices = problem.cluster.devices();
    let most_stages = constraints.most_stages.unwrap_or(devices).min(devices) as usize;
    let given_caps = problem.in_flight.given();
    let mut walk = Walk {
        problem,
        work_us: least_work_us(problem),
        within_us: asked.within_us,
        least: asked.least_stages,
        most: most_stages.min(problem.graph.ops.len()),
        replicas: Vec::new(),
        found: Vec::new(),
        steps: 0,
    };
    match &constraints.replicas {
        Some(replicas) => walk.found.push(replicas.clone()),
        None => walk.extend(devices)?,
    }
    let is_wanted = |replicas: &Vec<u32>| {
        asked.stages.is_none_or(|stages| stages == replicas.len())
            && given_caps.is_none_or(|caps| caps.len() == replicas.len())
            && (!constraints.no_replication || replicas.iter().all(|&count| count == 1))
            && (!constraints.has_equal_replicas() || replicas.iter().all(|count| *count == replicas[0]))
    };
    walk.found.retain(is_wanted);
    // The sort is stable: lists of equal length and sum keep their order.
    walk.found.sort_by_key(|replicas| (std::cmp::Reverse(replicas.iter().sum::<u32>()), replicas.len()));
    let mut choices = Vec::new();
    for replicas in walk.found {
        let published = || in_flight::published(&build_plan::flow(problem, devices), &replicas);
        let caps = given_caps.map_or_else(published, <[u32]>::to_vec);
        let bits = if may_recompute(problem) { replicas.len() } else { 0 };
        if bits > 16 || choices.len() + (1 << bits) > MOST_CHOICES {
            return None;
        }
        let always = problem.recomputation().is_full();
        for set in 0..1u32 << bits {
            let recompute = (0..replicas.len()).map(|stage| always || set >> stage & 1 == 1).collect();
            let mut choice = Choice { replicas: replicas.clone(), recompute, caps: caps.clone(), paces: Vec::new() };
            let pace = |stage| class::slowest(&problem.cluster.classes, choice.devices(stage));
            choice.paces = (0..replicas.len()).map(pace).collect();
            choices.push(choice);
        }
    }
    Some(choices)
}

/// Returns whether recomputation is worth trying: it never makes a plan faster, only smaller.
fn may_recompute(problem: &Problem) -> bool {
    problem.recomputation() == Recomputation::Auto && build_plan::is_limited(problem)
}

/// Total work on one device in microseconds, if the stages' throughput must cover it; otherwise 0.
fn least_work_us(problem: &Problem) -> f64 {
    let forward = || problem.graph.ops.iter().map(|op| op.fwd_us).sum();
    let asked = build_plan::asked(problem);
    match problem.cost {
        CostModel::Paper | CostModel::Pipedream | CostModel::Load | CostModel::Hybrid => problem.graph.total_us(),
        CostModel::Pipec if asked.latency || !problem.schedule.is_continuous() => 0.0,
        // 2BW: for all micro-batches of a minibatch.
        CostModel::Pipec if asked.trains() => asked.link_weight() * problem.graph.total_us(),
        CostModel::Pipec => forward(),
    }
}

struct Walk<'a> {
    problem: &'a Problem,
    work_us: f64,
    within_us: f64,
    least: usize,
    most: usize,
    replicas: Vec<u32>,
    found: Vec<Vec<u32>>,
    steps: u64,
}

impl Walk<'_> {
    /// Adds all lists that begin with `replicas` and use at most `left` more devices; `None` if there are too many.
    fn extend(&mut self, left: u32) -> Option<()> {
        self.steps += 1;
        if self.steps > MOST_STEPS || self.found.len() > MOST_CHOICES {
            return None;
        }
        let used = self.problem.cluster.devices() - left;
        // Slack for rounding, so that no plan is lost.
        let done_us = f64::from(used) * class::fastest(&self.problem.cluster.classes) * self.within_us;
        let enough = done_us * (1.0 + 1e-9) >= self.work_us;
        if !self.replicas.is_empty() && self.replicas.len() >= self.least && enough {
            self.found.push(self.replicas.clone());
        }
        if self.replicas.len() < self.most {
            for count in 1..=left {
                self.replicas.push(count);
                self.extend(left - count)?;
                self.replicas.pop();
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Bytes;
    use crate::cluster::read::levels;
    use crate::profile::cost_graph::{CostGraph, OpCost};

    fn problem(ops: u32, cluster: &str, cost: CostModel) -> Problem {
        let op = |id| OpCost { id, fwd_us: 1.0, bwd_us: 1.0, ..OpCost::default() };
        let graph = CostGraph { ops: (0..ops).map(op).collect(), ..CostGraph::default() };
        Problem::new(graph, levels(cluster).unwrap(), cost)
    }

    const FREE: Asked = Asked { stages: None, least_stages: 1, within_us: f64::INFINITY };

    fn replicas(problem: &Problem, asked: &Asked) -> Vec<Vec<u32>> {
        choices(problem, asked).unwrap().into_iter().map(|choice| choice.replicas).collect()
    }

    #[test]
    fn every_way_to_give_out_devices_is_there_once() {
        let three = problem(5, "3:1GB/s", CostModel::Paper);
        let expected: [&[u32]; 7] = [&[3], &[1, 2], &[2, 1], &[1, 1, 1], &[2], &[1, 1], &[1]];
        assert_eq!(replicas(&three, &FREE), expected);
        assert_eq!(choices(&problem(9, "8:1GB/s", CostModel::Paper), &FREE).unwrap().len(), 255);
        assert_eq!(replicas(&problem(1, "3:1GB/s", CostModel::Paper), &FREE), [[3], [2], [1]]);
        assert_eq!(choices(&problem(99, "64:1GB/s", CostModel::Paper), &FREE), None);
    }

    #[test]
    fn what_cannot_do_the_work_in_time_is_left_out() {
        let three = problem(5, "3:1GB/s", CostModel::Paper);
        let within = |within_us| replicas(&three, &Asked { within_us, ..FREE }).len();
        assert_eq!((within(10.0), within(9.9), within(4.9), within(3.0)), (7, 6, 4, 0));
    }

    #[test]
    fn constraints_are_obeyed() {
        let mut pinned = problem(5, "3:1GB/s", CostModel::Pipec);
        pinned.constraints.no_replication = true;
        assert_eq!(replicas(&pinned, &FREE), [&[1, 1, 1][..], &[1, 1], &[1]]);
        pinned.constraints.no_replication = false;
        assert_eq!(replicas(&pinned, &Asked { stages: Some(2), ..FREE }), [[1, 2], [2, 1], [1, 1]]);
        pinned.constraints.replicas = Some(vec![2, 1]);
        assert_eq!(replicas(&pinned, &FREE), [[2, 1]]);
        pinned.memory_limit = Some(Bytes(1));
        pinned.graph.ops[0].saved_bytes = 10;
        let recompute: Vec<Vec<bool>> = choices(&pinned, &FREE).unwrap().into_iter().map(|c| c.recompute).collect();
        assert_eq!(recompute, [[false, false], [true, false], [false, true], [true, true]]);
    }
}
