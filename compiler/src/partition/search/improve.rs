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
//! The climb simulates what is cheap to simulate: without a flush few items under given limits, and recomputation of fused
//! ops. The last moves, of [`polish`], are compared by the time of the whole plan, as it is written in the end.
//!
//! Among plans within [`ALIKE`] of the fastest the simplest wins: fewer stages, fewer devices, fewer micro-batches in
//! flight, less memory.

use crate::partition::dp::nested_partition::Shape;
use crate::partition::search::build_plan::{self, StagePosition};
use crate::partition::search::context::SearchContext;
use crate::partition::search::evaluate::{Evaluated, Evaluator, Stages};
use crate::partition::search::moves::{MOST_WITHOUT_FLUSH, Moves};
use crate::partition::search::range_costs::RangeCosts;
use crate::partition::search::result::PlanCandidate;
use crate::partition::search::select::{Simulated, plays};
use crate::partition::search::starts::{Layout, Order, Starts};
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::problem::{CostModel, InFlight, Objective, Problem};
use std::collections::{HashMap, HashSet};

/// Work of a climb, in micro-batches times stages; about two microseconds each. The starts have the same for closed
/// forms.
const WORK: u64 = 800_000;

/// An item without a flush costs several times as much.
const TIMES_WITHOUT_FLUSH: u64 = 3;

/// Work of a closed form, per stage.
const ESTIMATE: u64 = 2;

/// Work of the last climb, from the best plan, and of the choice of lower in-flight limits.
const WORK_OF_LAST: u64 = 400_000;
const WORK_OF_LIMITS: u64 = 50_000;

/// Plans from which the climb starts, after the starts were simulated with a part of the work: so many that each has this
/// number of simulations, but at least and at most these.
const CLIMBED: [usize; 2] = [6, 16];
const SIMULATIONS: u64 = 80;
const PART_OF_STARTS: u64 = 3;

/// Starts with the same replicas, along different orders.
const ALIKE_STARTS: usize = 2;

/// More micro-batches in flight with which starts are simulated. With a flush, a minibatch is the limit.
const MORE: [u32; 4] = [0, 2, 5, u32::MAX];

/// A move is taken if the time falls below this fraction.
const FASTER: f64 = 0.9995;

/// Plans within this fraction of the fastest are as good; the simplest of them wins.
const ALIKE: f64 = 0.005;

/// With a flush, a plan whose closed form is above this multiple of the best time is not simulated.
const HOPELESS: f64 = 1.6;

/// Work of the last moves, in simulations of the steady state. A plan that chooses its limits takes several.
const POLISHING: u32 = 200;
const PLAYING: u32 = 8;

/// A plan is not simulated to the steady state if it seems slower than the best by more than the first factor, and does not
/// choose its limits if it is slower by more than the second.
const NEAR: f64 = 1.05;
const NEARER: f64 = 1.02;

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
    moves: Moves<'a>,
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
    if !has_moves(context) {
        return (None, 0);
    }
    let mut starts = Starts::new(context);
    let first = layout_of(&mut starts, best);
    for other in others.iter().filter(|other| other.fits) {
        let layout = starts.layout_of(other);
        starts.layouts.push(layout);
    }
    if may_change_replicas(context.problem) || context.problem.constraints.replicas.is_some() {
        starts.add_balanced_layouts();
    }
    let layouts = std::mem::take(&mut starts.layouts);
    let costs = costs(context, &starts.orders);
    let mut climb = Climb::new(context, &starts.orders, &costs, part);
    let found = climb.run(best, first, layouts);
    (found, climb.states)
}

/// The plan after all moves that are faster by the time of the whole plan, and the number of plans that
/// were simulated. `None` if nothing may be changed, nothing is better, or the climb compared whole plans already.
pub fn polish(context: &SearchContext<'_>, best: &Simulated) -> (Option<Simulated>, u64) {
    let is_recomputed = best.candidate.spots.iter().any(|spot| spot.recompute.is_any());
    if !has_moves(context) || context.problem.schedule.flushes() && !is_recomputed {
        return (None, 0);
    }
    let mut starts = Starts::new(context);
    let first = layout_of(&mut starts, best);
    let costs = costs(context, &starts.orders);
    let mut climb = Climb::new(context, &starts.orders, &costs, 1);
    let found = climb.polished(best, first);
    (found, climb.states)
}

fn costs<'a>(context: &SearchContext<'a>, orders: &'a [Order]) -> Vec<RangeCosts<'a>> {
    let passing = GradientBuffers::of(&context.problem.cluster);
    orders.iter().map(|order| RangeCosts::new(&context.problem.graph, &order.space, passing)).collect()
}

/// The layout of a plan, with its limits.
fn layout_of(starts: &mut Starts<'_>, best: &Simulated) -> Layout {
    let problem = starts.problem();
    let mut layout = starts.layout_of(&best.candidate);
    if may_change_limits(problem) && !problem.schedule.flushes() {
        let rule = build_plan::caps(problem, &layout.stages.replicas);
        let more =
            best.played.caps.iter().zip(rule).map(|(cap, rule)| cap.saturating_sub(rule).min(MOST_WITHOUT_FLUSH));
        layout.stages.more = more.collect();
    }
    layout
}

fn has_moves(context: &SearchContext<'_>) -> bool {
    let constraints = &context.problem.constraints;
    constraints.cut_after.is_none() && constraints.pins.is_empty() && may_improve(context)
}

fn may_change_replicas(problem: &Problem) -> bool {
    let constraints = &problem.constraints;
    let is_given = constraints.replicas.is_some() || problem.in_flight.given().is_some();
    !is_given && !constraints.no_replication && !constraints.has_equal_replicas()
}

fn may_change_limits(problem: &Problem) -> bool {
    problem.schedule.takes_caps() && problem.in_flight == InFlight::Auto && problem.constraints.target.is_none()
}

/// True if plans of this problem are compared by their simulated times, and their cuts may change.
pub fn may_improve(context: &SearchContext<'_>) -> bool {
    let problem = context.problem;
    let is_timed = problem.cost == CostModel::Pipec && problem.objective == Objective::Throughput;
    let is_cut = problem.chunks == 1 && problem.graph.ops.len() > 1 && !problem.schedule.is_custom();
    is_timed && is_cut && context.options.efficiency.is_some()
}

impl<'a> Climb<'a> {
    fn new(context: &'a SearchContext<'a>, orders: &'a [Order], costs: &'a [RangeCosts<'a>], part: u64) -> Climb<'a> {
        let problem = context.problem;
        let evaluators = orders.iter().zip(costs).map(|(order, costs)| Evaluator::new(problem, &order.ops, costs));
        let (has_free_replicas, has_free_limits) = (may_change_replicas(problem), may_change_limits(problem));
        Climb {
            problem,
            context,
            moves: Moves { problem, orders, has_free_replicas, has_free_limits },
            evaluators: evaluators.collect(),
            part,
            work: WORK / part,
            seen: HashSet::new(),
            best_us: f64::INFINITY,
            kept: Vec::new(),
            states: 0,
        }
    }

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
        let spent = WORK / self.part - self.work;
        climbed.sort_by(|left, right| left.0.total_cmp(&right.0));
        // Along another order the same stages may take the same time.
        climbed.dedup_by(|next, one| next.0 == one.0 && next.1.stages.replicas == one.1.stages.replicas);
        let [least, most] = CLIMBED;
        let simulations = self.work / (spent / self.states.max(1)).max(1);
        climbed.truncate(((simulations / SIMULATIONS) as usize).clamp(least, most));
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
        if self.moves.has_free_limits && self.problem.schedule.flushes() {
            self.work += WORK_OF_LIMITS / self.part;
            self.lower_limits(simplest.layout.clone());
            simplest = self.simplest().unwrap_or(simplest);
        }
        let better = (simplest.layout != first).then(|| self.simulated(&simplest))?;
        (better.played.minibatch_us <= best.played.minibatch_us * (1.0 + ALIKE)).then_some(better)
    }

    /// The plan after moves that make the whole plan faster.
    fn polished(&mut self, start: &Simulated, mut layout: Layout) -> Option<Simulated> {
        let mut left = POLISHING;
        let mut best: Option<Simulated> = None;
        let mut best_us = start.played.minibatch_us;
        let mut is_improved = true;
        while is_improved && left > 0 {
            is_improved = false;
            for (_, moved, evaluated) in self.near(&layout, best_us) {
                if left == 0 {
                    break;
                }
                left -= 1;
                let us = self.evaluators[moved.order].whole_us(&evaluated);
                if us > NEARER * best_us {
                    continue;
                }
                left = left.saturating_sub(PLAYING);
                let Evaluated { spots, caps, .. } = evaluated;
                let other = self.simulated(&Kept { layout: moved.clone(), us, spots, caps });
                if other.candidate.fits && other.played.minibatch_us < best_us * FASTER {
                    best_us = other.played.minibatch_us;
                    (best, layout, is_improved) = (Some(other), moved, true);
                    break;
                }
            }
        }
        best
    }

    /// New layouts after a move that seem no slower than [`NEAR`], the fastest first, with their short simulations.
    fn near(&mut self, layout: &Layout, best_us: f64) -> Vec<(f64, Layout, Evaluated)> {
        let mut near = Vec::new();
        for stages in self.moves.of(layout) {
            let moved = Layout { stages, ..*layout };
            if self.seen.contains(&moved) {
                continue;
            }
            let evaluator = &mut self.evaluators[moved.order];
            let Some(evaluated) = evaluator.evaluate(&moved.stages, NEAR * best_us) else { continue };
            self.states += 1;
            let (us, _) = evaluator.simulated_us(&evaluated);
            if us <= NEAR * best_us {
                self.seen.insert(moved.clone());
                near.push((us, moved, evaluated));
            }
        }
        near.sort_by(|left, right| left.0.total_cmp(&right.0));
        near
    }

    /// The layout after all moves of cuts that are faster by the closed form, if no limit on items in flight binds.
    fn settled(&mut self, layout: Layout) -> (f64, Layout) {
        let is_one_stage = layout.stages.replicas.len() == 1;
        let more = if self.moves.has_free_limits { self.moves.most_more() } else { 0 };
        let of = |stages: Stages| Stages { more: vec![more; stages.replicas.len()], ..stages };
        let mut best = Layout { stages: of(layout.stages.clone()), ..layout };
        let mut best_us = self.estimate_us(&best);
        let mut is_improved = !is_one_stage;
        while is_improved && self.work > 0 {
            is_improved = false;
            let mut moves = Vec::new();
            self.moves.cuts(&best, &mut moves);
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

    fn estimate_us(&mut self, layout: &Layout) -> f64 {
        let stages = layout.stages.replicas.len() as u64;
        self.work = self.work.saturating_sub(ESTIMATE * stages);
        self.evaluators[layout.order].closed_form_us(&layout.stages)
    }

    /// The fastest of a layout and the same with more micro-batches in flight.
    fn try_with_limits(&mut self, layout: &Layout) -> Option<(f64, Layout)> {
        let count = layout.stages.replicas.len();
        let choices = if self.moves.has_free_limits && count > 1 { &MORE[..] } else { &MORE[..1] };
        let mut best: Option<(f64, Layout)> = None;
        for &more in choices {
            let more = more.min(self.moves.most_more());
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
            for stages in self.moves.of(&layout) {
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
}
