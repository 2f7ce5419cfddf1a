//! The plan: stages, replicas, device placement and predicted cost. [`Plan`] is the file `plan.json`.
//!
//! Training needs only the plan and the model. Times are microseconds per minibatch, sizes bytes per device, unless a
//! field states otherwise.

pub mod buckets;
pub mod check;
pub mod chunks;
pub mod coarsen;
pub mod cost_estimate;
pub mod cut_bytes;
pub mod device_memory;
pub mod diff;
pub mod gradient_buffers;
pub mod groups;
pub mod in_flight;
pub mod links;
pub mod memory;
pub mod ports;
pub mod problem;
pub mod read;
pub mod stage_cost;
pub mod zero;

use crate::cluster::{Bytes, Device, DeviceClass, Level};
use crate::profile::Method;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Value of the `schema` field.
pub const SCHEMA: &str = "pipec.plan/1";

/// Index of a stage, in topological order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct StageId(pub u32);

impl StageId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The model a plan is for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedModel {
    /// File name without its folder.
    pub file: String,
    /// SHA-256 of the file without its tensor payloads, in hex.
    pub sha256: String,
    /// Number of ops.
    pub ops: u64,
    /// Hash of the imported graph in canonical order, before any pass.
    pub graph_hash: String,
    /// What the import was told.
    pub import: ImportSettings,
}

/// What an import was told: everything that changes the graph it makes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportSettings {
    /// Symbolic dimensions and the values they were given.
    pub dims: BTreeMap<String, u64>,
    /// Whether what was exported for inference was turned back into training mode.
    pub train_mode: bool,
    /// The axes of inputs that were said to be the batch.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub batch_dims: BTreeMap<String, u64>,
    /// The loss that was put on the output, if one was: `cross-entropy`, or `cross-entropy over 1` with an axis of classes.
    pub loss: Option<String>,
}

/// The profile a plan was made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedProfile {
    /// SHA-256 of the profile file, in hex; empty where there was no file.
    pub sha256: String,
    /// How its figures were come by.
    pub method: Method,
}

/// The cluster a plan was made for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedCluster {
    /// Levels, innermost first. Bandwidths are bytes per second, latencies seconds.
    pub levels: Vec<Level>,
    /// All devices.
    pub devices: u32,
    /// Bytes that may be used on each device, or null where no limit was set.
    pub memory_per_device: Option<Bytes>,
    /// The kind of device, or the first of several.
    pub device: Device,
    /// The classes of devices in device order where there are several; empty where all devices are alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<DeviceClass>,
    /// Devices on which no stage stands; absent where there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub idle: Vec<u32>,
}

/// The order in which a stage works through minibatches and micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ScheduleKind {
    /// All forwards, then all backwards.
    #[serde(rename = "gpipe")]
    Gpipe,
    /// One forward, one backward, with a flush at the end of a minibatch.
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// 1F1B over several chunks per worker.
    #[serde(rename = "interleaved")]
    Interleaved,
    /// Looped breadth first.
    #[serde(rename = "bfs")]
    Bfs,
    /// Zero bubble, first form.
    #[serde(rename = "zb-h1")]
    ZbH1,
    /// Zero bubble, second form.
    #[serde(rename = "zb-h2")]
    ZbH2,
    /// Zero bubble on a V of two chunks.
    #[serde(rename = "zbv")]
    Zbv,
    /// Two directions on a V of two chunks.
    #[serde(rename = "dualpipev")]
    DualPipeV,
    /// Two weight versions, a new one for every minibatch of micro-batches.
    #[serde(rename = "2bw")]
    TwoBw,
    /// 1F1B with round robin replicas and weight stashing.
    #[serde(rename = "1f1b-rr")]
    RoundRobin,
    /// The same with one weight version for a minibatch in all stages.
    #[serde(rename = "1f1b-rr-vsync")]
    RoundRobinVsync,
    /// Forward only.
    #[serde(rename = "inference")]
    Inference,
    /// An order from a file of the user.
    #[serde(rename = "csv")]
    Csv,
}

/// How work is ordered, and what each stage may hold while it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedSchedule {
    /// The kind of schedule.
    pub kind: ScheduleKind,
    /// Samples in one micro-batch.
    pub micro_batch: u64,
    /// Micro-batches in one minibatch.
    pub microbatches: u32,
    /// Chunks per worker.
    pub chunks: u32,
    /// For each stage: micro-batches that one replica may have in flight.
    pub in_flight: Vec<u32>,
    /// For each stage: weight versions that one replica holds.
    pub weight_versions: Vec<u32>,
    /// For each stage: micro-batches that one replica may have between the halves of their backward; empty where it is whole.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub apart: Vec<u32>,
}

/// What each device of a stage's replicas holds, in bytes. `total` is the sum of the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StageMemory {
    /// One copy of the weights, or the replica's share of one; a tied parameter counts once in each stage that uses it.
    pub weights: u64,
    /// The stashed versions beyond that copy.
    pub versions: u64,
    /// Gradients of the weights: those that are summed up, and those of the run at hand; where these leave as they are made, those of one op, in
    /// whose place weights may lie that are gathered.
    pub gradients: u64,
    /// State of the optimizer, and the `f32` copies that it moves of parameters of two bytes a number.
    pub optimizer: u64,
    /// Saved tensors, inputs from other stages and what is sent to them, for every micro-batch in flight; where the stage is
    /// recomputed, the saved ones for one, and what is sent for one more.
    pub activations: u64,
    /// Where backwards are split, for every micro-batch between the halves: what the second reads of the first, and the gradients that
    /// came for it, those of one aside.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub between: u64,
    /// Gradients of one micro-batch that come from other stages or go to them, and those on their way of the one before.
    #[serde(default)]
    pub messages: u64,
    /// The arena: what is alive within one run at its fullest, scratch included.
    pub workspace: u64,
    /// All of them.
    pub total: u64,
}

fn is_nothing(bytes: &u64) -> bool {
    *bytes == 0
}

fn is_none_of(number: &u32) -> bool {
    *number == 0
}

/// One level of a stage's place in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LevelPlacement {
    /// Which group of this level the stage belongs to, counted from 0 inside the group of the next level out.
    pub group: u32,
    /// How often that group is replicated over this level's members.
    pub replicas: u32,
}

/// One stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Place in topological order.
    pub id: StageId,
    /// Half-open ranges of op ids, ascending, as long as possible.
    pub ops: Vec<(u32, u32)>,
    /// Names of the source nodes, or op ids in text where a node has no name.
    pub op_names: Vec<String>,
    /// Module paths in order of first use, each once.
    pub modules: Vec<String>,
    /// Number of replicas.
    pub replicas: u32,
    /// Devices that share every op of one replica; 1 where it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_degree: Option<u32>,
    /// What that does to the stage, where devices share its ops.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<TensorParallelCost>,
    /// For each op the name of the choice that was taken, where ops have some.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<String>,
    /// Device of each replica; where several share one, those of one replica after those of the other.
    pub devices: Vec<u32>,
    /// Whether forward runs again before backward instead of saving its tensors.
    pub recompute: bool,
    /// Forward time of one minibatch on one replica, in microseconds; where devices differ, on the slowest.
    pub fwd_us: f64,
    /// Backward time of one minibatch on one replica, in microseconds, and of the optimizer's step for it where that is known; where the
    /// stage is recomputed, its forward runs once more in it.
    pub bwd_us: f64,
    /// The part of `bwd_us` that makes gradients of weights, which a split backward may run later. Where it is absent, half of the
    /// backward counts as that part, what runs forward again aside.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_us: Option<f64>,
    /// Parts in which replicas sum their gradients, in the order in which a backward makes them; none for all at once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<GradientBucket>,
    /// The level of ZeRO by which replicas share what they would hold alike: 1 the optimizer's state, 2 the sums of gradients too, 3 the weights too; absent for none.
    #[serde(default, skip_serializing_if = "is_none_of")]
    pub zero: u32,
    /// Bytes of the stage's parameters, where each replica holds a share of them; absent where it holds all.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub parameter_bytes: u64,
    /// What each device of a replica holds.
    pub memory: StageMemory,
    /// The stage's place in the levels of the cluster, innermost first. One entry on a cluster of several levels means that the
    /// plan does not take whole groups and is judged on [`crate::cluster::Cluster::flattened`]; under cost `pipec`, by `devices`.
    pub hierarchy: Vec<LevelPlacement>,
}

/// What a stage of one replica gains and pays by having its ops shared, in microseconds for one item.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TensorParallelCost {
    /// Forward time if one device did everything.
    pub alone_fwd_us: f64,
    /// Backward time if one device did everything and forward did not run again.
    pub alone_bwd_us: f64,
    /// The part of the forward time in which devices bring together what each has of a tensor.
    pub meeting_fwd_us: f64,
    /// The same of the backward time, what runs forward again aside.
    pub meeting_bwd_us: f64,
}

/// One part of the gradients of a stage with replicas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GradientBucket {
    /// Names of its parameters, in the order in which a backward makes their gradients.
    pub parameters: Vec<String>,
    /// Bytes of all of them.
    pub bytes: u64,
    /// The share of a backward, what runs forward again aside, after which all of them are made.
    pub ready: f64,
}

/// Tensors that go from one stage straight to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Edge {
    /// The stage that makes them.
    pub from: StageId,
    /// The stage that reads them.
    pub to: StageId,
    /// Their names.
    pub tensors: Vec<String>,
    /// Bytes of all of them for one micro-batch, in one direction.
    pub bytes: u64,
}

/// What the plan is predicted to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Predicted {
    /// Time of one minibatch, in microseconds. Under cost `pipec` that is a whole minibatch, with filling and draining where the
    /// schedule flushes, and it is what the plan's own program takes when it is played; one item under schedule `inference`. Under
    /// the other cost models it is what the slowest stage or link takes for one micro-batch in steady state.
    pub minibatch_us: f64,
    /// What the cost model's equations give in the place of `minibatch_us`: the figure that the search made least. Absent where both
    /// are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objective_us: Option<f64>,
    /// Time from one weight update to the next, in microseconds: all micro-batches of a minibatch. Under 1F1B-RR a minibatch is one
    /// item, and a stage of r replicas updates every r minibatches; the figure is that of one.
    pub step_us: f64,
    /// Samples per second.
    pub throughput_per_s: f64,
    /// Fraction of a worker's time that the schedule leaves idle between steps.
    pub bubble: f64,
    /// What sets `minibatch_us`.
    pub bottleneck: String,
    /// The link of a group of devices that has most to do; absent on clusters of one level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busiest_link: Option<BusiestLink>,
}

/// What goes over the link of one group of devices, a server for example, for each minibatch: activations, gradients and the rings
/// of all-reduces.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BusiestLink {
    /// The level that the link belongs to.
    pub level: String,
    /// Which group of devices below that level, counted over the whole cluster.
    pub unit: u32,
    /// Which way: `out` or `in`.
    pub direction: String,
    /// Bytes of one minibatch, or of one micro-batch where it has several.
    pub bytes: u64,
    /// The share of the predicted time that the link needs for them.
    pub share: f64,
}

/// Times of the plain alternatives, in microseconds for one minibatch, under the same cost model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Baselines {
    /// Everything on one device.
    pub single: f64,
    /// The whole model replicated on every device.
    pub data_parallel: f64,
    /// A straight pipeline of stages of equal compute.
    pub uniform: f64,
    /// Which of them fit in memory.
    pub fits: Fits,
}

/// Which baselines fit in the memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fits {
    /// Everything on one device.
    pub single: bool,
    /// The whole model on every device.
    pub data_parallel: bool,
    /// The straight pipeline.
    pub uniform: bool,
}

impl Predicted {
    /// The objective value from the cost model's equations, which the plan checker recomputes.
    pub fn by_equations_us(&self) -> f64 {
        self.objective_us.unwrap_or(self.minibatch_us)
    }
}

/// How the plan was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Search {
    /// Name of the partitioner.
    pub method: String,
    /// States it looked at.
    pub states: u64,
    /// What it fell back to, null where the search was complete.
    pub fallback: Option<String>,
}

/// A plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Plan {
    /// Always [`SCHEMA`].
    #[schemars(extend("const" = SCHEMA))]
    pub schema: String,
    /// What is planned.
    pub model: PlannedModel,
    /// Element type of weights and activations.
    pub dtype: String,
    /// Optimizer, as the command line names it.
    pub optimizer: String,
    /// Where the costs came from.
    pub profile: PlannedProfile,
    /// For which cluster.
    pub cluster: PlannedCluster,
    /// Cost model.
    pub cost: problem::CostModel,
    /// What was minimised.
    pub objective: problem::Objective,
    /// Order of work.
    pub schedule: PlannedSchedule,
    /// Stages in topological order.
    pub stages: Vec<Stage>,
    /// Traffic between stages.
    pub edges: Vec<Edge>,
    /// Predicted times.
    pub predicted: Predicted,
    /// No plan for this problem under this cost model takes less for a minibatch, in microseconds.
    pub lower_bound_us: f64,
    /// Whether the figure of the cost model's equations is proven the least of all plans, and `minibatch_us` is that figure to 2 %.
    pub proven_optimal: bool,
    /// The plain alternatives.
    pub baselines: Baselines,
    /// How the plan was found.
    pub search: Search,
    /// What the reader should know.
    pub warnings: Vec<String>,
    /// Seed of everything random.
    pub seed: u64,
    /// Options that change the result, normalised.
    pub options: BTreeMap<String, Value>,
    /// Fields of other tools; each name starts with `x-`.
    #[serde(flatten)]
    pub extra: BTreeMap<String, Value>,
}

impl Stage {
    /// Tensor-parallel degree.
    pub fn degree(&self) -> u32 {
        self.tensor_degree.unwrap_or(1).max(1)
    }

    /// Bytes of all parameters of the stage; under ZeRO 3 a replica holds only its shard of them.
    pub fn all_weights(&self) -> u64 {
        if self.zero >= 3 { self.parameter_bytes } else { self.memory.weights }
    }

    /// All op ids of the stage, ascending.
    pub fn op_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.ops.iter().flat_map(|&(from, to)| from..to)
    }
}

impl ScheduleKind {
    pub const ALL: [ScheduleKind; 13] = [
        ScheduleKind::Gpipe,
        ScheduleKind::OneFOneB,
        ScheduleKind::Interleaved,
        ScheduleKind::Bfs,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbH2,
        ScheduleKind::Zbv,
        ScheduleKind::DualPipeV,
        ScheduleKind::TwoBw,
        ScheduleKind::RoundRobin,
        ScheduleKind::RoundRobinVsync,
        ScheduleKind::Inference,
        ScheduleKind::Csv,
    ];

    /// Name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            ScheduleKind::Gpipe => "gpipe",
            ScheduleKind::OneFOneB => "1f1b",
            ScheduleKind::Interleaved => "interleaved",
            ScheduleKind::Bfs => "bfs",
            ScheduleKind::ZbH1 => "zb-h1",
            ScheduleKind::ZbH2 => "zb-h2",
            ScheduleKind::Zbv => "zbv",
            ScheduleKind::DualPipeV => "dualpipev",
            ScheduleKind::TwoBw => "2bw",
            ScheduleKind::RoundRobin => "1f1b-rr",
            ScheduleKind::RoundRobinVsync => "1f1b-rr-vsync",
            ScheduleKind::Inference => "inference",
            ScheduleKind::Csv => "csv",
        }
    }

    /// True if the stages go down the ranks and back up in a V, two per rank.
    pub fn is_on_a_v(self) -> bool {
        matches!(self, ScheduleKind::Zbv | ScheduleKind::DualPipeV)
    }

    /// True if in-flight caps are configurable. In the other schedules they follow from the number of micro-batches and
    /// stages.
    pub fn takes_caps(self) -> bool {
        let flows = matches!(self, ScheduleKind::RoundRobin | ScheduleKind::RoundRobinVsync | ScheduleKind::TwoBw);
        flows || matches!(self, ScheduleKind::OneFOneB | ScheduleKind::Inference | ScheduleKind::Csv)
    }

    /// True if the backward is split into input-gradient and weight-gradient passes.
    pub fn splits_backward(self) -> bool {
        self.is_on_a_v() || matches!(self, ScheduleKind::ZbH1 | ScheduleKind::ZbH2)
    }

    /// True if a rank holds several stages.
    pub fn has_chunks(self) -> bool {
        self.is_on_a_v() || matches!(self, ScheduleKind::Interleaved | ScheduleKind::Bfs)
    }

    /// True if replicas process whole minibatches in round-robin order.
    pub fn is_round_robin(self) -> bool {
        matches!(self, ScheduleKind::RoundRobin | ScheduleKind::RoundRobinVsync)
    }

    pub fn from_name(name: &str) -> Option<ScheduleKind> {
        ScheduleKind::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// True if minibatches overlap: there is no flush between weight updates.
    pub fn is_continuous(self) -> bool {
        matches!(
            self,
            ScheduleKind::RoundRobin | ScheduleKind::RoundRobinVsync | ScheduleKind::TwoBw | ScheduleKind::Inference
        )
    }
}
