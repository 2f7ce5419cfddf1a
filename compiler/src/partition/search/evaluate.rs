//! The memory and the simulated time of stages along an order of the ops, for a search that asks for thousands.
//!
//! A stage is a range of the order. What a range costs is computed once; stages that differ only in their devices share
//! it. The results are those of `build_plan` and `simulate_candidate`.

use crate::partition::search::build_plan::{self, Placed, Recompute, StageCosts, StagePosition};
use crate::partition::search::partial_recompute;
use crate::partition::search::range_costs::RangeCosts;
use crate::plan::cost_estimate::{FlowQuery, outlook};
use crate::plan::memory::{MemoryMultipliers, MemoryTerms};
use crate::plan::problem::{Problem, Recomputation};
use crate::plan::schedule::Schedule;
use crate::plan::tied;
use crate::plan::{Edge, RecomputedOps, Stage, StageId};
use crate::profile::cost_graph::ParamCost;
use crate::profile::recompute_scope::{RecomputeCosts, RecomputeTerms};
use crate::schedule::Pipeline;
use crate::schedule::pipeline::{generated, pipeline_of};
use crate::simulate::step_time;
use std::collections::HashMap;

/// Stages along an order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Stages {
    /// Where stages begin and end in the order.
    pub ends: Vec<usize>,
    pub replicas: Vec<u32>,
    /// The first device of each stage, if they are not side by side.
    pub firsts: Option<Vec<u32>>,
    /// Micro-batches in flight beyond the schedule's rule.
    pub more: Vec<u32>,
}

impl Stages {
    /// Stages side by side, with the schedule's in-flight limits.
    pub fn new(ends: Vec<usize>, replicas: Vec<u32>) -> Stages {
        Stages { ends, more: vec![0; replicas.len()], replicas, firsts: None }
    }
}

/// The stages of a plan that fits.
#[derive(Clone, Debug)]
pub struct Evaluated {
    pub spots: Vec<StagePosition>,
    pub caps: Vec<u32>,
    /// By the closed form.
    pub estimate_us: f64,
    stages: Vec<Stage>,
    edges: Vec<Edge>,
}

/// The costs of a range, without and with recomputation.
struct Range {
    terms: MemoryTerms,
    costs: [Option<StageCosts>; 2],
    first: Option<Vec<FirstOps>>,
}

/// The first ops of a range that may be recomputed without the others.
#[derive(Clone, Copy)]
struct FirstOps {
    recompute_us: f64,
    terms: RecomputeTerms,
}

pub struct Evaluator<'a> {
    problem: &'a Problem,
    asked: FlowQuery,
    order: &'a [u32],
    costs: &'a RangeCosts<'a>,
    ranges: HashMap<(usize, usize), Range>,
    /// The position of each op in the order.
    place: Vec<u32>,
    /// Parameters with several users.
    tied: Vec<ParamCost>,
    /// What recomputation frees, and the tensors of each op; once they are needed.
    recomputation: Option<(RecomputeCosts, Vec<Vec<usize>>)>,
}

impl<'a> Evaluator<'a> {
    /// `costs` are those of all cuts of the order.
    pub fn new(problem: &'a Problem, order: &'a [u32], costs: &'a RangeCosts<'a>) -> Evaluator<'a> {
        let mut place = vec![0; order.len()];
        order.iter().enumerate().for_each(|(at, &op)| place[op as usize] = at as u32);
        let tied = costs.tied().cloned().collect();
        let (asked, ranges) = (build_plan::asked(problem), HashMap::new());
        Evaluator { problem, asked, order, costs, ranges, place, tied, recomputation: None }
    }

    /// The time of a minibatch by the closed form, whether the stages fit or not.
    pub fn closed_form_us(&mut self, wanted: &Stages) -> f64 {
        let (caps, spots) = (self.caps(wanted), self.spots(wanted));
        let edges = self.edges(wanted);
        self.estimate_us(wanted, &spots, &caps, &edges)
    }

    fn spots(&self, wanted: &Stages) -> Vec<StagePosition> {
        let recompute = self.problem.recomputation().is_full().into();
        let firsts = wanted.firsts.clone().unwrap_or_else(|| build_plan::firsts(&wanted.replicas));
        firsts.into_iter().map(|first| StagePosition { first, recompute }).collect()
    }

    /// The stages if they fit, recomputed where they do not fit otherwise. `None` also if the closed form is above
    /// `most_us`.
    pub fn evaluate(&mut self, wanted: &Stages, most_us: f64) -> Option<Evaluated> {
        let problem = self.problem;
        let caps = self.caps(wanted);
        let full = problem.recomputation().is_full();
        let mut spots = self.spots(wanted);
        let edges = self.edges(wanted);
        let us = self.estimate_us(wanted, &spots, &caps, &edges);
        if us > most_us {
            return None;
        }
        // The time of each stage's recomputation in the end: no more than it needs to fit.
        let mut recompute_us: Vec<Option<f64>> = vec![None; spots.len()];
        let mut is_slower = false;
        let mut memory = Vec::with_capacity(spots.len());
        let pending = build_plan::pending_weight_grads(problem, &wanted.replicas, &caps);
        let multiples = build_plan::multiples(problem, &wanted.replicas, &caps, &pending);
        for (at, multiples) in multiples.into_iter().enumerate() {
            let (first, replicas) = (spots[at].first, wanted.replicas[at]);
            let pace = build_plan::pace(problem, &spots[at], replicas);
            let limit = problem.limit_of(first..first + replicas).unwrap_or(u64::MAX);
            let terms = self.range(wanted, at).terms;
            let held = |recompute: bool| terms.held(&MemoryMultipliers { recompute, ..multiples });
            memory.push(held(full));
            if memory[at].total <= limit {
                continue;
            }
            memory[at] = held(true);
            if problem.recomputation() != Recomputation::Auto || memory[at].total > limit {
                return None;
            }
            spots[at].recompute = Recompute::All;
            let multiples = MemoryMultipliers { recompute: true, ..multiples };
            let first = self.first_ops(wanted, at);
            let fits =
                |first: &FirstOps| MemoryTerms { recompute: first.terms, ..terms }.held(&multiples).total <= limit;
            let least = first.partition_point(|first| !fits(first));
            recompute_us[at] = first.get(least).map(|first| first.recompute_us / pace);
            is_slower = true;
        }
        let estimate_us = if is_slower { self.estimate_us(wanted, &spots, &caps, &edges) } else { us };
        let stages = (0..spots.len()).map(|at| {
            let placed = self.placed(wanted, &spots, at);
            let mut stage = self.costs_of(wanted, at, spots[at].recompute).stage(problem, &placed);
            if let Some(fwd_us) = recompute_us[at].filter(|_| stage.recompute) {
                stage.bwd_us -= stage.recompute_us() - fwd_us;
                stage.recomputed = Some(RecomputedOps { ops: 0, layers: None, fwd_us });
            }
            Stage { id: StageId(at as u32), memory: memory[at], ..stage }
        });
        let mut stages: Vec<Stage> = stages.collect();
        stages.iter_mut().zip(self.tied_us(wanted, &spots)).for_each(|(stage, us)| stage.tied_us = us);
        Some(Evaluated { spots, caps, estimate_us, stages, edges })
    }

    /// The time of a minibatch in microseconds by a short simulation, and the work of it; the closed form if it cannot be
    /// simulated.
    pub fn simulated_us(&self, evaluated: &Evaluated) -> (f64, u64) {
        let (estimate_us, microbatches) = (evaluated.estimate_us, self.problem.microbatches);
        let Some((kind, pipeline)) = self.pipeline(evaluated) else { return (estimate_us, 0) };
        let us = step_time::short_step_us(kind, &pipeline, microbatches).ok().flatten();
        (us.unwrap_or(estimate_us), step_time::short_work(kind, &pipeline, microbatches))
    }

    /// The time of a minibatch in microseconds by a simulation; infinite if it cannot be simulated.
    pub fn whole_us(&self, evaluated: &Evaluated) -> f64 {
        let whole = self.pipeline(evaluated);
        let us = whole.and_then(|(kind, whole)| step_time::step_us(kind, &whole, self.problem.microbatches).ok()?);
        us.unwrap_or(f64::INFINITY)
    }

    /// What is simulated.
    fn pipeline(&self, Evaluated { caps, stages, edges, .. }: &Evaluated) -> Option<(Schedule, Pipeline)> {
        let pipeline = pipeline_of(&self.problem.cluster.levels, stages, edges, caps).ok()?;
        Some((generated(self.problem.schedule).ok()?, pipeline))
    }

    /// The ops of a stage, sorted.
    pub fn ops(&self, stages: &Stages, at: usize) -> Vec<u32> {
        let mut ops = self.order[stages.ends[at]..stages.ends[at + 1]].to_vec();
        ops.sort_unstable();
        ops
    }

    fn caps(&self, stages: &Stages) -> Vec<u32> {
        let rule = build_plan::caps(self.problem, &stages.replicas);
        let raised = |((cap, more), replicas): ((u32, &u32), &u32)| match more {
            0 => cap,
            more if self.problem.schedule.is_continuous() => cap + more,
            more => (cap + more).min(self.problem.microbatches.div_ceil(*replicas).max(cap)),
        };
        rule.into_iter().zip(&stages.more).zip(&stages.replicas).map(raised).collect()
    }

    fn range(&mut self, stages: &Stages, at: usize) -> &mut Range {
        let (from, to) = (stages.ends[at], stages.ends[at + 1]);
        let costs = self.costs;
        self.ranges.entry((from, to)).or_insert_with(|| Range {
            terms: costs.run(from, to).holdings,
            costs: [None, None],
            first: None,
        })
    }

    /// What recomputing the first ops of a stage takes and frees; empty if it recomputes all or nothing.
    fn first_ops(&mut self, stages: &Stages, at: usize) -> &[FirstOps] {
        if self.range(stages, at).first.is_none() {
            let (problem, ops) = (self.problem, self.ops(stages, at));
            let fresh = || (RecomputeCosts::of(&problem.graph), partial_recompute::produced(problem));
            let (costs, produced) = self.recomputation.get_or_insert_with(fresh);
            let (from, to, place) = (stages.ends[at] as u32, stages.ends[at + 1] as u32, &self.place);
            let is_inside = |op: usize| (from..to).contains(&place[op]);
            let terms = partial_recompute::terms_of(problem, costs, produced, &ops, &is_inside);
            let mut us = vec![0.0];
            us.extend(ops.iter().scan(0.0, |sum, &op| {
                *sum += problem.graph.ops[op as usize].recompute_us();
                Some(*sum)
            }));
            let counts = partial_recompute::counts(problem, &ops).into_iter().map(|count| count as usize);
            let first = counts.map(|count| FirstOps { recompute_us: us[count], terms: terms[count] }).collect();
            self.range(stages, at).first = Some(first);
        }
        self.range(stages, at).first.as_deref().unwrap_or_default()
    }

    fn costs_of(&mut self, stages: &Stages, at: usize, recompute: Recompute) -> &StageCosts {
        let is_known = self.range(stages, at).costs[usize::from(recompute.is_any())].is_some();
        let fresh = (!is_known).then(|| StageCosts::of(self.problem, &self.ops(stages, at), recompute).without_names());
        let costs = &mut self.range(stages, at).costs[usize::from(recompute.is_any())];
        costs.get_or_insert_with(|| fresh.expect("it was computed if it was unknown"))
    }

    fn placed(&self, stages: &Stages, spots: &[StagePosition], at: usize) -> Placed {
        let replicas = stages.replicas[at];
        Placed { first: spots[at].first, replicas, pace: build_plan::pace(self.problem, &spots[at], replicas) }
    }

    fn estimate_us(&mut self, stages: &Stages, spots: &[StagePosition], caps: &[u32], edges: &[Edge]) -> f64 {
        let placed = (0..spots.len()).map(|at| {
            let placed = self.placed(stages, spots, at);
            let gradient_bytes = self.range(stages, at).terms.summed;
            self.costs_of(stages, at, spots[at].recompute).placed(&placed, gradient_bytes, caps[at])
        });
        let mut placed: Vec<_> = placed.collect();
        placed.iter_mut().zip(self.tied_us(stages, spots)).for_each(|(stage, us)| stage.tied_us = us);
        outlook(&self.asked, &self.problem.cluster.levels, &placed, edges).minibatch_us
    }

    fn stage_of(&self, stages: &Stages, op: usize) -> usize {
        let place = self.place[op] as usize;
        stages.ends.partition_point(|end| *end <= place) - 1
    }

    fn tied_us(&self, stages: &Stages, spots: &[StagePosition]) -> Vec<f64> {
        if !self.problem.schedule.trains() {
            return vec![0.0; spots.len()];
        }
        let places: Vec<(u32, u32)> =
            spots.iter().map(|spot| spot.first).zip(stages.replicas.iter().copied()).collect();
        let stage_of = |op: usize| self.stage_of(stages, op);
        tied::exchange_us(&self.problem.cluster.levels, &self.tied, &places, &stage_of)
    }

    /// The bytes between stages.
    fn edges(&self, stages: &Stages) -> Vec<Edge> {
        let stage_of = |op: usize| self.stage_of(stages, op) as u32;
        let mut bytes: HashMap<(u32, u32), u64> = HashMap::new();
        let mut readers: Vec<u32> = Vec::new();
        // A tensor that is sent crosses the first cut behind its producer.
        for &end in &stages.ends[1..stages.ends.len() - 1] {
            for &tensor in self.costs.crossing(end) {
                let tensor = &self.problem.graph.tensors[tensor as usize];
                let from = stage_of(tensor.producer.index());
                if stages.ends[from as usize + 1] != end {
                    continue;
                }
                readers.clear();
                readers.extend(tensor.consumers.iter().map(|op| stage_of(op.index())));
                readers.sort_unstable();
                readers.dedup();
                for &to in readers.iter().filter(|to| **to != from) {
                    *bytes.entry((from, to)).or_default() += tensor.bytes;
                }
            }
        }
        let mut edges: Vec<Edge> = bytes
            .into_iter()
            .map(|((from, to), bytes)| Edge { from: StageId(from), to: StageId(to), tensors: Vec::new(), bytes })
            .collect();
        edges.sort_unstable_by_key(|edge| (edge.from, edge.to));
        edges
    }
}
