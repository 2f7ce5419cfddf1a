//! Layouts: p ranks of r replicas with v stages each, as frameworks use them (Narayanan et al., "Efficient large-scale
//! language model training on GPU clusters using Megatron-LM", SC 2021).
//!
//! Stages are cut to equal time. The time of a layout is the closed form of cost model `pipec`, its memory that of the
//! schedule, so a search can rank thousands of layouts. The best are then simulated, and planned with better cuts.
//!
//! Split backwards shorten fill and drain, which the closed form of one stage per rank does not know. With W the time of
//! the weight gradients, zb-h1 saves 2 (p - 1) W and zb-h2 3 (p - 1) W (Qi et al., "Zero bubble pipeline parallelism",
//! ICLR 2024, section 2).

use crate::partition::answer::{Answer, conclude};
use crate::partition::dp::nested_partition::Shape;
use crate::partition::error::PlanError;
use crate::partition::infeasible;
use crate::partition::options::PlannerOptions;
use crate::partition::planned::Planned;
use crate::partition::search::balanced_cuts::Line;
use crate::partition::search::build_plan::{self, HeldTerms, StagePosition};
use crate::partition::search::context::SearchContext;
use crate::partition::search::fused_graph::FusedGraph;
use crate::partition::search::interleaved::Counts;
use crate::partition::search::module_boundaries::Borders;
use crate::partition::search::result::PlanCandidate;
use crate::partition::search::simulate_candidate::short_us;
use crate::partition::search::{finish_plan, interleaved, linear_search, partial_recompute, pipec_rules};
use crate::plan::Edge;
use crate::plan::chunks::{self, rank_of};
use crate::plan::cost_estimate::{self, FlowQuery, PlacedStage};
use crate::plan::in_flight::{self, ScheduleFlow};
use crate::plan::links;
use crate::plan::memory::{MemoryMultipliers, MemoryTerms};
use crate::plan::problem::{Problem, Recomputation, Target};
use crate::plan::schedule::Schedule;
use crate::plan::tied;
use crate::plan::zero::Zero;
use crate::profile::cost_graph::ParamCost;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// Tolerance over the shortest longest stage, to send fewer bytes.
const SLACK: f64 = 0.01;

/// Numbers of stages per rank that are tried; larger ones only if they divide the cuts between layers evenly.
const MOST_CHUNKS: u32 = 16;

/// Largest cluster in which numbers of ranks are tried that do not divide the devices.
const FEW_DEVICES: u32 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    pub schedule: Schedule,
    pub ranks: u32,
    /// Replicas of each stage.
    pub replicas: u32,
    /// Stages of each rank.
    pub chunks: u32,
    pub zero: Zero,
}

/// A layout with its estimated time and memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayoutEstimate {
    pub layout: Layout,
    pub minibatch_us: f64,
    /// Lower bound of the time, without messages.
    pub bound_us: f64,
    /// Compute of the busiest rank per minibatch, and the part of it that recomputes activations.
    pub busy_us: f64,
    pub recompute_us: f64,
    /// Memory of the fullest device.
    pub peak_bytes: u64,
}

impl LayoutEstimate {
    /// True if stages recompute their activations.
    pub fn recomputes(&self) -> bool {
        self.recompute_us > 0.0
    }
}

/// The layouts of a problem, whose schedule, number of chunks and ZeRO stage they replace.
pub struct Layouts<'a> {
    problem: &'a Problem,
    joined: FusedGraph<'a>,
    order: Vec<u32>,
    ends: Vec<usize>,
}

/// A model cut into stages of equal time.
struct Cut {
    ops: Vec<Vec<u32>>,
    holdings: Vec<MemoryTerms>,
    forward: Vec<f64>,
    backward: Vec<f64>,
    /// Forward of the ops that can be recomputed.
    again: Vec<f64>,
    weight_grad: Vec<f64>,
    edges: Vec<Edge>,
    /// Parameters with several users.
    params: Vec<ParamCost>,
    stage_of: Vec<u32>,
}

impl<'a> Layouts<'a> {
    pub fn of(problem: &'a Problem) -> Layouts<'a> {
        let joined = FusedGraph::of(&problem.graph);
        let graph = joined.graph();
        // The last order is depth-first.
        let order = linear_search::orders(&graph).pop().unwrap_or_default();
        let borders = Borders::of(problem, &joined);
        let ends = borders.map_or_else(|| (0..=order.len()).collect(), |borders| borders.ends(&order));
        Layouts { problem, joined, order, ends }
    }

    /// The layouts that fit in memory under these schedules and kinds of ZeRO, in a fixed order. A kind is left out if an
    /// earlier one is as fast.
    pub fn estimates(&self, schedules: &[Schedule], kinds: &[Zero], chunks: Option<u32>) -> Vec<LayoutEstimate> {
        let mut found = Vec::new();
        self.each(schedules, chunks, &mut |cut, layout, held| {
            let mut best_us = f64::INFINITY;
            for (at, &zero) in kinds.iter().enumerate() {
                let layout = Layout { zero, ..layout };
                let Some((recomputed, peak_bytes)) = self.fitted(cut, &layout, held) else { continue };
                let estimate = LayoutEstimate { peak_bytes, ..self.time(cut, &layout, &recomputed, held) };
                if estimate.minibatch_us < best_us {
                    best_us = estimate.minibatch_us;
                    found.push(estimate);
                }
                let may_gain = kinds[at + 1..].iter().any(|zero| zero.of_stage(layout.replicas).degree > 0);
                if (recomputed.iter().all(|share| *share == 0.0) && !may_gain) || layout.replicas == 1 {
                    break;
                }
            }
        });
        found
    }

    /// The layout that needs the least memory at this ZeRO stage, and the bytes of its fullest device.
    pub fn least_memory(&self, schedules: &[Schedule], zero: Zero, chunks: Option<u32>) -> Option<(Layout, u64)> {
        let mut least: Option<(Layout, u64)> = None;
        self.each(schedules, chunks, &mut |cut, layout, held| {
            let layout = Layout { zero, ..layout };
            let peak = self
                .of_ranks(cut, &layout, held, self.problem.recomputation() != Recomputation::Never)
                .into_iter()
                .max()
                .unwrap_or(0);
            if least.is_none_or(|(_, known)| peak < known) {
                least = Some((layout, peak));
            }
        });
        least
    }

    /// Visits all layouts, at ZeRO stage 0.
    fn each(&self, schedules: &[Schedule], chunks: Option<u32>, visit: &mut dyn FnMut(&Cut, Layout, &Counts)) {
        let asked = self.joined.problem(self.problem);
        let line = Line::new(&asked, self.order.clone(), self.ends.clone());
        let mut cuts: BTreeMap<usize, Option<Cut>> = BTreeMap::new();
        for ranks in 1..=self.problem.cluster.devices().min((self.ends.len() - 1) as u32) {
            for &schedule in schedules {
                for count in self.chunk_counts(schedule, ranks).filter(|count| chunks.is_none_or(|only| *count == only))
                {
                    let Some(replicas) = self.replicas(ranks, count) else { continue };
                    let stages = (ranks * count) as usize;
                    let cut = cuts.entry(stages).or_insert_with(|| Cut::of(&asked, &line, stages));
                    if let Some(cut) = cut {
                        let held = self.by_rule(schedule, ranks, replicas, count);
                        visit(cut, Layout { schedule, ranks, replicas, chunks: count, zero: Zero::default() }, &held);
                    }
                }
            }
        }
    }

    /// The replicas of each stage; `None` if there is no such layout.
    fn replicas(&self, ranks: u32, chunks: u32) -> Option<u32> {
        let (devices, constraints) = (self.problem.cluster.devices(), &self.problem.constraints);
        let stages = ranks * chunks;
        if constraints.most_stages.is_some_and(|most| stages > most) {
            return None;
        }
        if let Some(given) = &constraints.replicas {
            let replicas = given.first().copied().filter(|_| given.len() == stages as usize)?;
            return Some(replicas).filter(|replicas| u64::from(*replicas) * u64::from(ranks) <= u64::from(devices));
        }
        if constraints.no_replication {
            return Some(1);
        }
        // Megatron-LM interleaves rounds of as many micro-batches as there are ranks.
        let replicas = (devices / ranks).min(self.problem.microbatches);
        let rounds = self.problem.microbatches / replicas;
        if constraints.target == Some(Target::Megatron) && chunks > 1 && !rounds.is_multiple_of(ranks) {
            return None;
        }
        let is_tried = devices <= FEW_DEVICES || devices.is_multiple_of(ranks);
        // Frameworks divide a minibatch evenly.
        let is_even = constraints.target.is_none() || self.problem.microbatches.is_multiple_of(replicas);
        (is_tried && is_even).then_some(replicas)
    }

    /// Numbers of stages per rank.
    fn chunk_counts(&self, schedule: Schedule, ranks: u32) -> RangeInclusive<u32> {
        let most = (self.ends.len() - 1) as u32 / ranks;
        match schedule {
            _ if !schedule.has_chunks() => 1..=1,
            _ if ranks < 2 || most < 2 => RangeInclusive::new(1, 0),
            _ if schedule.is_on_a_v() => 2..=2,
            _ => 2..=most.min(MOST_CHUNKS),
        }
    }

    /// In-flight limits by the rule of the schedule.
    fn by_rule(&self, schedule: Schedule, ranks: u32, replicas: u32, chunks: u32) -> Counts {
        let microbatches = self.problem.microbatches;
        let flow = ScheduleFlow { schedule, microbatches, chunks, workers: ranks * replicas, room: 0 };
        let replicas = vec![replicas; ranks as usize];
        let caps = in_flight::published(&flow, &replicas);
        let pending = in_flight::pending_weight_grads(&flow, &replicas, &caps);
        let of_stage = |of_rank: &[u32]| -> Vec<u32> {
            let rank = |stage| rank_of(schedule, ranks, stage) as usize;
            (0..ranks * chunks).filter_map(|stage| of_rank.get(rank(stage)).copied()).collect()
        };
        Counts { caps: of_stage(&caps), pending_weight_grads: of_stage(&pending) }
    }

    /// Memory of a device of each rank, if all or no stages recompute their activations.
    fn of_ranks(&self, cut: &Cut, layout: &Layout, held: &Counts, recompute: bool) -> Vec<u64> {
        let &Layout { schedule, ranks, replicas, zero, .. } = layout;
        let mut of_rank: Vec<Vec<HeldTerms>> = vec![Vec::new(); ranks as usize];
        for (stage, holdings) in cut.holdings.iter().enumerate() {
            let multiples = MemoryMultipliers {
                in_flight: held.caps[stage],
                pending_weight_grads: held.pending_weight_grads.get(stage).copied().unwrap_or(0),
                recompute,
                zero,
                schedule,
                ..build_plan::multiples_of_one(self.problem, replicas)
            };
            of_rank[rank_of(schedule, ranks, stage as u32) as usize].push((*holdings, multiples));
        }
        let stages = cut.holdings.len();
        let held = |(rank, own): (usize, Vec<HeldTerms>)| {
            let together = if build_plan::has_one_peak(self.problem, schedule) { own.len().max(1) } else { 1 };
            let memory = own.chunks(together).flat_map(|own| build_plan::of_device(self.problem, rank, stages, own));
            memory.fold(0u64, |sum, stage| sum.saturating_add(stage.total))
        };
        of_rank.into_iter().enumerate().map(held).collect()
    }

    /// The fraction of each stage that recomputes its activations, and the peak memory; `None` if the layout does not
    /// fit. The fraction is that of the bytes; it is the same for all stages of a rank.
    fn fitted(&self, cut: &Cut, layout: &Layout, held: &Counts) -> Option<(Vec<f64>, u64)> {
        let limit = self.problem.limit_of(0..self.problem.cluster.devices()).unwrap_or(u64::MAX);
        let recomputation = self.problem.recomputation();
        let mut of_rank = self.of_ranks(cut, layout, held, recomputation.is_full());
        let mut recomputed = vec![if recomputation.is_full() { 1.0 } else { 0.0 }; of_rank.len()];
        if of_rank.iter().any(|bytes| *bytes > limit) {
            if recomputation != Recomputation::Auto {
                return None;
            }
            let fewer = self.of_ranks(cut, layout, held, true);
            for rank in 0..of_rank.len() {
                if of_rank[rank] > limit {
                    let (needed, most) = (of_rank[rank] - limit, of_rank[rank].saturating_sub(fewer[rank]));
                    recomputed[rank] = (needed as f64 / most.max(1) as f64).min(1.0);
                    of_rank[rank] = fewer[rank].max(limit);
                }
            }
        }
        let peak = of_rank.into_iter().max().unwrap_or(0);
        let rank = |stage: usize| rank_of(layout.schedule, layout.ranks, stage as u32) as usize;
        (peak <= limit).then(|| ((0..cut.ops.len()).map(|stage| recomputed[rank(stage)]).collect(), peak))
    }

    /// The closed form of the time of a minibatch, and a lower bound of it without messages; both in microseconds.
    ///
    /// With k micro-batches on each replica, rank r computes `k Σ C_s` over its stages s. It starts after the forward of
    /// the first stages of all ranks before it, and unless the backward is split, their backward follows. The all-reduce
    /// of the first stage overlaps at most with its last backward.
    fn time(&self, cut: &Cut, layout: &Layout, recomputed: &[f64], held: &Counts) -> LayoutEstimate {
        let &Layout { schedule, ranks, replicas, chunks, zero } = layout;
        let levels = &self.problem.cluster.levels;
        let stage = |at: usize| {
            let first = rank_of(schedule, ranks, at as u32) * replicas;
            let ring = |bytes: u64| {
                let rings = links::rings_of_range(levels, first, zero.shards(replicas), bytes as f64);
                if replicas > 1 { links::all_reduce_us(&rings) / 2.0 } else { 0.0 }
            };
            // As in `schedule::pipeline`: weights are gathered before each op, gradients are scattered meanwhile.
            let gather = if zero.level >= 3 { ring(cut.holdings[at].weights) } else { 0.0 };
            let scatter = if zero.level >= 2 { ring(cut.holdings[at].summed) } else { 0.0 };
            let forward_us = cut.forward[at] + gather;
            let again = recomputed[at] * cut.again[at] * (1.0 + gather / cut.forward[at].max(f64::MIN_POSITIVE));
            PlacedStage {
                forward_us,
                backward_us: cut.backward[at].max(scatter) + gather + again,
                gradient_bytes: cut.holdings[at].summed as f64,
                first,
                replicas,
                in_flight: held.caps[at],
                tied_us: 0.0,
            }
        };
        let mut stages: Vec<PlacedStage> = (0..cut.ops.len()).map(stage).collect();
        let places: Vec<(u32, u32)> = stages.iter().map(|stage| (stage.first, stage.replicas)).collect();
        let tied = tied::exchange_us(levels, &cut.params, &places, &|op| cut.stage_of[op] as usize);
        stages.iter_mut().zip(tied).for_each(|(stage, us)| stage.tied_us = us);
        let asked = FlowQuery {
            schedule,
            microbatches: self.problem.microbatches,
            latency: false,
            bucket_bytes: self.problem.bucket.0 as f64,
        };
        let all_reduce_us = |members: u32| match replicas {
            1 => 0.0,
            _ => links::all_reduce_us(&links::rings_of_range(levels, 0, members, stages[0].gradient_bytes)),
        };
        let (reduce_us, group_us) = (all_reduce_us(replicas), all_reduce_us(zero.shards(replicas)));
        // Shards are all-reduced across groups.
        let reduce_us = if zero.level >= 2 { (reduce_us - group_us).max(0.0) } else { reduce_us };
        let bound_us = bound(&stages, &cut.weight_grad, reduce_us, layout, asked.microbatches);
        let items = f64::from(asked.microbatches.div_ceil(replicas));
        let of_ranks = |us: &dyn Fn(usize) -> f64| -> Vec<f64> {
            let mut sums = vec![0.0; ranks as usize];
            (0..stages.len()).for_each(|at| sums[rank_of(schedule, ranks, at as u32) as usize] += items * us(at));
            sums
        };
        let busy = of_ranks(&|at| stages[at].forward_us + stages[at].backward_us);
        let again = of_ranks(&|at| recomputed[at] * cut.again[at]);
        let busiest = (0..busy.len()).max_by(|a, b| busy[*a].total_cmp(&busy[*b])).unwrap_or(0);
        let estimate = LayoutEstimate {
            layout: *layout,
            minibatch_us: 0.0,
            bound_us,
            busy_us: busy[busiest],
            recompute_us: again[busiest],
            peak_bytes: 0,
        };
        // Updated weights are gathered after the last backward.
        let gather_us = if matches!(zero.level, 1 | 2) { group_us / 2.0 } else { 0.0 };
        if chunks > 1 {
            let minibatch_us = chunks::outlook(&asked, levels, &stages, &cut.edges).minibatch_us + gather_us;
            return LayoutEstimate { minibatch_us, ..estimate };
        }
        let found = cost_estimate::outlook(&asked, levels, &stages, &cut.edges);
        let hidden = match schedule {
            Schedule::ZbH1 => 2.0,
            Schedule::ZbH2 => 3.0,
            _ => 0.0,
        };
        let later: f64 = cut.weight_grad[..cut.weight_grad.len() - 1].iter().sum();
        LayoutEstimate {
            minibatch_us: (found.minibatch_us - hidden * later).max(found.busiest_us) + gather_us,
            ..estimate
        }
    }

    fn problem_of(&self, problem: &Problem, layout: &Layout) -> Problem {
        let &Layout { schedule, chunks, zero, .. } = layout;
        Problem { schedule, chunks, zero, ..problem.clone() }
    }

    fn candidate(&self, question: &SearchContext<'_>, layout: &Layout) -> Option<PlanCandidate> {
        let problem = question.problem;
        let &Layout { schedule, ranks, replicas, chunks, .. } = layout;
        let line = Line::new(problem, self.order.clone(), self.ends.clone());
        let cut = Cut::of(problem, &line, (ranks * chunks) as usize)?;
        let held = match chunks {
            1 => self.by_rule(schedule, ranks, replicas, 1),
            _ => interleaved::counts(problem, ranks, replicas)?,
        };
        let (recomputed, _) = self.fitted(&cut, layout, &held)?;
        let spot = |(at, share): (usize, f64)| {
            let first = rank_of(schedule, ranks, at as u32) * replicas;
            StagePosition { first, recompute: (share > 0.0).into() }
        };
        let spots: Vec<StagePosition> = recomputed.into_iter().enumerate().map(spot).collect();
        let stages = cut.ops.into_iter().map(|ops| (ops, replicas)).collect();
        let shape = Shape::flat(stages, problem.cluster.levels.len() > 1);
        let Counts { caps, pending_weight_grads } = held;
        Some(question.priced("pipec", shape, spots, caps, pending_weight_grads))
    }

    /// The simulated time of a minibatch in microseconds; `None` if the layout does not fit.
    pub fn simulated(&self, layout: &Layout, options: &PlannerOptions<'_>) -> Option<f64> {
        let full = self.problem_of(self.problem, layout);
        let asked = self.joined.problem(&full);
        let question = SearchContext::new(&full, &asked, &self.joined, options);
        let candidate = self.candidate(&question, layout).filter(|candidate| candidate.fits)?;
        let PlanCandidate { shape, spots, caps, pending_weight_grads, .. } = candidate;
        let shape = self.joined.spread(&shape);
        let fewer = match full.recomputation() {
            Recomputation::Auto => partial_recompute::reduced(&full, &shape, &spots, (&caps, &pending_weight_grads)),
            Recomputation::Never | Recomputation::Full => None,
        };
        let spots = fewer.unwrap_or(spots);
        let estimate = || build_plan::minibatch_us(&full, &shape, &spots, &caps);
        Some(short_us(&full, &shape, &spots, &caps).unwrap_or_else(estimate))
    }

    /// The plan of a layout, with the best cuts found.
    pub fn plan(&self, layout: &Layout, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
        let full = self.problem_of(self.problem, layout);
        let asked = self.joined.problem(&full);
        let question = SearchContext::new(&full, &asked, &self.joined, options);
        let baselines = question.baselines();
        let mut pinned = asked.clone().into_owned();
        pinned.constraints.replicas = Some(vec![layout.replicas; (layout.ranks * layout.chunks) as usize]);
        let mut found = pipec_rules::found(&question.about(&pinned), &baselines).unwrap_or_default();
        found.candidates.extend(self.candidate(&question, layout));
        found.candidates.retain(|candidate| candidate.name == "pipec");
        let Some(chosen) = found.take_best(full.objective) else {
            return Err(infeasible::error(&question, &found.candidates));
        };
        (found.fallback, found.proven_us, found.bound_us) = (None, None, finish_plan::spread(&asked));
        let mut planned = conclude(&question, Answer { found, chosen, baselines })?;
        planned.set_idle(&full);
        Ok(planned)
    }
}

/// Lower bound of the time of a minibatch; see [`Layouts::time`].
fn bound(stages: &[PlacedStage], weight_grads: &[f64], reduce_us: f64, layout: &Layout, microbatches: u32) -> f64 {
    let items = f64::from(microbatches.div_ceil(layout.replicas));
    let ranks = layout.ranks as usize;
    let mut work = vec![0.0; ranks];
    for (at, stage) in stages.iter().enumerate() {
        work[rank_of(layout.schedule, layout.ranks, at as u32) as usize] += stage.forward_us + stage.backward_us;
    }
    let splits = layout.schedule.splits_backward();
    let (mut before, mut bound) = (0.0, 0.0f64);
    for rank in 0..ranks {
        bound = bound.max(before + items * work[rank]);
        before += stages[rank].forward_us + if splits { 0.0 } else { stages[rank].backward_us };
    }
    // The weights of the first stage are the last that receive a gradient.
    let last = if splits { weight_grads[0] } else { stages[0].backward_us };
    bound + (reduce_us - last).max(0.0)
}

impl Cut {
    fn of(problem: &Problem, line: &Line<'_>, stages: usize) -> Option<Cut> {
        let shortest = line.shortest(stages);
        let cuts = line.cheapest(stages, shortest * (1.0 + SLACK))?;
        let shape = line.shape(&cuts, 1);
        let ops: Vec<Vec<u32>> = shape.leaves().iter().map(|leaf| leaf.ops.to_vec()).collect();
        let sum = |us: &dyn Fn(usize) -> f64| -> Vec<f64> {
            ops.iter().map(|ops| ops.iter().map(|&op| us(op as usize)).sum()).collect()
        };
        let graph = &problem.graph;
        Some(Cut {
            holdings: build_plan::holdings(problem, &shape),
            forward: sum(&|op| graph.ops[op].fwd_us),
            backward: sum(&|op| graph.ops[op].bwd_us),
            again: sum(&|op| graph.ops[op].recompute_us()),
            weight_grad: sum(&|op| graph.ops[op].weight_part_us()),
            edges: build_plan::edges(problem, &shape),
            params: graph.params.iter().filter(|param| param.users.len() > 1).cloned().collect(),
            stage_of: build_plan::stage_of(problem, &shape),
            ops,
        })
    }
}
