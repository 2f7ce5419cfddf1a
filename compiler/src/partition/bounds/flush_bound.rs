//! Lower bound on the time of plans that flush the pipeline after each minibatch.
//!
//! The bound counts compute, fill and drain, messages and the all-reduce of a stage, for every chain of stages on D
//! devices. With n = ⌈m / r⌉ micro-batches on the busiest of r replicas, a stage with forward F and backward B per
//! micro-batch ends no earlier than
//!
//! ```text
//! fill + n (F + B - W) + drain        fill, drain: forward and backward of all ops before the stage, and k messages
//! fill + n (F + B) + S                S = max(R - B, 0) + X
//! back + n (B - W) + drain            back: forward of all ops, backward of those after the stage, and messages
//! back + n B + S
//! fill + n t + drain                  t: messages that the stage sends per micro-batch; drain without the last message
//! fill + n u + B - W + drain          u: messages that it receives; fill without the last message
//! fill + n u + R + X
//! ```
//!
//! | symbol | meaning |
//! | --- | --- |
//! | W | weight gradients, if the schedule splits the backward; else 0 |
//! | R, X | all-reduce of the stage, which overlaps with one backward at most, and exchange of tied parameters |
//! | k | cuts before the stage |
//!
//! A stage waits for an op only if a path leads from it. So the model is divided at the ops that every other op precedes
//! or follows ([`Chain`]). Between two of them the fill counts the longest path, and a cut may divide the work in any
//! way. The shortest time for which D devices suffice is found by bisection; for each time, a dynamic program over
//! the cuts finds the fewest devices.
//!
//! With several stages per rank, p ranks of r replicas take at least the longest of
//!
//! ```text
//! n Σ (F + B) / p
//! Σ (F + B - W) + 2 c messages        c = 2 (p - 1) cuts between ranks, as a micro-batch passes all ranks twice
//! 2 n c t / p
//! Σ F + c messages + R                R of 1 / p of all gradient sums
//! ```

use crate::cluster::{Cluster, class};
use crate::partition::bounds::chain::{Chain, Work};
use crate::plan::links::{self, Wire};
use crate::plan::problem::{CostModel, Objective, Problem};
use crate::plan::schedule::Schedule;
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

/// What a stage takes, and how its time depends on its number of micro-batches.
#[derive(Clone, Copy)]
struct Stage {
    /// The way of the first micro-batch to the stage.
    fill_us: f64,
    /// The way back of the last one from the stage before, and the message that takes its gradients there.
    drain_us: f64,
    returns_us: f64,
    has_gradients: bool,
    /// When the first gradients reach the stage, and when the stage receives the first message.
    returns_at_us: f64,
    receives_at_us: f64,
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

    /// True if the bound holds for the plans of a problem.
    pub fn holds_for(problem: &Problem) -> bool {
        let Problem { schedule, cost, objective, .. } = problem;
        let is_flow = *cost == CostModel::Pipec && *objective == Objective::Throughput;
        is_flow && schedule.trains() && schedule.flushes() && !schedule.is_custom()
    }

    /// A lower bound in microseconds from compute alone: all of it spread over all devices, or one micro-batch without
    /// its weight gradients on groups of this many devices.
    pub fn compute_us(&self, degree: u32) -> f64 {
        let Work { forward_us, input_us, .. } = self.chain.total();
        self.spread_us().max((forward_us + input_us) / self.fastest / f64::from(degree))
    }

    /// All compute spread over all devices.
    pub fn spread_us(&self) -> f64 {
        let Work { forward_us, backward_us, .. } = self.chain.total();
        (forward_us + backward_us) * self.microbatches / self.speed
    }

    /// A lower bound in microseconds under any of these schedules and ZeRO stages up to `zero`; `known_us`, the time of
    /// a plan, if no plan is faster.
    pub fn least_us(&self, schedules: &[Schedule], zero: u32, known_us: f64) -> f64 {
        self.under(schedules, zero, known_us, false)
    }

    /// The same for all smaller micro-batches, if those are not computed faster.
    pub fn smaller_us(&self, schedules: &[Schedule], zero: u32, known_us: f64) -> f64 {
        self.under(schedules, zero, known_us, true)
    }

    fn under(&self, schedules: &[Schedule], zero: u32, known_us: f64, is_steady: bool) -> f64 {
        let low_us = if is_steady { self.spread_us() } else { self.compute_us(1) };
        if self.is_mixed || low_us >= known_us || !known_us.is_finite() {
            return low_us.min(known_us);
        }
        let splits_backward = schedules.iter().any(|schedule| schedule.splits_backward());
        let rules = Rules { splits_backward, reduced: if zero >= 3 { self.zero3 } else { 1.0 }, is_steady };
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
        let Work { forward_us, backward_us, input_us } = self.chain.total();
        let backward_way_us = if rules.splits_backward { input_us } else { backward_us };
        let (ways, summed) = (if self.chain.passes_gradients() { 2.0 } else { 1.0 }, self.chain.all_summed());
        let message_us = self.link.time(self.chain.least_message);
        let of = |ranks: u32, replicas: u32| {
            let p = f64::from(ranks);
            let cuts = 2.0 * (p - 1.0);
            let dealt = self.microbatches / f64::from(replicas);
            let dealt = if rules.is_steady { dealt } else { dealt.ceil() };
            let work_us = dealt * (forward_us + backward_us) / p;
            let way_us = forward_us + backward_way_us + ways * cuts * message_us;
            let sent_us = dealt * ways * cuts * self.chain.least_message / self.link.bytes_per_us / p / self.levels;
            let reduced_us = rules.reduced * self.all_reduce_us(replicas, summed / p);
            let flow_us = work_us.max(sent_us).max(reduced_us);
            match rules.is_steady {
                true => flow_us,
                false => flow_us.max(way_us).max(forward_us + cuts * message_us + reduced_us),
            }
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
        let most = self.most_messages();
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
                let dealt = within(us - stage.fill_us, stage.work_us);
                if dealt * f64::from(self.devices - least) < self.microbatches {
                    break;
                }
            }
        }
        false
    }

    fn most_messages(&self) -> usize {
        MOST_MESSAGES.min(self.devices as usize - 1)
    }

    /// A stage between two cuts, apart from messages before the last.
    fn stage(&self, rules: &Rules, from: usize, to: usize) -> Stage {
        let chain = &self.chain;
        let back = |work: &Work| if rules.splits_backward { work.input_us } else { work.backward_us };
        let (is_first, is_last) = (from == 0, to + 1 == chain.cuts.len());
        let passes_gradients = chain.passes_gradients();
        let entry_us = chain.entry(from).map_or(0.0, |bytes| self.link.time(bytes));
        let before = chain.way(from, to);
        let (all, after) = chain.ways(to);
        let (least, most) = (chain.least(from, to), chain.most(from, to));
        let work_us = chain.work_us(from, to);
        let is_back = before.backward_us > 0.0;
        let [comes_in, goes_out] = chain.received_and_sent(from, to).map(|bytes| bytes / self.link.bytes_per_us);
        let joined = |left: f64, right: f64| if self.levels == 1.0 { left + right } else { left.max(right) };
        let (tied, tied_bytes) = chain.tied(from, to);
        let out_and_back_us = if is_last { 0.0 } else { 2.0 * self.link.time(chain.least_message) };
        let stage = Stage {
            fill_us: before.forward_us + entry_us,
            drain_us: back(&before),
            returns_us: if is_back { entry_us } else { 0.0 },
            returns_at_us: all.forward_us
                + back(&after)
                + entry_us
                + if passes_gradients { out_and_back_us } else { 0.0 },
            receives_at_us: if is_first { all.forward_us + back(&after) } else { before.forward_us },
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
            has_gradients: is_back,
        };
        let flow = Stage {
            message_us: 0.0,
            fill_us: 0.0,
            drain_us: 0.0,
            returns_us: 0.0,
            returns_at_us: 0.0,
            receives_at_us: 0.0,
            ..stage
        };
        if rules.is_steady { flow } else { stage }
    }

    /// Micro-batches that a replica of the stage can do in time, after some messages, if its all-reduce takes this long.
    fn micro_batches(&self, rules: &Rules, stage: &Stage, messages: usize, us: f64, all_reduce_us: f64) -> f64 {
        let earlier_us = messages.saturating_sub(1) as f64 * stage.message_us;
        let us = us - earlier_us;
        let after_us = (all_reduce_us - stage.backward_us).max(0.0) + stage.tied_us;
        let drain_us = stage.drain_us + if stage.has_gradients { earlier_us } else { 0.0 };
        let returned_us = stage.returns_us + drain_us;
        let last_us = (stage.least_back_us + returned_us).max(all_reduce_us + stage.tied_us);
        let dealt = within(us - stage.fill_us - after_us, stage.work_us)
            .min(within(us - stage.fill_us - returned_us, stage.in_flow_us))
            .min(within(us - stage.fill_us - drain_us, stage.sent_us))
            .min(within(us - stage.returns_at_us - after_us, stage.least_backward_us))
            .min(within(us - stage.returns_at_us - returned_us, stage.least_back_us))
            .min(within(us - stage.receives_at_us - if rules.is_steady { 0.0 } else { last_us }, stage.received_us));
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
    use crate::partition::options::PlannerOptions;
    use crate::partition::planner::plan;
    use crate::profile::cost_graph::{OpCost, OpId, ParamCost, TensorCost};

    /// splitmix64; a seed always gives the same graph.
    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: u64) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) % limit
        }
    }

    /// A chain with branches, skip connections, light ops aside, and tied parameters.
    fn graph(random: &mut Random) -> CostGraph {
        let ops = 2 + random.below(8) as u32;
        let mut readers: Vec<Vec<OpId>> = vec![Vec::new(); ops as usize];
        for to in 1..ops {
            for _ in 0..1 + random.below(5) / 3 {
                let back = if random.below(3) > 0 { 1 } else { 1 + random.below(u64::from(to)) as u32 };
                let from = (to - back) as usize;
                if random.below(12) > 0 && readers[from].last() != Some(&OpId(to)) {
                    readers[from].push(OpId(to));
                }
            }
        }
        let mut graph = CostGraph::default();
        for (id, consumers) in readers.into_iter().enumerate() {
            let fwd_us = if random.below(6) == 0 { 0.01 } else { 10.0 + random.below(1000) as f64 };
            let param_bytes = [0, 10_000, 400_000, 3_000_000][random.below(4) as usize];
            graph.ops.push(OpCost {
                id: id as u32,
                name: format!("op{id}"),
                fwd_us,
                bwd_us: 2.0 * fwd_us,
                param_bytes,
                out_bytes: 100_000 * random.below(4),
                ..OpCost::default()
            });
            let (name, bytes) = (format!("t{id}"), graph.ops[id].out_bytes);
            graph.tensors.push(TensorCost { name, producer: OpId(id as u32), bytes, consumers });
            let mut users = vec![OpId(id as u32)];
            if random.below(4) == 0 && id as u32 + 1 < ops {
                users.push(OpId(ops - 1));
            }
            if param_bytes > 0 {
                graph.params.push(ParamCost::new(format!("p{id}"), param_bytes, users));
            }
        }
        graph
    }

    fn problem(random: &mut Random) -> Problem {
        let graph = graph(random);
        let cluster = ["1:1GB/s", "2:1GB/s", "4:1GB/s", "5:0.3GB/s", "2:4GB/s,2:1GB/s"][random.below(5) as usize];
        let mut problem = Problem::new(graph, levels(cluster).unwrap(), CostModel::Pipec);
        let schedules = [Schedule::OneFOneB, Schedule::Gpipe, Schedule::ZbH1, Schedule::ZbH2, Schedule::Interleaved];
        problem.schedule = schedules[random.below(5) as usize];
        problem.chunks = if problem.schedule.has_chunks() { 2 } else { 1 };
        problem.microbatches = 1 + random.below(9) as u32;
        problem.zero = [0, 0, 0, 1, 3][random.below(5) as usize];
        problem
    }

    #[test]
    fn no_plan_is_faster() {
        let (mut closed, mut plans) = (0.0, 0.0);
        for seed in 0..500 {
            let mut problem = problem(&mut Random(seed));
            let devices = problem.cluster.devices();
            let mut pins: Vec<Option<Vec<u32>>> = vec![None];
            for stages in 1..=devices {
                pins.extend([Some(vec![1; stages as usize]), Some(vec![devices / stages; stages as usize])]);
                let mut uneven = vec![1; stages as usize];
                uneven[0] = devices - stages + 1;
                pins.push(Some(uneven));
            }
            let mut best_us = f64::INFINITY;
            let mut times = Vec::new();
            for pin in pins {
                problem.constraints.replicas = pin;
                let Ok(planned) = plan(&problem, &PlannerOptions::default()) else { continue };
                let us = planned.plan.predicted.minibatch_us;
                best_us = best_us.min(us);
                times.push((us, problem.constraints.replicas.clone()));
            }
            problem.constraints.replicas = None;
            let bound = FlushBound::of(&problem.graph, &problem.cluster, problem.microbatches);
            let bound_us = bound.least_us(&[problem.schedule], problem.zero, 2.0 * best_us);
            let smaller_us = bound.smaller_us(&[problem.schedule], problem.zero, 2.0 * best_us);
            assert!(smaller_us <= bound_us * (1.0 + CLOSE), "seed {seed}: {smaller_us} > {bound_us}");
            for (us, pin) in times {
                assert!(
                    bound_us <= us * (1.0 + 1e-9),
                    "seed {seed}, {:?}, {pin:?}: {bound_us} > {us}",
                    problem.schedule
                );
            }
            if !problem.schedule.has_chunks() {
                closed += bound_us / best_us;
                plans += 1.0;
            }
        }
        println!("bounds are {:.4} of the best plans", closed / plans);
        assert!(closed >= 0.8 * plans, "{}", closed / plans);
    }
}
