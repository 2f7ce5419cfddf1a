//! Local improvement by simulation: one move at a time, for every kind of plan.
//!
//! The searches rank plans by a closed form and cut along few orders. Here the simulated time decides. The climb starts
//! from the best plans of the searches and from pipelines of balanced stages, takes every move that is faster, and ends
//! when none is or the work is spent:
//!
//! | move | |
//! | --- | --- |
//! | cut | a stage ends 1, 2, 4, 8 … ops earlier or later |
//! | device | from one stage to another, to an idle place, or from it |
//! | merge, split | two neighbours become one stage, or one becomes two |
//! | swap | of unequal devices, two stages exchange theirs |
//! | turn | on several levels, another stage gets the first device, and the rest follow around the cluster |
//! | limit | one micro-batch more in flight, at one stage or at all |
//!
//! Among plans within [`ALIKE`] of the fastest the simplest wins: fewer stages, fewer devices, fewer micro-batches in
//! flight, less memory.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::search::build_plan::{self, StagePosition};
use crate::partition::search::context::SearchContext;
use crate::partition::search::evaluate::{Evaluator, Stages};
use crate::partition::search::linear_order;
use crate::partition::search::range_costs::RangeCosts;
use crate::partition::search::result::PlanCandidate;
use crate::partition::search::select::{Simulated, plays};
use crate::partition::search::starts::{Layout, Order, Starts};
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::problem::{CostModel, InFlight, Objective, Problem};
use std::collections::{HashMap, HashSet};

/// Work of a climb, in micro-batches times stages; about two microseconds each. The starts have the same for closed
/// forms.
const WORK: u64 = 600_000;

/// An item without a flush costs several times as much.
const TIMES_WITHOUT_FLUSH: u64 = 3;

/// Work of a closed form, per stage.
const ESTIMATE: u64 = 2;

/// Work of the last climb, from the best plan, and of the choice of lower in-flight limits.
const WORK_OF_LAST: u64 = 200_000;
const WORK_OF_LIMITS: u64 = 50_000;

/// Plans from which the climb starts, after the starts were simulated with a part of the work.
const CLIMBED: usize = 6;
const PART_OF_STARTS: u64 = 3;

/// Starts with the same replicas, along different orders.
const ALIKE_STARTS: usize = 2;

/// More micro-batches in flight with which starts are simulated. With a flush, a minibatch is the limit.
const MORE: [u32; 4] = [0, 2, 5, u32::MAX];
const MOST_WITHOUT_FLUSH: u32 = 6;

/// A move is taken if the time falls below this fraction.
const FASTER: f64 = 0.9995;

/// Plans within this fraction of the fastest are as good; the simplest of them wins.
const ALIKE: f64 = 0.005;

/// With a flush, a plan whose closed form is above this multiple of the best time is not simulated.
const HOPELESS: f64 = 1.6;

/// A layout as good as the fastest.
#[derive(Clone)]
struct Kept {
    layout: Layout,
    us: f64,
    spots: Vec<StagePosition>,
    caps: Vec<u32>,
}

struct Climb<'a> {
    problem: &'a Problem,
    context: &'a SearchContext<'a>,
    /// What may change besides the cuts: replicas, and limits on micro-batches in flight.
    has_free_replicas: bool,
    has_free_limits: bool,
    orders: &'a [Order],
    evaluators: Vec<Evaluator<'a>>,
    /// The work is divided by this number.
    part: u64,
    work: u64,
    seen: HashSet<Layout>,
    best_us: f64,
    kept: Vec<Kept>,
    states: u64,
}

/// The best plan found from these, the best first, and the number of plans that were simulated, with one `part`-th of the
/// work. `None` if nothing may be changed, or nothing is better.
pub fn improve(
    context: &SearchContext<'_>,
    best: &Simulated,
    others: &[PlanCandidate],
    part: u64,
) -> (Option<Simulated>, u64) {
    let problem = context.problem;
    let constraints = &problem.constraints;
    if constraints.cut_after.is_some() || !constraints.pins.is_empty() || !may_improve(context) {
        return (None, 0);
    }
    let is_given = constraints.replicas.is_some() || problem.in_flight.given().is_some();
    let has_free_replicas =
        !is_given && !problem.cluster.is_mixed() && !constraints.no_replication && !constraints.has_equal_replicas();
    let has_free_limits =
        problem.schedule.takes_caps() && problem.in_flight == InFlight::Auto && constraints.target.is_none();
    let mut starts = Starts::new(context);
    let mut first = starts.layout_of(&best.candidate);
    if has_free_limits && !problem.schedule.flushes() {
        let rule = build_plan::caps(problem, &first.stages.replicas);
        let more =
            best.played.caps.iter().zip(rule).map(|(cap, rule)| cap.saturating_sub(rule).min(MOST_WITHOUT_FLUSH));
        first.stages.more = more.collect();
    }
    for other in others.iter().filter(|other| other.fits) {
        let layout = starts.layout_of(other);
        starts.layouts.push(layout);
    }
    if has_free_replicas || constraints.replicas.is_some() {
        starts.add_balanced_layouts();
    }
    let Starts { orders, layouts, .. } = starts;
    let passing = GradientBuffers::of(&problem.cluster);
    let costs: Vec<RangeCosts<'_>> =
        orders.iter().map(|order| RangeCosts::new(&problem.graph, &order.space, passing)).collect();
    let evaluators = orders.iter().zip(&costs).map(|(order, costs)| Evaluator::new(problem, &order.ops, costs));
    let mut climb = Climb {
        problem,
        context,
        has_free_replicas,
        has_free_limits,
        orders: &orders,
        evaluators: evaluators.collect(),
        part,
        work: WORK / part,
        seen: HashSet::new(),
        best_us: f64::INFINITY,
        kept: Vec::new(),
        states: 0,
    };
    let found = climb.run(best, first, layouts);
    (found, climb.states)
}

/// True if plans of this problem are compared by their simulated times, and their cuts may change.
pub fn may_improve(context: &SearchContext<'_>) -> bool {
    let problem = context.problem;
    let is_timed = problem.cost == CostModel::Pipec && problem.objective == Objective::Throughput;
    let is_cut = problem.chunks == 1 && problem.graph.ops.len() > 1 && !problem.schedule.is_custom();
    is_timed && is_cut && context.options.efficiency.is_some()
}

impl Climb<'_> {
    fn run(&mut self, best: &Simulated, first: Layout, starts: Vec<Layout>) -> Option<Simulated> {
        let mut starts: Vec<(f64, Layout)> = starts.into_iter().map(|layout| self.settled(layout)).collect();
        starts.sort_by(|left, right| left.0.total_cmp(&right.0));
        let mut counts: HashMap<Vec<u32>, usize> = HashMap::new();
        starts.retain(|(_, layout)| {
            let count = counts.entry(layout.stages.replicas.clone()).or_default();
            *count += 1;
            *count <= ALIKE_STARTS
        });
        self.work = WORK / self.part;
        let starts_end = self.work - self.work / PART_OF_STARTS;
        // Plans are compared by short simulations.
        let short_us = self.try_layout(&first);
        let us = short_us.unwrap_or(best.played.minibatch_us);
        let mut climbed = vec![(us, first.clone())];
        if short_us.is_none() {
            self.seen.insert(first.clone());
            let (spots, caps) = (best.candidate.spots.clone(), best.played.caps.clone());
            self.keep(Kept { layout: first.clone(), us, spots, caps });
        }
        for (_, layout) in starts {
            if self.work < starts_end {
                break;
            }
            climbed.extend(self.try_with_limits(&layout));
        }
        climbed.sort_by(|left, right| left.0.total_cmp(&right.0));
        climbed.truncate(CLIMBED);
        let count = climbed.len();
        for (at, (us, layout)) in climbed.into_iter().enumerate() {
            // What one start leaves is for the next ones.
            let left = self.work - self.work / (count - at) as u64;
            self.work -= left;
            self.climb(us, layout);
            self.work += left;
        }
        // The best one is climbed to the end.
        let times = if self.problem.schedule.flushes() { 1 } else { TIMES_WITHOUT_FLUSH };
        self.work += times * WORK_OF_LAST / self.part;
        if let Some(best) = self.kept.iter().min_by(|left, right| left.us.total_cmp(&right.us)).cloned() {
            self.climb(best.us, best.layout);
        }
        let mut simplest = self.simplest()?;
        if self.has_free_limits && self.problem.schedule.flushes() {
            self.work += WORK_OF_LIMITS / self.part;
            self.lower_limits(simplest.layout.clone());
            simplest = self.simplest().unwrap_or(simplest);
        }
        let better = (simplest.layout != first).then(|| self.simulated(&simplest))?;
        (better.played.minibatch_us <= best.played.minibatch_us * (1.0 + ALIKE)).then_some(better)
    }

    /// The layout after all moves of cuts that are faster by the closed form, if no limit on items in flight binds.
    fn settled(&mut self, layout: Layout) -> (f64, Layout) {
        let is_one_stage = layout.stages.replicas.len() == 1;
        let more = if self.has_free_limits { self.most_more() } else { 0 };
        let of = |stages: Stages| Stages { more: vec![more; stages.replicas.len()], ..stages };
        let mut best = Layout { stages: of(layout.stages.clone()), ..layout };
        let mut best_us = self.estimate_us(&best);
        let mut is_improved = !is_one_stage;
        while is_improved && self.work > 0 {
            is_improved = false;
            let mut moves = Vec::new();
            self.cut_moves(&best, &mut moves);
            for stages in moves {
                let moved = Layout { stages, ..best };
                let other = self.estimate_us(&moved);
                if other < best_us * FASTER {
                    (best_us, best, is_improved) = (other, moved, true);
                }
            }
        }
        best.stages.more = layout.stages.more;
        (best_us, best)
    }

    /// The most micro-batches in flight beyond the schedule's rule.
    fn most_more(&self) -> u32 {
        if self.problem.schedule.flushes() { self.problem.microbatches } else { MOST_WITHOUT_FLUSH }
    }

    fn estimate_us(&mut self, layout: &Layout) -> f64 {
        let stages = layout.stages.replicas.len() as u64;
        self.work = self.work.saturating_sub(ESTIMATE * stages);
        self.evaluators[layout.order].closed_form_us(&layout.stages)
    }

    /// The fastest of a layout and the same with more micro-batches in flight.
    fn try_with_limits(&mut self, layout: &Layout) -> Option<(f64, Layout)> {
        let count = layout.stages.replicas.len();
        let choices = if self.has_free_limits && count > 1 { &MORE[..] } else { &MORE[..1] };
        let mut best: Option<(f64, Layout)> = None;
        for &more in choices {
            let more = more.min(self.most_more());
            // Without a flush the last stage may wait for updates, else for nothing.
            let of_last = if self.problem.schedule.flushes() { 0 } else { more.min(1) };
            let more = (0..count).map(|at| if at + 1 < count { more } else { of_last }).collect();
            let layout = Layout { stages: Stages { more, ..layout.stages.clone() }, ..*layout };
            let Some(us) = self.try_layout(&layout) else { continue };
            if best.as_ref().is_none_or(|(known, _)| us < known * FASTER) {
                best = Some((us, layout));
            }
        }
        best
    }

    /// Fewer micro-batches in flight, if the plan stays as good as the fastest.
    fn lower_limits(&mut self, mut layout: Layout) {
        for at in 0..layout.stages.more.len() {
            let mut step = layout.stages.more[at];
            while step > 0 {
                let mut lower = layout.clone();
                lower.stages.more[at] = layout.stages.more[at].saturating_sub(step);
                match self.try_layout(&lower) {
                    Some(us) if us <= self.best_us * (1.0 + ALIKE) => {
                        layout = lower;
                        step = step.min(layout.stages.more[at]);
                    }
                    _ => step /= 2,
                }
            }
        }
    }

    /// Takes faster moves until there is none, or the work is spent.
    fn climb(&mut self, us: f64, layout: Layout) {
        let (mut us, mut layout) = (us, layout);
        let mut is_improved = true;
        while is_improved {
            is_improved = false;
            for stages in self.moves(&layout) {
                if self.work == 0 {
                    return;
                }
                let moved = Layout { stages, ..layout };
                let Some(other) = self.try_layout(&moved) else { continue };
                if other < us * FASTER {
                    (us, layout, is_improved) = (other, moved, true);
                    break;
                }
            }
        }
    }

    /// The simulated time of a layout that fits and was not tried before.
    fn try_layout(&mut self, layout: &Layout) -> Option<f64> {
        if !self.seen.insert(layout.clone()) {
            return None;
        }
        let problem = self.problem;
        self.work = self.work.saturating_sub(ESTIMATE * layout.stages.replicas.len() as u64);
        let evaluator = &mut self.evaluators[layout.order];
        // Without a flush the closed form is never above the simulated time.
        let most = if problem.schedule.flushes() { HOPELESS } else { FASTER };
        let evaluated = evaluator.evaluate(&layout.stages, most * self.best_us)?;
        self.states += 1;
        let (us, work) = evaluator.simulated_us(&evaluated);
        let times = if problem.schedule.flushes() { 1 } else { TIMES_WITHOUT_FLUSH };
        self.work = self.work.saturating_sub(times * work);
        let caps = evaluated.caps;
        self.keep(Kept { layout: layout.clone(), us, spots: evaluated.spots, caps });
        Some(us)
    }

    fn shape(&self, layout: &Layout) -> Shape {
        let evaluator = &self.evaluators[layout.order];
        let stage = |(at, &replicas): (usize, &u32)| (evaluator.ops(&layout.stages, at), replicas);
        let stages = layout.stages.replicas.iter().enumerate().map(stage).collect();
        Shape::flat(stages, self.problem.cluster.levels.len() > 1)
    }

    /// The plan of a layout.
    fn simulated(&self, kept: &Kept) -> Simulated {
        let (shape, spots) = (self.shape(&kept.layout), kept.spots.clone());
        let candidate = self.context.placed_with_limits("pipec", shape, spots, kept.caps.clone());
        let played = plays(self.context, &candidate);
        Simulated { candidate, played }
    }

    fn keep(&mut self, kept: Kept) {
        if kept.us < self.best_us {
            self.best_us = kept.us;
            let most = kept.us * (1.0 + ALIKE);
            self.kept.retain(|other| other.us <= most);
        }
        if kept.us <= self.best_us * (1.0 + ALIKE) {
            self.kept.push(kept);
        }
    }

    /// The simplest of the plans that are as good as the fastest.
    fn simplest(&self) -> Option<Kept> {
        let key = |kept: &Kept| {
            let replicas = &kept.layout.stages.replicas;
            (replicas.len(), replicas.iter().sum::<u32>(), kept.caps.iter().sum::<u32>())
        };
        let at = (0..self.kept.len()).min_by(|&left, &right| {
            let (left, right) = (&self.kept[left], &self.kept[right]);
            key(left).cmp(&key(right)).then(left.us.total_cmp(&right.us))
        })?;
        Some(self.kept[at].clone())
    }

    fn moves(&self, layout: &Layout) -> Vec<Stages> {
        let mut moves = Vec::new();
        if self.has_free_limits {
            let last_waits = !self.problem.schedule.flushes();
            limit_moves(&layout.stages, self.most_more(), last_waits, &mut moves);
        }
        self.cut_moves(layout, &mut moves);
        if self.problem.cluster.is_mixed() {
            swap_moves(&layout.stages, &mut moves);
        }
        if self.has_free_replicas {
            self.device_moves(layout, &mut moves);
            self.stage_moves(layout, &mut moves);
            self.turn_moves(layout, &mut moves);
        }
        moves
    }

    fn cut_moves(&self, layout: &Layout, moves: &mut Vec<Stages>) {
        let cuts = &self.orders[layout.order].cuts;
        for at in 1..layout.stages.ends.len() - 1 {
            let Ok(place) = cuts.binary_search(&layout.stages.ends[at]) else { continue };
            let mut step = 1;
            while step < cuts.len() {
                for moved in [place.checked_sub(step), place.checked_add(step)].into_iter().flatten() {
                    let Some(&end) = cuts.get(moved) else { continue };
                    if end > layout.stages.ends[at - 1] && end < layout.stages.ends[at + 1] {
                        let mut ends = layout.stages.ends.clone();
                        ends[at] = end;
                        moves.push(Stages { ends, ..layout.stages.clone() });
                    }
                }
                step *= 2;
            }
        }
    }

    fn idle(&self, layout: &Layout) -> u32 {
        self.problem.cluster.devices().saturating_sub(layout.stages.replicas.iter().sum())
    }

    /// A layout with other replicas: with the same cuts, and with balanced ones.
    fn push_with(&self, layout: &Layout, ends: Vec<usize>, replicas: Vec<u32>, moves: &mut Vec<Stages>) {
        let more = vec![layout.stages.more.iter().copied().max().unwrap_or(0); replicas.len()];
        let of = |ends: Vec<usize>| Stages { ends, replicas: replicas.clone(), firsts: None, more: more.clone() };
        let balanced = linear_order::balanced(&self.problem.graph, &self.orders[layout.order].ops, &replicas);
        moves.push(of(ends));
        if balanced.len() == replicas.len() + 1 {
            moves.push(of(balanced));
        }
    }

    fn device_moves(&self, layout: &Layout, moves: &mut Vec<Stages>) {
        let own = &layout.stages.replicas;
        let mut push = |to: Option<usize>, from: Option<usize>| {
            let mut replicas = own.clone();
            to.into_iter().for_each(|to| replicas[to] += 1);
            from.into_iter().for_each(|from| replicas[from] -= 1);
            self.push_with(layout, layout.stages.ends.clone(), replicas, moves);
        };
        let givers = || (0..own.len()).filter(|from| own[*from] > 1);
        for to in 0..own.len() {
            if self.idle(layout) > 0 {
                push(Some(to), None);
            }
            givers().filter(|from| *from != to).for_each(|from| push(Some(to), Some(from)));
        }
        givers().for_each(|from| push(None, Some(from)));
    }

    fn stage_moves(&self, layout: &Layout, moves: &mut Vec<Stages>) {
        let (stages, idle) = (layout.stages.replicas.len(), self.idle(layout));
        for at in 0..stages.saturating_sub(1) {
            let mut ends = layout.stages.ends.clone();
            ends.remove(at + 1);
            let mut replicas = layout.stages.replicas.clone();
            let later = replicas.remove(at + 1);
            replicas[at] += later;
            self.push_with(layout, ends.clone(), replicas.clone(), moves);
            replicas[at] -= later.min(replicas[at] - 1);
            self.push_with(layout, ends, replicas, moves);
        }
        if self.problem.constraints.most_stages.is_some_and(|most| stages as u32 >= most) {
            return;
        }
        for at in (0..stages).filter(|at| layout.stages.ends[at + 1] - layout.stages.ends[*at] > 1) {
            let have = layout.stages.replicas[at] + idle;
            let halves = [(have.div_ceil(2), have / 2), (have.saturating_sub(1), 1), (1, have.saturating_sub(1))];
            for (first, second) in halves.into_iter().filter(|(first, second)| *first > 0 && *second > 0) {
                let mut replicas = layout.stages.replicas.clone();
                replicas[at] = first;
                replicas.insert(at + 1, second);
                let mut ends = layout.stages.ends.clone();
                ends.insert(at + 1, self.middle(layout, at, first, second));
                self.push_with(layout, ends, replicas, moves);
            }
        }
    }

    /// The same stages around the cluster, so that the first and the last are neighbours: they may share a tied parameter.
    fn turn_moves(&self, layout: &Layout, moves: &mut Vec<Stages>) {
        let cluster = &self.problem.cluster;
        if cluster.levels.len() < 2 || self.idle(layout) > 0 {
            return;
        }
        let devices = cluster.devices();
        let firsts = build_plan::firsts(&layout.stages.replicas);
        for &start in &firsts {
            let turned: Vec<u32> = firsts.iter().map(|first| (first + devices - start) % devices).collect();
            let firsts = (start > 0).then_some(turned);
            if firsts != layout.stages.firsts {
                moves.push(Stages { firsts, ..layout.stages.clone() });
            }
        }
    }

    /// Where a stage is cut in proportion to the devices of its parts.
    fn middle(&self, layout: &Layout, at: usize, first: u32, second: u32) -> usize {
        let (from, to) = (layout.stages.ends[at], layout.stages.ends[at + 1]);
        let order = &self.orders[layout.order].ops;
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

/// Two stages of equally many replicas exchange their devices.
fn swap_moves(stages: &Stages, moves: &mut Vec<Stages>) {
    let firsts = stages.firsts.clone().unwrap_or_else(|| build_plan::firsts(&stages.replicas));
    for one in 0..firsts.len() {
        for other in (0..one).filter(|other| stages.replicas[*other] == stages.replicas[one]) {
            let mut firsts = firsts.clone();
            firsts.swap(one, other);
            moves.push(Stages { firsts: Some(firsts), ..stages.clone() });
        }
    }
}

/// One micro-batch more in flight, at one stage or at all; with `last_waits` also at the last stage.
fn limit_moves(stages: &Stages, most: u32, last_waits: bool, moves: &mut Vec<Stages>) {
    let count = stages.more.len();
    let mut push = |more: Vec<u32>| {
        if more.iter().all(|more| *more <= most) {
            moves.push(Stages { more, ..stages.clone() });
        }
    };
    if count < 2 {
        return;
    }
    let waiting = if last_waits { count } else { count - 1 };
    for raised in count - 1..=waiting {
        push((0..count).map(|at| stages.more[at] + u32::from(at < raised)).collect());
    }
    for at in 0..waiting {
        let mut more = stages.more.clone();
        more[at] += 1;
        push(more);
    }
}
