//! Local improvement by simulation: one move at a time, for every kind of plan.
//!
//! The searches rank plans by a closed form and cut along few orders. Here the simulated time decides. The climb starts
//! from the best plans of the searches and from pipelines of equal stages, takes every move that is faster, and ends
//! when none is or the work is spent:
//!
//! | move | |
//! | --- | --- |
//! | cut | a stage ends 1, 2, 4, 8 … ops earlier or later |
//! | device | from one stage to another, to an idle place, or from it |
//! | merge, split | two neighbours become one stage, or one becomes two |
//! | limit | one micro-batch more or fewer in flight, at one stage or at all |
//!
//! Among plans within [`ALIKE`] of the fastest the simplest wins: fewer stages, fewer devices, fewer micro-batches in
//! flight, less memory.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::options::PlannerOptions;
use crate::partition::search::balanced_cuts::Line;
use crate::partition::search::build_plan::{self, Recompute, StagePosition};
use crate::partition::search::context::SearchContext;
use crate::partition::search::module_boundaries::Borders;
use crate::partition::search::result::PlanCandidate;
use crate::partition::search::simulate_candidate::{Played, played};
use crate::partition::search::{linear_order, linear_search};
use crate::plan::problem::{CostModel, InFlight, Objective, Problem, Recomputation};
use std::collections::HashSet;

/// Work of a climb, in micro-batches times stages; about two microseconds each.
const WORK: u64 = 600_000;

/// Work of one evaluation besides its simulation, for each op of the graph.
const WORK_OF_OP: u64 = 1;

/// Plans from which the climb starts, after all starts were simulated.
const CLIMBED: usize = 3;

/// Starts that are simulated.
const SIMULATED: usize = 16;

/// A move is taken if the time falls below this fraction.
const FASTER: f64 = 0.9995;

/// Plans within this fraction of the fastest are as good; the simplest of them wins.
const ALIKE: f64 = 0.005;

/// A plan whose closed form is above this multiple of the best time is not simulated.
const HOPELESS: f64 = 1.6;

/// What a climb may change besides the cuts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Freedom {
    replicas: bool,
    limits: bool,
}

/// Stages along an order of the ops.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Layout {
    order: usize,
    /// Where stages begin and end in the order.
    ends: Vec<usize>,
    replicas: Vec<u32>,
    /// The first device of each stage, if they are not side by side.
    firsts: Option<Vec<u32>>,
    /// Micro-batches in flight beyond the schedule's rule.
    more: Vec<u32>,
}

/// A simulated plan.
#[derive(Clone)]
pub struct Simulated {
    pub candidate: PlanCandidate,
    pub played: Played,
}

struct Climb<'a> {
    problem: &'a Problem,
    context: &'a SearchContext<'a>,
    options: &'a PlannerOptions<'a>,
    freedom: Freedom,
    /// Topological orders, and where each may be cut.
    orders: Vec<(Vec<u32>, Vec<usize>)>,
    work: u64,
    seen: HashSet<Layout>,
    best_us: f64,
    /// All plans that are as good as the fastest so far.
    kept: Vec<(Layout, Simulated)>,
    states: u64,
}

/// The best plan found from these, the best first, and the number of plans that were simulated. `None` if nothing may be
/// changed, or nothing is better.
pub fn improve(
    context: &SearchContext<'_>,
    options: &PlannerOptions<'_>,
    best: &Simulated,
    others: &[PlanCandidate],
) -> (Option<Simulated>, u64) {
    let problem = context.problem;
    let constraints = &problem.constraints;
    let is_fixed = constraints.cut_after.is_some() || !constraints.pins.is_empty() || problem.schedule.is_custom();
    let is_timed = problem.cost == CostModel::Pipec && problem.objective == Objective::Throughput;
    if is_fixed || !is_timed || problem.chunks > 1 || options.efficiency.is_none() || problem.graph.ops.len() < 2 {
        return (None, 0);
    }
    let is_one_stage_each = problem.chunks == 1;
    let is_given = constraints.replicas.is_some() || matches!(problem.in_flight, InFlight::Given(_));
    let freedom = Freedom {
        replicas: is_one_stage_each
            && !is_given
            && !problem.cluster.is_mixed()
            && !constraints.no_replication
            && !constraints.has_equal_replicas(),
        limits: is_one_stage_each
            && problem.schedule.flushes()
            && problem.schedule.takes_caps()
            && problem.in_flight == InFlight::Auto
            && constraints.target.is_none(),
    };
    let mut climb = Climb {
        problem,
        context,
        options,
        freedom,
        orders: Vec::new(),
        work: WORK,
        seen: HashSet::new(),
        best_us: best.played.minibatch_us,
        kept: Vec::new(),
        states: 0,
    };
    let found = climb.run(best, others);
    (found, climb.states)
}

impl Climb<'_> {
    fn run(&mut self, best: &Simulated, others: &[PlanCandidate]) -> Option<Simulated> {
        let mut starts: Vec<(f64, Layout)> = Vec::new();
        for candidate in std::iter::once(&best.candidate).chain(others.iter().filter(|other| other.fits)) {
            let layout = self.layout_of(candidate);
            starts.push((candidate.minibatch_us, layout));
        }
        let first = starts[0].1.clone();
        self.keep(first.clone(), best.clone());
        self.seen.insert(first);
        if self.freedom.replicas {
            starts.extend(self.equal_layouts());
        }
        let mut ranked = starts.split_off(1);
        ranked.sort_by(|left, right| left.0.total_cmp(&right.0));
        let mut climbed = vec![(best.played.minibatch_us, starts.swap_remove(0).1)];
        for (_, layout) in ranked.into_iter().take(SIMULATED) {
            if let Some(us) = self.try_layout(&layout) {
                climbed.push((us, layout));
            }
        }
        climbed.sort_by(|left, right| left.0.total_cmp(&right.0));
        let each = self.work / CLIMBED as u64;
        for (us, layout) in climbed.into_iter().take(CLIMBED) {
            let left = self.work.saturating_sub(each);
            self.work = self.work.min(each);
            self.climb(us, layout);
            self.work += left;
        }
        self.simplest().filter(|simplest| simplest.candidate.spots != best.candidate.spots
            || simplest.candidate.shape != best.candidate.shape
            || simplest.candidate.caps != best.candidate.caps)
    }

    /// Takes faster moves until there is none, or the work is spent.
    fn climb(&mut self, us: f64, layout: Layout) {
        let (mut us, mut layout) = (us, layout);
        let mut is_improved = true;
        while is_improved {
            is_improved = false;
            for moved in self.moves(&layout) {
                if self.work == 0 {
                    return;
                }
                let Some(other) = self.try_layout(&moved) else { continue };
                if other < us * FASTER {
                    (us, layout, is_improved) = (other, moved, true);
                    break;
                }
            }
        }
    }

    /// The layout of a candidate, in an order of its own.
    fn layout_of(&mut self, candidate: &PlanCandidate) -> Layout {
        let graph = &self.problem.graph;
        let depth_first = linear_search::orders(graph).pop().unwrap_or_default();
        let mut rank = vec![0usize; graph.ops.len()];
        depth_first.iter().enumerate().for_each(|(at, &op)| rank[op as usize] = at);
        let (mut order, mut ends, mut replicas) = (Vec::with_capacity(rank.len()), vec![0], Vec::new());
        for leaf in candidate.shape.leaves() {
            let mut ops = leaf.ops.to_vec();
            ops.sort_unstable_by_key(|&op| rank[op as usize]);
            order.extend(ops);
            ends.push(order.len());
            replicas.push(leaf.replicas);
        }
        let firsts: Vec<u32> = candidate.spots.iter().map(|spot| spot.first).collect();
        let side_by_side = replicas.iter().scan(0, |next, replicas| {
            let first = *next;
            *next += replicas;
            Some(first)
        });
        let is_side_by_side = side_by_side.eq(firsts.iter().copied());
        let more = vec![0; replicas.len()];
        let order = self.order(order);
        Layout { order, ends, replicas, firsts: (!is_side_by_side).then_some(firsts), more }
    }

    /// The number of an order.
    fn order(&mut self, order: Vec<u32>) -> usize {
        if let Some(at) = self.orders.iter().position(|(known, _)| *known == order) {
            return at;
        }
        let keeps_modules = self.problem.constraints.target.is_some_and(|target| target.keeps_modules());
        let cuts = match keeps_modules {
            true => Borders::of(self.context.joined).ends(&order),
            false => (0..=order.len()).collect(),
        };
        self.orders.push((order, cuts));
        self.orders.len() - 1
    }

    /// Pipelines of equal stages, with all devices or one a stage.
    fn equal_layouts(&mut self) -> Vec<(f64, Layout)> {
        let problem = self.problem;
        let order = linear_search::orders(&problem.graph).pop().unwrap_or_default();
        let line = Line::new(problem, order.clone(), (0..=order.len()).collect());
        let at = self.order(order);
        let devices = problem.cluster.devices();
        let most = problem.constraints.most_stages.unwrap_or(u32::MAX).min(devices).min(problem.graph.ops.len() as u32);
        let mut found = Vec::new();
        for stages in 1..=most {
            let Some(ends) = line.cheapest(stages as usize, line.shortest(stages as usize) * 1.01) else { continue };
            let mut counts = vec![devices / stages];
            counts.extend((devices / stages > 1).then_some(1));
            for replicas in counts {
                let replicas = vec![replicas; stages as usize];
                let layout =
                    Layout { order: at, ends: ends.clone(), more: vec![0; replicas.len()], replicas, firsts: None };
                let shape = self.shape(&layout);
                let spots = build_plan::side_by_side(problem, &shape);
                let caps = build_plan::caps(problem, &shape);
                found.push((build_plan::minibatch_us(problem, &shape, &spots, &caps), layout));
            }
        }
        found
    }

    fn shape(&self, layout: &Layout) -> Shape {
        let order = &self.orders[layout.order].0;
        let stage = |(pair, &replicas): (&[usize], &u32)| {
            let mut ops = order[pair[0]..pair[1]].to_vec();
            ops.sort_unstable();
            (ops, replicas)
        };
        let stages = layout.ends.windows(2).zip(&layout.replicas).map(stage).collect();
        Shape::flat(stages, self.problem.cluster.levels.len() > 1)
    }

    /// The simulated time of a layout that fits and was not tried before.
    fn try_layout(&mut self, layout: &Layout) -> Option<f64> {
        if !self.seen.insert(layout.clone()) {
            return None;
        }
        let problem = self.problem;
        self.work = self.work.saturating_sub(WORK_OF_OP * problem.graph.ops.len() as u64 + 200);
        let shape = self.shape(layout);
        let mut spots = build_plan::side_by_side(problem, &shape);
        if let Some(firsts) = &layout.firsts {
            spots.iter_mut().zip(firsts).for_each(|(spot, first)| spot.first = *first);
        }
        let us = build_plan::minibatch_us(problem, &shape, &spots, &self.caps(layout, &shape));
        if us > HOPELESS * self.best_us {
            return None;
        }
        let mut candidate = self.context.placed("pipec", shape, spots);
        self.limit(layout, &mut candidate);
        if !candidate.fits && problem.recomputation() == Recomputation::Auto {
            self.recompute(&mut candidate);
        }
        if !candidate.fits {
            return None;
        }
        self.states += 1;
        let items = u64::from(problem.microbatches) * 4 * candidate.caps.len() as u64;
        self.work = self.work.saturating_sub(if problem.schedule.flushes() { items.min(120_000) } else { 20_000 });
        let PlanCandidate { shape, spots, caps, minibatch_us, .. } = &candidate;
        let played = played(problem, shape, spots, caps, *minibatch_us, self.options.efficiency);
        let us = played.minibatch_us;
        self.keep(layout.clone(), Simulated { candidate, played });
        Some(us)
    }

    /// The in-flight limits of a layout.
    fn caps(&self, layout: &Layout, shape: &Shape) -> Vec<u32> {
        let rule = build_plan::caps(self.problem, shape);
        let raised = |((cap, more), replicas): ((u32, &u32), &u32)| match more {
            0 => cap,
            more => (cap + more).min(self.problem.microbatches.div_ceil(*replicas).max(1)),
        };
        rule.into_iter().zip(&layout.more).zip(&layout.replicas).map(raised).collect()
    }

    /// Sets the in-flight limits of a layout.
    fn limit(&self, layout: &Layout, candidate: &mut PlanCandidate) {
        let caps = self.caps(layout, &candidate.shape);
        if caps != candidate.caps {
            candidate.caps = caps;
            self.measure(candidate);
        }
    }

    /// Recomputes the stages that do not fit.
    fn recompute(&self, candidate: &mut PlanCandidate) {
        let limit_of = |spot: &StagePosition, replicas: u32| {
            self.problem.limit_of(spot.first..spot.first.saturating_add(replicas)).unwrap_or(u64::MAX)
        };
        let replicas = candidate.shape.replicas();
        for ((spot, memory), replicas) in candidate.spots.iter_mut().zip(&candidate.memory).zip(replicas) {
            if memory.total > limit_of(spot, replicas) {
                spot.recompute = Recompute::All;
            }
        }
        self.measure(candidate);
    }

    /// Sets the memory of a candidate.
    fn measure(&self, candidate: &mut PlanCandidate) {
        let PlanCandidate { shape, spots, caps, .. } = &*candidate;
        let pending = build_plan::pending_weight_grads(self.problem, shape, caps);
        let holdings = build_plan::holdings(self.problem, shape);
        let memory = build_plan::memory(self.problem, shape, spots, &holdings, caps, &pending);
        let fits = build_plan::fits(self.problem, shape, spots, &memory);
        let minibatch_us = build_plan::minibatch_us(self.problem, shape, spots, caps);
        (candidate.fits, candidate.minibatch_us) = (fits, minibatch_us);
        (candidate.pending_weight_grads, candidate.memory) = (pending, memory);
    }

    fn keep(&mut self, layout: Layout, simulated: Simulated) {
        let us = simulated.played.minibatch_us;
        if us <= self.best_us * (1.0 + ALIKE) {
            self.kept.push((layout, simulated));
        }
        if us < self.best_us {
            self.best_us = us;
            let most = us * (1.0 + ALIKE);
            self.kept.retain(|(_, other)| other.played.minibatch_us <= most);
        }
    }

    /// The simplest of the plans that are as good as the fastest.
    fn simplest(&mut self) -> Option<Simulated> {
        let key = |(_, one): &(Layout, Simulated)| {
            let candidate = &one.candidate;
            let in_flight: u32 = one.played.caps.iter().sum();
            (candidate.memory.len(), candidate.devices(), in_flight)
        };
        let at = (0..self.kept.len()).min_by(|&left, &right| {
            let (left, right) = (&self.kept[left], &self.kept[right]);
            key(left).cmp(&key(right)).then(left.1.played.minibatch_us.total_cmp(&right.1.played.minibatch_us))
        })?;
        Some(self.kept.swap_remove(at).1)
    }

    fn moves(&self, layout: &Layout) -> Vec<Layout> {
        let mut moves = Vec::new();
        if self.freedom.limits {
            self.limit_moves(layout, &mut moves);
        }
        self.cut_moves(layout, &mut moves);
        if self.freedom.replicas {
            self.device_moves(layout, &mut moves);
            self.stage_moves(layout, &mut moves);
        }
        moves
    }

    fn limit_moves(&self, layout: &Layout, moves: &mut Vec<Layout>) {
        let stages = layout.more.len();
        let mut push = |more: Vec<u32>| moves.push(Layout { more, ..layout.clone() });
        if stages < 2 {
            return;
        }
        // The last stage never waits for a backward.
        let raised = |most: usize| (0..stages).map(|at| layout.more[at] + u32::from(at < most)).collect::<Vec<_>>();
        push(raised(stages - 1));
        for at in 0..stages - 1 {
            let mut more = layout.more.clone();
            more[at] += 1;
            push(more);
        }
    }

    fn cut_moves(&self, layout: &Layout, moves: &mut Vec<Layout>) {
        let cuts = &self.orders[layout.order].1;
        for at in 1..layout.ends.len() - 1 {
            let Ok(place) = cuts.binary_search(&layout.ends[at]) else { continue };
            let mut step = 1;
            while step < cuts.len() {
                for moved in [place.checked_sub(step), place.checked_add(step)].into_iter().flatten() {
                    let Some(&end) = cuts.get(moved) else { continue };
                    if end > layout.ends[at - 1] && end < layout.ends[at + 1] {
                        let mut ends = layout.ends.clone();
                        ends[at] = end;
                        moves.push(Layout { ends, ..layout.clone() });
                    }
                }
                step *= 2;
            }
        }
    }

    fn idle(&self, layout: &Layout) -> u32 {
        self.problem.cluster.devices().saturating_sub(layout.replicas.iter().sum())
    }

    /// A layout with other replicas: with the same cuts, and with balanced ones.
    fn push_with(&self, layout: &Layout, ends: Option<Vec<usize>>, replicas: Vec<u32>, moves: &mut Vec<Layout>) {
        let more = vec![layout.more.iter().copied().max().unwrap_or(0); replicas.len()];
        let of = |ends: Vec<usize>| Layout {
            order: layout.order,
            ends,
            replicas: replicas.clone(),
            firsts: None,
            more: more.clone(),
        };
        if let Some(ends) = ends {
            moves.push(of(ends));
        }
        let order = &self.orders[layout.order].0;
        let ends = linear_order::balanced(&self.problem.graph, order, &replicas);
        if ends.len() == replicas.len() + 1 {
            moves.push(of(ends));
        }
    }

    fn device_moves(&self, layout: &Layout, moves: &mut Vec<Layout>) {
        let idle = self.idle(layout);
        let stages = layout.replicas.len();
        for to in 0..stages {
            let mut replicas = layout.replicas.clone();
            replicas[to] += 1;
            if idle > 0 {
                self.push_with(layout, Some(layout.ends.clone()), replicas.clone(), moves);
            }
            for from in (0..stages).filter(|from| *from != to && layout.replicas[*from] > 1) {
                let mut replicas = replicas.clone();
                replicas[from] -= 1;
                self.push_with(layout, Some(layout.ends.clone()), replicas, moves);
            }
        }
        for from in (0..stages).filter(|from| layout.replicas[*from] > 1) {
            let mut replicas = layout.replicas.clone();
            replicas[from] -= 1;
            self.push_with(layout, Some(layout.ends.clone()), replicas, moves);
        }
    }

    fn stage_moves(&self, layout: &Layout, moves: &mut Vec<Layout>) {
        let (stages, idle) = (layout.replicas.len(), self.idle(layout));
        for at in 0..stages.saturating_sub(1) {
            let mut ends = layout.ends.clone();
            ends.remove(at + 1);
            let mut replicas = layout.replicas.clone();
            let later = replicas.remove(at + 1);
            replicas[at] += later;
            self.push_with(layout, Some(ends.clone()), replicas.clone(), moves);
            if later > 0 {
                replicas[at] -= later.min(replicas[at] - 1);
                self.push_with(layout, Some(ends), replicas, moves);
            }
        }
        if self.problem.constraints.most_stages.is_some_and(|most| stages as u32 >= most) {
            return;
        }
        for at in (0..stages).filter(|at| layout.ends[at + 1] - layout.ends[*at] > 1) {
            let have = layout.replicas[at] + idle;
            let halves = [(have.div_ceil(2), have / 2), (have.saturating_sub(1), 1), (1, have.saturating_sub(1))];
            for (first, second) in halves.into_iter().filter(|(first, second)| *first > 0 && *second > 0) {
                let mut replicas = layout.replicas.clone();
                replicas[at] = first;
                replicas.insert(at + 1, second);
                let mut ends = layout.ends.clone();
                ends.insert(at + 1, self.middle(layout, at, first, second));
                self.push_with(layout, Some(ends), replicas, moves);
            }
        }
    }

    /// Where a stage is cut in proportion to the devices of its parts.
    fn middle(&self, layout: &Layout, at: usize, first: u32, second: u32) -> usize {
        let (from, to) = (layout.ends[at], layout.ends[at + 1]);
        let order = &self.orders[layout.order].0;
        let us = |op: &u32| {
            let op = &self.problem.graph.ops[*op as usize];
            op.fwd_us + op.bwd_us
        };
        let wanted = order[from..to].iter().map(us).sum::<f64>() * f64::from(first) / f64::from(first + second);
        let mut sum = 0.0;
        for (place, op) in order.iter().enumerate().take(to - 1).skip(from) {
            sum += us(op);
            if sum >= wanted {
                return place + 1;
            }
        }
        to - 1
    }
}
