//! Recomputes costs `paper`, `pipedream`, `load` and `hybrid` over nested groups, outermost level first.
//!
//! It shares no code with `stage_cost` and `cut_bytes`, which have the equations.

use crate::cluster::Cluster;
use crate::plan::check::error::PlanFault;
use crate::plan::problem::{CostModel, Problem};
use crate::plan::{Plan, Stage};
use crate::profile::cost_graph::OpId;

struct NestedTime<'a> {
    problem: &'a Problem,
    cluster: Cluster,
    stages: &'a [Stage],
    stage_of: &'a [usize],
    faults: &'a mut Vec<PlanFault>,
}

/// The plan's objective in microseconds, and its bottleneck.
pub fn time(problem: &Problem, plan: &Plan, stage_of: &[usize], faults: &mut Vec<PlanFault>) -> (f64, String) {
    let levels = problem.cluster.levels.len();
    let depth = plan.stages.first().map_or(0, |stage| stage.hierarchy.len());
    if let Some(stage) = plan.stages.iter().position(|stage| stage.hierarchy.len() != depth) {
        faults.push(PlanFault::Hierarchy { stage, what: "not as deep as that of stage 0".into() });
        return (0.0, String::new());
    }
    let cluster = match depth {
        1 if levels > 1 => problem.cluster.flattened(),
        _ if depth == levels => problem.cluster.clone(),
        _ => {
            faults.push(PlanFault::Hierarchy { stage: 0, what: format!("{depth} entries for {levels} levels") });
            return (0.0, String::new());
        }
    };
    let mut clock = NestedTime { problem, cluster, stages: &plan.stages, stage_of, faults };
    clock.span(depth - 1, 0, plan.stages.len())
}

impl NestedTime<'_> {
    /// Time of the stages [from, to), which fill one unit of the level above `level`, and its bottleneck.
    fn span(&mut self, level: usize, from: usize, to: usize) -> (f64, String) {
        let mut worst = (0.0, String::new());
        let (mut start, mut group, mut units) = (from, 0u32, 0u64);
        while start < to {
            let place = self.stages[start].hierarchy[level];
            let end = (start..to).find(|&at| self.stages[at].hierarchy[level].group != place.group).unwrap_or(to);
            if place.group != group {
                let what = format!("group {} instead of the next group, {group}", place.group);
                self.faults.push(PlanFault::Hierarchy { stage: start, what });
            }
            if (start..end).any(|at| self.stages[at].hierarchy[level].replicas != place.replicas) {
                let what = format!("the stages of group {group} have different replicas");
                self.faults.push(PlanFault::Hierarchy { stage: start, what });
            }
            let time = self.group(level, from, start, end, place.replicas);
            if worst.1.is_empty() || time.0 > worst.0 {
                worst = time;
            }
            units += u64::from(place.replicas);
            group += 1;
            start = end;
        }
        let count = self.cluster.levels[level].count;
        if units > u64::from(count) {
            let what = format!("the groups take {units} of the {count} members of level {level}");
            self.faults.push(PlanFault::Hierarchy { stage: from, what });
        }
        worst
    }

    /// Time of one group, the stages [start, end), in a span that begins at stage `from`.
    fn group(&mut self, level: usize, from: usize, start: usize, end: usize, replicas: u32) -> (f64, String) {
        let (inner, mut what) = if level > 0 {
            self.span(level - 1, start, end)
        } else {
            if end != start + 1 {
                let what = format!("stages {start} to {} share a group of the innermost level", end - 1);
                self.faults.push(PlanFault::Hierarchy { stage: start, what });
            }
            let ops = self.problem.graph.ops.iter().zip(self.stage_of);
            let compute =
                ops.filter(|(_, stage)| (start..end).contains(*stage)).map(|(op, _)| op.fwd_us + op.bwd_us).sum();
            (compute, format!("compute of stage {start}"))
        };
        let weights: f64 = {
            let ops = self.problem.graph.ops.iter().zip(self.stage_of);
            ops.filter(|(_, stage)| (start..end).contains(*stage)).map(|(op, _)| op.param_bytes as f64).sum()
        };
        let m = f64::from(replicas);
        let bandwidth = self.cluster.levels[level].bandwidth.0 / 1e6;
        let mut links = Vec::new();
        let stage = match self.problem.cost {
            CostModel::Paper => {
                let sync = 2.0 * (m - 1.0) * weights / bandwidth;
                if sync > inner {
                    what = format!("all-reduce of {}", stages(start, end));
                }
                if start > from {
                    links.push((start, 2.0 * self.crossing_tensors(start) / bandwidth));
                }
                inner.max(sync) / m
            }
            CostModel::Load | CostModel::Hybrid if replicas > 1 => f64::INFINITY,
            CostModel::Load | CostModel::Hybrid => {
                inner + (self.crossing_tensors(start) + self.crossing_tensors(end)) / bandwidth
            }
            CostModel::Pipedream => {
                let mut sync = 4.0 * (m - 1.0) * weights / (bandwidth * m);
                if start == from && level > 0 {
                    sync /= f64::from(self.cluster.levels[level - 1].count);
                }
                if sync > inner {
                    what = format!("all-reduce of {}", stages(start, end));
                }
                if let (Some(ratio), true) = (self.problem.activation_compression, start > from) {
                    links.push((start, 2.0 * self.charged_outputs(start) / (bandwidth * m * ratio)));
                    if end < self.stages.len() {
                        links.push((end, 2.0 * self.charged_outputs(end) / (bandwidth * m * ratio)));
                    }
                }
                (inner + sync) / m
            }
            CostModel::Pipec => unreachable!("cost pipec has its own cost function"),
        };
        let mut worst = (stage, what);
        for (cut, time) in links {
            if time > worst.0 {
                worst = (time, format!("transfer between stages {} and {cut}", cut - 1));
            }
        }
        worst
    }

    /// Bytes of all tensors made before stage `cut` and read at or after it, each once.
    fn crossing_tensors(&self, cut: usize) -> f64 {
        let before = |op: usize| self.stage_of[op] < cut;
        let tensors = self.problem.graph.tensors.iter();
        let crossing =
            tensors.filter(|t| before(t.producer.index()) && t.consumers.iter().any(|to| !before(to.index())));
        crossing.map(|tensor| tensor.bytes as f64).sum()
    }

    /// The PipeDream charge at a cut. It counts all outputs of frontier ops (no reader before the cut), and of their
    /// predecessors with a reader that does not precede the frontier op. Fused ops count as one op, whose internal
    /// tensors are free.
    fn charged_outputs(&self, cut: usize) -> f64 {
        let graph = &self.problem.graph;
        let with = |op: OpId| graph.ops[op.index()].joins.unwrap_or(op).index();
        let mut edges: Vec<(usize, usize)> = graph.edges().iter().map(|(from, to)| (with(*from), with(*to))).collect();
        edges.retain(|(from, to)| from != to);
        edges.sort_unstable();
        edges.dedup();
        let mut out_bytes: Vec<f64> = graph.ops.iter().map(|op| op.out_bytes as f64).collect();
        (0..graph.ops.len()).filter(|&op| graph.ops[op].joins.is_some()).for_each(|op| out_bytes[op] = 0.0);
        for tensor in graph.tensors.iter().filter(|tensor| graph.ops[tensor.producer.index()].joins.is_some()) {
            let joined = with(tensor.producer);
            if tensor.consumers.is_empty() || tensor.consumers.iter().any(|to| with(*to) != joined) {
                out_bytes[joined] += tensor.bytes as f64;
            }
        }
        let before = |op: usize| self.stage_of[op] < cut && graph.ops[op].joins.is_none();
        let mut is_read = vec![false; graph.ops.len()];
        edges.iter().filter(|(_, to)| before(*to)).for_each(|(from, _)| is_read[*from] = true);
        let frontier: Vec<usize> = (0..graph.ops.len()).filter(|&op| before(op) && !is_read[op]).collect();
        let mut charged = vec![false; graph.ops.len()];
        for &last in &frontier {
            charged[last] = true;
            let mut precedes = vec![false; graph.ops.len()];
            precedes[last] = true;
            // Edges are sorted by producer in topological order, so one reverse pass is enough.
            for &(from, to) in edges.iter().rev().filter(|(_, to)| *to <= last) {
                precedes[from] |= precedes[to];
            }
            for &(from, to) in &edges {
                charged[from] |= from != last && precedes[from] && !precedes[to];
            }
        }
        out_bytes.iter().zip(charged).filter(|(_, charged)| *charged).map(|(bytes, _)| *bytes).sum()
    }
}

fn stages(start: usize, end: usize) -> String {
    if end == start + 1 { format!("stage {start}") } else { format!("stages {start} to {}", end - 1) }
}
