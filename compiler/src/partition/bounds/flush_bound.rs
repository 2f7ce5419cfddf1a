//! Lower bound on the time of plans that flush the pipeline after each minibatch.
//!
//! The time is that of one of many minibatches: the first stage starts the next one as soon as its own weights are
//! updated, while later stages may still reduce theirs. With n = ⌈m / r⌉ micro-batches on the busiest of r replicas, a
//! stage with forward F and backward B per micro-batch takes at least
//!
//! ```text
//! fill + n (F + B - W) + drain        fill, drain: way of a micro-batch to the stage, and of its gradients from it
//! fill + back + n (B - W) + drain     back: way from the first forward of the stage to the first gradients that reach it
//! n (F + B) + S                       S = max(R - B, 0) + X
//! back + n B + S
//! fill + n t + drain                  t: messages that the stage sends per micro-batch
//! fill + n u + B - W + drain          u: messages that it receives
//! n u + R                             on one level, where both use the same port
//! ```
//!
//! | symbol | meaning |
//! | --- | --- |
//! | W | weight gradients, if the schedule splits the backward; else 0 |
//! | R, X | all-reduce of the stage, which overlaps with one backward at most, and exchange of tied parameters |
//!
//! A stage waits for an op only if a path leads from it. So the model is divided at the ops that every other op precedes
//! or follows ([`Chain`]). The shortest time for which D devices suffice is found by bisection; for each time, a dynamic
//! program over the cuts finds the fewest devices.
//!
//! With several stages per rank, p ranks of r replicas take at least the longest of n Σ (F + B) / p, of the way of one
//! micro-batch, and of the all-reduce of 1 / p of all gradient sums.

use crate::cluster::{Cluster, class};
use crate::partition::bounds::chain::{Chain, Work};
use crate::plan::links::{self, Wire};
use crate::plan::problem::{CostModel, Objective, Problem};
use crate::plan::schedule::Schedule;
use crate::plan::zero::Zero;
use crate::profile::cost_graph::CostGraph;

/// Relative precision of the bisection.
const CLOSE: f64 = 4e-3;

/// A plan is as fast as the bound if no plan can be faster by this fraction.
const CLOSEST: f64 = 1e-7;

/// Largest number of messages before a stage that is counted.
const MOST_MESSAGES: usize = 7;

/// Cuts of a chain; on large clusters more of them are reached.
const MOST_CUTS: usize = 800;
const LARGE: u32 = 64;
const MOST_CUTS_ON_LARGE: usize = 300;

/// What a stage takes, whatever its replicas and the messages before its last.
#[derive(Clone, Copy)]
struct Stage {
    /// The way of the first micro-batch to the stage, and of the last one's gradients from it.
    fill_us: f64,
    drain_us: f64,
    /// From the first forward to the first gradients that reach the stage.
    back_us: f64,
    /// The way to what makes the first of its inputs, and from there.
    made_us: f64,
    unmade_us: f64,
    has_gradients: bool,
    /// Forward and backward per micro-batch, and the part that must end before the drain.
    work_us: f64,
    in_flow_us: f64,
    /// The backward at least, the part of it before the drain, and the backward at most.
    least_backward_us: f64,
    least_back_us: f64,
    backward_us: f64,
    /// A message over an earlier cut.
    message_us: f64,
    /// Messages per micro-batch.
    sent_us: f64,
    received_us: f64,
    tied_us: f64,
    /// Bytes that replicas all-reduce.
    summed: f64,
}

/// The bound of one problem, whatever its schedule.
pub struct FlushBound {
    chain: Chain,
    microbatches: f64,
    devices: u32,
    /// The speed of all devices together, and of the fastest one.
    speed: f64,
    fastest: f64,
    is_mixed: bool,
    /// The fastest link.
    link: Wire,
    levels: f64,
    /// ZeRO 3 reduces half as much, and gathers the parameters for every forward and backward, without overlap. With
    /// parameters half as wide as gradients, that takes as long as one all-reduce or longer.
    zero3: f64,
    /// Microseconds of an all-reduce over at least this many replicas: latency, and per byte.
    rings: Vec<(f64, f64)>,
}

/// What is left open in a search for which a bound is computed.
#[derive(Clone, Copy)]
struct Rules {
    splits_backward: bool,
    /// The part of the all-reduce that counts under the highest ZeRO stage.
    reduced: f64,
    /// For any smaller micro-batches: without fill, drain and rounding.
    is_steady: bool,
}

impl FlushBound {
    /// The bound of problems under cost model `pipec` that train with flushes.
    pub fn of(graph: &CostGraph, cluster: &Cluster, microbatches: u32) -> FlushBound {
        let devices = cluster.devices();
        let most_cuts = if devices > LARGE { MOST_CUTS_ON_LARGE } else { MOST_CUTS };
        let levels = &cluster.levels;
        let trained = graph.params.iter().filter(|param| param.sum_bytes > 0);
        let narrowest = trained.map(|param| param.bytes as f64 / param.sum_bytes as f64).fold(1.0, f64::min);
        FlushBound {
            chain: Chain::of(graph, most_cuts),
            microbatches: f64::from(microbatches.max(1)),
            devices,
            speed: class::together(cluster),
            fastest: class::fastest(&cluster.classes),
            is_mixed: !cluster.classes.is_empty(),
            link: Wire {
                level: 0,
                latency_us: levels.iter().map(|level| level.latency.0 * 1e6).fold(f64::INFINITY, f64::min),
                bytes_per_us: levels.iter().map(|level| level.bandwidth.0 / 1e6).fold(0.0, f64::max),
            },
            levels: levels.len() as f64,
            zero3: (0.5 + narrowest).min(1.0),
            rings: rings(cluster),
        }
    }

    /// The bound for micro-batches of a part of this size, if those are not computed faster.
    pub fn of_part(graph: &CostGraph, part: f64, cluster: &Cluster, microbatches: u32) -> FlushBound {
        let mut graph = graph.clone();
        for op in &mut graph.ops {
            (op.fwd_us, op.bwd_us) = (op.fwd_us * part, op.bwd_us * part);
            op.weight_grad_us = op.weight_grad_us.map(|us| us * part);
        }
        graph.tensors.iter_mut().for_each(|tensor| tensor.bytes = (tensor.bytes as f64 * part) as u64);
        FlushBound::of(&graph, cluster, microbatches)
    }

    /// True if the bound holds for the plans of a problem.
    pub fn holds_for(problem: &Problem) -> bool {
        let Problem { schedule, cost, objective, .. } = problem;
        let is_flow = *cost == CostModel::Pipec && *objective == Objective::Throughput;
        is_flow && schedule.trains() && schedule.flushes() && !schedule.is_custom()
    }

    /// A lower bound in microseconds from compute alone: all of it spread over all devices, or the way of one micro-batch
    /// without its weight gradients on groups of this many devices.
    pub fn compute_us(&self, degree: u32) -> f64 {
        let Work { forward_us, input_us, .. } = self.chain.all_ways();
        self.spread_us().max((forward_us + input_us) / self.fastest / f64::from(degree))
    }

    /// All compute spread over all devices.
    pub fn spread_us(&self) -> f64 {
        let Work { forward_us, backward_us, .. } = self.chain.total();
        (forward_us + backward_us) * self.microbatches / self.speed
    }

    /// A lower bound in microseconds under any of these schedules and ZeRO up to `zero`; `known_us`, the time of
    /// a plan, if no plan is faster.
    pub fn least_us(&self, schedules: &[Schedule], zero: Zero, known_us: f64) -> f64 {
        self.under(schedules, zero, known_us, false)
    }

    /// The same for all smaller micro-batches, if those are not computed faster.
    pub fn smaller_us(&self, schedules: &[Schedule], zero: Zero, known_us: f64) -> f64 {
        self.under(schedules, zero, known_us, true)
    }

    fn under(&self, schedules: &[Schedule], zero: Zero, known_us: f64, is_steady: bool) -> f64 {
        let low_us = if is_steady { self.spread_us() } else { self.compute_us(1) };
        if self.is_mixed || low_us >= known_us || !known_us.is_finite() {
            return low_us.min(known_us);
        }
        let splits_backward = schedules.iter().any(|schedule| schedule.splits_backward());
        let reduced = match zero {
            Zero { level: 0..3, .. } => 1.0,
            // Groups gather within fast levels.
            Zero { degree: 1.., .. } => 0.5,
            Zero { degree: 0, .. } => self.zero3,
        };
        let rules = Rules { splits_backward, reduced, is_steady };
        let mut us = known_us;
        if schedules.iter().any(|schedule| schedule.has_chunks()) {
            us = us.min(self.chunked_us(&rules)).max(low_us);
        }
        if schedules.iter().any(|schedule| !schedule.has_chunks()) {
            us = self.single_us(&rules, low_us, us);
        }
        us
    }

    /// The bound with one stage per device.
    fn single_us(&self, rules: &Rules, low_us: f64, known_us: f64) -> f64 {
        let (mut low_us, mut high_us) = (low_us, known_us * (1.0 - CLOSEST));
        if low_us >= high_us || !self.is_possible(rules, high_us) {
            return known_us;
        }
        while high_us - low_us > CLOSE * high_us {
            let us = 0.5 * (low_us + high_us);
            match self.is_possible(rules, us) {
                true => high_us = us,
                false => low_us = us,
            }
        }
        low_us
    }

    /// The bound with several stages per rank.
    fn chunked_us(&self, rules: &Rules) -> f64 {
        let total_us = self.chain.total().us();
        let way = self.chain.all_ways();
        let way_us = way.forward_us + if rules.splits_backward { way.input_us } else { way.backward_us };
        let of = |ranks: u32, replicas: u32| {
            let p = f64::from(ranks);
            let dealt = self.microbatches / f64::from(replicas);
            let dealt = if rules.is_steady { dealt } else { dealt.ceil() };
            let reduced_us = rules.reduced * self.all_reduce_us(replicas, self.chain.all_summed() / p);
            (dealt * total_us / p).max(reduced_us).max(if rules.is_steady { 0.0 } else { way_us })
        };
        let choices = (1..=self.devices).flat_map(|ranks| (1..=self.devices / ranks).map(move |r| (ranks, r)));
        choices.map(|(ranks, replicas)| of(ranks, replicas)).fold(f64::INFINITY, f64::min)
    }

    fn all_reduce_us(&self, replicas: u32, bytes: f64) -> f64 {
        let (latency_us, us_per_byte) = self.rings[replicas as usize];
        if replicas > 1 && bytes > 0.0 { latency_us + us_per_byte * bytes } else { 0.0 }
    }
}

/// Latency and time per byte of an all-reduce over at least 0, 1, 2, … replicas, wherever they are.
fn rings(cluster: &Cluster) -> Vec<(f64, f64)> {
    let (levels, devices) = (&cluster.levels, cluster.devices());
    let inner = levels[0].count.clamp(1, devices);
    let mut least = vec![(f64::INFINITY, f64::INFINITY); devices as usize + 1];
    for replicas in (0..=devices).rev() {
        let above = least.get(replicas as usize + 1).copied().unwrap_or((f64::INFINITY, f64::INFINITY));
        let starts = 0..inner.min(devices - replicas + 1);
        let places = starts.map(|first| {
            let us = |bytes: f64| links::all_reduce_us(&links::rings_of_range(levels, first, replicas, bytes));
            let latency = us(0.0);
            (latency, us(1e6) / 1e6 - latency / 1e6)
        });
        least[replicas as usize] =
            places.fold(above, |least, place| (least.0.min(place.0), least.1.min(place.1.max(0.0))));
    }
    least
}

impl FlushBound {
    /// False if no plan with one stage per device takes only `us`.
    fn is_possible(&self, rules: &Rules, us: f64) -> bool {
        let us = us * (1.0 + 1e-9);
        let cuts = &self.chain.cuts;
        let end = cuts.len() - 1;
        let most = MOST_MESSAGES.min(self.devices as usize - 1);
        // The fewest devices for the stages up to a cut, by the number of cuts between elements up to there.
        let mut fewest = vec![u32::MAX; cuts.len() * (most + 1)];
        fewest[0] = 0;
        for from in 0..end {
            let states = &fewest[from * (most + 1)..(from + 1) * (most + 1)];
            // More messages are worse, unless they save devices.
            let mut open: Vec<(usize, u32)> = Vec::new();
            for (messages, &before) in states.iter().enumerate() {
                if before < open.last().map_or(self.devices, |(_, least)| *least) {
                    open.push((messages, before));
                }
            }
            let Some(&(_, least)) = open.last() else { continue };
            for to in from + 1..=end {
                let stage = self.stage(rules, from, to);
                for &(messages, before) in &open {
                    let after = (messages + usize::from(cuts[to].is_between())).min(most);
                    let known = fewest[to * (most + 1) + after];
                    let left = (self.devices - before).min(known.saturating_sub(before + 1));
                    if let Some(replicas) = self.replicas(rules, &stage, messages, us, left) {
                        if to == end {
                            return true;
                        }
                        fewest[to * (most + 1) + after] = before + replicas;
                    }
                }
                let dealt = within(us, stage.work_us);
                if dealt * f64::from(self.devices - least) < self.microbatches {
                    break;
                }
            }
        }
        false
    }

    /// A stage between two cuts, apart from messages before the last.
    fn stage(&self, rules: &Rules, from: usize, to: usize) -> Stage {
        let chain = &self.chain;
        let back = |work: &Work| if rules.splits_backward { work.input_us } else { work.backward_us };
        let passes_gradients = chain.passes_gradients();
        let time = |bytes: Option<f64>| bytes.map_or(0.0, |bytes| self.link.time(bytes));
        let (entry_us, exit_us) = (time(chain.entry(from)), time(chain.exit(to)));
        let (before, after) = (chain.way(from, to), chain.way_after(to));
        let (least, most) = (chain.least(from, to), chain.most(from, to));
        let work_us = chain.work_us(from, to);
        let is_back = before.backward_us > 0.0;
        let (moved, since) = chain.received_and_sent(from, to);
        let [comes_in, goes_out] = moved.map(|bytes| bytes / self.link.bytes_per_us);
        let made = chain.way_before(since);
        let joined = |left: f64, right: f64| if self.levels == 1.0 { left + right } else { left.max(right) };
        let (tied, tied_bytes) = chain.tied(from, to);
        let stage = Stage {
            fill_us: before.forward_us + entry_us,
            drain_us: back(&before) + if is_back { entry_us } else { 0.0 },
            back_us: after.forward_us + back(&after) + if passes_gradients { 2.0 * exit_us } else { 0.0 },
            made_us: made.forward_us,
            unmade_us: back(&made),
            has_gradients: is_back,
            work_us,
            in_flow_us: work_us - if rules.splits_backward { most.backward_us - most.input_us } else { 0.0 },
            least_backward_us: least.backward_us,
            least_back_us: back(&least),
            backward_us: most.backward_us,
            message_us: self.link.time(chain.least_before(from)),
            sent_us: joined(if is_back { comes_in } else { 0.0 }, goes_out),
            received_us: joined(comes_in, if passes_gradients { goes_out } else { 0.0 }),
            tied_us: 2.0 * tied * self.link.latency_us + tied_bytes / self.link.bytes_per_us,
            summed: chain.summed(from, to),
        };
        let (fill_us, drain_us, back_us) = (0.0, 0.0, 0.0);
        let flow = Stage { fill_us, drain_us, back_us, made_us: 0.0, unmade_us: 0.0, message_us: 0.0, ..stage };
        if rules.is_steady { flow } else { stage }
    }

    /// Micro-batches that a replica of the stage can do in time, after some messages, if its all-reduce takes this long.
    fn micro_batches(&self, rules: &Rules, stage: &Stage, messages: usize, us: f64, all_reduce_us: f64) -> f64 {
        let earlier_us = messages.saturating_sub(1) as f64 * stage.message_us;
        let fill_us = stage.fill_us + earlier_us;
        let drain_us = stage.drain_us + if stage.has_gradients { earlier_us } else { 0.0 };
        let after_us = (all_reduce_us - stage.backward_us).max(0.0) + stage.tied_us;
        let least_back_us = if rules.is_steady { 0.0 } else { stage.least_back_us };
        let reduced_us = if self.levels == 1.0 { all_reduce_us } else { 0.0 };
        let dealt = within(us - after_us, stage.work_us)
            .min(within(us - fill_us - drain_us, stage.in_flow_us))
            .min(within(us - stage.back_us - after_us, stage.least_backward_us))
            .min(within(us - fill_us - stage.back_us - drain_us, stage.least_back_us))
            .min(within(us - fill_us - stage.unmade_us, stage.sent_us))
            .min(within(us - stage.made_us - least_back_us - drain_us, stage.received_us))
            .min(within(us - reduced_us, stage.received_us));
        if rules.is_steady { dealt } else { dealt.floor() }
    }

    /// The fewest replicas with which the stage ends in time; `None` if more than `most`.
    fn replicas(&self, rules: &Rules, stage: &Stage, messages: usize, us: f64, most: u32) -> Option<u32> {
        let mut replicas = 1;
        loop {
            let all_reduce_us = rules.reduced * self.all_reduce_us(replicas, stage.summed);
            let dealt = self.micro_batches(rules, stage, messages, us, all_reduce_us);
            let needed = (self.microbatches / dealt).ceil();
            if needed > f64::from(most) {
                return None;
            }
            if needed as u32 <= replicas {
                return Some(replicas);
            }
            replicas = needed as u32;
        }
    }
}

/// The micro-batches of this length in a time.
fn within(us: f64, each_us: f64) -> f64 {
    us.max(0.0) / each_us.max(1e-12)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;
    use crate::partition::bounds::random::Random;
    use crate::partition::bounds::test_graphs::graph;
    use crate::partition::dp::nested_partition::Shape;
    use crate::partition::options::PlannerOptions;
    use crate::partition::planner::plan;
    use crate::partition::search::build_plan::{self, Recompute, StagePosition};
    use crate::partition::search::simulate_candidate::played;
    use crate::plan::problem::InFlight;
    use crate::plan::{Edge, Stage as PlannedStage};
    use crate::simulate::one_f_one_b_rr::Steady;

    fn problem(random: &mut Random) -> Problem {
        let graph = graph(random);
        let cluster =
            ["1:1GB/s", "2:1GB/s", "4:1GB/s", "6:100GB/s", "5:0.3GB/s", "2:4GB/s,2:1GB/s"][random.below(6) as usize];
        let mut problem = Problem::new(graph, levels(cluster).unwrap(), CostModel::Pipec);
        let schedules = [Schedule::OneFOneB, Schedule::Gpipe, Schedule::ZbH1, Schedule::ZbH2, Schedule::Interleaved];
        problem.schedule = schedules[random.below(5) as usize];
        problem.chunks = if problem.schedule.has_chunks() { 2 } else { 1 };
        problem.microbatches = 1 + random.below(9) as u32;
        problem.zero = Zero::over_all([0, 0, 0, 1, 3][random.below(5) as usize]);
        problem
    }

    /// Nothing waits in a steady state, which is not simulated under a flush.
    fn free(stages: &[PlannedStage], _: &[Edge], _: &[u32]) -> Steady {
        Steady { share: 1.0, held: vec![false; stages.len()], pieces: 0 }
    }

    /// The simulated time of stages with random ops, devices, in-flight limits and order of branches.
    fn plan_us(random: &mut Random, problem: &Problem) -> Option<f64> {
        let (graph, devices) = (&problem.graph, problem.cluster.devices());
        let edges = graph.edges();
        let mut order: Vec<u32> = Vec::new();
        while order.len() < graph.ops.len() {
            let is_ready =
                |op: &u32| !order.contains(op) && edges.iter().all(|(from, to)| to.0 != *op || order.contains(&from.0));
            let ready: Vec<u32> = (0..graph.ops.len() as u32).filter(is_ready).collect();
            order.push(ready[random.below(ready.len() as u64) as usize]);
        }
        let (mut stages, mut positions): (Vec<(Vec<u32>, u32)>, Vec<StagePosition>) = (Vec::new(), Vec::new());
        let (mut first, is_dense) = (0, random.below(2) == 0);
        let (ranks, equal) = match problem.chunks {
            1 => (0, 0),
            _ if devices < 2 => return None,
            _ => (2 + random.below(u64::from(devices / 2)) as u32, 1 + random.below(2) as u32),
        };
        for op in order {
            let is_full = problem.chunks > 1 && stages.len() as u32 == ranks * problem.chunks;
            let starts = stages.is_empty() || !is_full && (is_dense || random.below(2) == 0);
            if starts && (problem.chunks > 1 || first < devices) {
                let left = u64::from(devices.saturating_sub(first).max(1));
                let replicas = if problem.chunks > 1 { equal } else { 1 + random.below(left.min(3)) as u32 };
                let at = if problem.chunks > 1 { stages.len() as u32 % ranks * equal } else { first };
                positions.push(StagePosition { first: at, recompute: Recompute::None });
                stages.push((Vec::new(), replicas));
                first += replicas;
            }
            stages.last_mut()?.0.push(op);
        }
        if problem.chunks > 1 && (stages.len() as u32 != ranks * problem.chunks || ranks * equal > devices) {
            return None;
        }
        stages.iter_mut().for_each(|(ops, _)| ops.sort_unstable());
        let caps: Vec<u32> = stages.iter().map(|_| 1 + random.below(u64::from(problem.microbatches)) as u32).collect();
        let replicas: Vec<u32> = stages.iter().map(|(_, replicas)| *replicas).collect();
        let caps = if random.below(2) == 0 { caps } else { build_plan::caps(problem, &replicas) };
        let problem = Problem { in_flight: InFlight::Given(caps.clone()), ..problem.clone() };
        let shape = Shape::flat(stages, problem.cluster.levels.len() > 1);
        let us = played(&problem, &shape, &positions, &caps, f64::INFINITY, Some(&free)).minibatch_us;
        us.is_finite().then_some(us)
    }

    #[test]
    fn no_plan_is_faster() {
        for seed in 0..500 {
            let random = &mut Random(seed);
            let problem = problem(random);
            let bound = FlushBound::of(&problem.graph, &problem.cluster, problem.microbatches);
            let mut plans: Vec<_> = (0..60).filter_map(|_| plan_us(random, &problem)).collect();
            let options = PlannerOptions { efficiency: Some(&free), ..PlannerOptions::default() };
            plans.extend(plan(&problem, &options).ok().map(|planned| planned.plan.predicted.minibatch_us));
            let best_us = plans.into_iter().fold(f64::INFINITY, f64::min);
            let bound_us = bound.least_us(&[problem.schedule], problem.zero, 2.0 * best_us);
            let smaller_us = bound.smaller_us(&[problem.schedule], problem.zero, 2.0 * best_us);
            assert!(bound_us <= best_us * (1.0 + 1e-9), "seed {seed}: {bound_us} > {best_us}");
            assert!(smaller_us <= bound_us * (1.0 + CLOSE), "seed {seed}: {smaller_us} > {bound_us}");
        }
    }
}
