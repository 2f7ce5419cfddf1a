//! Entry point of planning: runs the requested partitioner and turns its answer into a plan.
//!
//! Every returned plan fits in memory, carries a lower bound and three baselines (data parallelism, uniform pipeline,
//! single device), and has passed `plan::check`. If nothing fits, the error names the stage that is too large, the
//! missing bytes and the smallest limit that would be enough. If a graph has too many down-sets, or a linear order too
//! many cuts, planning falls back to linear orders or groups of ops. The plan then has a warning.

use crate::partition::bounds::lower_bound::Bounds;
use crate::partition::explain::infeasible;
use crate::partition::explain::infeasible::Infeasible;
use crate::partition::heterogeneous::plan;
use crate::partition::partitioners::{Partitioner, Request};
use crate::partition::search::candidates::{PlanCandidate, SearchContext, SearchLimits, SearchResult, same};
use crate::partition::search::finish_plan;
use crate::partition::search::finish_plan::Statement;
use crate::partition::search::fused_graph::FusedGraph;
use crate::partition::search::in_flight::Efficiency;
use crate::partition::search::memory_dp::FitObjective;
use crate::partition::search::select::{best, play_baselines};
use crate::partition::search::{constraints, interleaved, pipec_rules, tensor_parallel};
use crate::plan::Plan;
use crate::plan::check::error::PlanFault;
use crate::plan::problem::{CostModel, InFlight, Objective, Problem, ProblemError};
use crate::plan::stage_cost;
use serde_json::json;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::time::Duration;

pub const MAX_DEVICES: u32 = 4096;

#[derive(Clone, Copy, Default)]
pub struct PlannerOptions<'a> {
    pub partitioner: Partitioner,
    /// Down-sets to explore before falling back. Default: `DEFAULT_BUDGET`, and a few seconds of work.
    pub budget: Option<u64>,
    /// Wall-clock limit; only for `Milp`. A run stopped by it is not reproducible, and its plan says so.
    pub time_limit: Option<Duration>,
    /// Recorded in the plan; no partitioner here is random.
    pub seed: u64,
    /// Simulates how stages run under in-flight limits, to choose the caps automatically. `None` uses the published rule
    /// and the cost model's closed-form times; nothing is simulated.
    pub efficiency: Option<&'a Efficiency<'a>>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ComparedPlan {
    pub name: &'static str,
    pub minibatch_us: f64,
    pub replicas: Vec<u32>,
    /// Distinct devices; fewer than the replicas if a device runs several stages.
    pub devices: u32,
    pub tensor: u32,
    pub peak_bytes: u64,
    pub fits: bool,
}

#[derive(Clone, Debug)]
pub struct Planned {
    pub plan: Plan,
    /// All candidates, the chosen one first.
    pub compared: Vec<ComparedPlan>,
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// Infeasible: no plan fits. The figures describe the partition that needs the least memory.
    #[error(
        "no plan fits in {limit} bytes per device: stage {stage} of {stages} (`{first_op}` to `{last_op}`, {replicas} \
         replicas) exceeds it by {missing} bytes; a limit of {smallest_limit} bytes is enough"
    )]
    Infeasible {
        limit: u64,
        stage: usize,
        stages: usize,
        replicas: u32,
        first_op: String,
        last_op: String,
        /// Bytes by which that stage exceeds the limit.
        missing: u64,
        /// Smallest limit for which a partition was found.
        smallest_limit: u64,
    },
    /// Infeasible at every limit: the memory of some device class is too small.
    #[error(transparent)]
    DeviceMemory(Box<Infeasible>),
    /// The plan checker rejected the plan. This is a bug in a partitioner, never an input error.
    #[error("bug in pipec: the plan checker rejects the plan: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Unsound(Vec<PlanFault>),
}

pub fn plan(problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    let mut planned = found(problem, options)?;
    let busy: BTreeSet<u32> = planned.plan.stages.iter().flat_map(|stage| stage.devices.iter().copied()).collect();
    planned.plan.cluster.idle = (0..problem.cluster.devices()).filter(|device| !busy.contains(device)).collect();
    Ok(planned)
}

fn found(problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    problem.check()?;
    check(problem, options)?;
    if problem.constraints.tensor || !problem.shared.is_empty() {
        return tensor_parallel::best(problem, options);
    }
    let joined = FusedGraph::of(&problem.graph);
    let asked = joined.problem(problem);
    let question =
        SearchContext { problem: &asked, joined: &joined, budget: options.budget, among: SearchLimits::ALONE };
    if problem.cluster.is_mixed() {
        return plan::plan(problem, &question, options);
    }
    let answer = answer(&question, options).map_err(|refused| refused.error)?;
    conclude(problem, &question, options, answer)
}

/// Rejects problems that no partitioner supports, and options that the chosen partitioner does not support.
fn check(problem: &Problem, options: &PlannerOptions<'_>) -> Result<(), ProblemError> {
    let devices = problem.cluster.devices();
    if devices > MAX_DEVICES {
        let (limit, found) = (u64::from(MAX_DEVICES), u64::from(devices));
        return Err(ProblemError::TooLarge { method: "planning", what: "devices", limit, found });
    }
    if options.time_limit.is_some() && options.partitioner != Partitioner::Milp {
        let what = "only partitioner `milp` supports a time limit; use `--budget` for the others";
        return Err(ProblemError::Unmet { what: what.to_string() });
    }
    if problem.cluster.is_mixed() && (problem.constraints.tensor || !problem.shared.is_empty()) {
        return Err(ProblemError::Mixed { what: "`--tensor`" });
    }
    if problem.chunks > 1 && options.partitioner != Partitioner::Pipec {
        let what = "only partitioner `pipec` supports several stages per rank";
        return Err(ProblemError::Unmet { what: what.to_string() });
    }
    Ok(())
}

/// The result of a partitioner, before it becomes a plan.
pub struct Answer {
    /// The other candidates, and how complete the search was.
    pub found: SearchResult,
    pub chosen: PlanCandidate,
    /// Single device, data parallelism, uniform pipeline.
    pub baselines: [PlanCandidate; 3],
}

pub struct Refused {
    pub error: PlanError,
    /// Lower bound on the time of every plan when the search was limited to plans faster than a known one; otherwise 0.
    pub bound_us: f64,
}

impl From<ProblemError> for Refused {
    fn from(error: ProblemError) -> Refused {
        Refused { error: error.into(), bound_us: 0.0 }
    }
}

fn is_pinned(problem: &Problem) -> bool {
    problem.constraints.replicas.is_some()
        || problem.constraints.cut_after.is_some()
        || problem.constraints.require_pipec_cost()
        || matches!(problem.in_flight, InFlight::Given(_))
}

/// Runs a partitioner with the devices in the order of the problem's cluster.
pub fn answer(question: &SearchContext<'_>, options: &PlannerOptions<'_>) -> Result<Answer, Refused> {
    let problem = question.problem;
    let baselines = question.baselines();
    let is_pinned = is_pinned(problem);
    let request = Request { question, baselines: &baselines, time_limit: options.time_limit, is_pinned };
    let mut found = (options.partitioner.row().find)(&request)?;
    let is_ours = options.partitioner == Partitioner::Pipec && problem.cost == CostModel::Pipec && !is_pinned;
    let has_missed = problem.chunks > 1 || !found.candidates.iter().any(|candidate| candidate.fits);
    if is_ours && has_missed && question.among.is_alone() && !problem.constraints.no_replication {
        add_candidates_without_replication(question, &baselines, &mut found);
    }
    found.candidates.sort_by(|left, right| order(problem.objective, left, right));
    let best = found.candidates.iter().position(|candidate| candidate.fits);
    let Some(at) = best else {
        let error = infeasible(question, &found, options.partitioner, is_pinned);
        return Err(Refused { error, bound_us: found.proven_us.unwrap_or(0.0) });
    };
    let chosen = found.candidates.remove(at);
    if problem.cluster.is_mixed() && options.partitioner == Partitioner::Pipedream {
        // PipeDream's search ignores device classes, so its bounds do not hold here.
        (found.bound_us, found.proven_us) = (0.0, None);
    }
    if found.bound_us == 0.0 && Bounds::are_valid_for(problem) {
        found.bound_us = Bounds::of(problem).of_any_plan(chosen.minibatch_us);
    }
    Ok(Answer { found, chosen, baselines })
}

/// Adds the candidates found without replication: an incomplete search over all plans may miss them.
fn add_candidates_without_replication(
    question: &SearchContext<'_>,
    baselines: &[PlanCandidate; 3],
    found: &mut SearchResult,
) {
    let mut narrower = question.problem.clone();
    narrower.constraints.no_replication = true;
    let narrower = question.about(&narrower);
    let more = match narrower.problem.chunks {
        1 => pipec_rules::found(&narrower, baselines),
        _ => interleaved::found(&narrower),
    };
    let Ok(more) = more else { return };
    let fitting = more.candidates.iter().filter(|candidate| candidate.fits);
    let best_us = fitting.map(|candidate| candidate.minibatch_us).fold(f64::INFINITY, f64::min);
    // The proof covers all plans, unless one of the new ones is faster.
    found.proven_us = found.proven_us.filter(|proven_us| *proven_us <= best_us);
    found.states += more.states;
    found.candidates.extend(more.candidates.into_iter().filter(|candidate| candidate.name == "pipec"));
}

/// Turns an answer into a plan and verifies it; `question` holds `problem` over fused ops.
pub fn conclude(
    problem: &Problem,
    question: &SearchContext<'_>,
    options: &PlannerOptions<'_>,
    answer: Answer,
) -> Result<Planned, PlanError> {
    let Answer { mut found, chosen, mut baselines } = answer;
    let (mut chosen, played) = best(problem, question, &mut found, chosen, options);
    play_baselines(problem, question, &mut baselines, &played, options);
    chosen.shape = question.joined.spread(&chosen.shape);
    let names = problem.constraints.cut_after.as_deref().unwrap_or_default();
    let is_pinned = is_pinned(problem) && options.partitioner != Partitioner::Milp;
    let statement = Statement {
        found: &found,
        baselines: &baselines,
        method: if is_pinned { "pinned" } else { options.partitioner.name() },
        partitioner: options.partitioner.name(),
        budget: options.budget,
        seed: options.seed,
        played: &played,
        is_played: options.efficiency.is_some(),
        asked: question.problem,
        notes: constraints::moved(question.joined, names),
    };
    let mut plan = finish_plan::finish(problem, &chosen, &statement).map_err(PlanError::Unsound)?;
    if let Some(limit) = options.time_limit {
        plan.options.insert("time_limit".to_string(), json!(limit.as_secs_f64()));
    }
    let rest = found.candidates.iter().chain(&baselines);
    let compared = std::iter::once(&chosen).chain(rest).map(ComparedPlan::of).collect();
    Ok(Planned { plan, compared })
}

impl ComparedPlan {
    fn of(candidate: &PlanCandidate) -> ComparedPlan {
        ComparedPlan {
            name: candidate.name,
            minibatch_us: candidate.minibatch_us,
            replicas: candidate.shape.replicas(),
            devices: candidate.devices(),
            tensor: 1,
            peak_bytes: candidate.peak(),
            fits: candidate.fits,
        }
    }
}

/// Orders candidates: by the objective, then fewer stages, then fewer devices.
pub fn order(objective: Objective, left: &PlanCandidate, right: &PlanCandidate) -> Ordering {
    let stages = |candidate: &PlanCandidate| candidate.memory.len();
    let devices = |candidate: &PlanCandidate| candidate.shape.replicas().iter().sum::<u32>();
    let time = if same(left.minibatch_us, right.minibatch_us) {
        Ordering::Equal
    } else {
        left.minibatch_us.total_cmp(&right.minibatch_us)
    };
    let memory = left.peak().cmp(&right.peak());
    let first = match objective {
        Objective::Throughput | Objective::Latency => time,
        Objective::Memory => memory.then(time),
    };
    first.then(stages(left).cmp(&stages(right))).then(devices(left).cmp(&devices(right)))
}

/// The infeasibility report, based on the candidate that needs the least memory.
fn infeasible(
    question: &SearchContext<'_>,
    found: &SearchResult,
    partitioner: Partitioner,
    is_pinned: bool,
) -> PlanError {
    let problem = question.problem;
    let mut candidates = found.candidates.clone();
    // The other searches already looked for the least memory; the enumeration only keeps what fits.
    if partitioner == Partitioner::Exhaustive && !is_pinned && problem.cost != CostModel::Pipec {
        let shapes = question.fitting(&stage_cost::levels(&problem.cluster), FitObjective::Memory);
        candidates.extend(shapes.into_iter().map(|shape| question.candidate("least memory", shape)));
    }
    infeasible::error(question, &candidates)
}
