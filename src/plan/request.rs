//! Plan requests: the model, its costs, the devices, and the constraints of the search.

use crate::cluster::ClusterRequest;
use crate::costs::PrecisionChoice;
use crate::costs::{CostInput, ModelFormat};
use crate::error::Error;
use crate::files::output;
use crate::loss::CountedLoss;
use crate::model::ImportRequest;
use crate::plan::custom_schedule::{self, CustomSchedule};
use crate::plan::optimizer::Optimizer;
use crate::plan::tensor_parallel::TensorParallel;
use crate::plan::zero::ZeroStage;
use compiler::cluster::Bytes;
use compiler::partition::partitioners::Partitioner;
use compiler::plan::PlannedModel;
use compiler::plan::buckets::USUAL_BYTES;
use compiler::plan::problem::{CostModel, InFlight, Objective, Recomputation, Target};
use compiler::plan::schedule::Schedule;
use compiler::plan::zero::Zero;
use std::path::{Path, PathBuf};
use std::time::Duration;

#[derive(Clone, Debug, Default)]
pub struct PlanRequest {
    /// The model, or a published profile.
    pub model: PathBuf,
    /// The format of the model file; from its name if absent.
    pub format: Option<ModelFormat>,
    /// The source of op costs.
    pub costs: CostInput,
    pub cluster: ClusterRequest,
    pub import: ImportRequest,
    /// Samples per micro-batch; the profile's, the model's or 32 if absent.
    pub micro_batch: Option<u64>,
    /// The loss included in the costs; the one that training would use if absent.
    pub loss: Option<CountedLoss>,
    /// Samples per minibatch; the number of micro-batches is then part of the search.
    pub batch: Option<u64>,
    /// The search and its constraints.
    pub options: PlanOptions,
    /// The output file of the plan, if it must not overwrite the plan of another model. This is checked before the search.
    pub protected_output: Option<PathBuf>,
}

impl PlanRequest {
    /// A request for a plan of this model over `count` equal devices, with default settings.
    pub fn new(model: impl AsRef<Path>, count: u32) -> PlanRequest {
        PlanRequest {
            model: model.as_ref().to_path_buf(),
            cluster: ClusterRequest { gpus: Some(count), ..ClusterRequest::default() },
            ..PlanRequest::default()
        }
    }

    /// Refuses to overwrite the plan of another model.
    pub fn protect_output(&self, model: &PlannedModel) -> Result<(), Error> {
        let marks = [("sha256", &*model.sha256), ("graph_hash", &*model.graph_hash)];
        match &self.protected_output {
            Some(path) => output::protect(path, &self.model, &marks, "plan"),
            None => Ok(()),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScheduleChoice {
    /// The best synchronous schedule.
    Auto,
    Named(Schedule),
    /// A file: a table `.csv`, or programs `.json`.
    File(PathBuf),
}

impl ScheduleChoice {
    /// The file of a custom schedule.
    pub fn file(&self) -> Option<&Path> {
        if let ScheduleChoice::File(path) = self { Some(path) } else { None }
    }

    pub fn named(&self) -> Option<Schedule> {
        if let ScheduleChoice::Named(kind) = self { Some(*kind) } else { None }
    }
}

/// The size of gradient buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BucketSize {
    /// The power of two with which the plan's program is fastest.
    Auto,
    /// Approximate size in bytes.
    Bytes(Bytes),
}

/// The default of [`PlanOptions::gap`].
pub const GAP: f64 = 0.005;

/// Search settings and constraints, apart from the model and the devices.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    pub cost: CostModel,
    /// PipeDream's activation compression ratio.
    pub activation_compression: Option<f64>,
    /// The memory limit of each device; the memory of the device if absent.
    pub memory_limit: Option<Bytes>,
    /// Micro-batches per minibatch.
    pub microbatches: u32,
    /// The schedule; 1F1B-RR if absent, 1F1B with micro-batches or a target, inference for latency.
    pub schedule: Option<ScheduleChoice>,
    /// Stages per rank, for interleaved schedules.
    pub chunks: Option<u32>,
    pub objective: Objective,
    /// The framework that will run the plan.
    pub target: Option<Target>,
    pub partitioner: Partitioner,
    /// Replicas of each stage.
    pub replicas: Option<Vec<u32>>,
    /// Names after which a stage ends.
    pub cut_after: Option<Vec<String>>,
    /// Nodes or modules and the stage that they are pinned to.
    pub pins: Vec<(String, u32)>,
    pub max_stages: Option<u32>,
    /// True if every stage has one replica.
    pub no_replication: bool,
    /// Tensor parallelism; degree 1 if absent, the best degree with a batch.
    pub tensor_parallel: Option<TensorParallel>,
    /// The stages that recompute their activations.
    pub recompute: Recomputation,
    /// The optimizer, for its state and step time.
    pub optimizer: Optimizer,
    /// The momentum that training will use.
    pub momentum: Option<f64>,
    pub precision: PrecisionChoice,
    /// The largest number of states that a search visits.
    pub budget: Option<u64>,
    /// A plan within this fraction of the lower bound ends the search over layouts.
    pub gap: f64,
    /// The time limit of the MILP partitioner.
    pub time_limit: Option<Duration>,
    /// In-flight micro-batches of each stage.
    pub in_flight: InFlight,
    /// The size of gradient buckets.
    pub bucket: BucketSize,
    /// The ZeRO stage; 0 if absent, the best stage with a batch.
    pub zero: Option<ZeroStage>,
    /// The seed of random choices.
    pub seed: u64,
}

impl Default for PlanOptions {
    fn default() -> PlanOptions {
        PlanOptions {
            cost: CostModel::Pipec,
            activation_compression: None,
            memory_limit: None,
            microbatches: 1,
            schedule: None,
            chunks: None,
            objective: Objective::Throughput,
            target: None,
            partitioner: Partitioner::default(),
            replicas: None,
            cut_after: None,
            pins: Vec::new(),
            max_stages: None,
            no_replication: false,
            tensor_parallel: None,
            recompute: Recomputation::Auto,
            optimizer: Optimizer::Sgd,
            momentum: None,
            precision: PrecisionChoice::Usual,
            budget: None,
            gap: GAP,
            time_limit: None,
            in_flight: InFlight::Auto,
            bucket: BucketSize::Bytes(Bytes(USUAL_BYTES)),
            zero: None,
            seed: 0,
        }
    }
}

/// The partitioners that support constraints on the stages.
const SUPPORT_CONSTRAINTS: [Partitioner; 2] = [Partitioner::Pipec, Partitioner::Milp];

impl PlanOptions {
    /// The optimizer with its momentum.
    pub fn optimizer(&self) -> Result<Optimizer, Error> {
        self.optimizer.with_momentum(self.momentum)
    }

    /// Tensor parallelism, if it is not part of a search.
    pub fn tensor_parallel(&self) -> TensorParallel {
        self.tensor_parallel.unwrap_or(TensorParallel::Never)
    }

    /// The ZeRO stage, if it is not part of a search.
    pub fn zero(&self) -> ZeroStage {
        self.zero.unwrap_or(ZeroStage::Given(Zero::default()))
    }

    /// The custom schedule, if the schedule is a file.
    pub fn custom_schedule(&self) -> Result<Option<CustomSchedule>, Error> {
        custom_schedule::read(self.schedule.as_ref().and_then(ScheduleChoice::file))
    }

    /// True if the plan is for inference, as far as known without reading a custom schedule.
    pub fn is_inference(&self) -> bool {
        self.schedule_kind(None) == Schedule::Inference
    }

    /// The kind of the schedule: the given one, else the default.
    pub fn schedule_kind(&self, custom: Option<&CustomSchedule>) -> Schedule {
        let default = match (&self.target, self.objective) {
            (_, Objective::Latency) => Schedule::Inference,
            (Some(_), _) => Schedule::OneFOneB,
            // Round-robin schedules need whole minibatches.
            (None, _) if self.microbatches > 1 => Schedule::OneFOneB,
            (None, _) => Schedule::OneFOneBRr,
        };
        let named = self.schedule.as_ref().and_then(ScheduleChoice::named);
        custom.map(CustomSchedule::kind).or(named).unwrap_or(default)
    }

    /// Refuses settings that contradict each other.
    pub fn validate(&self) -> Result<(), Error> {
        let constraints = [
            ("--stages", self.replicas.is_some()),
            ("--cut-after", self.cut_after.is_some()),
            ("--in-flight", matches!(self.in_flight, InFlight::Given(_))),
            ("--pin", !self.pins.is_empty()),
            ("--max-stages", self.max_stages.is_some()),
            ("--no-replication", self.no_replication),
            ("--target", self.target.is_some()),
        ];
        let name = self.partitioner.name();
        if let Some((flag, _)) = constraints.iter().find(|(_, is_given)| *is_given)
            && !SUPPORT_CONSTRAINTS.contains(&self.partitioner)
        {
            return Err(Error::conflict(format!("--partitioner {name}"), format!("`{flag}`"))
                .because("this partitioner does not support constraints")
                .with_help(format!("omit one of them, or use `--partitioner {}`", Partitioner::default().name())));
        }
        if self.time_limit.is_some() && self.partitioner != Partitioner::Milp {
            return Err(Error::conflict("--time-limit", format!("`--partitioner {name}`"))
                .because("only `--partitioner milp` has a wall-clock limit")
                .with_help("use `--budget`, which limits the states a search visits and is deterministic"));
        }
        self.validate_schedule()
    }

    /// Refuses a schedule that the target or the objective does not support.
    fn validate_schedule(&self) -> Result<(), Error> {
        let kind = self.schedule_kind(self.custom_schedule()?.as_ref());
        if let Some(target) = self.target.map(Target::name)
            && (kind.is_continuous() || kind == Schedule::Inference)
        {
            return Err(Error::conflict(format!("--target {target}"), format!("`--schedule {}`", kind.name()))
                .because("no framework supports weight versions")
                .with_help(
                    "use a synchronous schedule, `--schedule 1f1b` or `--schedule gpipe`, with `--microbatches`",
                ));
        }
        let unequal = self.replicas.as_ref().is_some_and(|stages| stages.iter().any(|replicas| *replicas != stages[0]));
        if let Some(target) = self.target.map(Target::name).filter(|_| unequal) {
            return Err(Error::conflict(format!("--target {target}"), "unequal `--stages`")
                .because("no framework supports stages with different numbers of replicas")
                .with_help("use equal numbers, for example `--stages 2,2,2`, or omit it"));
        }
        if self.objective == Objective::Latency && kind.trains() {
            return Err(Error::conflict("--objective latency", format!("`--schedule {}`", kind.name()))
                .because("it is the end-to-end latency of an inference pipeline")
                .with_help("omit `--schedule`, or use `--schedule inference`"));
        }
        self.zero().validate(kind.trains(), self.target)
    }
}
