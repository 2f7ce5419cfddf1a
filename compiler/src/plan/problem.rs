//! The partitioning problem: cost graph, cluster, objective and limits.

use crate::cluster::read::{self, ClusterError};
use crate::cluster::{Bytes, BytesPerSecond, Cluster, class};
use crate::plan::schedule::Schedule;
use crate::plan::zero::{LEVELS, MOST, Zero};
use crate::plan::{PlannedModel, PlannedProfile, buckets};
use crate::profile::Method;
use crate::profile::cost_graph::{CostGraph, CostGraphError};
use crate::profile::precision::Precision;
use crate::profile::recompute_scope;
use crate::profile::shared::TensorParallelCosts;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Cost model: the time of a stage as a function of its ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CostModel {
    /// The formula of the PipeDream paper.
    Paper,
    /// The formula of PipeDream's released optimizer.
    Pipedream,
    /// Models links, replicas and the schedule.
    Pipec,
    // The crate `instances` defines, solves and checks the two costs below.
    /// Sum of compute, send and receive times of a device, without replicas; only for device-placement instances.
    Load,
    /// Compute, transfer and all-reduce times of tensor-parallel replicas; only for hybrid-parallel instances.
    Hybrid,
}

impl CostModel {
    pub fn name(self) -> &'static str {
        match self {
            CostModel::Paper => "paper",
            CostModel::Pipedream => "pipedream",
            CostModel::Pipec => "pipec",
            CostModel::Load => "load",
            CostModel::Hybrid => "hybrid",
        }
    }
}

/// Bandwidth used to express the costs of `load` as bytes in plans: 1 GB/s, so that one microsecond is 1000 bytes.
pub const NOMINAL: BytesPerSecond = BytesPerSecond(1e9);

/// Kind of the devices that plans of cost `load` charge for no transfer: the hosts of an instance.
pub const HOST: &str = "cpu";

/// The objective to minimise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// Time of one minibatch in steady state.
    #[default]
    Throughput,
    /// Peak memory per device.
    Memory,
    /// Latency of one micro-batch in an inference pipeline; needs schedule `inference` and cost `pipec`.
    Latency,
}

/// External framework that must be able to run the plan; its limits constrain the search.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    Torchtitan,
    Megatron,
    Deepspeed,
    Torch,
}

impl Target {
    pub const ALL: [Target; 4] = [Target::Torchtitan, Target::Megatron, Target::Deepspeed, Target::Torch];

    pub fn name(self) -> &'static str {
        match self {
            Target::Torchtitan => "torchtitan",
            Target::Megatron => "megatron",
            Target::Deepspeed => "deepspeed",
            Target::Torch => "torch",
        }
    }

    pub fn from_name(name: &str) -> Option<Target> {
        Target::ALL.into_iter().find(|target| target.name() == name)
    }

    /// True if it runs a schedule.
    pub fn runs(self, schedule: Schedule) -> bool {
        match self {
            Target::Megatron => matches!(schedule, Schedule::OneFOneB | Schedule::Interleaved),
            Target::Deepspeed => schedule == Schedule::OneFOneB,
            Target::Torchtitan | Target::Torch => schedule.flushes(),
        }
    }

    /// The highest ZeRO stage that it combines with pipelines.
    pub fn most_zero(self) -> u32 {
        match self {
            Target::Torchtitan => MOST,
            Target::Megatron | Target::Deepspeed => 1,
            Target::Torch => 0,
        }
    }

    /// True if groups of replicas may shard at this ZeRO stage: hybrid sharding of FSDP, instances of Megatron's
    /// distributed optimizer.
    pub fn has_shard_degree(self, level: u32) -> bool {
        match self {
            Target::Torchtitan => true,
            Target::Megatron => level == 1,
            Target::Deepspeed | Target::Torch => false,
        }
    }

    /// True if it has tensor-parallel groups.
    pub fn has_groups(self) -> bool {
        matches!(self, Target::Torchtitan | Target::Megatron)
    }

    /// True if it recomputes the layers of a stage one by one. The torch bundle recomputes a stage at once.
    pub fn recomputes_layers(self) -> bool {
        self != Target::Torch
    }

    /// True if stages must end at module boundaries. torch can cut between any two ops.
    pub fn keeps_modules(self) -> bool {
        self != Target::Torch
    }
}

/// Marks the ops that a target recomputes together. Ops are fused only after this.
pub fn set_recompute_scopes(graph: &mut CostGraph, target: Option<Target>) {
    match target {
        None => recompute_scope::recompute_parts(graph),
        Some(target) if target.recomputes_layers() => recompute_scope::recompute_layers(graph),
        Some(_) => {}
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum InFlight {
    /// Raised by the planner until the workers are busy.
    #[default]
    Auto,
    /// The published rule: workers from the stage to the end over its replicas, rounded up.
    Pipedream,
    Given(Vec<u32>),
}

impl InFlight {
    pub fn given(&self) -> Option<&[u32]> {
        if let InFlight::Given(caps) = self { Some(caps) } else { None }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Constraints {
    /// Replicas of each stage; cuts are free.
    pub replicas: Option<Vec<u32>>,
    /// A stage ends after each of these: source node names, module paths, or op ids as text.
    pub cut_after: Option<Vec<String>>,
    pub pins: Vec<(String, u32)>,
    pub most_stages: Option<u32>,
    pub no_replication: bool,
    /// True if the plan must be tensor parallel.
    pub tensor: bool,
    pub target: Option<Target>,
    /// True if all stages must have the same number of replicas, which every target requires.
    pub equal_replicas: bool,
}

impl Constraints {
    pub fn has_equal_replicas(&self) -> bool {
        self.equal_replicas || self.target.is_some()
    }

    /// True if a constraint requires cost `pipec`.
    pub fn require_pipec_cost(&self) -> bool {
        !self.pins.is_empty() || self.most_stages.is_some() || self.no_replication || self.has_equal_replicas()
    }
}

/// Which stages may recompute their activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recomputation {
    Never,
    /// Stages that do not fit otherwise, as few of their first ops as possible.
    #[default]
    Auto,
    /// All ops of every stage.
    Full,
}

impl Recomputation {
    pub const ALL: [Recomputation; 3] = [Recomputation::Never, Recomputation::Auto, Recomputation::Full];

    pub fn name(self) -> &'static str {
        match self {
            Recomputation::Never => "never",
            Recomputation::Auto => "auto",
            Recomputation::Full => "full",
        }
    }

    pub fn from_name(name: &str) -> Option<Recomputation> {
        Recomputation::ALL.into_iter().find(|one| one.name() == name)
    }

    /// Whether a stage is recomputed: the permitted answers, fastest first.
    pub fn choices(self) -> &'static [bool] {
        match self {
            Recomputation::Never => &[false],
            Recomputation::Auto => &[false, true],
            Recomputation::Full => &[true],
        }
    }

    pub fn is_full(self) -> bool {
        self == Recomputation::Full
    }
}

/// Input of a partitioner: costs, cluster, schedule and limits.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Costs per micro-batch.
    pub graph: CostGraph,
    /// Costs under tensor parallelism, by degree, ascending; empty if it is not considered.
    pub shared: Vec<TensorParallelCosts>,
    pub cluster: Cluster,
    pub cost: CostModel,
    pub objective: Objective,
    /// PipeDream's activation compression ratio. `None` makes transfers between stages free under cost `pipedream`.
    pub activation_compression: Option<f64>,
    /// Usable bytes per device; `None` means no limit.
    pub memory_limit: Option<Bytes>,
    /// Bytes of optimizer state per byte of weights: 0 for plain SGD, 1 with momentum, 2 for Adam.
    pub optimizer_state: f64,
    pub schedule: Schedule,
    pub micro_batch: u64,
    pub microbatches: u32,
    pub chunks: u32,
    pub in_flight: InFlight,
    /// In-flight micro-batches beyond the rule that must fit in every stage. The planner uses it to find plans whose
    /// caps can be raised.
    pub room: u32,
    /// Target size of a gradient bucket.
    pub bucket: Bytes,
    pub zero: Zero,
    pub recompute: Recomputation,
    pub constraints: Constraints,
    pub model: PlannedModel,
    pub profile: PlannedProfile,
    pub dtype: String,
    /// The precision, if it is not that of the model file.
    pub precision: Option<Precision>,
    pub optimizer: String,
}

impl Problem {
    /// Adds the optimizer step to the op costs. Call it once schedule, micro-batches and optimizer are known. The
    /// published cost models leave it out.
    pub fn count_updates(&mut self) {
        if self.cost == CostModel::Pipec && self.schedule.trains() {
            let items = if self.schedule.is_round_robin() { 1 } else { self.microbatches };
            for graph in std::iter::once(&mut self.graph).chain(self.shared.iter_mut().map(|costs| &mut costs.graph)) {
                graph.charge_updates(self.optimizer_state, items);
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProblemError {
    #[error(transparent)]
    Graph(#[from] CostGraphError),
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    #[error("{what} is {value}; it must be {range}")]
    Setting { what: &'static str, value: String, range: &'static str },
    #[error("`{flag} {name}`: no op, node or module of that name{hint}")]
    UnknownName {
        flag: &'static str,
        name: String,
        /// The nearest name, as "; did you mean …?", or empty.
        hint: String,
    },
    #[error("`--cut-after {name}`: {why}")]
    EmptyCut {
        name: String,
        /// For example "everything up to it is before an earlier cut".
        why: &'static str,
    },
    #[error("the stages need {wanted} devices, the cluster has {devices}")]
    TooManyReplicas { wanted: u64, devices: u32 },
    #[error("the stages need {wanted} tensor-parallel groups of {degree} devices, the cluster has {devices} devices")]
    TooManyGroups { wanted: u64, degree: u32, devices: u32 },
    #[error("{stages} stages are requested, the model has {ops} ops")]
    TooManyStages { stages: usize, ops: usize },
    #[error("{cuts} cuts give {stages} stages, but there are {replicas} replica counts")]
    Disagree { cuts: usize, stages: usize, replicas: usize },
    #[error("there are {caps} in-flight limits for {stages} stages")]
    Caps { caps: usize, stages: usize },
    #[error("`--pin` names stage {stage}, but there are at most {most} stages")]
    NoStage { stage: usize, most: usize },
    #[error("{what}")]
    Unmet { what: String },
    #[error("{what} requires cost `pipec`")]
    OtherCost { what: &'static str },
    #[error("{what} cannot be combined with a cluster of several device classes")]
    Mixed { what: &'static str },
    #[error("the speed of device class {class} (`{kind}`) is unknown: neither the cluster nor the costs give it")]
    NoSpeed { class: usize, kind: String },
    #[error("{method} supports at most {limit} {what}, the problem has {found}")]
    TooLarge { method: &'static str, what: &'static str, limit: u64, found: u64 },
}

impl Problem {
    /// A problem with default settings: throughput, 1F1B-RR, plain SGD, one micro-batch of one sample, no memory limit.
    pub fn new(graph: CostGraph, cluster: Cluster, cost: CostModel) -> Problem {
        let model = PlannedModel { ops: graph.ops.len() as u64, ..PlannedModel::default() };
        Problem {
            graph,
            shared: Vec::new(),
            cluster,
            cost,
            objective: Objective::Throughput,
            activation_compression: None,
            memory_limit: None,
            optimizer_state: 0.0,
            schedule: Schedule::OneFOneBRr,
            micro_batch: 1,
            microbatches: 1,
            chunks: 1,
            in_flight: InFlight::Pipedream,
            room: 0,
            bucket: Bytes(buckets::USUAL_BYTES),
            zero: Zero::default(),
            recompute: Recomputation::Auto,
            constraints: Constraints::default(),
            model,
            profile: PlannedProfile::new(String::new(), Method::Imported),
            dtype: "f32".to_string(),
            precision: None,
            optimizer: "sgd".to_string(),
        }
    }

    /// Plans for a framework, which decides where stages may end and how memory is counted.
    pub fn set_target(&mut self, target: Option<Target>) {
        self.constraints.target = target;
        set_recompute_scopes(&mut self.graph, target);
        // pipec's tensor-parallel groups recompute a stage at once.
        if target.is_some() {
            self.shared.iter_mut().for_each(|costs| set_recompute_scopes(&mut costs.graph, target));
        }
    }

    /// Recomputation, which only training under cost `pipec` has.
    pub fn recomputation(&self) -> Recomputation {
        let may = self.cost == CostModel::Pipec && self.schedule.trains();
        if may { self.recompute } else { Recomputation::Never }
    }

    /// True if gradients are all-reduced in their own buffer, as pipec, Megatron-LM, DeepSpeed, and the runtime of the
    /// torch bundle do. torchtitan's data parallelism copies them into buckets.
    pub fn reduces_in_place(&self) -> bool {
        self.constraints.target != Some(Target::Torchtitan)
    }

    /// Memory limit of the given devices; `None` means no limit.
    pub fn limit_of(&self, devices: Range<u32>) -> Option<u64> {
        let own = class::smallest(&self.cluster.classes, devices);
        own.into_iter().chain(self.memory_limit.map(|limit| limit.0)).min()
    }

    fn mixed(&self) -> Result<(), ProblemError> {
        if !self.cluster.is_mixed() {
            return Ok(());
        }
        if self.cost != CostModel::Pipec {
            return Err(ProblemError::OtherCost { what: "a cluster of several device classes" });
        }
        if self.objective == Objective::Memory {
            return Err(ProblemError::Mixed { what: "objective memory" });
        }
        if self.chunks > 1 {
            return Err(ProblemError::Mixed { what: "a schedule with several stages per device" });
        }
        let unknown = self.cluster.classes.iter().position(|class| class.speed.is_none());
        unknown.map_or(Ok(()), |class| {
            let kind = self.cluster.classes[class].device.kind.escape_debug().to_string();
            Err(ProblemError::NoSpeed { class, kind })
        })
    }

    /// Validates costs, cluster and settings; every search starts with it.
    pub fn check(&self) -> Result<(), ProblemError> {
        self.graph.check()?;
        self.shared.iter().try_for_each(|costs| costs.graph.check())?;
        read::check(self.cluster.clone())?;
        let setting = |fine: bool, what, value: String, range| {
            if fine { Ok(()) } else { Err(ProblemError::Setting { what, value, range }) }
        };
        let ratio = self.activation_compression.unwrap_or(1.0);
        let fine = ratio.is_finite() && ratio > 0.0;
        setting(fine, "activation compression", ratio.to_string(), "finite and above 0")?;
        let state = self.optimizer_state;
        let fine = (0.0..=64.0).contains(&state);
        setting(fine, "optimizer state per weight byte", state.to_string(), "from 0 to 64")?;
        setting(self.micro_batch >= 1, "micro-batch", self.micro_batch.to_string(), "at least 1")?;
        let fine = (1..=1 << 20).contains(&self.microbatches);
        setting(fine, "micro-batches", self.microbatches.to_string(), "from 1 to 2^20")?;
        setting((1..=1024).contains(&self.chunks), "chunks", self.chunks.to_string(), "from 1 to 1024")?;
        let fine = self.chunks == 1 || self.schedule.has_chunks();
        setting(
            fine,
            "chunks",
            self.chunks.to_string(),
            "1 for this schedule; interleaved, bfs, zbv and dualpipev have more",
        )?;
        let fine = self.chunks > 1 || !self.schedule.has_chunks();
        setting(fine, "chunks", self.chunks.to_string(), "at least 2 for this schedule")?;
        let fine = self.chunks == 2 || !self.schedule.is_on_a_v();
        setting(fine, "chunks", self.chunks.to_string(), "2 for this schedule")?;
        setting(self.zero.level <= MOST, "ZeRO stage", self.zero.level.to_string(), LEVELS)?;
        self.mixed()?;
        if self.cost != CostModel::Pipec {
            let settings = [
                ("`--chunks`", self.chunks > 1),
                ("objective latency", self.objective == Objective::Latency),
                ("`--pin`", !self.constraints.pins.is_empty()),
                ("`--max-stages`", self.constraints.most_stages.is_some()),
                ("`--no-replication`", self.constraints.no_replication),
                ("`--tensor`", self.constraints.tensor || !self.shared.is_empty()),
                ("`--target`", self.constraints.target.is_some()),
            ];
            if let Some((what, _)) = settings.into_iter().find(|(_, is_set)| *is_set) {
                return Err(ProblemError::OtherCost { what });
            }
        }
        let flows = self.objective != Objective::Latency || !self.schedule.trains();
        setting(flows, "schedule", self.schedule.name().to_string(), "inference for objective latency")?;
        let most = self.constraints.most_stages.unwrap_or(1);
        setting(most >= 1, "maximum number of stages", most.to_string(), "at least 1")?;
        if let InFlight::Given(caps) = &self.in_flight {
            let worst = caps.iter().copied().find(|cap| !(1..=1 << 20).contains(cap));
            setting(worst.is_none(), "in-flight cap", worst.unwrap_or(0).to_string(), "from 1 to 2^20")?;
        }
        if let Some(replicas) = &self.constraints.replicas {
            let empty = replicas.is_empty() || replicas.contains(&0);
            setting(!empty, "replicas of a stage", format!("{replicas:?}"), "at least 1, for at least one stage")?;
            let wanted = replicas.iter().map(|&r| u64::from(r)).sum::<u64>() / u64::from(self.chunks);
            if wanted > u64::from(self.cluster.devices()) {
                return Err(ProblemError::TooManyReplicas { wanted, devices: self.cluster.devices() });
            }
            if replicas.len() > self.graph.ops.len() {
                return Err(ProblemError::TooManyStages { stages: replicas.len(), ops: self.graph.ops.len() });
            }
        }
        Ok(())
    }
}
