//! The effect of moving one op across each cut, computed by the plan checker.
//!
//! No partitioner runs: an op is moved to the other stage, and `plan::check` evaluates the result. Of several movable
//! ops, the one with the shortest resulting minibatch time is reported; ties are broken by peak memory.

use crate::export::report::{CutCost, ModelInfo, Move};
use crate::plan::Plan;
use crate::plan::check::verify;
use crate::plan::problem::Problem;
use std::collections::BTreeSet;

/// Maximum number of ops tried per side of a cut.
const TRIED: usize = 12;
/// Limit on the number of cuts times the number of ops.
const WORK: usize = 4_000_000;

/// The model's costs under the plan, and the effect of moving each cut.
pub fn modelled(problem: Problem, plan: &Plan) -> ModelInfo {
    let faults = match verify::check(&problem, plan) {
        Ok(_) => Vec::new(),
        Err(faults) => faults.iter().take(8).map(ToString::to_string).collect(),
    };
    let cuts = if faults.is_empty() { Cuts::new(&problem, plan).cut_costs() } else { Vec::new() };
    ModelInfo { graph: problem.graph, cuts, faults }
}

struct Cuts<'a> {
    problem: &'a Problem,
    /// The plan without the fields that the checker's evaluation does not read.
    base: Plan,
    stage_of: Vec<usize>,
    /// Ops that must be in the same stage, by the id of their leader; empty for other ops.
    group: Vec<Vec<u32>>,
    /// Producers of the tensors an op reads, and consumers of its outputs.
    before: Vec<Vec<usize>>,
    after: Vec<Vec<usize>>,
}

impl<'a> Cuts<'a> {
    fn new(problem: &'a Problem, plan: &Plan) -> Cuts<'a> {
        let ops = problem.graph.ops.len();
        let mut stage_of = vec![0; ops];
        for (at, stage) in plan.stages.iter().enumerate() {
            stage.op_ids().for_each(|op| stage_of[op as usize] = at);
        }
        let mut group: Vec<Vec<u32>> = vec![Vec::new(); ops];
        for op in &problem.graph.ops {
            group[op.joins.map_or(op.id as usize, |leader| leader.index())].push(op.id);
        }
        let (mut before, mut after) = (vec![Vec::new(); ops], vec![Vec::new(); ops]);
        for tensor in &problem.graph.tensors {
            for to in &tensor.consumers {
                before[to.index()].push(tensor.producer.index());
                after[tensor.producer.index()].push(to.index());
            }
        }
        let mut base = plan.clone();
        base.edges.clear();
        for stage in &mut base.stages {
            stage.op_names.clear();
            stage.modules.clear();
        }
        Cuts { problem, base, stage_of, group, before, after }
    }

    fn cut_costs(&self) -> Vec<CutCost> {
        let stages = self.base.stages.len();
        let affordable = WORK / self.stage_of.len().max(1) / (2 * TRIED);
        let cut_cost = |before: usize| {
            let crosses = |from: usize, to: usize| from <= before && to > before;
            let crossing = self.problem.graph.tensors.iter().filter(|tensor| {
                let from = self.stage_of[tensor.producer.index()];
                tensor.consumers.iter().any(|to| crosses(from, self.stage_of[to.index()]))
            });
            let (tensors, bytes) =
                crossing.fold((0, 0u64), |(count, sum), tensor| (count + 1, sum.saturating_add(tensor.bytes)));
            let is_tried = before < affordable.max(4);
            let best_move = |from, to| if is_tried { self.best_move(from, to) } else { None };
            CutCost {
                before,
                bytes,
                tensors,
                earlier: best_move(before, before + 1),
                later: best_move(before + 1, before),
            }
        };
        (0..stages.saturating_sub(1)).map(cut_cost).collect()
    }

    fn best_move(&self, from: usize, to: usize) -> Option<Move> {
        let leaders = (0..self.group.len()).filter(|&op| !self.group[op].is_empty() && self.stage_of[op] == from);
        let movable = leaders.filter(|&op| self.can_move(op, from, to));
        // Start with the ops next to the cut: the last ops of the stage before, the first ops of the stage after.
        let mut movable: Vec<usize> = movable.collect();
        if to > from {
            movable.reverse();
        }
        let size: usize =
            self.group.iter().enumerate().filter(|(op, _)| self.stage_of[*op] == from).map(|(_, g)| g.len()).sum();
        let moves = movable.into_iter().filter(|&op| self.group[op].len() < size).take(TRIED);
        let moves = moves.filter_map(|op| self.evaluate_move(op, to));
        moves.min_by(|a, b| a.minibatch_us.total_cmp(&b.minibatch_us).then(a.peak_bytes.cmp(&b.peak_bytes)))
    }

    /// True if no consumer (moving forward) or producer (moving backward) of the op remains in its stage.
    fn can_move(&self, leader: usize, from: usize, to: usize) -> bool {
        let members: BTreeSet<usize> = self.group[leader].iter().map(|op| *op as usize).collect();
        let neighbours = if to > from { &self.after } else { &self.before };
        members
            .iter()
            .flat_map(|&op| &neighbours[op])
            .filter(|other| !members.contains(other))
            .all(|&other| self.stage_of[other] != from)
    }

    fn evaluate_move(&self, leader: usize, to: usize) -> Option<Move> {
        let mut stage_of = self.stage_of.clone();
        self.group[leader].iter().for_each(|&op| stage_of[op as usize] = to);
        let mut plan = self.base.clone();
        plan.stages.iter_mut().for_each(|stage| stage.ops.clear());
        for (op, &stage) in (0u32..).zip(&stage_of) {
            let ranges = &mut plan.stages[stage].ops;
            match ranges.last_mut() {
                Some((_, end)) if *end == op => *end += 1,
                _ => ranges.push((op, op + 1)),
            }
        }
        let evaluation = verify::evaluate(self.problem, &plan).ok()?;
        let peak_bytes = evaluation.memory.iter().map(|memory| memory.total).max().unwrap_or(0);
        let fits = self.problem.memory_limit.is_none_or(|limit| peak_bytes <= limit.0);
        Some(Move { ops: self.group[leader].clone(), minibatch_us: evaluation.minibatch_us, peak_bytes, fits })
    }
}
