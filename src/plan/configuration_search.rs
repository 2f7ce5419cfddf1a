//! Searches everything that a minibatch leaves open: micro-batch size, tensor-parallel degree, stages, replicas, stages
//! per rank, schedule, ZeRO stage and recomputation.
//!
//! 1. Each micro-batch size has costs on one device, and on groups of every tensor-parallel degree: its variants
//!    ([`variants`]). Groups are tried only at sizes at which they may be faster than the best layout so far.
//! 2. All layouts of a variant are estimated (`compiler::partition::search::layouts`).
//! 3. The best layouts by estimate are simulated, and others while that finds faster ones.
//! 4. The best simulated layouts are planned with better cuts. Plans with unequal replicas are searched as well: of the
//!    best variants, and on small clusters under every schedule.
//!
//! The search ends at the first layout or plan within the requested gap of the lower bound. The work is divided before
//! it is distributed over threads, so the result does not depend on their number.

mod attempts;
mod too_large;
mod variants;

use crate::costs::{COSTS, Costs};
use crate::error::Error;
use crate::events::{Event, EventSink};
use crate::plan::configuration_search::attempts::{Attempt, Task, best};
use crate::plan::configuration_search::variants::Size;
use crate::plan::from_costs::state_collectives;
use crate::plan::infeasible::describe;
use crate::plan::interruptible::mark_interrupted;
use crate::plan::parallel::in_parallel;
use crate::plan::request::{GAP, PlanRequest, ScheduleChoice};
use crate::plan::result::{Alternative, Losses, PlanResult, Tried, TriedPlan, of_each_kind};
use crate::plan::tensor_parallel::{GroupLayout, TensorParallel};
use crate::plan::tied_weights;
use crate::plan::variant::{MOST_OPS, SizedCosts, Variant};
use crate::plan::zero::ZeroStage;
use compiler::partition::error::PlanError;
use compiler::partition::infeasible::is_infeasible;
use compiler::partition::options::Effort;
use compiler::partition::planned::Planned;
use compiler::partition::search::layouts::{LayoutEstimate, Layouts};
use compiler::partition::search::select::baselines;
use compiler::plan::check::verify;
use compiler::plan::problem::{Problem, Target};
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::Zero;
use compiler::plan::{Baselines, Plan};
use compiler::text::quantity;
use serde_json::json;
use std::collections::HashMap;
use std::sync::OnceLock;

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

/// Layouts and plans that are compared before it is decided whether to go on.
const AT_ONCE: usize = 4;

/// A size is clearly slower than the best if its best estimate takes this many times as long.
const SLOWER: f64 = 1.2;

/// Layouts that are simulated, those of them that are planned, and the most rounds while the target accepts none.
const SIMULATED: usize = 48;
const PLANNED: usize = 4;
const ROUNDS: usize = 4;

/// Simulated layouts of one variant with the same numbers of ranks and replicas.
const ALIKE: usize = 6;

/// Of plans that fill memory to this part, those that are slower by at most this part and need this part less win: real
/// runs also need memory for the allocator and communication.
const FULL: f64 = 0.9;
const SLOWER_WITH_ROOM: f64 = 0.01;
const ROOM: f64 = 0.1;

/// An estimate above this multiple of the best is not simulated.
const HOPELESS: f64 = 1.3;

/// The ZeRO stage, which is part of the search for a batch. A torch bundle shards nothing.
fn zero(request: &PlanRequest) -> ZeroStage {
    let is_searched = request.batch.is_some() && request.options.target != Some(Target::Torch);
    let default = if is_searched { ZeroStage::Auto } else { ZeroStage::Given(Zero::default()) };
    request.options.zero.unwrap_or(default)
}

/// The search, with what it has found so far.
struct Search<'a> {
    request: &'a PlanRequest,
    events: &'a dyn EventSink,
    batch: u64,
    schedules: Vec<Schedule>,
    zero: ZeroStage,
    /// Ascending.
    sizes: Vec<Size>,
    /// The costs of sizes that were computed, among them those of all variants.
    costs: HashMap<u64, Costs>,
    /// Tensor-parallel degrees with layouts of weights.
    groups: Vec<(u32, GroupLayout)>,
    variants: Vec<Variant>,
    /// Lower bounds of the time on single devices, once it was asked, and on groups, once they were tried.
    least_alone_us: OnceLock<f64>,
    least_group_us: Option<f64>,
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
    let zero = zero(request);
    let mut search = Search {
        request,
        events,
        batch,
        schedules,
        zero,
        sizes: Vec::new(),
        costs: HashMap::new(),
        groups: Vec::new(),
        variants: Vec::new(),
        least_alone_us: OnceLock::new(),
        least_group_us: None,
        done: 0,
        total: 0,
        best_us: f64::INFINITY,
    };
    search.make_variants(source)?;
    search.offer_estimated();
    let mut simulated = search.simulate(0, Vec::new());
    if !search.groups.is_empty() && !search.is_close(search.best_us) {
        let alone = search.variants.len();
        search.add_groups(source)?;
        if simulated.is_empty() {
            search.offer_estimated();
        }
        simulated = search.simulate(alone, simulated);
    }
    let result = search.conclude(source, simulated).and_then(|result| search.with_memory_of_ops(result));
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

    /// The ZeRO for lower bounds.
    fn fastest_zero(&self) -> Zero {
        self.zero.fastest(self.request.options.target)
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
                zero: layout.zero.of_stage(layout.replicas),
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

    /// True if no plan is clearly faster than this time.
    fn is_close(&self, us: f64) -> bool {
        us.is_finite() && us <= self.bound(us) * (1.0 + self.request.options.gap)
    }

    /// Simulates layouts of the variants from this number on: the best by estimate, and others while a round finds a
    /// faster one. Returns them with the known ones, by their simulated time.
    fn simulate(&mut self, from: usize, known: Vec<Ranked>) -> Vec<Ranked> {
        let mut simulated = known;
        self.best_us = simulated.first().map_or(f64::INFINITY, |one| one.us);
        let mut open: Vec<Ranked> = self.estimated(from).collect();
        open.sort_by(|left, right| left.us.total_cmp(&right.us));
        let best_us = open.first().map_or(0.0, |best| best.us.min(self.best_us));
        open.retain(|one| one.us <= HOPELESS * best_us);
        let (mut next, mut open) = promising(open);
        open.reverse();
        self.total = self.done + next.len() as u64;
        while !next.is_empty() && !self.is_close(self.best_us) {
            let before_us = self.best_us;
            for few in next.chunks(2 * AT_ONCE) {
                if (self.events.stops() && !simulated.is_empty()) || self.is_close(self.best_us) {
                    break;
                }
                let few: Vec<Ranked> = few.iter().filter(|one| one.estimate.bound_us < self.best_us).copied().collect();
                simulated.extend(self.times(&few));
                self.best_us = simulated.iter().map(|one| one.us).fold(f64::INFINITY, f64::min);
                self.progress(few.len() as u64);
            }
            next.clear();
            let has_improved = simulated.is_empty() || self.best_us < before_us * (1.0 - GAP);
            if has_improved && !self.events.stops() {
                let more = open.len().saturating_sub(4 * AT_ONCE);
                next.extend(open.drain(more..).rev());
            }
            self.total += next.len() as u64;
        }
        simulated.sort_by(|left, right| left.us.total_cmp(&right.us));
        simulated
    }

    /// The layouts of the variants from this number on, with their estimated times.
    fn estimated(&self, from: usize) -> impl Iterator<Item = Ranked> {
        self.variants.iter().enumerate().skip(from).flat_map(|(variant, of)| {
            of.estimates.iter().map(move |estimate| Ranked { variant, estimate: *estimate, us: estimate.minibatch_us })
        })
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

    /// Plans the best layouts, and plans with unequal replicas; returns the best plan.
    fn conclude(&mut self, source: &dyn SizedCosts, simulated: Vec<Ranked>) -> Result<PlanResult, Error> {
        let may_end = self.events.stops() || self.is_close(self.best_us);
        let mut attempts: Vec<Attempt> = Vec::new();
        for few in simulated.chunks(PLANNED).take(ROUNDS) {
            let layouts = few.iter().map(|one| (one.variant, Task::Layout(*one))).collect();
            self.attempt(layouts, if may_end { 1 } else { AT_ONCE }, &mut attempts);
            if self.events.stops() || best(&attempts).is_some() {
                break;
            }
        }
        self.attempt(self.unequal(&simulated), AT_ONCE, &mut attempts);
        self.attempt(self.split_backward(&simulated), AT_ONCE, &mut attempts);
        self.attempt(self.other_schedules(&simulated, &attempts), AT_ONCE, &mut attempts);
        self.improve(&mut attempts);
        self.neighbours(source, &mut attempts);
        self.roomier(&simulated, &mut attempts);
        self.best(simulated, attempts)
    }

    fn best(&self, simulated: Vec<Ranked>, attempts: Vec<Attempt>) -> Result<PlanResult, Error> {
        let mut accepted: Vec<(bool, f64, usize, Planned)> = Vec::new();
        let mut failure: Option<(Schedule, PlanError)> = None;
        let tried_count = attempts.len() + simulated.len();
        let mut tried: Vec<Tried> = Vec::new();
        for Attempt { variant, task, is_refused, planned } in attempts {
            let schedule = task.schedule();
            match planned {
                Ok(planned) => {
                    let us = planned.plan.predicted.minibatch_us;
                    tried.push(Tried::of(&planned.plan));
                    accepted.push((is_refused, us, variant, planned));
                }
                Err(error @ PlanError::Unsound(_)) => return Err(describe(&self.request.model, error, schedule)),
                Err(error) => {
                    failure.get_or_insert((schedule, error));
                }
            }
        }
        // The fastest, or the fastest of those with clearly more room.
        accepted.sort_by(|left, right| left.0.cmp(&right.0).then(left.1.total_cmp(&right.1)));
        let with_room = accepted.first().and_then(|(is_refused, _, _, full)| {
            accepted.iter().position(|one| one.0 == *is_refused && self.is_roomier(&one.3.plan, &full.plan))
        });
        let best = (!accepted.is_empty()).then(|| accepted.swap_remove(with_room.unwrap_or(0)));
        let Some((_, _, variant, mut planned)) = best else {
            let is_too_large = failure.as_ref().is_some_and(|(_, error)| is_infeasible(error));
            return Err(match (self.too_large().filter(|_| is_too_large), failure) {
                (Some(error), _) => error,
                (None, Some((schedule, error))) => describe(&self.request.model, error, schedule),
                (None, None) => Error::bug("no configuration was tried"),
            });
        };
        let alternative = self.asynchronous(variant, &planned.plan);
        planned.plan.baselines = self.baselines(variant, &planned.plan);
        planned.plan.options.insert("combinations".to_string(), (tried_count as u64).into());
        tied_weights::aged(&self.variants[variant].whole.graph.params, &planned.plan)
            .iter()
            .for_each(|note| self.events.note(note));
        tried.extend(simulated.iter().map(|one| self.tried(one)));
        let too_large = self.too_large_kinds();
        let untrainable = self.state(variant, &mut planned);
        if self.events.stops() {
            mark_interrupted(&mut planned.plan);
        }
        let tried = of_each_kind(Tried::of(&planned.plan), tried);
        Ok(PlanResult { planned, untrainable, tried, alternative, too_large })
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
        if self.request.options.gap != GAP {
            options.insert("gap".to_string(), self.request.options.gap.into());
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
        let Some(best) = self.estimated(0).min_by(|left, right| left.us.total_cmp(&right.us)) else { return };
        let (variant, options) = (&self.variants[best.variant], &self.request.options);
        self.offer(best.variant, &|| Task::Layout(best).planned(variant, options, Effort::Draft).ok());
    }

    /// A lower bound of the time in microseconds, at all sizes and degrees; at most that of a known plan.
    fn bound(&self, known_us: f64) -> f64 {
        let most = self.groups.iter().map(|(degree, _)| *degree).max();
        let alone = || {
            *self.least_alone_us.get_or_init(|| {
                let us =
                    |known_us: f64, size: &Size| size.bound.least_us(&self.schedules, self.fastest_zero(), known_us);
                self.sizes.iter().fold(known_us, us)
            })
        };
        let us = match (self.least_group_us, most, self.tensor_parallel()) {
            (None, None, _) => alone(),
            (None, Some(most), _) => {
                self.sizes.iter().map(|size| size.bound.compute_us(most)).fold(f64::INFINITY, f64::min)
            }
            (Some(us), _, TensorParallel::Degree(_)) => us,
            (Some(us), ..) => alone().min(us),
        };
        us.min(known_us)
    }

    /// States the memory of all ops: a model with many ops is searched in pieces, which know less about the ends of stages.
    fn with_memory_of_ops(&self, mut result: PlanResult) -> Result<PlanResult, Error> {
        let plan = &mut result.planned.plan;
        let is_own = |one: &&Variant| one.micro_batch == plan.schedule.micro_batch && one.groups.is_none();
        let is_single = plan.stages.iter().all(|stage| stage.degree() == 1);
        let is_in_pieces = |one: &&Variant| is_single && one.whole.graph.ops.len() > MOST_OPS;
        let Some(variant) = self.variants.iter().find(is_own).filter(is_in_pieces) else { return Ok(result) };
        let graph = self.costs[&variant.micro_batch].graph.clone();
        let mut problem = Problem { graph, ..variant.whole.clone() };
        problem.set_target(problem.constraints.target);
        let fail = |faults| describe(&self.request.model, PlanError::Unsound(faults), plan.schedule.kind);
        let checked = verify::evaluate(&problem, plan).map_err(fail)?;
        plan.stages.iter_mut().zip(checked.memory).for_each(|(stage, memory)| stage.memory = memory);
        Ok(result)
    }

    /// The simulated baselines of a plan.
    fn baselines(&self, variant: usize, plan: &Plan) -> Baselines {
        let (variant, zero) = (&self.variants[variant], plan.zero());
        let (schedule, chunks) = (plan.schedule.kind, plan.schedule.chunks);
        let problem = Problem { schedule, chunks, zero, ..variant.whole.clone() };
        let us = plan.predicted.minibatch_us;
        variant.with_planner(&self.request.options, |planner| baselines(&problem, planner, us))
    }

    /// The time per minibatch of the same stages without a flush, where each update uses gradients of weights one
    /// update old (2BW, Narayanan et al., ICML 2021), if it is shorter.
    fn asynchronous(&self, variant: usize, plan: &Plan) -> Option<Alternative> {
        if plan.stages.len() < 2 || plan.schedule.chunks > 1 || self.request.options.target.is_some() {
            return None;
        }
        let schedule = Schedule::TwoBw;
        let replicas: Vec<u32> = plan.stages.iter().map(|stage| stage.replicas).collect();
        let task = Task::Replicas { schedule, zero: plan.zero(), given: Some(replicas) };
        let planned = task.planned(&self.variants[variant], &self.request.options, Effort::Whole);
        let minibatch_us = planned.ok()?.plan.predicted.minibatch_us;
        (minibatch_us < plan.predicted.minibatch_us).then_some(Alternative { schedule, minibatch_us })
    }
}

/// The layouts with the best estimates, only some of those that are alike, and the others; both in order.
fn promising(ranked: Vec<Ranked>) -> (Vec<Ranked>, Vec<Ranked>) {
    let shape = |one: &Ranked| (one.variant, one.estimate.layout.ranks, one.estimate.layout.replicas);
    let (mut chosen, mut others): (Vec<Ranked>, Vec<Ranked>) = (Vec::new(), Vec::new());
    for one in ranked {
        let alike = chosen.iter().filter(|other| shape(other) == shape(&one)).count();
        if chosen.len() < SIMULATED && alike < ALIKE { &mut chosen } else { &mut others }.push(one);
    }
    (chosen, others)
}
