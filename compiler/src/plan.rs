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
pub mod digest;
pub mod expected_time;
pub mod fullest_moment;
pub mod gradient_buffers;
pub mod groups;
pub mod in_flight;
pub mod links;
pub mod memory;
pub mod ports;
pub mod problem;
pub mod read;
pub mod schedule;
pub mod stage_cost;
pub mod tied;
pub mod zero;

use crate::cluster::{Bytes, Device, DeviceClass, Level};
use crate::plan::schedule::Schedule;
use crate::profile::precision::{ElementTypes, Precision};
use crate::profile::shared::ActivationSharding;
use crate::profile::{Method, Profile, Whole};
use crate::profile::{is_one, one};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Value of the `schema` field.
pub const SCHEMA: &str = "pipec.plan/1";

/// Index of a stage, in topological order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
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
    /// Settings of the import.
    pub import: ImportSettings,
}

/// Import settings: everything that changes the imported graph.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ImportSettings {
    /// Values given for symbolic dimensions.
    pub dims: BTreeMap<String, u64>,
    /// True if inference-mode ops were restored to training mode.
    pub train_mode: bool,
    /// Batch axes given for inputs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub batch_dims: BTreeMap<String, u64>,
    /// Parameters that are not trained: names, or prefixes that end with `*`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub freeze: Vec<String>,
    /// The loss added to the output, if any: `cross-entropy`, or `cross-entropy over 1` with an axis of classes.
    pub loss: Option<String>,
}

/// The profile a plan was made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedProfile {
    /// SHA-256 of the profile file, in hex; empty without a file.
    pub sha256: String,
    /// Source of its times.
    pub method: Method,
    /// Workers that ran at the same time when it was measured; absent if 1.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub workers: u32,
    /// Prediction interval of the time of a step, relative to `predicted.step_us`: the 5th to 95th percentile of the
    /// measured runs of the whole model, and 20 % either way for other errors. Absent if they were not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<[f64; 2]>,
}

impl PlannedProfile {
    /// A profile without measurements of the whole model.
    pub fn new(sha256: String, method: Method) -> PlannedProfile {
        PlannedProfile { sha256, method, workers: 1, interval: None }
    }

    /// A profile from a file with this SHA-256.
    pub fn of(profile: &Profile, sha256: String) -> PlannedProfile {
        let interval = profile.whole.as_ref().and_then(Whole::interval);
        PlannedProfile { sha256, method: profile.method, workers: profile.settings.workers, interval }
    }
}

/// The cluster a plan was made for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedCluster {
    /// Levels, innermost first. Bandwidths are bytes per second, latencies seconds.
    pub levels: Vec<Level>,
    /// Number of devices.
    pub devices: u32,
    /// Memory limit per device in bytes, or null.
    pub memory_per_device: Option<Bytes>,
    /// The device type, or the first of several.
    pub device: Device,
    /// Device classes in device order; empty if all devices are alike.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<DeviceClass>,
    /// Devices without a stage; absent if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub idle: Vec<u32>,
}

/// The schedule, batch sizes and per-stage limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedSchedule {
    /// The schedule.
    pub kind: Schedule,
    /// Samples in one micro-batch.
    pub micro_batch: u64,
    /// Micro-batches in one minibatch.
    pub microbatches: u32,
    /// Chunks per worker.
    pub chunks: u32,
    /// In-flight cap of each stage, in micro-batches per replica.
    pub in_flight: Vec<u32>,
    /// Weight versions per replica of each stage.
    pub weight_versions: Vec<u32>,
    /// Pending weight-gradient passes per replica of each stage; empty if the backward is not split.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending_weight_grads: Vec<u32>,
}

/// Memory per device of a stage, in bytes. `total` is the sum of the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StageMemory {
    /// One copy of the weights, or the replica's shard; a tied weight counts once in each stage that uses it.
    pub weights: u64,
    /// Weights that are not trained: frozen parameters, buffers and constants. They have one version and are not sharded.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub frozen: u64,
    /// Stashed weight versions beyond that copy.
    pub versions: u64,
    /// Weight gradients: accumulated ones and those of the current micro-batch. If gradients are reduce-scattered
    /// during the backward, those of one op only, which may share memory with gathered weights.
    pub gradients: u64,
    /// Optimizer state, including `f32` master copies of 16-bit parameters.
    pub optimizer: u64,
    /// Saved activations, stage inputs and outputs of every micro-batch in flight. Saved activations of recomputed ops
    /// count for one micro-batch.
    pub activations: u64,
    /// For split backwards: tensors kept for each pending weight-gradient pass, and received gradients beyond those of
    /// one micro-batch.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub split_backward: u64,
    /// Gradients of one micro-batch from and to other stages, and those of the previous one still in transfer.
    #[serde(default)]
    pub messages: u64,
    /// The arena: peak of temporary tensors in one pass, including scratch.
    pub workspace: u64,
    /// Sum of all.
    pub total: u64,
    /// True if `activations` counts recomputed ops part by part: the inputs of every part are kept, and one part at a time is
    /// recomputed within the backward. Else all are recomputed at once before it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub by_part: bool,
}

fn is_false(flag: &bool) -> bool {
    !*flag
}

fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

fn is_nothing(bytes: &u64) -> bool {
    *bytes == 0
}

fn is_none_of(number: &u32) -> bool {
    *number == 0
}

/// One level of a stage's position in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LevelPlacement {
    /// Group of this level that the stage belongs to, counted from 0 within the enclosing group.
    pub group: u32,
    /// Number of replicas of that group over this level's members.
    pub replicas: u32,
}

/// One stage.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// Index in topological order.
    pub id: StageId,
    /// Half-open ranges of op ids, ascending, of maximum length.
    pub ops: Vec<(u32, u32)>,
    /// Names of the source nodes, or op ids as text for nodes without a name.
    pub op_names: Vec<String>,
    /// Module paths in order of first use, without duplicates.
    pub modules: Vec<String>,
    /// Number of replicas.
    pub replicas: u32,
    /// Tensor-parallel degree; 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_degree: Option<u32>,
    /// Times without tensor parallelism and of its collectives, if the degree exceeds 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor_parallel: Option<TensorParallelCost>,
    /// Name of the selected choice of each op, if ops have choices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<String>,
    /// Devices, replica by replica.
    pub devices: Vec<u32>,
    /// True if activations are recomputed before the backward instead of saved.
    pub recompute: bool,
    /// The ops that are recomputed; absent if all are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recomputed: Option<RecomputedOps>,
    /// Forward time of one micro-batch on one replica, in microseconds; on the slowest if devices differ.
    pub fwd_us: f64,
    /// Backward time of one micro-batch on one replica, in microseconds, including recomputation and the optimizer step
    /// if known.
    pub bwd_us: f64,
    /// The weight-gradient part of `bwd_us`, which a split backward may delay. If absent, half of the backward without
    /// recomputation is assumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_grad_us: Option<f64>,
    /// Gradient buckets of the all-reduce, in backward order; empty for one bucket.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<GradientBucket>,
    /// ZeRO stage: 1 shards the optimizer state, 2 also gradients, 3 also weights; absent for none.
    #[serde(default, skip_serializing_if = "is_none_of")]
    pub zero: u32,
    /// Number of consecutive replicas that shard together under ZeRO; absent for all.
    #[serde(default, skip_serializing_if = "is_none_of")]
    pub shard_degree: u32,
    /// Bytes of all parameters of the stage, if each replica holds a shard (ZeRO 3); otherwise absent.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub parameter_bytes: u64,
    /// Bytes of the gradients that replicas all-reduce, if they are not as many as those of the parameters.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub gradient_bytes: u64,
    /// Time per update to exchange gradients of tied parameters with the other stages that use them, in microseconds;
    /// absent if there are none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub tied_us: f64,
    /// Memory per device.
    pub memory: StageMemory,
    /// The stage's position in the cluster levels, innermost first. One entry on a cluster of several levels means that
    /// stages do not fill whole groups; the checker then uses the flattened cluster, or `devices` under cost `pipec`.
    pub hierarchy: Vec<LevelPlacement>,
}

/// The first ops of a stage, in ascending order of ids, which are recomputed before the backward. The other ops save
/// their activations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RecomputedOps {
    /// Number of ops, counted from the first.
    pub ops: u32,
    /// Number of layers, if the framework that will run the plan recomputes them one by one. Ops outside of layers are then
    /// not recomputed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<u32>,
    /// Forward time of these ops for one micro-batch on one replica, in microseconds.
    pub fwd_us: f64,
}

/// Times of a tensor-parallel stage, in microseconds per micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TensorParallelCost {
    /// True if matrices of weights are sharded and never gathered.
    #[serde(default, skip_serializing_if = "is_false")]
    pub keeps_weights: bool,
    /// What each device holds of the activations between layers and stages.
    #[serde(default, skip_serializing_if = "ActivationSharding::is_replicated")]
    pub activations: ActivationSharding,
    /// Forward time on one device.
    pub unsharded_fwd_us: f64,
    /// Backward time on one device, without recomputation.
    pub unsharded_bwd_us: f64,
    /// Time of collectives in the forward.
    pub collective_fwd_us: f64,
    /// Time of collectives in the backward, without recomputation.
    pub collective_bwd_us: f64,
}

/// A gradient bucket of a stage with replicas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GradientBucket {
    /// Names of its parameters, in backward order.
    pub parameters: Vec<String>,
    /// Total bytes.
    pub bytes: u64,
    /// Fraction of the backward, without recomputation, after which the bucket is complete.
    pub ready: f64,
}

/// Tensors sent from one stage to another.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Edge {
    /// The sending stage.
    pub from: StageId,
    /// The receiving stage.
    pub to: StageId,
    /// Names of the tensors.
    pub tensors: Vec<String>,
    /// Total bytes per micro-batch, in one direction.
    pub bytes: u64,
}

/// Predicted performance of the plan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Predicted {
    /// Time of one minibatch, in microseconds. Under cost `pipec` it is the simulated time of a whole minibatch,
    /// including fill and drain of flushed schedules, or of one micro-batch under schedule `inference`. Under the other
    /// cost models it is the steady-state time of the slowest stage or link per micro-batch.
    pub minibatch_us: f64,
    /// The cost model's estimate of `minibatch_us`, which the search minimised. Absent if both are equal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objective_us: Option<f64>,
    /// Time between weight updates, in microseconds: all micro-batches of a minibatch. Under 1F1B-RR, where a stage of
    /// r replicas updates every r minibatches, the time of one minibatch.
    pub step_us: f64,
    /// Samples per second.
    pub throughput_per_s: f64,
    /// Pipeline bubble: the idle fraction of a worker's time.
    pub bubble: f64,
    /// The bottleneck that determines `minibatch_us`.
    pub bottleneck: String,
    /// Operations of a minibatch: forward, and in training a backward of twice as many; 0 if unknown. Recomputation does
    /// not count.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub flops: f64,
    /// Operations of a minibatch that recomputation repeats.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub recomputed_flops: f64,
    /// The busiest link of a group of devices; absent on clusters of one level.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busiest_link: Option<BusiestLink>,
    /// Collectives of tensor-parallel groups per micro-batch, over all stages; absent without tensor parallelism.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub collectives: Vec<PlannedCollective>,
    /// Weights of the experts of a mixture; absent if the model has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<PlannedExperts>,
}

/// The collectives of one kind in a tensor-parallel plan, per micro-batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedCollective {
    /// `all-reduce`, `all-gather`, `reduce-scatter` or `all-to-all`.
    pub kind: String,
    /// Number over all stages, forward and backward, with recomputation.
    pub count: u64,
    /// Bytes that the device of one tensor rank sends, over all stages.
    pub bytes: u64,
}

/// Expert weights that tensor-parallel groups shard in the same way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlannedExperts {
    /// Experts of a layer.
    pub experts: u64,
    /// Number of such weights.
    pub weights: u32,
    /// What is split over the devices of a group: `experts`, `inputs` or `outputs` of each expert, or `nothing`. If
    /// `experts` are, device d of a group of t holds the d-th of t equal ranges.
    pub split: String,
}

/// Traffic per minibatch over the link of one group of devices, such as a server: activations, gradients and all-reduce
/// rings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BusiestLink {
    /// The level that the link belongs to.
    pub level: String,
    /// Index of the group of devices below that level, over the whole cluster.
    pub unit: u32,
    /// Direction: `out` or `in`.
    pub direction: String,
    /// Bytes per minibatch, or per micro-batch if it has several.
    pub bytes: u64,
    /// Fraction of the predicted time that the link needs for them.
    pub share: f64,
}

/// Times of baseline plans, in microseconds per minibatch, under the same cost model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Baselines {
    /// The whole model on one device.
    pub single: f64,
    /// The whole model replicated on every device.
    pub data_parallel: f64,
    /// A pipeline of stages with equal compute, without replication.
    pub uniform: f64,
    /// Baselines that fit in memory.
    pub fits: Fits,
}

/// Baselines that fit in the memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fits {
    /// The whole model on one device.
    pub single: bool,
    /// The whole model on every device.
    pub data_parallel: bool,
    /// The uniform pipeline.
    pub uniform: bool,
}

impl StageMemory {
    /// All parts of the total.
    pub fn parts(&self) -> [u64; 9] {
        let StageMemory { weights, frozen, versions, gradients, optimizer, .. } = *self;
        let StageMemory { activations, split_backward, messages, workspace, .. } = *self;
        [weights, frozen, versions, gradients, optimizer, activations, split_backward, messages, workspace]
    }

    /// The same parts with their total, at most `u64::MAX`.
    pub fn with_total(self) -> StageMemory {
        StageMemory { total: self.parts().into_iter().fold(0, u64::saturating_add), ..self }
    }
}

impl Plan {
    /// The highest ZeRO stage.
    pub fn most_zero(&self) -> u32 {
        self.stages.iter().map(|stage| stage.zero).max().unwrap_or(0)
    }

    /// What each device of a tensor-parallel group holds of the activations between stages.
    pub fn activations(&self) -> ActivationSharding {
        self.stages.iter().find_map(|stage| stage.tensor_parallel).unwrap_or_default().activations
    }

    /// The precision, if it is not that of the model. Plans without element types may state f64.
    pub fn precision(&self) -> Option<Precision> {
        let wide = Some(Precision::Fp64).filter(|wide| self.dtype == wide.dtype().name());
        self.element_types.as_ref().map(|types| types.precision).or(wide)
    }

    /// The name of the precision, or of the model's element type.
    pub fn precision_name(&self) -> &str {
        match self.precision() {
            Some(precision) => precision.name(),
            None => &self.dtype,
        }
    }
}

impl Predicted {
    /// The objective value from the cost model's equations, which the plan checker recomputes.
    pub fn by_equations_us(&self) -> f64 {
        self.objective_us.unwrap_or(self.minibatch_us)
    }
}

/// The search that found the plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Search {
    /// Name of the partitioner.
    pub method: String,
    /// Number of states explored.
    pub states: u64,
    /// The reason why the search is not exhaustive, or null.
    pub fallback: Option<String>,
}

/// A plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Plan {
    /// Always [`SCHEMA`].
    #[schemars(extend("const" = SCHEMA))]
    pub schema: String,
    /// The planned model.
    pub model: PlannedModel,
    /// Element type of weights and activations.
    pub dtype: String,
    /// The element type of each kind of tensor; absent if all are `dtype`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub element_types: Option<ElementTypes>,
    /// Optimizer, as the command line names it.
    pub optimizer: String,
    /// Source of the costs.
    pub profile: PlannedProfile,
    /// The cluster.
    pub cluster: PlannedCluster,
    /// Cost model.
    pub cost: problem::CostModel,
    /// The objective.
    pub objective: problem::Objective,
    /// The schedule.
    pub schedule: PlannedSchedule,
    /// Stages in topological order.
    pub stages: Vec<Stage>,
    /// Transfers between stages.
    pub edges: Vec<Edge>,
    /// Predicted times.
    pub predicted: Predicted,
    /// Lower bound on the minibatch time of any plan that recomputes all of a stage or nothing, under this cost model, in
    /// microseconds.
    pub lower_bound_us: f64,
    /// True if the cost model's estimate is proven optimal and `minibatch_us` equals it within 2 %.
    pub proven_optimal: bool,
    /// Baseline plans.
    pub baselines: Baselines,
    /// The search that found the plan.
    pub search: Search,
    /// Warnings.
    pub warnings: Vec<String>,
    /// Random seed.
    pub seed: u64,
    /// Options that change the result, normalised.
    pub options: BTreeMap<String, Value>,
    /// SHA-256 of the other fields but those that start with `x-`, in hex; absent from plans that pipec did not write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Fields of other tools; each name starts with `x-`.
    #[serde(flatten)]
    pub extra: BTreeMap<String, Value>,
}

impl Stage {
    /// Tensor-parallel degree.
    pub fn degree(&self) -> u32 {
        self.tensor_degree.unwrap_or(1).max(1)
    }

    /// Number of replicas that shard together under ZeRO.
    pub fn shards(&self) -> u32 {
        if self.shard_degree > 0 { self.shard_degree } else { self.replicas }
    }

    /// Bytes of all parameters of the stage; under ZeRO 3 a replica holds only its shard of them.
    pub fn all_weights(&self) -> u64 {
        if self.zero >= 3 { self.parameter_bytes } else { self.memory.weights }
    }

    /// Bytes of the gradients that replicas all-reduce.
    pub fn reduced_bytes(&self) -> u64 {
        if self.gradient_bytes > 0 { self.gradient_bytes } else { self.all_weights() }
    }

    /// Time of recomputation per micro-batch on one replica, in microseconds.
    pub fn recompute_us(&self) -> f64 {
        if self.recompute { self.recomputed.map_or(self.fwd_us, |recomputed| recomputed.fwd_us) } else { 0.0 }
    }

    /// Ids of the recomputed ops, ascending.
    pub fn recomputed_op_ids(&self) -> impl Iterator<Item = u32> + '_ {
        let all = self.recomputed.map_or(usize::MAX, |recomputed| recomputed.ops as usize);
        self.op_ids().take(if self.recompute { all } else { 0 })
    }

    /// All op ids of the stage, ascending.
    pub fn op_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.ops.iter().flat_map(|&(from, to)| from..to)
    }
}
