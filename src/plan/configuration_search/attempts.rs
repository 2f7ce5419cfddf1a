//! The plans of a search: of the best layouts, and with unequal replicas. The best drafts are improved move by move.

use crate::plan::configuration_search::{FULL, HOPELESS, ROOM, Ranked, SLOWER_WITH_ROOM, SYNCHRONOUS, Search};
use crate::plan::parallel::in_parallel;
use crate::plan::request::{PlanOptions, ScheduleChoice};
use crate::plan::solve::refusal;
use crate::plan::tensor_parallel::TensorParallel;
use crate::plan::variant::{MOST_OPS, SizedCosts, Variant};
use crate::plan::zero::ZeroStage;
use compiler::partition::error::PlanError;
use compiler::partition::options::Effort;
use compiler::partition::planned::Planned;
use compiler::partition::search::layouts::{Layout, LayoutEstimate, Layouts};
use compiler::partition::single_degree;
use compiler::plan::Plan;
use compiler::plan::device_memory::fullest;
use compiler::plan::problem::Problem;
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::Zero;
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// Plans that are improved move by move, those of them under one schedule, and on groups.
const IMPROVED: usize = 6;
const IMPROVED_UNDER_ONE: usize = 3;
const IMPROVED_ON_GROUPS: usize = 1;

/// Improved plans of which the replicas near theirs are searched as well.
const WHOLE: usize = 3;

/// Up to this many devices, unequal replicas are searched for this many variants of single devices, and of groups.
const SMALL: u32 = 16;
const SEARCHED: usize = 8;
const SEARCHED_GROUPS: usize = 2;

/// A plan that was made, or why there is none.
pub struct Attempt {
    pub variant: usize,
    pub task: Task,
    /// True if the export to the target refuses the plan.
    pub is_refused: bool,
    pub planned: Result<Planned, PlanError>,
}

impl Attempt {
    pub fn us(&self) -> f64 {
        self.planned.as_ref().map_or(f64::INFINITY, |planned| planned.plan.predicted.minibatch_us)
    }

    fn by_time(&self, other: &Attempt) -> Ordering {
        self.us().total_cmp(&other.us())
    }

    /// Plans that the target accepts come first.
    fn by_preference(&self, other: &Attempt) -> Ordering {
        self.is_refused.cmp(&other.is_refused).then(self.by_time(other))
    }
}

/// The fastest plan that the target accepts.
pub fn best(attempts: &[Attempt]) -> Option<&Attempt> {
    let accepted = attempts.iter().filter(|attempt| !attempt.is_refused && attempt.planned.is_ok());
    accepted.min_by(|left, right| left.by_time(right))
}

/// A plan to make.
#[derive(Clone)]
pub enum Task {
    /// Of this layout.
    Layout(Ranked),
    /// With these replicas, or any.
    Replicas { schedule: Schedule, zero: Zero, given: Option<Vec<u32>> },
}

impl Task {
    fn is_free(&self) -> bool {
        matches!(self, Task::Replicas { given: None, .. })
    }

    pub fn schedule(&self) -> Schedule {
        match self {
            Task::Layout(one) => one.estimate.layout.schedule,
            Task::Replicas { schedule, .. } => *schedule,
        }
    }

    /// Makes the plan.
    pub fn planned(&self, variant: &Variant, options: &PlanOptions, effort: Effort) -> Result<Planned, PlanError> {
        variant.planned(options, effort, &|problem, planner| match self {
            Task::Layout(one) => Layouts::of(problem).plan(&one.estimate.layout, planner),
            &Task::Replicas { schedule, zero, ref given } => {
                let chunks = if self.is_free() && schedule.has_chunks() { 2 } else { 1 };
                let mut problem = Problem { schedule, chunks, zero, ..problem.clone() };
                if given.is_some() {
                    problem.constraints.replicas.clone_from(given);
                }
                single_degree::plan(&problem, planner)
            }
        })
    }
}

impl Search<'_> {
    /// Makes plans, `at_once` in parallel, and offers the better ones. Ends at a plan that cannot be much improved.
    pub fn attempt(&mut self, tasks: Vec<(usize, Task)>, at_once: usize, attempts: &mut Vec<Attempt>) {
        self.total = self.done + tasks.len() as u64;
        for few in tasks.chunks(at_once) {
            let best_us = best(attempts).map_or(f64::INFINITY, Attempt::us);
            if best_us.is_finite() && (self.events.stops() || self.is_close(best_us)) {
                break;
            }
            let made = self.make(few, Effort::Draft);
            if let Some(best) = made.iter().min_by(|left, right| left.by_time(right))
                && best.us() < best_us
            {
                if !best.is_refused {
                    self.best_us = self.best_us.min(best.us());
                }
                self.offer(best.variant, &|| best.planned.as_ref().ok().cloned());
            }
            attempts.extend(made);
            self.progress(few.len() as u64);
        }
    }

    /// True if a plan is preferred to another that nearly fills memory: about as fast, with clearly less memory.
    pub fn is_roomier(&self, plan: &Plan, full: &Plan) -> bool {
        let (us, full_us) = (plan.predicted.minibatch_us, full.predicted.minibatch_us);
        self.has_more_room(us, fullest(plan), full_us, fullest(full))
    }

    /// Memory per device. On unequal devices the fullest is not the one with the most bytes.
    fn limit(&self) -> Option<u64> {
        let whole = self.variants.first().map(|variant| &variant.whole);
        let whole = whole.filter(|whole| whole.cluster.classes.is_empty())?;
        whole.limit_of(0..whole.cluster.devices())
    }

    fn is_full(&self, bytes: u64) -> bool {
        self.limit().is_some_and(|limit| bytes as f64 > FULL * limit as f64)
    }

    fn has_more_room(&self, us: f64, bytes: u64, full_us: f64, full_bytes: u64) -> bool {
        self.is_full(full_bytes)
            && us <= full_us * (1.0 + SLOWER_WITH_ROOM)
            && bytes as f64 <= full_bytes as f64 * (1.0 - ROOM)
    }

    /// Adds layouts that are about as fast as the best plan, if this nearly fills memory, and need clearly less.
    pub fn roomier(&self, simulated: &[Ranked], attempts: &mut Vec<Attempt>) {
        let Some(best) = best(attempts) else { return };
        let (us, Ok(full)) = (best.us(), &best.planned) else { return };
        let full_bytes = fullest(&full.plan);
        if !self.is_full(full_bytes) {
            return;
        }
        let mut roomy: Vec<Ranked> = simulated.to_vec();
        roomy.retain(|one| self.has_more_room(one.us, one.estimate.peak_bytes, us, full_bytes));
        roomy.sort_by(|left, right| left.us.total_cmp(&right.us));
        roomy.truncate(2);
        // The same layout with more sharding.
        if let Task::Layout(one) = best.task {
            let kinds = self.zero.kinds(self.variants[one.variant].problem());
            let more = kinds.into_iter().skip_while(|zero| *zero != one.estimate.layout.zero).skip(1).take(2);
            roomy.extend(more.map(|zero| {
                let layout = Layout { zero, ..one.estimate.layout };
                Ranked { estimate: LayoutEstimate { layout, ..one.estimate }, ..one }
            }));
        }
        for one in roomy {
            if self.events.stops() {
                return;
            }
            attempts.extend(self.make(&[(one.variant, Task::Layout(one))], Effort::Whole));
        }
    }

    /// Makes plans in parallel, each of a variant.
    fn make(&self, tasks: &[(usize, Task)], effort: Effort) -> Vec<Attempt> {
        let (variants, options) = (&self.variants, &self.request.options);
        let found = in_parallel(tasks, |(variant, task)| task.planned(&variants[*variant], options, effort));
        let refuses = |plan: &Plan| options.target.is_some_and(|target| refusal(target, plan).is_some());
        let made = tasks.iter().cloned().zip(found).map(|((variant, task), planned)| {
            let is_refused = planned.as_ref().is_ok_and(|planned| refuses(&planned.plan));
            Attempt { variant, task, is_refused, planned }
        });
        made.collect()
    }

    /// Replaces the best drafts by plans that are improved move by move.
    pub fn improve(&self, attempts: &mut [Attempt]) {
        if self.events.stops() {
            return;
        }
        let mut order: Vec<usize> = (0..attempts.len()).filter(|at| attempts[*at].us().is_finite()).collect();
        order.sort_by(|left, right| attempts[*left].by_preference(&attempts[*right]));
        let most_us = HOPELESS * order.first().map_or(0.0, |at| attempts[*at].us());
        // The climbs from two plans of one variant end alike, if the number of stages may change.
        let mut known: Vec<(usize, Schedule, usize)> = Vec::new();
        let is_fixed = self.request.options.no_replication;
        let (mut on_groups, is_given) = (0, matches!(self.tensor_parallel(), TensorParallel::Degree(_)));
        order.retain(|at| {
            let Attempt { variant, task, planned, .. } = &attempts[*at];
            let stages = planned.as_ref().map_or(0, |planned| planned.plan.stages.len());
            let kind = (*variant, task.schedule(), if is_fixed { stages } else { 0 });
            let is_on_groups = self.variants[*variant].groups.is_some();
            let is_one_of_many = known.iter().filter(|known| known.1 == kind.1).count() >= IMPROVED_UNDER_ONE;
            let is_new = !known.contains(&kind)
                && (!is_one_of_many || !self.has_open_schedule())
                && (is_given || !is_on_groups || on_groups < IMPROVED_ON_GROUPS);
            if is_new {
                known.push(kind);
                on_groups += usize::from(is_on_groups);
            }
            is_new && attempts[*at].us() <= most_us
        });
        order.truncate(IMPROVED);
        self.replace(order.clone(), Effort::Climb, attempts);
        order.sort_by(|left, right| attempts[*left].by_preference(&attempts[*right]));
        order.truncate(WHOLE);
        self.replace(order, Effort::Whole, attempts);
    }

    /// Makes attempts again, with another effort.
    fn replace(&self, order: Vec<usize>, effort: Effort, attempts: &mut [Attempt]) {
        let tasks = order.iter().map(|at| (attempts[*at].variant, attempts[*at].task.clone()));
        let better = self.make(&Vec::from_iter(tasks), effort);
        for (at, better) in order.into_iter().zip(better) {
            if better.planned.is_ok() && (attempts[at].is_refused || !better.is_refused) {
                attempts[at] = better;
            }
        }
    }

    /// Tries the replicas of the best plan at the next smaller and larger micro-batches, while a plan is faster.
    pub fn neighbours(&mut self, source: &dyn SizedCosts, attempts: &mut Vec<Attempt>) {
        let mut tried = BTreeSet::new();
        loop {
            let Some(fastest) = best(attempts) else { return };
            let (us, Ok(Planned { plan, .. })) = (fastest.us(), &fastest.planned) else { return };
            if plan.schedule.chunks > 1 || !self.is_small(fastest.variant) || self.events.stops() || self.is_close(us) {
                return;
            }
            let schedule = plan.schedule.kind;
            let replicas: Vec<u32> = plan.stages.iter().map(|stage| stage.replicas).collect();
            let zero = plan.zero();
            tried.insert((fastest.variant, replicas.clone()));
            let mut next = self.next_sizes(source, fastest.variant);
            next.retain(|variant| self.bound_if_better(*variant, &[schedule]).is_some());
            next.retain(|variant| tried.insert((*variant, replicas.clone())));
            let task = Task::Replicas { schedule, zero, given: Some(replicas) };
            let tasks: Vec<(usize, Task)> = next.into_iter().map(|variant| (variant, task.clone())).collect();
            attempts.extend(self.make(&tasks, Effort::Whole).into_iter().filter(|attempt| attempt.planned.is_ok()));
            let best_us = best(attempts).map_or(f64::INFINITY, Attempt::us);
            self.best_us = self.best_us.min(best_us);
            if best_us >= us {
                return;
            }
        }
    }

    /// The variants of the next smaller and larger micro-batches: on groups those that were tried.
    fn next_sizes(&mut self, source: &dyn SizedCosts, variant: usize) -> Vec<usize> {
        let groups = |variant: &Variant| variant.whole.shared.first().map(|costs| costs.devices);
        let (of, micro_batch) = (groups(&self.variants[variant]), self.variants[variant].micro_batch);
        let smaller = self.sizes.iter().rev().find(|size| size.micro_batch < micro_batch);
        let larger = self.sizes.iter().find(|size| size.micro_batch > micro_batch);
        let sizes = [smaller, larger].into_iter().flatten().map(|size| size.micro_batch);
        let is = |one: &Variant, size: u64| one.micro_batch == size && groups(one) == of;
        let mut next = Vec::new();
        for size in Vec::from_iter(sizes) {
            let known = self.variants.iter().position(|one| is(one, size));
            next.extend(known.or_else(|| of.is_none().then(|| self.make_variant(source, size)).flatten()));
        }
        next
    }

    /// Makes the variant of a size on single devices.
    fn make_variant(&mut self, source: &dyn SizedCosts, micro_batch: u64) -> Option<usize> {
        let known = self.costs.get(&micro_batch).cloned();
        let costs = known.map_or_else(|| source.at(micro_batch), Ok).ok()?;
        self.costs.insert(micro_batch, costs.clone());
        self.variants.push(Variant::new(self.request, costs, None, self.batch).ok()?);
        Some(self.variants.len() - 1)
    }

    /// True if all schedules may be searched, with many variants.
    fn is_small(&self, variant: usize) -> bool {
        let whole = &self.variants[variant].whole;
        whole.cluster.devices() <= SMALL && whole.graph.ops.len() <= MOST_OPS
    }

    /// Searches for plans with unequal replicas: of the variants with the fastest layouts.
    pub fn unequal(&self, simulated: &[Ranked]) -> Vec<(usize, Task)> {
        let us = |variant: usize| {
            let simulated = simulated.iter().find(|one| one.variant == variant);
            simulated.map_or_else(|| self.variants[variant].least_us(), |one| one.us)
        };
        let schedules = if self.has_open_schedule() { &[Schedule::OneFOneB][..] } else { &self.schedules };
        let may_win = |variant: &usize| self.bound_if_better(*variant, schedules).is_some();
        let mut order: Vec<usize> = (0..self.variants.len()).filter(may_win).collect();
        order.sort_by(|left, right| us(*left).total_cmp(&us(*right)));
        match order.first().is_some_and(|variant| self.is_small(*variant)) {
            true => {
                let is_alone = |variant: &usize| self.variants[*variant].groups.is_none();
                let (mut alone, mut groups): (Vec<usize>, Vec<usize>) = order.into_iter().partition(is_alone);
                alone.truncate(SEARCHED);
                groups.truncate(SEARCHED_GROUPS);
                order = [alone, groups].concat();
            }
            false => order.truncate(1),
        }
        self.free(order, schedules, simulated)
    }

    /// The lower bound of a variant under these schedules, if it is below the best time.
    fn bound_if_better(&self, variant: usize, schedules: &[Schedule]) -> Option<f64> {
        let us = self.variants[variant].bound.least_us(schedules, self.fastest_zero(), self.best_us);
        (us * (1.0 + self.request.options.gap) < self.best_us).then_some(us)
    }

    /// Searches for plans with unequal replicas and split backwards: of the variants with the lowest bounds.
    pub fn split_backward(&self, simulated: &[Ranked]) -> Vec<(usize, Task)> {
        let kind = [Schedule::ZbH2, Schedule::ZbH1].into_iter().find(|kind| self.runs(*kind));
        let Some(kind) = kind.filter(|_| self.has_open_schedule()) else { return Vec::new() };
        let small = (0..self.variants.len()).filter(|variant| self.is_small(*variant));
        let mut order: Vec<(f64, usize)> =
            small.filter_map(|variant| Some((self.bound_if_better(variant, &[kind])?, variant))).collect();
        order.sort_by(|left, right| left.0.total_cmp(&right.0));
        order.truncate(SEARCHED);
        self.free(order.into_iter().map(|(_, variant)| variant).collect(), &[kind], simulated)
    }

    fn runs(&self, kind: Schedule) -> bool {
        self.request.options.target.is_none_or(|target| target.runs(kind))
    }

    /// The same under other schedules: of the variants of the best plan, and of the best with unequal replicas.
    pub fn other_schedules(&self, simulated: &[Ranked], attempts: &[Attempt]) -> Vec<(usize, Task)> {
        if !self.has_open_schedule() {
            return Vec::new();
        }
        let best_of = |is_any: bool| {
            let of = attempts.iter().filter(|attempt| is_any || attempt.task.is_free());
            of.min_by(|left, right| left.by_time(right)).map(|attempt| attempt.variant)
        };
        let variants: BTreeSet<usize> = [true, false].into_iter().filter_map(best_of).collect();
        let variants = variants.into_iter().filter(|variant| self.is_small(*variant)).collect();
        let others = SYNCHRONOUS.into_iter().filter(|kind| self.runs(*kind));
        let mut tasks = self.free(variants, &others.collect::<Vec<_>>(), simulated);
        let is_known = |variant: usize, task: &Task| {
            let of = attempts.iter().filter(|attempt| attempt.variant == variant && attempt.task.is_free());
            of.map(|attempt| attempt.task.schedule()).any(|schedule| schedule == task.schedule())
        };
        tasks.retain(|(variant, task)| !is_known(*variant, task));
        tasks
    }

    fn has_open_schedule(&self) -> bool {
        !matches!(self.request.options.schedule, Some(ScheduleChoice::Named(_)))
    }

    /// The searches for unequal replicas of variants under schedules; with ZeRO only if no layout fits without.
    fn free(&self, variants: Vec<usize>, schedules: &[Schedule], simulated: &[Ranked]) -> Vec<(usize, Task)> {
        let is_roomy = |estimate: &LayoutEstimate| estimate.layout.zero.level == 0 && !estimate.recomputes();
        let kinds = match self.zero {
            ZeroStage::Auto if simulated.iter().any(|one| is_roomy(&one.estimate)) => vec![Zero::default()],
            ZeroStage::Auto => vec![Zero::default(), self.zero.least(self.request.options.target)],
            given => vec![given.zero()],
        };
        let mut tasks = Vec::new();
        for variant in variants {
            for &schedule in schedules {
                tasks.extend(kinds.iter().map(|&zero| (variant, Task::Replicas { schedule, zero, given: None })));
            }
        }
        tasks
    }
}
