//! The door of planning: calls a partitioner by name and makes its answer a plan.
//!
//! Every plan that leaves here fits in memory, carries a lower bound, stands beside data parallelism, a uniform pipeline and one
//! device, and has passed `plan::check`. Where nothing fits, the answer says which stage is too large, by how many bytes, and the
//! least memory that would do. Work is bounded: a graph with too many closed sets, or too long a line, is planned along a linear
//! order or in groups of ops, and the plan says so.

use crate::partition::fit::{self, Fit, Least};
use crate::partition::in_flight::{self, Efficiency};
use crate::partition::line::{self, Line};
use crate::partition::pinned::{self, Pinned};
use crate::partition::shape::Shape;
use crate::partition::states::{Growth, Space};
use crate::partition::{build, cuts, data_parallel, exhaustive, linear, pipedream, single, uniform};
use crate::plan::check::{self, Fault};
use crate::plan::problem::{InFlight, Objective, Problem, ProblemError};
use crate::plan::stage_cost::{self, LevelCost, Part, StageCost};
use crate::plan::{Baselines, Fits, Plan, PlannedCluster, PlannedSchedule, Predicted, SCHEMA, Search, StageMemory};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The most devices that are planned for.
pub const MAX_DEVICES: u32 = 4096;

/// Closed sets that are looked at when `--budget` does not say.
pub const DEFAULT_BUDGET: u64 = 10_000;

/// The partitioners.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Partitioner {
    /// The best of what is known: every closed set, any number of devices, whole groups or not.
    #[default]
    Pipec,
    /// PipeDream's, with all devices.
    Pipedream,
    /// Everything, for small models.
    Exhaustive,
    /// The whole model on every device.
    DataParallel,
    /// A straight pipeline of equal compute.
    Uniform,
    /// Everything on one device.
    Single,
}

impl Partitioner {
    /// Every partitioner.
    pub const ALL: [Partitioner; 6] = [
        Partitioner::Pipec,
        Partitioner::Pipedream,
        Partitioner::Exhaustive,
        Partitioner::DataParallel,
        Partitioner::Uniform,
        Partitioner::Single,
    ];

    /// The name on the command line and in plans.
    pub fn name(self) -> &'static str {
        match self {
            Partitioner::Pipec => "pipec",
            Partitioner::Pipedream => "pipedream",
            Partitioner::Exhaustive => "exhaustive",
            Partitioner::DataParallel => "data-parallel",
            Partitioner::Uniform => "uniform",
            Partitioner::Single => "single",
        }
    }

    /// The partitioner of that name.
    pub fn from_name(name: &str) -> Option<Partitioner> {
        Partitioner::ALL.into_iter().find(|partitioner| partitioner.name() == name)
    }
}

/// How to plan.
#[derive(Clone, Copy, Default)]
pub struct PlannerOptions<'a> {
    /// Which partitioner.
    pub partitioner: Partitioner,
    /// Closed sets to look at before falling back; absent means [`DEFAULT_BUDGET`] and a few seconds of work.
    pub budget: Option<u64>,
    /// Seed, for the plan; no partitioner here is random.
    pub seed: u64,
    /// The fraction of ideal throughput that stages reach under caps, for automatic caps. Absent means the published rule.
    pub efficiency: Option<&'a Efficiency<'a>>,
}

/// One of the plans that were looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// Who made it.
    pub name: &'static str,
    /// Its time in microseconds for one minibatch.
    pub minibatch_us: f64,
    /// Replicas of each stage.
    pub replicas: Vec<u32>,
    /// Bytes of its fullest stage.
    pub peak_bytes: u64,
    /// Whether it fits.
    pub fits: bool,
}

/// A plan, and what it was chosen from.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// All candidates, the chosen one first.
    pub compared: Vec<Compared>,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The question makes no sense: bad input.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// An answer: nothing fits. The figures are those of the partition that needs the least.
    #[error(
        "no plan fits in {limit} bytes per device: stage {stage} of {stages} (`{first_op}` to `{last_op}`, {replicas} replicas) \
         lacks {missing} bytes; a limit of {smallest_limit} bytes would do"
    )]
    Infeasible {
        /// The limit that was given.
        limit: u64,
        /// The fullest stage.
        stage: usize,
        /// Stages of that partition.
        stages: usize,
        /// Replicas of that stage.
        replicas: u32,
        /// Its first op by name.
        first_op: String,
        /// Its last op by name.
        last_op: String,
        /// Bytes it has too much.
        missing: u64,
        /// The least limit under which a partition was found.
        smallest_limit: u64,
    },
    /// A partitioner made a plan that the judge refuses: a fault of ours, never of the input.
    #[error("internal fault: the plan does not pass its check: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Unsound(Vec<Fault>),
}

/// A shape with what it costs and holds.
#[derive(Clone)]
struct Candidate {
    name: &'static str,
    shape: Shape,
    minibatch_us: f64,
    caps: Vec<u32>,
    memory: Vec<StageMemory>,
    fits: bool,
}

impl Candidate {
    fn peak(&self) -> u64 {
        self.memory.iter().map(|held| held.total).max().unwrap_or(0)
    }
}

/// What a partitioner says about its answer.
struct Found {
    candidates: Vec<Candidate>,
    states: u64,
    fallback: Option<String>,
    /// The least time that any partition needs, where a complete search has shown it.
    proven_us: Option<f64>,
}

/// Makes a plan for `problem`.
pub fn plan(problem: &Problem, options: &PlannerOptions<'_>) -> Result<Planned, PlanError> {
    problem.check()?;
    let devices = problem.cluster.devices();
    if devices > MAX_DEVICES {
        let (limit, found) = (u64::from(MAX_DEVICES), u64::from(devices));
        return Err(ProblemError::TooLarge { method: "planning", what: "devices", limit, found }.into());
    }
    let question = Question { problem, budget: options.budget };
    let baselines = question.baselines();
    let is_pinned = problem.constraints.replicas.is_some()
        || problem.constraints.cut_after.is_some()
        || matches!(problem.in_flight, InFlight::Given(_));
    let mut found = match options.partitioner {
        _ if is_pinned => question.pinned()?,
        Partitioner::Pipec => question.hierarchical(Growth::All, &baselines),
        Partitioner::Pipedream => question.hierarchical(Growth::FirstSource, &baselines),
        Partitioner::Exhaustive => question.exhaustive()?,
        Partitioner::Single => Found::of(baselines[0].clone()),
        Partitioner::DataParallel => Found::of(baselines[1].clone()),
        Partitioner::Uniform => Found::of(baselines[2].clone()),
    };
    let best = |found: &Found| found.candidates.iter().position(|candidate| candidate.fits);
    found.candidates.sort_by(|left, right| question.order(left, right));
    let Some(at) = best(&found) else { return Err(question.infeasible(&found, is_pinned)) };
    let chosen = found.candidates.remove(at);
    let method = if is_pinned { "pinned" } else { options.partitioner.name() };
    let plan = question.finish(chosen.clone(), &found, &baselines, method, options)?;
    let rest = found.candidates.iter().chain(&baselines);
    let compared = std::iter::once(&chosen).chain(rest).map(Compared::of).collect();
    Ok(Planned { plan, compared })
}

impl Compared {
    fn of(candidate: &Candidate) -> Compared {
        Compared {
            name: candidate.name,
            minibatch_us: candidate.minibatch_us,
            replicas: candidate.shape.replicas(),
            peak_bytes: candidate.peak(),
            fits: candidate.fits,
        }
    }
}

impl Found {
    fn of(candidate: Candidate) -> Found {
        Found { candidates: vec![candidate], states: 1, fallback: None, proven_us: None }
    }
}

struct Question<'a> {
    problem: &'a Problem,
    budget: Option<u64>,
}

impl Question<'_> {
    fn candidate(&self, name: &'static str, shape: Shape) -> Candidate {
        let problem = self.problem;
        let caps = match &problem.in_flight {
            InFlight::Given(caps) if caps.len() == shape.replicas().len() => caps.clone(),
            _ => build::published_caps(problem, &shape),
        };
        let memory = build::memory(problem, &build::holdings(problem, &shape), &caps);
        let peak = memory.iter().map(|held| held.total).max().unwrap_or(0);
        let fits = problem.memory_limit.is_none_or(|limit| peak <= limit.0);
        let minibatch_us = shape.minibatch_us(problem);
        Candidate { name, shape, minibatch_us, caps, memory, fits }
    }

    /// One device, data parallelism, and the uniform pipeline, in this order.
    fn baselines(&self) -> [Candidate; 3] {
        let (graph, cluster) = (&self.problem.graph, &self.problem.cluster);
        let order: Vec<u32> = (0..graph.ops.len() as u32).collect();
        [
            self.candidate("single", single::single(graph.ops.len(), cluster)),
            self.candidate("data-parallel", data_parallel::data_parallel(graph.ops.len(), cluster)),
            self.candidate("uniform", uniform::uniform(graph, cluster, &order)),
        ]
    }

    /// Better candidates first: by the objective, then by stages, then by devices.
    fn order(&self, left: &Candidate, right: &Candidate) -> std::cmp::Ordering {
        let stages = |candidate: &Candidate| candidate.memory.len();
        let devices = |candidate: &Candidate| candidate.shape.replicas().iter().sum::<u32>();
        let time = if same(left.minibatch_us, right.minibatch_us) {
            std::cmp::Ordering::Equal
        } else {
            left.minibatch_us.total_cmp(&right.minibatch_us)
        };
        let memory = left.peak().cmp(&right.peak());
        let first = match self.problem.objective {
            Objective::Throughput => time,
            Objective::Memory => memory.then(time),
        };
        first.then(stages(left).cmp(&stages(right))).then(devices(left).cmp(&devices(right)))
    }

    /// The hierarchical search over closed sets; for `Growth::All` also with fewer devices and with stages that span groups.
    fn hierarchical(&self, growth: Growth, baselines: &[Candidate; 3]) -> Found {
        let problem = self.problem;
        let is_ours = growth == Growth::All;
        let name = if is_ours { "pipec" } else { "pipedream" };
        let levels = stage_cost::levels(&problem.cluster);
        let mut found = Found { candidates: Vec::new(), states: 0, fallback: None, proven_us: None };
        let mut searches = vec![(levels, false)];
        if is_ours && problem.cluster.levels.len() > 1 {
            searches.push((stage_cost::levels(&problem.cluster.flattened()), true));
        }
        for (levels, is_flat) in &searches {
            let searched = self.search(levels, growth, is_ours);
            found.states += searched.states;
            found.fallback = found.fallback.take().or(searched.fallback);
            found.candidates.extend(searched.shapes.into_iter().map(|mut shape| {
                shape.is_flat = *is_flat;
                self.candidate(name, shape)
            }));
            if problem.cluster.levels.len() == 1 {
                found.proven_us = searched.proven_us;
            }
        }
        let wants_memory = problem.objective == Objective::Memory;
        let fits = found.candidates.iter().any(|candidate| candidate.fits);
        if wants_memory || !fits {
            for (levels, is_flat) in &searches {
                let within = problem.memory_limit.map_or(u64::MAX, |limit| limit.0);
                let least = if wants_memory { Least::Memory } else { Least::Time { within } };
                found.candidates.extend(self.fitting(levels, least).into_iter().map(|mut shape| {
                    shape.is_flat = *is_flat;
                    self.candidate(name, shape)
                }));
            }
            if !wants_memory {
                found.fallback = found.fallback.take().or(Some("memory: search along linear orders".to_string()));
            }
        }
        if is_ours || !fits {
            found.candidates.extend(baselines.iter().cloned());
        }
        found
    }

    fn search(&self, levels: &[LevelCost], growth: Growth, may_leave_units: bool) -> Searched {
        let (graph, cost) = (&self.problem.graph, StageCost::of(self.problem));
        let mut states = 0;
        let mut best: Option<pipedream::Solution> = None;
        let limit = largest(graph.ops.len() + 1, |sets| {
            let (steps, bytes) = pipedream::effort(levels, sets);
            steps <= 2e8 && bytes <= 3e8
        });
        for order in linear::orders(graph) {
            let ends = line::ends(graph, cost.model, &order, limit.max(2) - 1);
            let space = Space::chain(graph, cost.model, order, ends);
            let solution = pipedream::solve(&space, &cost, levels, may_leave_units, f64::INFINITY);
            states += space.len() as u64;
            best = [best, solution].into_iter().flatten().reduce(|best, new| {
                let better = new.minibatch_us < best.minibatch_us && !same(new.minibatch_us, best.minibatch_us);
                if better { new } else { best }
            });
        }
        let bound = best.as_ref().map_or(f64::INFINITY, |solution| solution.minibatch_us);
        let budget = self.budget.unwrap_or_else(|| {
            let affordable = |sets: usize| pipedream::effort(levels, sets).0 <= 4e9;
            largest(DEFAULT_BUDGET as usize, affordable) as u64
        });
        let in_memory = largest(budget.min(1 << 24) as usize, |sets| pipedream::effort(levels, sets).1 <= 1e9);
        let grown = Space::grow(graph, cost.model, growth, in_memory);
        let fallback = grown.is_none().then(|| {
            let along = if limit > graph.ops.len() { "linear order" } else { "linear order of grouped ops" };
            format!("{along}: more than {in_memory} closed sets")
        });
        let exact = grown.and_then(|space| {
            states += space.len() as u64;
            pipedream::solve(&space, &cost, levels, may_leave_units, bound)
        });
        let starts = sources(&self.problem.graph);
        let is_complete = growth == Growth::All || starts == 1;
        let proven_us = exact.as_ref().filter(|_| is_complete && fallback.is_none()).map(|exact| exact.least_us);
        // The line's answer stays where the sets of `growth` leave it out.
        let shapes = exact.or(best).map(|solution| solution.shape).into_iter().collect();
        Searched { shapes, states, fallback, proven_us }
    }

    fn fitting(&self, levels: &[LevelCost], least: Least) -> Vec<Shape> {
        let (graph, cost) = (&self.problem.graph, StageCost::of(self.problem));
        let limit = largest((graph.ops.len() + 1).min(1200), |places| fit::effort(levels, places) <= 1e8);
        let solve = |order: Vec<u32>| {
            let ends = line::ends(graph, cost.model, &order, limit.max(2) - 1);
            let line = Line::new(graph, cost.model, order, ends);
            let settings = Fit {
                line: &line,
                cost: &cost,
                levels,
                flow: build::flow(self.problem, self.problem.cluster.devices()),
                optimizer_state: self.problem.optimizer_state,
            };
            fit::fit(&settings, least).map(|(_, shape)| shape)
        };
        linear::orders(graph).into_iter().filter_map(solve).collect()
    }

    fn pinned(&self) -> Result<Found, PlanError> {
        let shapes = self.pin(self.problem.objective == Objective::Memory)?;
        let candidates = shapes.into_iter().map(|shape| self.candidate("pinned", shape)).collect();
        Ok(Found { candidates, states: 1, fallback: None, proven_us: None })
    }

    fn pin(&self, least_memory: bool) -> Result<Vec<Shape>, PlanError> {
        let problem = self.problem;
        let (graph, cost) = (&problem.graph, StageCost::of(problem));
        let flattened = problem.cluster.flattened();
        let level = stage_cost::levels(&flattened)[0];
        let caps = match &problem.in_flight {
            InFlight::Given(caps) => Some(caps.as_slice()),
            _ => None,
        };
        let replicas = problem.constraints.replicas.as_deref();
        let units = u64::from(level.count);
        let fixed = problem.constraints.cut_after.as_ref().map(|names| cuts::resolve(graph, names)).transpose()?;
        let cut_stages = fixed.as_ref().map(|(_, ends)| ends.len() - 1);
        let stages = cut_stages.or(replicas.map(<[u32]>::len)).or(caps.map(<[u32]>::len)).unwrap_or(1);
        if let Some(replicas) = replicas.filter(|replicas| replicas.len() != stages) {
            return Err(ProblemError::Disagree { cuts: stages - 1, stages, replicas: replicas.len() }.into());
        }
        if let Some(caps) = caps.filter(|caps| caps.len() != stages) {
            return Err(ProblemError::Caps { caps: caps.len(), stages }.into());
        }
        if stages as u64 > units {
            let wanted = stages as u64;
            return Err(ProblemError::TooManyReplicas { wanted, devices: level.count }.into());
        }
        if stages > graph.ops.len() {
            return Err(ProblemError::TooManyStages { stages, ops: graph.ops.len() }.into());
        }
        let steps = |places: usize| {
            let choices = if replicas.is_some() { 1.0 } else { (units * units) as f64 / 2.0 };
            (places * places) as f64 / 2.0 * stages as f64 * choices
        };
        let least_places = stages + 1;
        if steps(least_places) > 2e10 {
            let (limit, found) = (512, stages as u64);
            return Err(ProblemError::TooLarge { method: "pinned", what: "stages", limit, found }.into());
        }
        let limit = largest((graph.ops.len() + 1).min(1200), |places| steps(places) <= 3e8).max(least_places);
        let lines = match fixed {
            Some(line) => vec![line],
            None => {
                let with_ends = |order: Vec<u32>| {
                    let mut ends = line::ends(graph, cost.model, &order, limit - 1);
                    // Grouping by weight may leave fewer places than stages; then the first places are taken as they come.
                    if ends.len() <= stages {
                        ends = (0..stages).chain([order.len()]).collect();
                    }
                    (order, ends)
                };
                linear::orders(graph).into_iter().map(with_ends).collect()
            }
        };
        let solve = |(order, ends): (Vec<u32>, Vec<usize>)| {
            let line = Line::new(graph, cost.model, order, ends);
            let settings = Pinned {
                line: &line,
                cost: &cost,
                level,
                flow: build::flow(problem, level.count),
                optimizer_state: problem.optimizer_state,
                stages,
                replicas,
                caps,
                memory_limit: problem.memory_limit.map(|limit| limit.0),
                least_memory,
            };
            pinned::pinned(&settings).map(|(_, shape)| shape)
        };
        Ok(lines.into_iter().filter_map(solve).collect())
    }

    fn exhaustive(&self) -> Result<Found, PlanError> {
        let problem = self.problem;
        let (graph, cost) = (&problem.graph, StageCost::of(problem));
        let too_large =
            |what, limit: u64, found: u64| ProblemError::TooLarge { method: "exhaustive", what, limit, found };
        if graph.ops.len() > exhaustive::MAX_OPS {
            return Err(too_large("ops", exhaustive::MAX_OPS as u64, graph.ops.len() as u64).into());
        }
        if problem.cluster.levels.len() > 1 && problem.memory_limit.is_some() {
            return Err(too_large("levels under a memory limit", 1, problem.cluster.levels.len() as u64).into());
        }
        let budget = 1 << (exhaustive::MAX_OPS + 1);
        let space = Space::grow(graph, cost.model, Growth::All, budget)
            .ok_or_else(|| too_large("closed sets", budget as u64, budget as u64 + 1))?;
        let fits = |shape: &Shape| problem.memory_limit.is_none() || self.candidate("exhaustive", shape.clone()).fits;
        let levels = stage_cost::levels(&problem.cluster);
        let walked = exhaustive::exhaustive(&space, &cost, &levels, &fits);
        let (shape, states) = walked.map_err(|limit| too_large("steps", limit, limit + 1))?;
        let candidates: Vec<_> = shape.into_iter().map(|shape| self.candidate("exhaustive", shape)).collect();
        let proven_us = candidates.first().filter(|_| levels.len() == 1).map(|candidate| candidate.minibatch_us);
        Ok(Found { candidates, states, fallback: None, proven_us })
    }

    /// The explained no: of all that can be found, what needs the least memory.
    fn infeasible(&self, found: &Found, is_pinned: bool) -> PlanError {
        let problem = self.problem;
        let mut candidates = found.candidates.clone();
        let add = |shape: Shape| self.candidate("least memory", shape);
        if is_pinned {
            candidates.extend(self.pin(true).unwrap_or_default().into_iter().map(add));
        } else if found.candidates.len() != 1 || found.proven_us.is_some() || found.states != 1 {
            candidates.extend(self.fitting(&stage_cost::levels(&problem.cluster), Least::Memory).into_iter().map(add));
            if problem.cluster.levels.len() > 1 {
                let flat = self.fitting(&stage_cost::levels(&problem.cluster.flattened()), Least::Memory);
                candidates.extend(flat.into_iter().map(|shape| add(Shape { is_flat: true, ..shape })));
            }
        }
        let limit = problem.memory_limit.map_or(0, |limit| limit.0);
        let Some(least) = candidates.iter().min_by_key(|candidate| candidate.peak()) else {
            return PlanError::Unsound(vec![Fault::NoStages]);
        };
        let smallest_limit = least.peak();
        let stage = least.memory.iter().position(|held| held.total == smallest_limit).unwrap_or(0);
        let leaves = least.shape.leaves();
        let name = |op: Option<&u32>| op.map_or(String::new(), |&op| shown(&problem.graph.ops[op as usize].name, op));
        PlanError::Infeasible {
            limit,
            stage,
            stages: leaves.len(),
            replicas: leaves[stage].replicas,
            first_op: name(leaves[stage].ops.first()),
            last_op: name(leaves[stage].ops.last()),
            missing: smallest_limit.saturating_sub(limit),
            smallest_limit,
        }
    }

    fn finish(
        &self,
        chosen: Candidate,
        found: &Found,
        baselines: &[Candidate; 3],
        method: &str,
        options: &PlannerOptions<'_>,
    ) -> Result<Plan, PlanError> {
        let problem = self.problem;
        let mut warnings = Vec::new();
        if let Some(fallback) = &found.fallback {
            warnings.push(format!("the search was not complete ({fallback}); a better plan may exist"));
        }
        let flattens = chosen.shape.is_flat && problem.cluster.levels.len() > 1;
        if flattens {
            warnings.push(
                "stages do not take whole groups; times assume every link at the slowest level's bandwidth".into(),
            );
        }
        let caps = match (&problem.in_flight, options.efficiency) {
            (InFlight::Auto, Some(efficiency)) => {
                let (caps, reached) = in_flight::choose(problem, &chosen.shape, efficiency);
                if reached < in_flight::ENOUGH {
                    let percent = reached * 100.0;
                    warnings
                        .push(format!("within memory the in-flight caps reach {percent:.0} % of the ideal throughput"));
                }
                caps
            }
            _ => chosen.caps.clone(),
        };
        let memory = build::memory(problem, &build::holdings(problem, &chosen.shape), &caps);
        let weight_versions = build::versions(problem, &caps);
        let proven_optimal = found.proven_us.is_some_and(|least| same(least, chosen.minibatch_us));
        let lower_bound_us = if proven_optimal {
            chosen.minibatch_us
        } else {
            found.proven_us.unwrap_or(0.0).max(self.lower_bound(flattens)).min(chosen.minibatch_us)
        };
        let stages = build::stages(problem, &chosen.shape, &memory);
        let [one, all, uniform] = baselines;
        let mut plan = Plan {
            schema: SCHEMA.to_string(),
            model: problem.model.clone(),
            dtype: problem.dtype.clone(),
            optimizer: problem.optimizer.clone(),
            profile: problem.profile.clone(),
            cluster: PlannedCluster {
                levels: problem.cluster.levels.clone(),
                devices: problem.cluster.devices(),
                memory_per_device: problem.memory_limit,
                device: problem.cluster.device.clone(),
            },
            cost: problem.cost,
            objective: problem.objective,
            schedule: PlannedSchedule {
                kind: problem.schedule,
                micro_batch: problem.micro_batch,
                microbatches: problem.microbatches,
                chunks: problem.chunks,
                in_flight: caps,
                weight_versions,
            },
            predicted: self.predicted(chosen.minibatch_us, stages.len()),
            stages,
            edges: build::edges(problem, &chosen.shape),
            lower_bound_us,
            proven_optimal,
            baselines: Baselines {
                single: one.minibatch_us,
                data_parallel: all.minibatch_us,
                uniform: uniform.minibatch_us,
                fits: Fits { single: one.fits, data_parallel: all.fits, uniform: uniform.fits },
            },
            search: Search { method: method.to_string(), states: found.states, fallback: found.fallback.clone() },
            warnings,
            seed: options.seed,
            options: self.options(options),
            extra: BTreeMap::new(),
        };
        let checked = check::check(problem, &plan).map_err(PlanError::Unsound)?;
        plan.predicted.bottleneck = checked.bottleneck;
        Ok(plan)
    }

    /// All compute on all devices at once; and on one level, the op that is slowest however often it is replicated.
    fn lower_bound(&self, flattens: bool) -> f64 {
        let problem = self.problem;
        let spread = problem.graph.total_us() / f64::from(problem.cluster.devices());
        if problem.cluster.levels.len() > 1 || flattens {
            return spread;
        }
        let (cost, level) = (StageCost::of(problem), stage_cost::levels(&problem.cluster)[0]);
        let alone = |op: &crate::profile::cost_graph::OpCost| {
            let part = |replicas| Part {
                is_first: true,
                is_last: true,
                replicas,
                inner_us: op.fwd_us + op.bwd_us,
                weight_bytes: op.param_bytes as f64,
                in_bytes: 0.0,
                out_bytes: 0.0,
            };
            (1..=level.count).map(|replicas| cost.part_us(&level, &part(replicas))).fold(f64::INFINITY, f64::min)
        };
        problem.graph.ops.iter().map(alone).fold(spread, f64::max)
    }

    fn predicted(&self, minibatch_us: f64, stages: usize) -> Predicted {
        let problem = self.problem;
        let (m, p) = (f64::from(problem.microbatches), stages as f64);
        let fill = if problem.schedule.is_continuous() { 0.0 } else { p - 1.0 };
        let step_us = minibatch_us * (m + fill);
        let samples = problem.micro_batch as f64 * m;
        let throughput_per_s = if step_us > 0.0 { samples * 1e6 / step_us } else { 0.0 };
        Predicted { minibatch_us, step_us, throughput_per_s, bubble: fill / (m + fill), bottleneck: String::new() }
    }

    fn options(&self, options: &PlannerOptions<'_>) -> BTreeMap<String, Value> {
        let problem = self.problem;
        let mut all = BTreeMap::from([
            ("partitioner".to_string(), json!(options.partitioner.name())),
            ("optimizer_state".to_string(), json!(problem.optimizer_state)),
        ]);
        let in_flight = match &problem.in_flight {
            InFlight::Auto => json!("auto"),
            InFlight::Pipedream => json!("pipedream"),
            InFlight::Given(caps) => json!(caps),
        };
        all.insert("in_flight".to_string(), in_flight);
        let mut add = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                all.insert(name.to_string(), value);
            }
        };
        add("activation_compression", problem.activation_compression.map(|ratio| json!(ratio)));
        add("budget", options.budget.map(|budget| json!(budget)));
        add("stages", problem.constraints.replicas.as_ref().map(|replicas| json!(replicas)));
        add("cut_after", problem.constraints.cut_after.as_ref().map(|names| json!(names)));
        all
    }
}

struct Searched {
    shapes: Vec<Shape>,
    states: u64,
    fallback: Option<String>,
    proven_us: Option<f64>,
}

fn same(left: f64, right: f64) -> bool {
    (left - right).abs() <= 1e-9 * left.abs().max(right.abs())
}

/// The largest number up to `most` that is `affordable`, which holds for all smaller ones; at least 2.
fn largest(most: usize, affordable: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (2, most.max(2));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if affordable(middle) { low = middle } else { high = middle - 1 }
    }
    low
}

fn sources(graph: &crate::profile::cost_graph::CostGraph) -> usize {
    let mut is_source = vec![true; graph.ops.len()];
    graph.edges().iter().for_each(|(_, to)| is_source[to.index()] = false);
    is_source.into_iter().filter(|is_source| *is_source).count()
}

fn shown(name: &str, op: u32) -> String {
    let name = if name.is_empty() { op.to_string() } else { name.to_string() };
    name.chars().take(80).map(|c| if c.is_control() { '?' } else { c }).collect()
}
