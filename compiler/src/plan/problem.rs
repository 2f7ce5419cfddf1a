//! What a partitioner is asked: a model as costs, a cluster, and limits.

use crate::cluster::read::{self, ClusterError};
use crate::cluster::{Bytes, Cluster, class};
use crate::plan::zero::{LEVELS, MOST};
use crate::plan::{PlannedModel, PlannedProfile, ScheduleKind, buckets};
use crate::profile::Method;
use crate::profile::cost_graph::{CostGraph, CostGraphError};
use crate::profile::shared::SharedCosts;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How the time of a stage follows from its ops. `plan/stage_cost` gives the equations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CostModel {
    /// The formula of the PipeDream paper.
    Paper,
    /// What PipeDream's released optimizer computes.
    Pipedream,
    /// What the links, the replicas and the schedule make of it.
    Pipec,
    /// What a device computes, sends and receives, one after the other, without replicas: `profile/placement` defines it, and instances
    /// of that problem alone are planned so.
    Load,
    /// What replicas of tensor-parallel devices compute, send and average for layers with choices: `profile/hybrid` defines it, and
    /// instances of that problem alone are planned so.
    Hybrid,
}

/// What is minimised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// Time of one minibatch in steady state.
    #[default]
    Throughput,
    /// Bytes on the fullest device.
    Memory,
    /// One item's way through a pipeline that only answers; with schedule `inference` and cost `pipec`.
    Latency,
}

/// For which framework a plan is, beside our own runtime: what it can carry limits the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// torchtitan.
    Torchtitan,
    /// Megatron-LM.
    Megatron,
    /// DeepSpeed.
    Deepspeed,
    /// torch.distributed.pipelining.
    Torch,
}

impl Target {
    /// Every target.
    pub const ALL: [Target; 4] = [Target::Torchtitan, Target::Megatron, Target::Deepspeed, Target::Torch];

    /// The name on the command line and in plans.
    pub fn name(self) -> &'static str {
        match self {
            Target::Torchtitan => "torchtitan",
            Target::Megatron => "megatron",
            Target::Deepspeed => "deepspeed",
            Target::Torch => "torch",
        }
    }

    /// The target of that name.
    pub fn from_name(name: &str) -> Option<Target> {
        Target::ALL.into_iter().find(|target| target.name() == name)
    }

    /// Whether stages must end where modules end: torch cuts between any two ops.
    pub fn keeps_modules(self) -> bool {
        self != Target::Torch
    }
}

/// How many minibatches a stage may have in flight.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum InFlight {
    /// Raised by the planner until the workers are busy.
    #[default]
    Auto,
    /// The published rule: workers from the stage to the end over its replicas, rounded up.
    Pipedream,
    /// One number for each stage.
    Given(Vec<u32>),
}

/// What the user fixed in advance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Constraints {
    /// Replicas of each stage; the cuts are free.
    pub replicas: Option<Vec<u32>>,
    /// A stage ends after each of these: source node names, module paths, or op ids in text.
    pub cut_after: Option<Vec<String>>,
    /// Nodes, modules or op ids, and the stages that they stand in.
    pub pins: Vec<(String, u32)>,
    /// The most stages.
    pub most_stages: Option<u32>,
    /// Whether every stage has one replica.
    pub no_replication: bool,
    /// Whether the ops of every stage are shared by a group of devices.
    pub tensor: bool,
    /// For which framework.
    pub target: Option<Target>,
}

impl Constraints {
    /// Whether there is any that only cost `pipec` can obey.
    pub fn are_placed(&self) -> bool {
        !self.pins.is_empty() || self.most_stages.is_some() || self.no_replication || self.target.is_some()
    }
}

/// A question to a partitioner.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The model as costs.
    pub graph: CostGraph,
    /// The model as costs on groups of devices that share its ops, by the size of groups, ascending; none where no stage is to be shared.
    pub shared: Vec<SharedCosts>,
    /// The devices.
    pub cluster: Cluster,
    /// Cost model.
    pub cost: CostModel,
    /// What is minimised.
    pub objective: Objective,
    /// PipeDream's activation compression ratio; absent means that transfers between stages are free under cost `pipedream`.
    pub activation_compression: Option<f64>,
    /// Bytes that may be used on each device; absent means no limit.
    pub memory_limit: Option<Bytes>,
    /// Bytes of optimizer state for each byte of weights: 0 for plain SGD, 1 with momentum, 2 for Adam.
    pub optimizer_state: f64,
    /// Order of work.
    pub schedule: ScheduleKind,
    /// Samples in one micro-batch; the costs of `graph` are for that many.
    pub micro_batch: u64,
    /// Micro-batches in one minibatch.
    pub microbatches: u32,
    /// Chunks per worker, for schedules that have them.
    pub chunks: u32,
    /// Caps of minibatches in flight.
    pub in_flight: InFlight,
    /// So many more than the rule's must have room in every stage: how the planner asks for plans whose caps memory lets rise.
    pub room: u32,
    /// Gradients of a stage with replicas are all-reduced in parts of about so many bytes.
    pub bucket: Bytes,
    /// The level of ZeRO by which replicas of a stage share what they would hold alike.
    pub zero: u32,
    /// Whether a stage that does not fit otherwise may be recomputed; cost `pipec` only.
    pub recompute: bool,
    /// What the user fixed.
    pub constraints: Constraints,
    /// The model, for the plan.
    pub model: PlannedModel,
    /// The profile, for the plan.
    pub profile: PlannedProfile,
    /// Element type, for the plan.
    pub dtype: String,
    /// Optimizer name, for the plan.
    pub optimizer: String,
}

impl Problem {
    /// Counts the optimizer's steps, once schedule, micro-batches and optimizer are known. The formulas of the literature leave them out.
    pub fn count_updates(&mut self) {
        if self.cost == CostModel::Pipec && self.schedule != ScheduleKind::Inference {
            let items = if self.schedule.is_round_robin() { 1 } else { self.microbatches };
            for graph in std::iter::once(&mut self.graph).chain(self.shared.iter_mut().map(|costs| &mut costs.graph)) {
                graph.charge_updates(self.optimizer_state, items);
            }
        }
    }
}

/// A question that makes no sense.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProblemError {
    /// The costs are broken.
    #[error(transparent)]
    Graph(#[from] CostGraphError),
    /// The cluster is broken.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A setting out of range.
    #[error("{what} is {value}; it must be {range}")]
    Setting {
        /// Which setting.
        what: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        range: &'static str,
    },
    /// A cut at something the model does not have.
    #[error("`{flag} {name}`: no op, node or module of that name{hint}")]
    UnknownName {
        /// The option.
        flag: &'static str,
        /// The name given.
        name: String,
        /// The nearest name, as "; did you mean …?", or nothing.
        hint: String,
    },
    /// A cut after which nothing new stands in the stage, or nothing is left for the next.
    #[error("`--cut-after {name}`: {why}")]
    EmptyCut {
        /// The name given.
        name: String,
        /// "everything up to it is before an earlier cut" for example.
        why: &'static str,
    },
    /// Replicas that the cluster does not hold.
    #[error("the stages take {wanted} devices, the cluster has {devices}")]
    TooManyReplicas {
        /// Sum of the replicas.
        wanted: u64,
        /// Devices of the cluster.
        devices: u32,
    },
    /// More stages than there are places to cut.
    #[error("{stages} stages are wanted, the model has {ops} ops to cut between")]
    TooManyStages {
        /// Stages wanted.
        stages: usize,
        /// Ops of the model.
        ops: usize,
    },
    /// Two constraints that do not agree.
    #[error("{cuts} cuts make {stages} stages, {replicas} replica counts are given")]
    Disagree {
        /// Number of cuts.
        cuts: usize,
        /// Stages they make.
        stages: usize,
        /// Replica counts given.
        replicas: usize,
    },
    /// A plan that does not have as many stages as caps were given.
    #[error("{caps} in-flight caps are given, the plan has {stages} stages")]
    Caps {
        /// Caps given.
        caps: usize,
        /// Stages of the plan.
        stages: usize,
    },
    /// A pin to a stage that there cannot be.
    #[error("`--pin` names stage {stage}, there are at most {most} stages")]
    NoStage {
        /// The stage, counted from 0.
        stage: usize,
        /// Stages.
        most: usize,
    },
    /// Constraints that no partition obeys.
    #[error("{what}")]
    Unmet {
        /// Which, and why.
        what: String,
    },
    /// A setting that goes with cost `pipec` only.
    #[error("{what} goes with cost `pipec` only")]
    OtherCost {
        /// Which setting.
        what: &'static str,
    },
    /// A setting that speaks of devices that are all alike.
    #[error("{what} does not go with a cluster of several device classes")]
    Mixed {
        /// Which setting.
        what: &'static str,
    },
    /// A class whose devices are of no known speed.
    #[error("the speed of device class {class} (`{kind}`) is not known: neither the cluster nor the costs tell")]
    NoSpeed {
        /// Its place in the cluster.
        class: usize,
        /// Its kind.
        kind: String,
    },
    /// A search that is only for small problems.
    #[error("{method} takes at most {limit} {what}, the problem has {found}")]
    TooLarge {
        /// The partitioner.
        method: &'static str,
        /// What is counted.
        what: &'static str,
        /// The most it takes.
        limit: u64,
        /// What the problem has.
        found: u64,
    },
}

impl Problem {
    /// A question with the usual settings: throughput, 1F1B-RR, plain SGD, one micro-batch of one sample, no memory limit.
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
            schedule: ScheduleKind::RoundRobin,
            micro_batch: 1,
            microbatches: 1,
            chunks: 1,
            in_flight: InFlight::Pipedream,
            room: 0,
            bucket: Bytes(buckets::USUAL_BYTES),
            zero: 0,
            recompute: true,
            constraints: Constraints::default(),
            model,
            profile: PlannedProfile { sha256: String::new(), method: Method::Imported },
            dtype: "f32".to_string(),
            optimizer: "sgd".to_string(),
        }
    }

    /// The bytes that may be used on each of some devices; absent means no limit.
    pub fn limit_of(&self, devices: Range<u32>) -> Option<u64> {
        let own = class::smallest(&self.cluster.classes, devices);
        own.into_iter().chain(self.memory_limit.map(|limit| limit.0)).min()
    }

    /// What must hold where devices differ.
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
            return Err(ProblemError::Mixed { what: "a schedule with several stages on each device" });
        }
        let unknown = self.cluster.classes.iter().position(|class| class.speed.is_none());
        unknown.map_or(Ok(()), |class| {
            let kind = self.cluster.classes[class].device.kind.escape_debug().to_string();
            Err(ProblemError::NoSpeed { class, kind })
        })
    }

    /// What must hold before a partitioner starts.
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
        setting(self.zero <= MOST, "level of ZeRO", self.zero.to_string(), LEVELS)?;
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
        let flows = self.objective != Objective::Latency || self.schedule == ScheduleKind::Inference;
        setting(flows, "schedule", self.schedule.name().to_string(), "inference for objective latency")?;
        let most = self.constraints.most_stages.unwrap_or(1);
        setting(most >= 1, "most stages", most.to_string(), "at least 1")?;
        if let InFlight::Given(caps) = &self.in_flight {
            let worst = caps.iter().copied().find(|cap| !(1..=1 << 20).contains(cap));
            setting(worst.is_none(), "in-flight cap", worst.unwrap_or(0).to_string(), "from 1 to 2^20")?;
        }
        if let Some(replicas) = &self.constraints.replicas {
            let empty = replicas.is_empty() || replicas.contains(&0);
            setting(!empty, "replicas of a stage", format!("{replicas:?}"), "at least 1, for at least one stage")?;
            // Chunks of one rank stand on the same devices.
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
