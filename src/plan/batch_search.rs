//! Searches for the number of micro-batches (`batch`) and the schedule (`ScheduleChoice::Auto`) together with the stages.
//!
//! [`configuration_search`] does this for most requests. Here are those with unequal replicas, given cuts, several device
//! types or another objective than throughput: micro-batch sizes that divide the minibatch are planned under 1F1B, similar
//! sizes only once. The best sizes are then planned under every other synchronous schedule.

use crate::costs::Costs;
use crate::error::{Error, ErrorKind};
use crate::events::{Event, EventSink};
use crate::plan::configuration_search::{self, SYNCHRONOUS};
use crate::plan::from_costs::solve_with_groups;
use crate::plan::request::{PlanRequest, ScheduleChoice};
use crate::plan::request_costs::{CostsBySize, untrainable};
use crate::plan::result::{PlanResult, Tried};
use crate::plan::tied_weights;
use crate::plan::variant::{self, SizedCosts};
use compiler::partition::partitioners::Partitioner;
use compiler::partition::planned::Planned;
use compiler::plan::device_memory::fullest;
use compiler::plan::problem::{CostModel, InFlight, Objective};
use compiler::plan::schedule::Schedule;
use compiler::profile::shared::TensorParallelCosts;

/// The number of sizes that are planned under every schedule.
const BEST: usize = 3;

/// True if a request leaves the number of micro-batches or the schedule open.
pub fn is_requested(request: &PlanRequest) -> bool {
    request.batch.is_some() || request.options.schedule == Some(ScheduleChoice::Auto)
}

/// True if layouts are searched: with equal replicas, without constraints on the cuts, under synchronous schedules.
fn searches_layouts(request: &PlanRequest, is_mixed: bool) -> bool {
    let options = &request.options;
    let is_equal = options.replicas.as_ref().is_none_or(|given| given.iter().all(|replicas| *replicas == given[0]));
    let is_free =
        is_equal && options.cut_after.is_none() && options.pins.is_empty() && options.in_flight == InFlight::Auto;
    let is_synchronous = match &options.schedule {
        None | Some(ScheduleChoice::Auto) => true,
        Some(ScheduleChoice::Named(kind)) => SYNCHRONOUS.contains(kind),
        Some(ScheduleChoice::File(_)) => false,
    };
    is_free
        && is_synchronous
        && !is_mixed
        && options.cost == CostModel::Pipec
        && options.partitioner == Partitioner::Pipec
        && options.objective == Objective::Throughput
}

/// Plans all combinations and returns the best.
pub fn plan(request: &PlanRequest, events: &dyn EventSink) -> Result<PlanResult, Error> {
    validate(request)?;
    let source = CostsBySize::open(request, events)?;
    if searches_layouts(request, source.cluster().is_mixed()) {
        let batch =
            request.batch.unwrap_or_else(|| source.default_size().saturating_mul(request.options.microbatches.into()));
        return configuration_search::plan(request, &source, batch, events);
    }
    let schedules: Vec<ScheduleChoice> = match &request.options.schedule {
        Some(ScheduleChoice::Auto) => SYNCHRONOUS.into_iter().map(ScheduleChoice::Named).collect(),
        // A batch needs a synchronous schedule, even with one micro-batch.
        given => vec![given.clone().unwrap_or(ScheduleChoice::Named(SYNCHRONOUS[0]))],
    };
    let mut search = Search { request, best: None, tried: Vec::new(), refused: Vec::new() };
    let sizes = sizes(request, &source)?;
    let total = (sizes.len() + BEST.min(sizes.len()) * (schedules.len() - 1)) as u64;
    let mut done = 0;
    let mut progress = |message: &str| {
        events.event(Event::Progress { unit: "combinations", done, total, message });
        done += 1;
    };
    progress("");
    let mut known = Vec::new();
    for (at, size) in sizes.into_iter().enumerate() {
        let costs = source.at(size.0)?;
        // The model is the same at every size.
        if at == 0 {
            request.protect_output(&costs.model)?;
            costs.untrainable.iter().for_each(|why| events.warn(&untrainable(why)));
        }
        let shared = request.options.tensor_parallel().costs(&costs, request.options.target)?;
        let sized = Sized { size, costs, shared };
        let score = search.solve(&sized, schedules[0].clone())?;
        progress("");
        known.push((score, sized));
    }
    // If 1F1B does not fit at any size, small micro-batches come closest.
    known.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.size.0.cmp(&b.1.size.0)));
    for (_, sized) in known.iter().take(BEST) {
        for schedule in &schedules[1..] {
            search.solve(sized, schedule.clone())?;
            progress(schedule.named().map_or("", Schedule::name));
        }
    }
    events.event(Event::ProgressEnd);
    let Search { best, mut tried, mut refused, .. } = search;
    // The best first.
    tried.sort_by(|left, right| match (&left.answer, &right.answer) {
        (Ok(left), Ok(right)) if request.options.objective == Objective::Memory => {
            left.peak_bytes.cmp(&right.peak_bytes)
        }
        (Ok(left), Ok(right)) => right.throughput_per_s.total_cmp(&left.throughput_per_s),
        (left, right) => left.is_err().cmp(&right.is_err()),
    });
    // The smallest micro-batches need least memory.
    refused.sort_by_key(|(micro_batch, _)| *micro_batch);
    match (best, refused.into_iter().next()) {
        (Some(Best { mut planned, untrainable, aged, .. }), _) => {
            aged.iter().for_each(|note| events.note(note));
            let options = &mut planned.plan.options;
            if let Some(batch) = request.batch {
                options.insert("batch".to_string(), batch.into());
            }
            options.insert("combinations".to_string(), (tried.len() as u64).into());
            Ok(PlanResult { planned, untrainable, tried, alternative: None, too_large: Vec::new() })
        }
        (None, Some((_, error))) => Err(error),
        (None, None) => Err(Error::bug("no combination was tried")),
    }
}

/// Refuses settings that contradict a search over sizes or schedules.
fn validate(request: &PlanRequest) -> Result<(), Error> {
    let options = &request.options;
    options.zero().validate(!options.is_inference(), options.target)?;
    let refused = |flag: &str, why: &str| Err(Error::conflict(flag, "`--schedule auto`").because(why));
    match (&options.schedule, request.batch) {
        (Some(ScheduleChoice::Auto), _) if options.objective == Objective::Latency => {
            refused("--objective latency", "it is for inference pipelines")
        }
        (Some(ScheduleChoice::Auto), _) if options.cost != CostModel::Pipec => {
            refused(&format!("--cost {}", options.cost.name()), "its formula supports only one schedule")
        }
        (_, Some(batch)) => {
            let parts = [("--micro-batch", request.micro_batch), ("--microbatches", Some(options.microbatches.into()))];
            let given = parts.into_iter().find(|(_, part)| part.is_some_and(|part| batch % part != 0));
            let both = request.micro_batch.filter(|_| options.microbatches > 1);
            let product = both.map(|size| size.saturating_mul(options.microbatches.into()));
            match given {
                _ if options.is_inference() => Err(Error::conflict("--batch", "a plan for inference")
                    .because("inference has no minibatches")
                    .with_help("use `--micro-batch` to set the samples per inference")),
                _ if product.is_some_and(|product| product != batch) => Err(Error::input(format!(
                    "`--batch {batch}` does not match `--micro-batch {}` and `--microbatches {}`",
                    both.unwrap_or(1),
                    options.microbatches
                ))
                .because(format!("their product is {} samples", product.unwrap_or(batch)))
                .with_help("omit one of the three")),
                Some((flag, Some(part))) => {
                    Err(Error::input(format!("`--batch {batch}` does not match `{flag} {part}`"))
                        .because(format!("{batch} samples are not a multiple of {part}"))
                        .with_help("omit one of them"))
                }
                _ => Ok(()),
            }
        }
        _ => Ok(()),
    }
}

/// Samples per micro-batch, and micro-batches per minibatch.
type Size = (u64, u32);

/// The sizes to plan for.
fn sizes(request: &PlanRequest, source: &CostsBySize) -> Result<Vec<Size>, Error> {
    let microbatches = request.options.microbatches;
    let Some(batch) = request.batch else {
        return Ok(vec![(source.default_size(), microbatches)]);
    };
    match source.only_size() {
        Some(size) => Ok(vec![(size, variant::count(batch, size)?)]),
        None if microbatches > 1 => Ok(vec![(batch / u64::from(microbatches), microbatches)]),
        None => variant::sizes(batch).into_iter().rev().map(|size| Ok((size, variant::count(batch, size)?))).collect(),
    }
}

/// The request for one combination.
fn combination(
    request: &PlanRequest,
    (micro_batch, microbatches): Size,
    schedule: Option<ScheduleChoice>,
) -> PlanRequest {
    let mut one = request.clone();
    one.batch = None;
    one.micro_batch = Some(micro_batch);
    one.options.microbatches = microbatches;
    one.options.schedule = schedule;
    if !one.options.schedule.as_ref().and_then(ScheduleChoice::named).is_some_and(Schedule::has_chunks) {
        one.options.chunks = None;
    }
    one
}

/// The costs of the model at one size, on devices and on tensor-parallel groups.
struct Sized {
    size: Size,
    costs: Costs,
    shared: Vec<TensorParallelCosts>,
}

struct Best {
    score: f64,
    planned: Planned,
    untrainable: Option<String>,
    aged: Option<String>,
}

struct Search<'a> {
    request: &'a PlanRequest,
    best: Option<Best>,
    tried: Vec<Tried>,
    /// Micro-batch sizes without a plan, with the error.
    refused: Vec<(u64, Error)>,
}

impl Search<'_> {
    /// Plans one combination and keeps the plan if it is the best so far. Returns its score.
    fn solve(&mut self, sized: &Sized, schedule: ScheduleChoice) -> Result<f64, Error> {
        let Sized { size, costs, shared } = sized;
        let kind = schedule.named().unwrap_or(Schedule::Csv);
        let one = combination(self.request, *size, Some(schedule));
        one.options.validate()?;
        let (answer, score) = match solve_with_groups(&one.model, costs.clone(), shared.clone(), &one.options, true) {
            Ok(planned) => {
                let tried = Tried::of(&planned.plan);
                let (speed, peak) = (planned.plan.predicted.throughput_per_s, fullest(&planned.plan));
                let score = if planned.plan.objective == Objective::Memory { -(peak as f64) } else { speed };
                if self.best.as_ref().is_none_or(|best| score > best.score) {
                    let (params, plan) = (&costs.graph.params, &planned.plan);
                    let (untrainable, aged) = (tied_weights::refused(params, plan), tied_weights::aged(params, plan));
                    self.best = Some(Best { score, planned, untrainable, aged });
                }
                (tried.answer, score)
            }
            Err(error) if error.kind() == ErrorKind::Bug => return Err(error),
            Err(error) => {
                let why = error.line();
                self.refused.push((size.0, error));
                (Err(why), f64::NEG_INFINITY)
            }
        };
        self.tried.push(Tried { micro_batch: size.0, microbatches: size.1, schedule: kind, answer });
        Ok(score)
    }
}
