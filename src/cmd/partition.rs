//! `pipec partition`: cuts a model into stages and writes the plan.

use crate::arguments::{Devices, Dims};
use crate::batch;
use crate::cmd::optimizer::{self, Optimizer};
use crate::cmd::unplanned::{Size, tried, unplanned};
use crate::failure::Failure;
use crate::groups::{self, Groups};
use crate::loss::LossArguments;
use crate::own::{self, Own};
use crate::replaced::Mark;
use crate::screen::Screen;
use crate::source::{self, Costs};
use crate::zero::{self, Zero};
use crate::{candidates, device_placement, hybrid, output, prediction, quantity, stages, ties};
use clap::Args;
use compiler::cluster::{Bytes, unit};
use compiler::partition::planner::{Partitioner, Planned, PlannerOptions};
use compiler::partition::search::bucket_size::{FIRST, best};
use compiler::plan::problem::{CostModel, InFlight, Objective, Problem, Target};
use compiler::plan::{Edge, PlannedModel, ScheduleKind, Stage, read};
use compiler::profile::shared::SharedCosts;
use compiler::schedule::pipeline::{pipeline, pipeline_of};
use compiler::simulate::one_f_one_b_rr::{Steady, steady, steady_in_sync};
use compiler::tensor::DType;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What to plan, for which devices, how.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Examples:\n  pipec partition model.onnx --gpus 8\n  pipec partition model.onnx --profile profile.json --cluster cluster.toml -o plan.json\n  pipec partition gpt.onnx --levels 8:450GB/s,2:50GB/s --microbatches 16 --optimizer adamw --compare"
)]
pub struct Arguments {
    /// The model, or a published profile
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Format of FILE [default: by its name, pipedream for .txt, a model for all else; instances are to be named]
    #[arg(long, value_enum, value_name = "FORMAT", help_heading = "Model")]
    pub from: Option<source::Format>,
    /// Costs: a file of `pipec profile`, or analytic[:KIND] for the roofline of a device kind [default: analytic]
    #[arg(long, value_name = "FILE|analytic[:KIND]", help_heading = "Model")]
    pub profile: Option<String>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub devices: Devices,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub dims: Dims,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub loss: LossArguments,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub question: Question,
    /// Samples in one minibatch: into how many micro-batches it is cut is found with the stages
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 32), help_heading = "Schedule")]
    pub batch: Option<u64>,
    /// Let a device hold nodes from anywhere in the graph (dnn-partitioning instances)
    #[arg(long, help_heading = "Constraints")]
    pub noncontiguous: bool,
    /// Also print the candidates that the plan was chosen from
    #[arg(long, help_heading = "Results")]
    pub compare: bool,
    /// Where to write the plan; - is standard output [default: MODEL.plan.json in the current folder, unless that is another model's]
    #[arg(short, long, value_name = "FILE", help_heading = "Results")]
    pub output: Option<PathBuf>,
}

/// As `plan::buckets` has it.
const USUAL_BUCKET: &str = "25MiB";

/// How a plan is looked for; also what `train` asks when it plans by itself.
#[derive(Clone, Debug, Args)]
pub struct Question {
    /// Cost model: the links, replicas and schedule as they run (pipec), the formula of the PipeDream paper (paper), or that of its released optimizer (pipedream)
    #[arg(long, value_name = "MODEL", value_parser = ["pipec", "paper", "pipedream"], default_value = "pipec", help_heading = "Costs and memory")]
    pub cost: String,
    /// PipeDream's activation compression ratio; without it cost `pipedream` takes transfers between stages as free
    #[arg(long, value_name = "R", help_heading = "Costs and memory")]
    pub activation_compression: Option<f64>,
    /// Bytes that may be used on each device, for example 16GB [default: the memory of the device]
    #[arg(long, value_name = "SIZE", help_heading = "Costs and memory")]
    pub memory: Option<String>,
    /// Micro-batches in one minibatch
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 20), help_heading = "Schedule")]
    pub microbatches: u32,
    /// Order of work: a schedule, a table FILE.csv, programs FILE.json, or the best of those that flush (auto) [default: 1f1b-rr; 1f1b with micro-batches, a batch or a target, inference for objective latency]
    #[arg(long, value_name = "NAME|FILE|auto", value_parser = schedule, help_heading = "Schedule")]
    pub schedule: Option<String>,
    /// Stages on each rank, for interleaved and bfs [default: 2; zbv and dualpipev have 2]
    #[arg(long, value_name = "V", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = "Schedule")]
    pub chunks: Option<u32>,
    /// What is minimised: the time of a minibatch (throughput), the bytes on the fullest device (memory), or one item's way through a pipeline that only answers (latency)
    #[arg(long, value_name = "WHAT", default_value = "throughput", value_parser = ["throughput", "memory", "latency"], help_heading = "Search")]
    pub objective: String,
    /// For which framework: equal replicas, a flush, and for all but torch cuts where modules end
    #[arg(long, value_name = "NAME", value_parser = ["torchtitan", "megatron", "deepspeed", "torch"], help_heading = "Constraints")]
    pub target: Option<String>,
    /// Who looks for the plan: the best of what is known (pipec), PipeDream's planner (pipedream), integer programs on top of pipec (milp), everything for up to 12 ops (exhaustive), or nobody: a plain alternative
    #[arg(long, value_name = "NAME", default_value = "pipec",
          value_parser = ["pipec", "pipedream", "milp", "exhaustive", "data-parallel", "uniform", "single"], help_heading = "Search")]
    pub partitioner: String,
    /// Replicas of each stage, for example 2,1,1; the cuts stay free
    #[arg(long, value_name = "R,R,…", value_delimiter = ',', value_parser = replicas, help_heading = "Constraints")]
    pub stages: Option<Vec<u32>>,
    /// End a stage after each of these nodes, modules or op ids
    #[arg(long, value_name = "NAME,…", value_delimiter = ',', help_heading = "Constraints")]
    pub cut_after: Option<Vec<String>>,
    /// Put a node, a module or an op id into a stage, counted from 0: --pin encoder=0,lm_head=3
    #[arg(long, value_name = "NAME=STAGE,…", value_delimiter = ',', value_parser = pin, help_heading = "Constraints")]
    pub pin: Vec<(String, u32)>,
    /// At most so many stages
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Constraints")]
    pub max_stages: Option<u32>,
    /// One replica for every stage
    #[arg(long, help_heading = "Constraints")]
    pub no_replication: bool,
    /// Devices that share every op of a replica, each with its part: so many of the fastest level, as many as is best (auto), or one (never)
    #[arg(long, value_name = "never|auto|N", default_value = "never", value_parser = groups::said, help_heading = "Constraints")]
    pub tensor: Groups,
    /// The same as `--tensor never`
    #[arg(long, conflicts_with = "tensor", help_heading = "Constraints")]
    pub no_tensor: bool,
    /// Whether a stage that does not fit otherwise may save its inputs only and run forward again before backward
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = ["auto", "never"], help_heading = "Costs and memory")]
    pub recompute: String,
    /// The same as `--recompute never`
    #[arg(long, conflicts_with = "recompute", help_heading = "Costs and memory")]
    pub no_recompute: bool,
    /// Optimizer, for its memory and the time of its step
    #[arg(long, value_enum, value_name = "NAME", default_value = "sgd", help_heading = "Costs and memory")]
    pub optimizer: Optimizer,
    /// sgd, rmsprop: the share of the last step that `train` will keep; any but 0 is a number more for each weight
    #[arg(long, value_name = "X", value_parser = optimizer::positive, help_heading = "Costs and memory")]
    pub momentum: Option<f64>,
    /// The type of all floats that is planned for [default: the model's own]
    #[arg(long, value_name = "f32|f64", value_parser = floats, help_heading = "Model")]
    pub dtype: Option<String>,
    /// States that a search may look at [default: as many as take seconds]
    #[arg(long, value_name = "STATES", help_heading = "Search")]
    pub budget: Option<u64>,
    /// When to end `--partitioner milp` by the clock, for example 60s; its plan may then differ from run to run
    #[arg(long, value_name = "TIME", value_parser = time_limit, help_heading = "Search")]
    pub time_limit: Option<Duration>,
    /// Minibatches in flight on each replica of a stage: auto, pipedream (the published rule), or one number a stage
    #[arg(long, value_name = "auto|pipedream|N,N,…", default_value = "auto", value_parser = in_flight, help_heading = "Schedule")]
    pub in_flight: InFlight,
    /// Replicas sum their gradients in parts of about so many bytes, each as soon as it is made; 1B is one parameter at a time, auto the power of two with which the plan's program is fastest
    #[arg(long, value_name = "SIZE|auto", default_value = USUAL_BUCKET, help_heading = "Schedule")]
    pub bucket: String,
    /// What replicas of a stage share of what they would hold alike (ZeRO): nothing (0), the optimizer's state (1), the sums of gradients too (2), the weights too (3), or the least with which the best plan fits (auto)
    #[arg(long, value_name = "LEVEL|auto", default_value = "0", value_parser = zero::read, help_heading = "Costs and memory")]
    pub zero: Zero,
    /// Seed of everything random
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Search")]
    pub seed: u64,
}

impl Default for Question {
    fn default() -> Question {
        Question {
            cost: "pipec".to_string(),
            activation_compression: None,
            memory: None,
            microbatches: 1,
            schedule: None,
            chunks: None,
            objective: "throughput".to_string(),
            target: None,
            partitioner: "pipec".to_string(),
            stages: None,
            cut_after: None,
            pin: Vec::new(),
            max_stages: None,
            no_replication: false,
            tensor: Groups::Never,
            no_tensor: false,
            recompute: "auto".to_string(),
            no_recompute: false,
            optimizer: Optimizer::Sgd,
            momentum: None,
            dtype: None,
            budget: None,
            time_limit: None,
            in_flight: InFlight::Auto,
            bucket: USUAL_BUCKET.to_string(),
            zero: Zero::Level(0),
            seed: 0,
        }
    }
}

impl Question {
    /// The type of all floats, if not the model's own.
    pub fn precision(&self) -> Option<DType> {
        self.dtype.as_deref().and_then(DType::parse)
    }

    /// The optimizer, by whichever words.
    pub fn optimizer(&self) -> Result<Optimizer, Failure> {
        self.optimizer.with_momentum(self.momentum)
    }
}

/// Plans, prints, writes.
pub fn run(arguments: Box<Arguments>, screen: &Screen) -> Result<(), Failure> {
    let started = Instant::now();
    match source::format(&arguments) {
        source::Format::DnnPartitioning => return device_placement::run(&arguments, screen),
        source::Format::Piper => return hybrid::run(&arguments, screen),
        source::Format::Onnx | source::Format::Pt2 | source::Format::Pipedream => {}
    }
    if arguments.noncontiguous {
        return Err(Failure::input("`--noncontiguous` goes with `--from dnn-partitioning`")
            .because("stages of a pipeline that trains are contiguous"));
    }
    let path = arguments.output.clone().unwrap_or_else(|| source::default_output(&arguments.file, "plan"));
    if !source::is_stdout(&path) {
        output::check(&path, &Mark::plan())?;
    }
    let (planned, refused, tried) = match batch::is_asked(&arguments) {
        true => batch::plan(&arguments, screen)?,
        false => {
            let (planned, refused) = plan(&arguments, screen)?;
            (planned, refused, Vec::new())
        }
    };
    let own = arguments.question.schedule.as_deref().filter(|schedule| own::is_file(schedule));
    screen.detail(&format!("planned in {}", quantity::time(started.elapsed().as_secs_f64() * 1e6)));
    let plan = &planned.plan;
    let json = read::to_json(plan).map_err(|error| Failure::bug(&error.to_string()))?;
    if source::is_stdout(&path) {
        screen.document(&json);
        return Ok(());
    }
    // Another run may have ended here since it was asked first.
    keep_others(&arguments, &plan.model)?;
    let wrote = if path.is_file() { "replaced" } else { "wrote" };
    source::write(&path, json.as_bytes())?;
    if let Some(verdict) = prediction::verdict(plan) {
        screen.prose(&verdict);
    }
    screen.text(&prediction::told(plan, screen));
    if arguments.compare {
        screen.text(&candidates::table(&planned, screen.width()));
    }
    if !tried.is_empty() {
        screen.text(&batch::table(&tried, plan.objective, screen.width()));
    }
    plan.warnings.iter().chain(&refused).for_each(|warning| screen.warn(warning));
    screen.json_file(&json);
    let next = match plan.cost {
        // What an instance knows of its devices is not what a simulation asks.
        CostModel::Load | CostModel::Hybrid => format!("next: pipec plan check {}\n", path.display()),
        _ => next(&arguments.file, &path, own, plan.schedule.kind, refused.is_some()),
    };
    screen.text(&format!("\n{wrote} {}", path.display()));
    screen.next(&next);
    Ok(())
}

/// Refuses to write over the plan of a model that is not this one.
pub fn keep_others(arguments: &Arguments, model: &PlannedModel) -> Result<(), Failure> {
    let marks = [("sha256", &*model.sha256), ("graph_hash", &*model.graph_hash)];
    output::keep_others(arguments.output.as_deref(), &arguments.file, &marks, "plan")
}

/// The plan that the arguments ask for, and why `pipec train` would refuse it.
fn plan(arguments: &Arguments, screen: &Screen) -> Result<(Planned, Option<String>), Failure> {
    arguments.question.check()?;
    own::open(arguments.question.schedule.as_deref(), screen)?;
    let costs = source::costs(arguments, screen)?;
    keep_others(arguments, &costs.model)?;
    let params = costs.graph.params.clone();
    let size = Size { ops: costs.graph.ops.len(), devices: costs.cluster.devices(), micro_batch: costs.micro_batch };
    let planned =
        ask(&arguments.file, costs, &arguments.question).map_err(|failure| tried(arguments, size, failure))?;
    let refused = ties::refused(&params, &planned.plan);
    ties::aged(&params, &planned.plan).iter().for_each(|told| screen.note(told));
    Ok((planned, refused))
}

/// The partitioners that obey flags which limit the stages.
const KNOWS_LIMITS: [&str; 2] = ["pipec", "milp"];

impl Question {
    /// Refuses a partitioner beside flags that leave it nothing to choose.
    pub fn check(&self) -> Result<(), Failure> {
        let pinned = [
            ("--stages", self.stages.is_some()),
            ("--cut-after", self.cut_after.is_some()),
            ("--in-flight", matches!(self.in_flight, InFlight::Given(_))),
            ("--pin", !self.pin.is_empty()),
            ("--max-stages", self.max_stages.is_some()),
            ("--no-replication", self.no_replication),
            ("--target", self.target.is_some()),
        ];
        match pinned.iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) if !KNOWS_LIMITS.contains(&self.partitioner.as_str()) => {
                Err(Failure::input(format!("`--partitioner {}` does not go with `{flag}`", self.partitioner))
                    .because(format!("`{flag}` limits the stages, and the partitioner would not know"))
                    .help(format!("leave out one of them, or write `--partitioner {}`", Partitioner::default().name())))
            }
            _ if self.time_limit.is_some() && self.partitioner != Partitioner::Milp.name() => {
                Err(Failure::input(format!("`--time-limit` does not go with `--partitioner {}`", self.partitioner))
                    .because("only `--partitioner milp` is ended by the clock, the others are bounded by their work")
                    .help("`--budget` bounds how much a search looks at, and gives the same plan every time"))
            }
            _ => self.agrees(),
        }
    }

    /// Refuses a schedule that the target or the objective cannot have.
    fn agrees(&self) -> Result<(), Failure> {
        let kind = self.kind(own::read(self.schedule.as_deref())?.as_ref());
        if let Some(target) = &self.target
            && (kind.is_continuous() || kind == ScheduleKind::Inference)
        {
            return Err(Failure::input(format!("`--target {target}` does not go with `--schedule {}`", kind.name()))
                .because("no framework carries weight versions")
                .help("`--schedule 1f1b` and `--schedule gpipe` flush; `--microbatches` says into how many pieces"));
        }
        let unequal = self.stages.as_ref().is_some_and(|stages| stages.iter().any(|replicas| *replicas != stages[0]));
        if let Some(target) = self.target.as_ref().filter(|_| unequal) {
            return Err(Failure::input(format!("`--target {target}` does not go with unequal `--stages`"))
                .because("no framework runs stages with different numbers of replicas")
                .help("`--stages 2,2,2`, or leave it out"));
        }
        if self.objective == "latency" && kind != ScheduleKind::Inference {
            return Err(Failure::input(format!("`--objective latency` does not go with `--schedule {}`", kind.name()))
                .because("it is about one item's way through a pipeline that only answers")
                .help("leave out `--schedule`, or write `--schedule inference`"));
        }
        self.zero.check(kind != ScheduleKind::Inference)
    }

    /// Whether nothing is trained, as far as can be told without a file of the user's order.
    pub fn infers(&self) -> bool {
        self.kind(None) == ScheduleKind::Inference
    }

    /// The order of work, said or usual.
    fn kind(&self, own: Option<&Own>) -> ScheduleKind {
        let usual = match (&self.target, self.objective.as_str()) {
            (_, "latency") => ScheduleKind::Inference,
            (Some(_), _) => ScheduleKind::OneFOneB,
            // Round robin takes whole minibatches.
            (None, _) if self.microbatches > 1 => ScheduleKind::OneFOneB,
            (None, _) => ScheduleKind::RoundRobin,
        };
        own::kind(self.schedule.as_deref(), own).unwrap_or(usual)
    }
}

/// The plan for these costs.
pub fn ask(file: &Path, costs: Costs, question: &Question) -> Result<Planned, Failure> {
    let shared = question.tensor.costs(&costs)?;
    ask_of_groups(file, costs, shared, question)
}

/// The same where it is known what the model costs on groups of devices.
pub fn ask_of_groups(
    file: &Path,
    costs: Costs,
    shared: Vec<SharedCosts>,
    question: &Question,
) -> Result<Planned, Failure> {
    let (has_memory, source) = (costs.has_memory, costs.source.clone());
    let mut problem = costs.problem(cost(&question.cost));
    problem.shared = shared;
    problem.constraints.tensor = matches!(question.tensor, Groups::Of(_));
    problem.activation_compression = question.activation_compression;
    problem.memory_limit = match &question.memory {
        Some(text) => Some(unit::bytes(text).map_err(|error| {
            Failure::input("cannot read `--memory`").because(error).help("`--memory 16GB`, for each device")
        })?),
        // Devices of several classes hold what their class holds.
        None if problem.cluster.is_mixed() => None,
        None => Some(problem.cluster.device.memory).filter(|memory| has_memory && memory.0 > 0),
    };
    problem.objective = match question.objective.as_str() {
        "memory" => Objective::Memory,
        "latency" => Objective::Latency,
        _ => Objective::Throughput,
    };
    let optimizer = question.optimizer()?;
    problem.optimizer_state = optimizer.state();
    problem.optimizer = optimizer.name().to_string();
    let own = own::read(question.schedule.as_deref())?;
    problem.schedule = question.kind(own.as_ref());
    if question.microbatches > 1 && problem.schedule == ScheduleKind::Inference {
        return Err(Failure::input(format!(
            "`--microbatches {}` does not go with a plan for inference",
            question.microbatches
        ))
        .because("what only answers has no minibatches")
        .help("`--micro-batch` says how many samples it answers at a time"));
    }
    if question.microbatches > 1 && problem.schedule.is_round_robin() {
        let (microbatches, kind) = (question.microbatches, problem.schedule.name());
        return Err(Failure::input(format!("`--microbatches {microbatches}` does not go with `--schedule {kind}`"))
            .because("it takes whole minibatches")
            .help("`--schedule 2bw` splits a minibatch without a flush, `--schedule 1f1b` with one"));
    }
    if matches!(question.in_flight, InFlight::Given(_)) && !problem.schedule.takes_caps() {
        return Err(Failure::input(format!("`--in-flight` does not go with `--schedule {}`", problem.schedule.name()))
            .because("it says itself how many micro-batches are in flight")
            .help("`--schedule 1f1b` flushes too and takes caps"));
    }
    // One is what nobody asked for.
    let asked = Some(question.microbatches).filter(|asked| *asked > 1);
    own.as_ref().map_or(Ok(()), |own| own.agrees(asked))?;
    problem.chunks = question.chunks.unwrap_or(if problem.schedule.has_chunks() { 2 } else { 1 });
    problem.recompute = question.recompute == "auto" && !question.no_recompute;
    problem.microbatches = own.as_ref().map_or(question.microbatches, Own::microbatches);
    problem.in_flight = match own.as_ref().and_then(Own::caps) {
        Some(caps) if question.in_flight == InFlight::Auto => InFlight::Given(caps),
        _ => question.in_flight.clone(),
    };
    let bucket = |error| Failure::input("cannot read `--bucket`").because(error);
    let finds_bucket = question.bucket == "auto";
    problem.bucket = if finds_bucket { Bytes(FIRST) } else { unit::bytes(&question.bucket).map_err(bucket)? };
    problem.zero = question.zero.level();
    problem.count_updates();
    problem.constraints.replicas = match (&question.stages, &own) {
        (None, Some(own)) => Some(own.replicas()?),
        (stages, _) => stages.clone(),
    };
    problem.constraints.cut_after = question.cut_after.clone();
    problem.constraints.pins = question.pin.clone();
    problem.constraints.most_stages = question.max_stages;
    problem.constraints.no_replication = question.no_replication;
    problem.constraints.target = question.target.as_deref().and_then(Target::from_name);
    let options = PlannerOptions {
        partitioner: Partitioner::from_name(&question.partitioner).unwrap_or_default(),
        budget: question.budget,
        time_limit: question.time_limit,
        seed: question.seed,
        efficiency: Some(&|stages: &[Stage], edges: &[Edge], caps: &[u32]| efficiency(&problem, stages, edges, caps)),
    };
    let ask = |problem: &Problem| question.zero.plan(problem, &options);
    let solve = |problem: &Problem| if finds_bucket { best(problem, &ask) } else { ask(problem) };
    // Who says which order of work gets it, also where it cannot be trained.
    let planned = solve(&problem).and_then(|planned| match question.schedule {
        None => ties::trained(&problem, planned, &solve),
        Some(_) => Ok(planned),
    });
    let mut planned = planned.map_err(|error| unplanned(file, error, problem.schedule))?;
    if let Some(own) = &own {
        let pipeline = pipeline(&planned.plan).map_err(|error| Failure::bug(&error.to_string()))?;
        own.program(&pipeline, 1)?;
    }
    if let Some(name) = source {
        planned.plan.options.insert(stages::COSTS.to_string(), name.into());
    }
    Ok(planned)
}

/// How stages run under caps, by playing them; a pipeline that cannot be played gains nothing by more caps.
fn efficiency(problem: &Problem, stages: &[Stage], edges: &[Edge], caps: &[u32]) -> Steady {
    let levels = &problem.cluster.levels;
    let played = |pipeline| match problem.schedule {
        ScheduleKind::RoundRobinVsync => steady_in_sync(&pipeline).ok(),
        _ => steady(&pipeline).ok(),
    };
    let unknown = || Steady { share: 1.0, held: vec![false; stages.len()], pieces: 0 };
    pipeline_of(levels, stages, edges, caps).ok().and_then(played).unwrap_or_else(unknown)
}

/// The name of a cost model on the command line.
pub fn cost_name(cost: CostModel) -> &'static str {
    match cost {
        CostModel::Paper => "paper",
        CostModel::Pipedream => "pipedream",
        CostModel::Pipec => "pipec",
        CostModel::Load => "load",
        CostModel::Hybrid => "hybrid",
    }
}

fn cost(name: &str) -> CostModel {
    match name {
        "pipedream" => CostModel::Pipedream,
        "paper" => CostModel::Paper,
        _ => CostModel::Pipec,
    }
}

/// What to type next. A plan of the user's own order of work is run with that order again: the plan does not hold it. What only
/// answers is not trained.
fn next(model: &Path, plan: &Path, own: Option<&str>, kind: ScheduleKind, is_refused: bool) -> String {
    let plan = plan.display();
    let schedule = match own {
        Some(file) => format!(" --schedule {file}"),
        None if is_refused => " --schedule 1f1b".to_string(),
        None => String::new(),
    };
    let mut text = format!("next: pipec simulate {plan}{}\n", if own.is_some() { &schedule } else { "" });
    let trains = kind != ScheduleKind::Inference;
    if trains && model.extension().is_some_and(|extension| extension == "onnx" || extension == "pt2") {
        text += &format!("      pipec train {} --plan {plan}{schedule} --data train.npz\n", model.display());
    }
    text
}

/// Reads one number of `--stages`.
pub fn replicas(text: &str) -> Result<u32, String> {
    let value = text.trim().parse().ok().filter(|replicas| *replicas >= 1);
    value.ok_or_else(|| "write the replicas of each stage with commas between, for example 2,1,1".to_string())
}

/// Reads one pin of `--pin`.
pub fn pin(text: &str) -> Result<(String, u32), String> {
    let pin =
        text.rsplit_once('=').and_then(|(name, stage)| Some((name.trim().to_string(), stage.trim().parse().ok()?)));
    pin.filter(|(name, _)| !name.is_empty())
        .ok_or_else(|| "write a node, a module or an op id and its stage, for example encoder=0".to_string())
}

/// Reads `--schedule`.
fn schedule(text: &str) -> Result<String, String> {
    if text == batch::AUTO { Ok(text.to_string()) } else { own::said(text) }
}

/// Reads `--dtype`.
pub fn floats(text: &str) -> Result<String, String> {
    match text {
        "f32" | "f64" => Ok(text.to_string()),
        "bf16" | "f16" => Err(format!(
            "a plan counts one size for all floats, and `{text}` has two: weights, sums of gradients and statistics stay in f32. Leave it out: \
             `pipec train --plan FILE --dtype {text}` reckons its memory anew and keeps to the plan's limit"
        )),
        _ => Err("write f32 or f64".to_string()),
    }
}

/// Reads `--time-limit`.
pub fn time_limit(text: &str) -> Result<Duration, String> {
    let seconds = unit::seconds(text).map_err(|error| error.to_string())?;
    Duration::try_from_secs_f64(seconds.0).map_err(|error| error.to_string())
}

/// Reads `--in-flight`.
pub fn in_flight(text: &str) -> Result<InFlight, String> {
    match text {
        "auto" => Ok(InFlight::Auto),
        "pipedream" => Ok(InFlight::Pipedream),
        _ => {
            let caps: Result<Vec<u32>, _> = text.split(',').map(|cap| cap.trim().parse()).collect();
            caps.map(InFlight::Given)
                .map_err(|_| "write auto, pipedream, or one number for each stage: 3,2,1".to_string())
        }
    }
}
