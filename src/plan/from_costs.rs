//! Computes a plan from costs and options.

use crate::costs::{COSTS, Costs};
use crate::error::Error;
use crate::plan::custom_schedule::CustomSchedule;
use crate::plan::infeasible::describe;
use crate::plan::request::{BucketSize, PlanOptions};
use crate::plan::tensor_parallel::TensorParallel;
use crate::plan::tied_weights;
use compiler::cluster::Bytes;
use compiler::partition::options::PlannerOptions;
use compiler::partition::planned::Planned;
use compiler::partition::search::bucket_size::{FIRST, best};
use compiler::partition::search::in_flight::Efficiency;
use compiler::plan::problem::{InFlight, Problem};
use compiler::plan::schedule::{Schedule, VersionRule};
use compiler::plan::{Edge, Stage};
use compiler::profile::precision::Precision;
use compiler::profile::shared::TensorParallelCosts;
use compiler::schedule::pipeline::{pipeline, pipeline_of};
use compiler::simulate::one_f_one_b_rr::{Steady, steady, steady_in_sync};
use std::path::Path;

/// The plan for these costs.
pub fn solve(file: &Path, costs: Costs, options: &PlanOptions) -> Result<Planned, Error> {
    let shared = options.tensor_parallel().costs(&costs, options.target)?;
    solve_with_groups(file, costs, shared, options)
}

/// The plan for these costs, and the costs of the model on tensor-parallel groups.
pub fn solve_with_groups(
    file: &Path,
    costs: Costs,
    shared: Vec<TensorParallelCosts>,
    options: &PlanOptions,
) -> Result<Planned, Error> {
    let source = costs.source.clone();
    let custom = options.custom_schedule()?;
    let problem = problem(costs, shared, options, custom.as_ref())?;
    let finds_bucket = options.bucket == BucketSize::Auto;
    let simulate = |stages: &[Stage], edges: &[Edge], caps: &[u32]| efficiency(&problem, stages, edges, caps);
    let planner = planner_options(options, &simulate);
    let once = |problem: &Problem| options.zero().plan(problem, &planner);
    let search = |problem: &Problem| if finds_bucket { best(problem, &once) } else { once(problem) };
    // A schedule that the user requests is kept, even if its plan cannot be trained.
    let planned = search(&problem).and_then(|planned| match options.schedule {
        None => tied_weights::trained(&problem, planned, &search),
        Some(_) => Ok(planned),
    });
    let mut planned = planned.map_err(|error| describe(file, error, problem.schedule))?;
    if let Some(custom) = &custom {
        let pipeline = pipeline(&planned.plan).map_err(|error| Error::bug(&error.to_string()))?;
        custom.program(&pipeline, 1)?;
    }
    if let Some(name) = source {
        planned.plan.options.insert(COSTS.to_string(), name.into());
    }
    Ok(planned)
}

/// The options of the planner, which simulates how stages run under in-flight limits.
pub fn planner_options<'a>(options: &PlanOptions, efficiency: &'a Efficiency<'a>) -> PlannerOptions<'a> {
    PlannerOptions {
        partitioner: options.partitioner,
        budget: options.budget,
        time_limit: options.time_limit,
        seed: options.seed,
        efficiency: Some(efficiency),
    }
}

/// The problem of the planner.
pub fn problem(
    costs: Costs,
    shared: Vec<TensorParallelCosts>,
    options: &PlanOptions,
    custom: Option<&CustomSchedule>,
) -> Result<Problem, Error> {
    let has_memory = costs.has_memory;
    let mut problem = costs.problem(options.cost);
    problem.shared = shared;
    problem.constraints.tensor = matches!(options.tensor_parallel, Some(TensorParallel::Degree(_)));
    problem.activation_compression = options.activation_compression;
    problem.memory_limit = match options.memory_limit {
        Some(limit) => Some(limit),
        // The limit of each device class is its memory.
        None if problem.cluster.is_mixed() => None,
        None => Some(problem.cluster.device.memory).filter(|memory| has_memory && memory.0 > 0),
    };
    problem.objective = options.objective;
    let optimizer = options.optimizer()?;
    problem.optimizer_state = optimizer.state();
    problem.optimizer = optimizer.name().to_string();
    problem.schedule = options.schedule_kind(custom);
    // The loss scale of fp16 needs a flush.
    let is_default = options.schedule.is_none() && custom.is_none() && problem.schedule.is_round_robin();
    if is_default && problem.precision == Some(Precision::Fp16) {
        problem.schedule = Schedule::OneFOneB;
    }
    let microbatches = options.microbatches;
    if microbatches > 1 && !problem.schedule.trains() {
        return Err(Error::input(format!(
            "`--microbatches {microbatches}` cannot be combined with a plan for inference"
        ))
        .because("inference has no minibatches")
        .with_help("use `--micro-batch` to set the samples per inference"));
    }
    if microbatches > 1 && problem.schedule.is_round_robin() {
        let kind = problem.schedule.name();
        return Err(Error::input(format!(
            "`--microbatches {microbatches}` cannot be combined with `--schedule {kind}`"
        ))
        .because("it does not split minibatches into micro-batches")
        .with_help("use `--schedule 2bw` (no flush) or `--schedule 1f1b` (with a flush)"));
    }
    if matches!(options.in_flight, InFlight::Given(_)) && !problem.schedule.takes_caps() {
        return Err(Error::input(format!(
            "`--in-flight` cannot be combined with `--schedule {}`",
            problem.schedule.name()
        ))
        .because("the schedule sets the number of in-flight micro-batches")
        .with_help("use `--schedule 1f1b`, which supports in-flight limits"));
    }
    // The default, 1, agrees with every custom schedule.
    let given = Some(microbatches).filter(|given| *given > 1);
    custom.map_or(Ok(()), |custom| custom.agrees(given))?;
    problem.chunks = options.chunks.unwrap_or(if problem.schedule.has_chunks() { 2 } else { 1 });
    problem.recompute = options.recompute;
    problem.microbatches = custom.map_or(microbatches, CustomSchedule::microbatches);
    problem.in_flight = match custom.and_then(CustomSchedule::caps) {
        Some(caps) if options.in_flight == InFlight::Auto => InFlight::Given(caps),
        _ => options.in_flight.clone(),
    };
    problem.bucket = match options.bucket {
        BucketSize::Auto => Bytes(FIRST),
        BucketSize::Bytes(bytes) => bytes,
    };
    problem.zero = options.zero().level();
    problem.count_updates();
    problem.constraints.replicas = match (&options.replicas, custom) {
        (None, Some(custom)) => Some(custom.replicas()?),
        (replicas, _) => replicas.clone(),
    };
    problem.constraints.cut_after = options.cut_after.clone();
    problem.constraints.pins = options.pins.clone();
    problem.constraints.most_stages = options.max_stages;
    problem.constraints.no_replication = options.no_replication;
    problem.constraints.target = options.target;
    Ok(problem)
}

/// The steady state of stages under in-flight limits, by simulation. A pipeline that cannot be simulated gains nothing from higher
/// limits.
pub fn efficiency(problem: &Problem, stages: &[Stage], edges: &[Edge], caps: &[u32]) -> Steady {
    let levels = &problem.cluster.levels;
    let simulated = |pipeline| match problem.schedule.versions() {
        VersionRule::Synchronised => steady_in_sync(&pipeline).ok(),
        _ => steady(&pipeline).ok(),
    };
    let unknown = || Steady { share: 1.0, held: vec![false; stages.len()], pieces: 0 };
    pipeline_of(levels, stages, edges, caps).ok().and_then(simulated).unwrap_or_else(unknown)
}
