//! Computes a plan from costs and options.

use crate::costs::{COSTS, Costs};
use crate::error::Error;
use crate::plan::custom_schedule::CustomSchedule;
use crate::plan::infeasible::describe;
use crate::plan::request::{BucketSize, PlanOptions};
use crate::plan::tensor_parallel::{TensorParallel, problem_as_trained};
use crate::plan::tied_weights;
use compiler::cluster::Bytes;
use compiler::partition::options::{Effort, PlannerOptions};
use compiler::partition::planned::Planned;
use compiler::partition::search::bucket_size::{FIRST, best};
use compiler::partition::search::in_flight::Efficiency;
use compiler::partition::search::tensor_parallel::as_trained;
use compiler::plan::groups;
use compiler::plan::problem::{CostModel, InFlight, Problem};
use compiler::plan::schedule::{Schedule, VersionRule};
use compiler::plan::{Edge, Plan, PlannedCollective, PlannedExperts, Stage};
use compiler::profile::precision::Precision;
use compiler::profile::shared::{Collective, ExpertWeights, TensorParallelCosts, Traffic};
use compiler::schedule::pipeline::{generated, pipeline, pipeline_of};
use compiler::simulate::one_f_one_b_rr::{Steady, steady, steady_in_sync};
use compiler::simulate::step_time::step_us;
use compiler::tensor_parallel::experts;
use std::collections::HashMap;
use std::path::Path;

/// The warning of a plan for which no tensor parallelism was tried.
const UNSHARDED: &str = "`--tensor auto` tried only degree 1, because the cluster has several device classes; with the devices of one type \
                         in the cluster file, it tries all degrees";

/// A single plan within this fraction of the lower bound is not improved move by move.
const GAP: f64 = 0.002;

/// The plan for these costs.
pub fn solve(file: &Path, costs: Costs, options: &PlanOptions) -> Result<Planned, Error> {
    let shared = options.tensor_parallel().costs_for(&costs, options)?;
    solve_with_groups(file, costs, shared, options, true)
}

/// A plan that is found faster: under a flush, candidates are compared by the cost model, and only the best is simulated. Its baselines
/// are not simulated.
pub fn solve_fast(
    file: &Path,
    costs: Costs,
    shared: Vec<TensorParallelCosts>,
    options: &PlanOptions,
) -> Result<Planned, Error> {
    let mut planned = solve_with_groups(file, costs, shared, options, false)?;
    let plan = &mut planned.plan;
    let (kind, samples) =
        (plan.schedule.kind, plan.schedule.micro_batch as f64 * f64::from(plan.schedule.microbatches));
    let made =
        generated(kind).ok().filter(|kind| plan.cost == CostModel::Pipec && kind.flushes()).zip(pipeline(plan).ok());
    let played = made.and_then(|(kind, pipeline)| step_us(kind, &pipeline, plan.schedule.microbatches).ok().flatten());
    if let Some(us) = played.filter(|us| *us > 0.0) {
        plan.predicted.objective_us = Some(plan.predicted.minibatch_us).filter(|estimate| *estimate != us);
        (plan.predicted.minibatch_us, plan.predicted.step_us) = (us, us);
        plan.predicted.throughput_per_s = samples * 1e6 / us;
    }
    Ok(planned)
}

/// The plan for these costs, and the costs of the model on tensor-parallel groups. Under a flush, candidates are
/// simulated, or else compared by the cost model.
pub fn solve_with_groups(
    file: &Path,
    costs: Costs,
    shared: Vec<TensorParallelCosts>,
    options: &PlanOptions,
    is_simulated: bool,
) -> Result<Planned, Error> {
    let source = costs.source.clone();
    let experts = costs.shareable.as_ref().map(|model| experts::of_graph(&model.graph, &HashMap::new()));
    let custom = options.custom_schedule()?;
    let known = (is_simulated && !shared.is_empty()).then(|| costs.clone());
    let problem = problem(costs, shared, options, custom.as_ref())?;
    let finds_bucket = options.bucket == BucketSize::Auto;
    let simulates = is_simulated || !problem.schedule.flushes();
    let simulate = |stages: &[Stage], edges: &[Edge], caps: &[u32]| efficiency(&problem, stages, edges, caps);
    let mut planner = planner_options(options, &simulate);
    planner.efficiency = planner.efficiency.filter(|_| simulates);
    let once = |problem: &Problem| options.zero().plan(problem, &planner);
    let search = |problem: &Problem| if finds_bucket { best(problem, &once) } else { once(problem) };
    // A schedule that the user requests is kept, even if its plan cannot be trained.
    let planned = search(&problem).and_then(|planned| match options.schedule {
        None => tied_weights::trained(&problem, planned, &search),
        Some(_) => Ok(planned),
    });
    let mut planned = planned.map_err(|error| describe(file, error, problem.schedule))?;
    // The figures of the plan are those of its stages as they run.
    let asked = known.as_ref().and_then(|costs| problem_as_trained(&problem, costs, &planned.plan));
    let trained = asked.as_ref().and_then(|asked| as_trained(asked, &planned, &planner));
    let figures = asked.as_ref().filter(|_| trained.is_some()).unwrap_or(&problem);
    planned = trained.unwrap_or(planned);
    if let Some(custom) = &custom {
        let pipeline = pipeline(&planned.plan).map_err(|error| Error::bug(&error.to_string()))?;
        custom.program(&pipeline, 1)?;
    }
    if options.tensor_parallel() == TensorParallel::Auto && problem.cluster.is_mixed() {
        planned.plan.warnings.push(UNSHARDED.to_string());
    }
    state_collectives(&mut planned.plan, &figures.shared, experts.unwrap_or_default());
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
        effort: Effort::Whole,
        without_baselines: false,
        gap: GAP,
    }
}

/// States the collectives of tensor-parallel groups, and where the weights of experts are; `experts` are those of one device.
pub fn state_collectives(plan: &mut Plan, shared: &[TensorParallelCosts], experts: Vec<ExpertWeights>) {
    let costs = groups::costs(shared, plan);
    let mut sums = [Traffic::default(); 4];
    for stage in plan.stages.iter().filter(|_| costs.is_some()) {
        let all = stage.op_ids().filter_map(|op| costs?.traffic.get(op as usize));
        let trains = plan.schedule.kind.trains();
        let forwards = if stage.recompute { 2 } else { 1 };
        for [forward, backward] in all {
            for (sum, (one, other)) in sums.iter_mut().zip(forward.iter().zip(backward)) {
                (0..forwards).for_each(|_| sum.add(*one));
                sum.add(if trains { *other } else { Traffic::default() });
            }
        }
    }
    let found = Collective::ALL.into_iter().zip(sums).filter(|(_, sum)| sum.count > 0);
    let of = |(kind, sum): (Collective, Traffic)| PlannedCollective {
        kind: kind.name().to_string(),
        count: sum.count,
        bytes: sum.bytes,
    };
    let split = |axis: Option<usize>| match axis {
        Some(0) => "experts",
        Some(1) => "inputs",
        Some(_) => "outputs",
        None => "nothing",
    };
    let experts = costs.map_or(experts, |costs| costs.experts.clone());
    let of_experts = |of: ExpertWeights| PlannedExperts {
        experts: of.experts,
        weights: of.weights,
        split: split(of.axis).to_string(),
    };
    plan.predicted.collectives = found.map(of).collect();
    plan.predicted.experts = experts.into_iter().map(of_experts).collect();
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
        return Err(Error::conflict(format!("--microbatches {microbatches}"), "a plan for inference")
            .because("inference has no minibatches")
            .with_help("use `--micro-batch` to set the samples per inference"));
    }
    if microbatches > 1 && problem.schedule.is_round_robin() {
        let kind = problem.schedule.name();
        return Err(Error::conflict(format!("--microbatches {microbatches}"), format!("`--schedule {kind}`"))
            .because("it does not split minibatches into micro-batches")
            .with_help("use `--schedule 2bw` (no flush) or `--schedule 1f1b` (with a flush)"));
    }
    if matches!(options.in_flight, InFlight::Given(_)) && !problem.schedule.takes_caps() {
        return Err(Error::conflict("--in-flight", format!("`--schedule {}`", problem.schedule.name()))
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
    problem.zero = options.zero().zero();
    problem.count_updates();
    problem.constraints.replicas = match (&options.replicas, custom) {
        (None, Some(custom)) => Some(custom.replicas()?),
        (replicas, _) => replicas.clone(),
    };
    problem.constraints.cut_after = options.cut_after.clone();
    problem.constraints.pins = options.pins.clone();
    problem.constraints.most_stages = options.max_stages;
    problem.constraints.no_replication = options.no_replication;
    problem.set_target(options.target);
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
