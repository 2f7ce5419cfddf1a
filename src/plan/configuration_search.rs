//! Searches everything that a minibatch leaves open: micro-batch size, tensor-parallel degree, stages, replicas, stages
//! per rank, schedule, ZeRO stage and recomputation.
//!
//! 1. Micro-batch sizes ascend until larger ones are clearly slower. Each size has costs on one device and on groups of
//!    every tensor-parallel degree: its variants.
//! 2. All layouts of a variant are estimated (`compiler::partition::search::layouts`).
//! 3. The best layouts by estimate are simulated, and others until their lower bounds show that none is much faster.
//! 4. The best simulated layouts are planned with better cuts. Plans with unequal replicas are searched as well: of the
//!    best variant, and on small clusters of several variants under every schedule.
//!
//! The work is divided before it is distributed over threads, so the result does not depend on their number.

use crate::costs::{COSTS, Costs};
use crate::error::Error;
use crate::events::{Event, EventSink};
use crate::plan::from_costs::state_collectives;
use crate::plan::infeasible::describe;
use crate::plan::interruptible::mark_interrupted;
use crate::plan::parallel::in_parallel;
use crate::plan::request::{PlanOptions, PlanRequest, ScheduleChoice};
use crate::plan::request_costs::untrainable;
use crate::plan::result::{Alternative, Losses, PlanResult, Tried, TriedPlan, of_each_kind};
use crate::plan::scope::Scope;
use crate::plan::solve::refusal;
use crate::plan::tensor_parallel::{GroupLayout, TensorParallel};
use crate::plan::tied_weights;
use crate::plan::variant::{MOST_OPS, SizedCosts, Variant, sizes};
use crate::plan::zero::ZeroStage;
use compiler::partition::error::PlanError;
use compiler::partition::explain::infeasible::is_infeasible;
use compiler::partition::options::PlannerOptions;
use compiler::partition::planned::Planned;
use compiler::partition::search::finish_plan;
use compiler::partition::search::layouts::{LayoutEstimate, Layouts};
use compiler::partition::single_degree;
use compiler::plan::Plan;
use compiler::plan::problem::{Problem, Target};
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::MOST;
use compiler::text::quantity;
use serde_json::json;
use std::ops::RangeInclusive;

/// Synchronous schedules whose layouts are estimated. GPipe is 1F1B with more memory, and bfs is interleaved with more.
const ESTIMATED: [Schedule; 6] =
    [Schedule::OneFOneB, Schedule::Interleaved, Schedule::ZbH1, Schedule::ZbH2, Schedule::Zbv, Schedule::DualPipeV];

/// All synchronous schedules, for plans with unequal replicas.
pub const SYNCHRONOUS: [Schedule; 8] = [
    Schedule::OneFOneB,
    Schedule::Gpipe,
    Schedule::Interleaved,
    Schedule::Bfs,
    Schedule::ZbH1,
    Schedule::ZbH2,
    Schedule::Zbv,
    Schedule::DualPipeV,
];

/// Sizes whose variants are made at the same time.
const AT_ONCE: usize = 4;

/// A size is clearly slower than the best if its best estimate takes this many times as long.
const SLOWER: f64 = 1.2;

/// Layouts that are simulated, and those of them that are planned.
const SIMULATED: usize = 48;
const PLANNED: usize = 4;

/// Plans that are improved move by move.
const IMPROVED: usize = 2;

/// Simulated layouts of one variant with the same numbers of ranks and replicas.
const ALIKE: usize = 6;

/// More layouts are simulated while their lower bound is below this fraction of the best time, up to this work: stages times
/// micro-batches.
const CLOSE: f64 = 0.96;
const MOST_WORK: u64 = 4_000_000;

/// An estimate above this multiple of the best is not simulated.
const HOPELESS: f64 = 1.3;

/// The largest cluster, and the number of variants, with a search for unequal replicas under every schedule.
const SMALL: u32 = 16;
const SEARCHED: usize = 3;

/// The ZeRO stage, which is part of the search for a batch. A torch bundle shards nothing.
fn zero(request: &PlanRequest) -> ZeroStage {
    let is_searched = request.batch.is_some() && request.options.target != Some(Target::Torch);
    let default = if is_searched { ZeroStage::Auto } else { ZeroStage::Level(0) };
    request.options.zero.unwrap_or(default)
}

/// The search, with what it has found so far.
struct Search<'a> {
    request: &'a PlanRequest,
    events: &'a dyn EventSink,
    batch: u64,
    schedules: Vec<Schedule>,
    zero: RangeInclusive<u32>,
    variants: Vec<Variant>,
    /// Units of work, for the progress.
    done: u64,
    total: u64,
    /// The best predicted time so far.
    best_us: f64,
}

/// A layout of a variant, with its estimated or simulated time.
#[derive(Clone, Copy)]
struct Ranked {
    variant: usize,
    estimate: LayoutEstimate,
    us: f64,
}

/// Plans all configurations and returns the best.
pub fn plan(
    request: &PlanRequest,
    source: &dyn SizedCosts,
    batch: u64,
    events: &dyn EventSink,
) -> Result<PlanResult, Error> {
    let target = request.options.target;
    let schedules = match &request.options.schedule {
        Some(ScheduleChoice::Named(kind)) => vec![*kind],
        _ => ESTIMATED.into_iter().filter(|kind| target.is_none_or(|target| target.runs(*kind))).collect(),
    };
    let zero = match zero(request) {
        ZeroStage::Auto => 0..=target.map_or(MOST, Target::most_zero),
        ZeroStage::Level(level) => level..=level,
    };
    let mut search = Search {
        request,
        events,
        batch,
        schedules,
        zero,
        variants: Vec::new(),
        done: 0,
        total: 0,
        best_us: f64::INFINITY,
    };
    search.make_variants(source)?;
    let simulated = search.simulate();
    let result = search.conclude(simulated);
    events.event(Event::ProgressEnd);
    result
}

impl Search<'_> {
    fn progress(&mut self, done: u64) {
        self.done += done;
        let message = match self.best_us.is_finite() {
            true => format!("best {} samples/s", quantity::samples(self.batch as f64 * 1e6 / self.best_us)),
            false => String::new(),
        };
        let (done, total) = (self.done, self.total.max(self.done));
        self.events.event(Event::Progress { unit: "configurations", done, total, message: &message });
    }

    /// Makes the variants of ascending micro-batch sizes.
    fn make_variants(&mut self, source: &dyn SizedCosts) -> Result<(), Error> {
        let (batch, options) = (self.batch, &self.request.options);
        let sizes = match source.only_size() {
            Some(size) => vec![size],
            None if self.request.batch.is_none() => vec![batch / u64::from(options.microbatches)],
            None if options.microbatches > 1 => vec![batch / u64::from(options.microbatches)],
            None => sizes(batch),
        };
        let mut failure: Option<Error> = None;
        for (at, sizes) in sizes.chunks(AT_ONCE).enumerate() {
            // Any plan is better than none.
            if self.events.stops() && self.variants.iter().any(|variant| !variant.estimates.is_empty()) {
                break;
            }
            self.total += (sizes.len() * 4) as u64;
            let mut tasks: Vec<(Costs, Option<(u32, GroupLayout)>)> = Vec::new();
            for costs in in_parallel(sizes, |size| source.at(*size)) {
                let costs = match costs {
                    Ok(costs) => costs,
                    // Larger sizes may not be possible.
                    Err(error) => {
                        failure.get_or_insert(error);
                        continue;
                    }
                };
                if self.variants.is_empty() && tasks.is_empty() {
                    self.request.protect_output(&costs.model)?;
                    if let Some(why) = &costs.untrainable {
                        self.events.warn(&untrainable(why));
                    }
                }
                tasks.extend(self.degrees(&costs)?.into_iter().map(|degree| (costs.clone(), degree)));
            }
            let (request, schedules, zero) = (self.request, &self.schedules, &self.zero);
            let made = in_parallel(&tasks, |(costs, degree)| {
                let groups = degree.map(|(degree, layout)| source.on_groups(costs, degree, layout)).transpose()?;
                let mut variant = Variant::new(request, costs.clone(), groups, batch)?;
                let layouts = Layouts::of(variant.problem());
                let estimates = layouts.estimates(schedules, zero.clone(), request.options.chunks);
                variant.estimates = estimates;
                Ok(variant)
            });
            for variant in made {
                let variant: Variant = variant.map_err(|error: Error| error)?;
                self.variants.push(variant);
            }
            let least = |variant: &Variant| variant.least_us();
            self.best_us = self.variants.iter().map(least).fold(f64::INFINITY, f64::min);
            self.progress((sizes.len() * 4) as u64);
            if at == 0 {
                self.offer_estimated();
            }
            let latest = |variant: &&Variant| Some(&variant.micro_batch) == sizes.last();
            let latest = self.variants.iter().filter(latest).map(least).fold(f64::INFINITY, f64::min);
            if self.best_us.is_finite() && latest > SLOWER * self.best_us {
                break;
            }
        }
        match failure {
            Some(failure) if self.variants.is_empty() => Err(failure),
            _ => Ok(()),
        }
    }

    /// The tensor-parallel degrees to try, each with a layout of weights; `None` for single devices.
    fn degrees(&self, costs: &Costs) -> Result<Vec<Option<(u32, GroupLayout)>>, Error> {
        let options = &self.request.options;
        let given = self.tensor_parallel();
        if costs.shareable.is_none() && options.tensor_parallel.is_none() {
            return Ok(vec![None]);
        }
        let is_large = costs.graph.ops.len() > MOST_OPS && given == TensorParallel::Auto;
        let mut layouts = GroupLayout::of(costs, options.target);
        layouts.retain(|layout| !is_large || *layout != GroupLayout::Any);
        let alone = if matches!(given, TensorParallel::Degree(_)) { None } else { Some(None) };
        let sizes = given.sizes(costs)?;
        let groups = sizes.iter().flat_map(|size| layouts.iter().map(|layout| Some((*size, *layout))));
        Ok(alone.into_iter().chain(groups).collect())
    }

    /// Tensor parallelism and ZeRO are part of the search for a batch.
    fn tensor_parallel(&self) -> TensorParallel {
        let has_groups = self.request.options.target.is_none_or(Target::has_groups);
        let is_open = self.request.batch.is_some() && has_groups;
        let default = if is_open { TensorParallel::Auto } else { TensorParallel::Never };
        self.request.options.tensor_parallel.unwrap_or(default)
    }

    fn scope(&self) -> Scope<'_> {
        Scope {
            file: &self.request.model,
            schedules: &self.schedules,
            zero: *self.zero.end(),
            chunks: self.request.options.chunks,
        }
    }

    fn tried(&self, one: &Ranked) -> Tried {
        let variant = &self.variants[one.variant];
        let LayoutEstimate { layout, peak_bytes, busy_us, recompute_us, .. } = one.estimate;
        let groups = variant.whole.shared.first();
        let collectives = groups.map_or(0.0, |groups| {
            let meetings: f64 = groups.meetings.iter().flatten().sum();
            meetings / groups.graph.total_us().max(f64::MIN_POSITIVE)
        });
        Tried {
            micro_batch: variant.micro_batch,
            microbatches: variant.whole.microbatches,
            schedule: layout.schedule,
            answer: Ok(TriedPlan {
                replicas: vec![layout.replicas; (layout.ranks * layout.chunks) as usize],
                chunks: layout.chunks,
                tensor: groups.map_or(1, |groups| groups.devices),
                zero: if layout.replicas > 1 { layout.zero } else { 0 },
                losses: Losses {
                    idle: (1.0 - busy_us / one.us).max(0.0),
                    recomputation: recompute_us / one.us,
                    collectives: collectives * (busy_us - recompute_us) / one.us,
                },
                throughput_per_s: self.batch as f64 * 1e6 / one.us,
                peak_bytes,
            }),
        }
    }

    /// Simulates layouts: the best by estimate, then those whose lower bound is smallest, until no other one can be much
    /// faster. Returns them by their simulated time.
    fn simulate(&mut self) -> Vec<Ranked> {
        let mut open: Vec<Ranked> = Vec::new();
        for (variant, of) in self.variants.iter().enumerate() {
            let rank = |estimate: &LayoutEstimate| Ranked { variant, estimate: *estimate, us: estimate.minibatch_us };
            open.extend(of.estimates.iter().map(rank));
        }
        open.sort_by(|left, right| left.us.total_cmp(&right.us));
        let first = self.promising(&open);
        let mut next: Vec<Ranked> = first.iter().map(|at| open[*at]).collect();
        for at in first.into_iter().rev() {
            open.remove(at);
        }
        // The layout with the smallest bound comes last.
        open.sort_by(|left, right| right.estimate.bound_us.total_cmp(&left.estimate.bound_us));
        self.total = self.done + next.len() as u64;
        self.best_us = f64::INFINITY;
        let (mut simulated, mut work): (Vec<Ranked>, u64) = (Vec::new(), 0);
        while !next.is_empty() {
            for few in next.chunks(2 * AT_ONCE) {
                if self.events.stops() && !simulated.is_empty() {
                    break;
                }
                simulated.extend(self.times(few));
                work += few.iter().map(|one| self.work(one)).sum::<u64>();
                self.best_us = simulated.iter().map(|one| one.us).fold(f64::INFINITY, f64::min);
                self.progress(few.len() as u64);
            }
            next.clear();
            let is_open = |one: &Ranked| one.estimate.bound_us < CLOSE * self.best_us;
            while next.len() < 2 * AT_ONCE
                && work < MOST_WORK
                && !self.events.stops()
                && open.last().is_some_and(is_open)
            {
                next.extend(open.pop());
            }
            self.total += next.len() as u64;
        }
        simulated.sort_by(|left, right| left.us.total_cmp(&right.us));
        simulated
    }

    /// The positions of the layouts with the best estimates, only some of those that are alike.
    fn promising(&self, ranked: &[Ranked]) -> Vec<usize> {
        let best_us = ranked.first().map_or(0.0, |best| best.us);
        let shape = |one: &Ranked| (one.variant, one.estimate.layout.ranks, one.estimate.layout.replicas);
        let mut chosen: Vec<usize> = Vec::new();
        for (at, one) in ranked.iter().enumerate().take_while(|(_, one)| one.us <= HOPELESS * best_us) {
            if chosen.iter().filter(|other| shape(&ranked[**other]) == shape(one)).count() < ALIKE {
                chosen.push(at);
            }
            if chosen.len() == SIMULATED {
                break;
            }
        }
        chosen
    }

    /// The simulated times of some layouts that fit.
    fn times(&self, few: &[Ranked]) -> Vec<Ranked> {
        let (variants, options) = (&self.variants, &self.request.options);
        let times = in_parallel(few, |one| {
            let variant = &variants[one.variant];
            let layouts = Layouts::of(variant.problem());
            variant.with_planner(options, |planner| layouts.simulated(&one.estimate.layout, planner))
        });
        few.iter().zip(times).filter_map(|(one, us)| us.map(|us| Ranked { us, ..*one })).collect()
    }

    /// The work of a simulation: stages times micro-batches of a replica.
    fn work(&self, one: &Ranked) -> u64 {
        let layout = &one.estimate.layout;
        let items = self.variants[one.variant].whole.microbatches.div_ceil(layout.replicas);
        u64::from(layout.ranks * layout.chunks) * u64::from(items.min(4 * layout.ranks * layout.chunks))
    }

    /// Plans the best layouts, and plans with unequal replicas; returns the best plan.
    fn conclude(&mut self, simulated: Vec<Ranked>) -> Result<PlanResult, Error> {
        let mut tasks: Vec<(usize, Task)> = Vec::new();
        for one in &simulated {
            if tasks.len() < PLANNED {
                tasks.push((one.variant, Task::Layout(*one)));
            }
        }
        if !self.events.stops() || tasks.is_empty() {
            tasks.extend(self.unequal(&simulated));
        }
        self.total = self.done + tasks.len() as u64;
        let options = &self.request.options;
        let mut answers: Vec<(usize, Schedule, Result<Planned, PlanError>)> = Vec::new();
        let mut offered_us = f64::INFINITY;
        for few in tasks.chunks(AT_ONCE) {
            let variants = &self.variants;
            let found = in_parallel(few, |(variant, task)| task.planned(&variants[*variant], options, true));
            for ((variant, task), planned) in few.iter().zip(found) {
                if let Ok(planned) = &planned
                    && planned.plan.predicted.minibatch_us < offered_us
                {
                    offered_us = planned.plan.predicted.minibatch_us;
                    self.best_us = self.best_us.min(offered_us);
                    self.offer(*variant, &|| Some(planned.clone()));
                }
                answers.push((*variant, task.schedule(), planned));
            }
            self.progress(few.len() as u64);
            if self.events.stops() && answers.iter().any(|(_, _, planned)| planned.is_ok()) {
                break;
            }
        }
        self.improve(&tasks, &mut answers);
        self.best(simulated, answers)
    }

    /// Replaces the best drafts by plans that are improved move by move.
    fn improve(&self, tasks: &[(usize, Task)], answers: &mut [(usize, Schedule, Result<Planned, PlanError>)]) {
        let us =
            |at: usize| answers[at].2.as_ref().map_or(f64::INFINITY, |planned| planned.plan.predicted.minibatch_us);
        let mut order: Vec<usize> = (0..answers.len()).filter(|at| us(*at).is_finite()).collect();
        order.sort_by(|left, right| us(*left).total_cmp(&us(*right)));
        order.truncate(IMPROVED);
        if self.events.stops() {
            return;
        }
        let (variants, options) = (&self.variants, &self.request.options);
        let better = in_parallel(&order, |at| {
            let (variant, task) = &tasks[*at];
            task.planned(&variants[*variant], options, false)
        });
        for (at, planned) in order.into_iter().zip(better) {
            if planned.is_ok() {
                answers[at].2 = planned;
            }
        }
    }

    /// Searches for plans with unequal replicas.
    fn unequal(&self, simulated: &[Ranked]) -> Vec<(usize, Task)> {
        let mut order: Vec<usize> = Vec::new();
        let ranked = simulated.iter().map(|one| one.variant);
        for variant in ranked.chain(0..self.variants.len()) {
            if !order.contains(&variant) {
                order.push(variant);
            }
        }
        let is_small = |variant: &usize| {
            let whole = &self.variants[*variant].whole;
            whole.cluster.devices() <= SMALL && whole.graph.ops.len() <= MOST_OPS
        };
        let runs = |kind: Schedule| self.request.options.target.is_none_or(|target| target.runs(kind));
        let is_open = !matches!(self.request.options.schedule, Some(ScheduleChoice::Named(_)));
        let is_roomy = |estimate: &LayoutEstimate| estimate.layout.zero == 0 && !estimate.recomputes();
        let levels: Vec<u32> = match zero(self.request) {
            ZeroStage::Level(level) => vec![level],
            ZeroStage::Auto if simulated.iter().any(|one| is_roomy(&one.estimate)) => vec![0],
            ZeroStage::Auto => vec![0, *self.zero.end()],
        };
        let mut tasks = Vec::new();
        let most = if order.first().is_some_and(is_small) { SEARCHED } else { 1 };
        for variant in order.into_iter().take(most) {
            let schedules: Vec<Schedule> = match is_open {
                true if is_small(&variant) => SYNCHRONOUS.into_iter().filter(|kind| runs(*kind)).collect(),
                true => vec![Schedule::OneFOneB],
                false => self.schedules.clone(),
            };
            for schedule in schedules {
                tasks.extend(levels.iter().map(|zero| (variant, Task::Free { schedule, zero: *zero })));
            }
        }
        tasks
    }

    fn best(
        &self,
        simulated: Vec<Ranked>,
        answers: Vec<(usize, Schedule, Result<Planned, PlanError>)>,
    ) -> Result<PlanResult, Error> {
        let target = self.request.options.target;
        let refuses = |plan: &Plan| target.is_some_and(|target| refusal(target, plan).is_some());
        let mut best: Option<(bool, f64, usize, Planned)> = None;
        let mut failure: Option<(Schedule, PlanError)> = None;
        let tried_count = answers.len() + simulated.len();
        let mut tried: Vec<Tried> = Vec::new();
        for (variant, schedule, planned) in answers {
            match planned {
                Ok(planned) => {
                    let us = planned.plan.predicted.minibatch_us;
                    let refused = refuses(&planned.plan);
                    tried.push(Tried::of(&planned.plan));
                    let is_better = |(other, known, ..): &(bool, f64, usize, Planned)| (refused, us) < (*other, *known);
                    if best.as_ref().is_none_or(is_better) {
                        best = Some((refused, us, variant, planned));
                    }
                }
                Err(error @ PlanError::Unsound(_)) => return Err(describe(&self.request.model, error, schedule)),
                Err(error) => {
                    failure.get_or_insert((schedule, error));
                }
            }
        }
        let Some((_, _, variant, mut planned)) = best else {
            if let Some(error) = failure
                .as_ref()
                .filter(|(_, error)| is_infeasible(error))
                .and_then(|_| self.scope().too_large(&self.variants))
            {
                return Err(error);
            }
            return Err(match failure {
                Some((schedule, error)) => describe(&self.request.model, error, schedule),
                None => Error::bug("no configuration was tried"),
            });
        };
        let alternative = self.asynchronous(variant, &planned.plan);
        planned.plan.options.insert("combinations".to_string(), (tried_count as u64).into());
        tied_weights::aged(&self.variants[variant].whole.graph.params, &planned.plan)
            .iter()
            .for_each(|note| self.events.note(note));
        tried.extend(simulated.iter().map(|one| self.tried(one)));
        let too_large = self.scope().too_large_kinds(&self.variants);
        let untrainable = self.state(variant, &mut planned);
        if self.events.stops() {
            mark_interrupted(&mut planned.plan);
        }
        Ok(PlanResult { planned, untrainable, tried: of_each_kind(tried), alternative, too_large })
    }

    /// States the search in a plan of a variant. Returns why the plan cannot be trained, if it cannot.
    fn state(&self, variant: usize, planned: &mut Planned) -> Option<String> {
        let variant = &self.variants[variant];
        let plan = &mut planned.plan;
        (plan.lower_bound_us, plan.proven_optimal) = (self.bound(plan.predicted.minibatch_us), false);
        let options = &mut plan.options;
        match self.tensor_parallel() {
            TensorParallel::Never => {}
            TensorParallel::Auto => drop(options.insert("tensor".to_string(), json!("auto"))),
            TensorParallel::Degree(degree) => drop(options.insert("tensor".to_string(), json!([degree]))),
        }
        if zero(self.request) == ZeroStage::Auto {
            options.insert("zero".to_string(), json!("auto"));
        }
        if let Some(source) = &variant.source {
            options.insert(COSTS.to_string(), source.clone().into());
        }
        if let Some(batch) = self.request.batch {
            options.insert("batch".to_string(), batch.into());
        }
        state_collectives(plan, &variant.whole.shared, variant.experts.clone());
        tied_weights::refused(&variant.whole.graph.params, plan)
    }

    /// Offers a plan, in case the user ends the search early.
    fn offer(&self, variant: usize, plan: &dyn Fn() -> Option<Planned>) {
        self.events.found(&|| {
            let mut planned = plan()?;
            let untrainable = self.state(variant, &mut planned);
            Some((planned, untrainable))
        });
    }

    /// Offers the plan of the best layout by estimate.
    fn offer_estimated(&self) {
        let ranked = self.variants.iter().enumerate().flat_map(|(variant, of)| {
            of.estimates.iter().map(move |estimate| Ranked { variant, estimate: *estimate, us: estimate.minibatch_us })
        });
        let Some(best) = ranked.min_by(|left, right| left.us.total_cmp(&right.us)) else { return };
        let (variant, options) = (&self.variants[best.variant], &self.request.options);
        self.offer(best.variant, &|| Task::Layout(best).planned(variant, options, true).ok());
    }

    /// A lower bound of the time in microseconds: all compute spread over all devices, at the sizes and degrees that were
    /// tried.
    fn bound(&self, us: f64) -> f64 {
        // A split backward has the shortest way through the pipeline.
        let spread =
            |variant: &Variant| finish_plan::spread(&Problem { schedule: Schedule::ZbH1, ..variant.problem().clone() });
        self.variants.iter().map(spread).fold(us, f64::min)
    }

    /// The time per minibatch of the same stages without a flush, where each update uses gradients of weights one
    /// update old (2BW, Narayanan et al., ICML 2021), if it is shorter.
    fn asynchronous(&self, variant: usize, plan: &Plan) -> Option<Alternative> {
        if plan.stages.len() < 2 || plan.schedule.chunks > 1 || self.request.options.target.is_some() {
            return None;
        }
        let variant = &self.variants[variant];
        let schedule = Schedule::TwoBw;
        let replicas: Vec<u32> = plan.stages.iter().map(|stage| stage.replicas).collect();
        let zero = plan.stages.iter().map(|stage| stage.zero).max().unwrap_or(0);
        let planned = variant.planned(&self.request.options, &|problem, planner| {
            let mut problem = Problem { schedule, chunks: 1, zero, ..problem.clone() };
            problem.constraints.replicas = Some(replicas.clone());
            single_degree::plan(&problem, planner)
        });
        let minibatch_us = planned.ok()?.plan.predicted.minibatch_us;
        (minibatch_us < plan.predicted.minibatch_us).then_some(Alternative { schedule, minibatch_us })
    }
}

/// A plan to make.
enum Task {
    /// Of this layout.
    Layout(Ranked),
    /// With any replicas.
    Free { schedule: Schedule, zero: u32 },
}

impl Task {
    fn schedule(&self) -> Schedule {
        match self {
            Task::Layout(one) => one.estimate.layout.schedule,
            Task::Free { schedule, .. } => *schedule,
        }
    }

    /// Makes the plan; a draft is not improved move by move.
    fn planned(&self, variant: &Variant, options: &PlanOptions, is_draft: bool) -> Result<Planned, PlanError> {
        variant.planned(options, &|problem, planner| {
            let planner = PlannerOptions { is_draft, ..*planner };
            match *self {
                Task::Layout(one) => Layouts::of(problem).plan(&one.estimate.layout, &planner),
                Task::Free { schedule, zero } => {
                    let chunks = if schedule.has_chunks() { 2 } else { 1 };
                    single_degree::plan(&Problem { schedule, chunks, zero, ..problem.clone() }, &planner)
                }
            }
        })
    }
}
