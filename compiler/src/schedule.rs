//! Schedules: from a pipeline to one instruction list per worker.
//!
//! A [`Pipeline`] is a plan as the schedulers see it: stage times, replicas, in-flight limits and edges. A [`Program`]
//! has one flat list of [`Instruction`]s per worker. All operands are explicit, so a worker is a loop with one `match`.
//!
//! A *rank* is a position in the pipeline: `replicas` workers that hold the same stages (several with chunks). Workers
//! are numbered in rank order, replica minor, and print as `rank.replica`. An *item* is a minibatch under asynchronous
//! schedules and a micro-batch under schedules with a flush.
//!
//! Send, Recv and collectives are asynchronous; only Wait blocks. A Send completes when its Recv is posted (channels
//! have no buffer), so a valid program runs on any link. A channel is (edge, kind, from worker, to worker) and FIFO;
//! the two directions of an edge are separate channels. Stages of one rank also exchange messages: a worker may send to
//! itself.
//!
//! Two things need no instruction. A backward accumulates into the gradient sums of its round. A Step that is not in
//! place keeps the previous version until its Drop.

pub mod action;
pub mod channel;
pub mod check;
pub mod collective;
pub mod compute_table;
pub mod custom;
pub mod dense_map;
pub mod error;
pub mod event_queue;
pub mod fit;
pub mod formats;
pub mod generators;
pub mod link_time;
pub mod list_scheduler;
pub mod lower;
pub mod pipeline;
pub mod resume;
pub mod semantics;
pub mod shape;
pub mod version_lifetime;
pub mod zero;

use crate::plan::schedule::Schedule;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

use crate::plan::StageId;
use crate::plan::ports::Ports;
use crate::profile::{is_one, one};
pub use crate::schedule::error::ScheduleError;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize, JsonSchema,
        )]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

id!(
    /// A rank: a place in the pipeline, whose workers hold the same stages.
    RankId
);
id!(
    /// A worker: ranks in order, replicas of a rank next to each other.
    WorkerId
);
id!(
    /// An item of work: a minibatch under asynchronous schedules, a micro-batch (counted over the whole run) under flush.
    MicrobatchId
);
id!(
    /// A weight version of one stage: the number of updates it has seen.
    Version
);
id!(
    /// An edge between two stages, by its place in [`Program::edges`].
    EdgeId
);
id!(
    /// Names one posted Send, Recv or collective of one worker, until its Wait.
    Token
);
id!(
    /// One of a worker's places for the saved activations of an item in flight.
    Slot
);

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    fn from_str(name: &str) -> Result<Self, ScheduleError> {
        let found = Schedule::GENERATED.into_iter().chain([Schedule::Csv]).find(|schedule| schedule.name() == name);
        found.ok_or_else(|| ScheduleError::UnknownName { name: name.to_string() })
    }
}

/// A stage as the schedulers see it. Times are microseconds.
#[derive(Clone, PartialEq, Debug)]
pub struct StageSpec {
    pub replicas: u32,
    /// True if this one replica represents several equal ones, with which it reduces its gradients.
    pub is_one_of_many: bool,
    pub forward: f64,
    /// Backward time per item on one replica, weight-gradient pass and recomputation included.
    pub backward: f64,
    /// The weight-gradient part of `backward`; no other stage waits for it.
    pub weight: f64,
    /// The recomputation part of `backward`, run as a separate Recompute; `None` if activations are saved.
    pub recompute: Option<f64>,
    /// Number of the first ops that are recomputed; all if absent.
    pub recomputed_ops: Option<u32>,
    /// True if they are recomputed part by part within the backward.
    pub recomputes_parts: bool,
    pub step: f64,
    /// Time of one gradient all-reduce, all buckets together; ignored for one replica.
    pub all_reduce: f64,
    /// Gradient buckets in backward order; empty for one bucket.
    pub buckets: Vec<Bucket>,
    /// ZeRO stage, see [`crate::plan::zero`].
    pub zero: u32,
    /// Number of replicas that shard together under ZeRO; 0 for all.
    pub shard_degree: u32,
    /// Share of the all-reduce time of its reduce-scatter under ZeRO; the all-gather has the rest.
    pub scattered: f64,
    /// In-flight items per replica, at least 1.
    pub cap: u32,
    pub param_bytes: u64,
    /// Activation bytes saved per item in flight.
    pub saved_bytes: u64,
}

impl StageSpec {
    /// True if it reduces its gradients over replicas.
    pub fn reduces(&self) -> bool {
        self.replicas > 1 || self.is_one_of_many
    }

    /// A stage with cap 1 and no bytes. Half of the backward is the weight-gradient pass, as for matrix products.
    pub fn new(replicas: u32, forward: f64, backward: f64) -> Self {
        let weight = backward / 2.0;
        Self {
            replicas,
            is_one_of_many: false,
            forward,
            backward,
            weight,
            recompute: None,
            recomputed_ops: None,
            recomputes_parts: false,
            step: 0.0,
            all_reduce: 0.0,
            buckets: Vec::new(),
            zero: 0,
            shard_degree: 0,
            scattered: 0.5,
            cap: 1,
            param_bytes: 0,
            saved_bytes: 0,
        }
    }

    /// Microseconds of the all-reduce that are not hidden by the round's last backward, without link contention.
    pub fn exposed_us(&self) -> f64 {
        if self.replicas < 2 {
            return 0.0;
        }
        let backward = (self.backward - self.recompute.unwrap_or(0.0)).max(0.0);
        let until_end = |ready: f64| (1.0 - ready) * backward;
        let reduced = self.buckets.iter().fold(f64::NEG_INFINITY, |before, bucket| {
            before.max(-until_end(bucket.ready)) + bucket.share * self.all_reduce
        });
        if self.buckets.is_empty() { self.all_reduce } else { reduced.clamp(0.0, self.all_reduce) }
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bucket {
    /// Fraction of the backward after which its gradients are complete.
    pub ready: f64,
    /// Fraction of the all-reduce time.
    pub share: f64,
}

/// Activations sent to a later stage, and their gradients sent back. Bytes and microseconds are per item.
#[derive(Clone, PartialEq, Debug)]
pub struct Edge {
    pub from: StageId,
    /// Later than `from`, not always the next stage.
    pub to: StageId,
    pub forward_bytes: u64,
    pub backward_bytes: u64,
    pub forward_us: f64,
    pub backward_us: f64,
}

impl Edge {
    /// An edge without bytes and transfer time.
    pub fn new(from: u32, to: u32) -> Self {
        let (from, to) = (StageId(from), StageId(to));
        Self { from, to, forward_bytes: 0, backward_bytes: 0, forward_us: 0.0, backward_us: 0.0 }
    }
}

#[derive(Clone, PartialEq, Debug)]
pub struct Pipeline {
    pub stages: Vec<StageSpec>,
    /// The rank of each stage. All ranks hold equally many stages, and stages of one rank have equally many replicas.
    pub ranks: Vec<RankId>,
    pub edges: Vec<Edge>,
    /// Ports that transfers contend for; empty without a cluster.
    pub ports: Ports,
}

/// PipeDream's in-flight limits: ⌈n_s / r_s⌉, with n_s the workers from stage s to the end.
pub fn published_caps(replicas: &[u32]) -> Vec<u32> {
    let mut behind = 0u64;
    let mut caps: Vec<u32> = replicas
        .iter()
        .rev()
        .map(|&r| {
            behind += u64::from(r);
            behind.div_ceil(u64::from(r.max(1))).clamp(1, u64::from(u32::MAX)) as u32
        })
        .collect();
    caps.reverse();
    caps
}

/// The kind of tensor sent over an edge.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Payload {
    /// From the earlier stage to the later one.
    Activation,
    /// From the later stage back to the earlier one.
    Gradient,
}

/// An instruction of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Instruction {
    /// Load the micro-batch's rows of the graph inputs and labels that this stage reads, if any.
    Load {
        /// A stage of this worker.
        stage: StageId,
        /// The micro-batch to load.
        item: MicrobatchId,
    },
    /// Run the stage's forward and save its activations in `slot`.
    Forward {
        /// A stage of this worker.
        stage: StageId,
        /// The micro-batch.
        item: MicrobatchId,
        /// The weights to use.
        version: Version,
        /// Holds the saved activations until the micro-batch's backward. A slot may be reused after the Wait for its
        /// Sends. Each stage has its own slots.
        slot: Slot,
    },
    /// Run the stage's backward. Weight gradients accumulate in program order until the stage's next AllReduce, or its
    /// next Step for one replica.
    Backward {
        /// A stage of this worker.
        stage: StageId,
        /// The micro-batch.
        item: MicrobatchId,
        /// The weight version of the forward.
        version: Version,
        /// The slot of the forward; free afterwards.
        slot: Slot,
    },
    /// Recompute the stage's forward from its inputs to fill `slot` for the micro-batch's backward. It may overlap with
    /// the gradient transfer.
    Recompute {
        /// A stage of this worker.
        stage: StageId,
        /// The micro-batch.
        item: MicrobatchId,
        /// The weight version of the forward.
        version: Version,
        /// The slot of the forward.
        slot: Slot,
    },
    /// Run the input-gradient pass of the stage's backward. The tensors for the weight-gradient pass remain in `slot`.
    BackwardInput {
        /// A stage of this worker.
        stage: StageId,
        /// The micro-batch.
        item: MicrobatchId,
        /// The weight version of the forward.
        version: Version,
        /// The slot of the forward.
        slot: Slot,
    },
    /// Run the weight-gradient pass of the stage's backward; gradients accumulate as for [`Instruction::Backward`].
    BackwardWeight {
        /// A stage of this worker.
        stage: StageId,
        /// The micro-batch, whose BackwardInput precedes.
        item: MicrobatchId,
        /// The weight version of the forward.
        version: Version,
        /// The slot of the forward; free afterwards.
        slot: Slot,
    },
    /// Post the send of a micro-batch's activations or gradients.
    Send {
        /// The edge.
        edge: EdgeId,
        /// The micro-batch.
        item: MicrobatchId,
        /// The direction.
        kind: Payload,
        /// The receiver.
        peer: WorkerId,
        /// Token for Wait; the buffer is in use until then.
        token: Token,
    },
    /// Post the receive of a micro-batch's activations or gradients.
    Recv {
        /// The edge.
        edge: EdgeId,
        /// The micro-batch.
        item: MicrobatchId,
        /// The direction.
        kind: Payload,
        /// The sender.
        peer: WorkerId,
        /// Token for Wait; the data is available after it.
        token: Token,
    },
    /// Block until the operation of `token` is complete.
    Wait {
        /// A token of an earlier Send, Recv or collective of this worker.
        token: Token,
    },
    /// Post the all-reduce of one gradient bucket of one round over all replicas of the stage. The round ends after its
    /// last bucket and its last backward; later backwards start from zero in another buffer. A replica without a micro-
    /// batch in the round contributes zeros. Buckets may be posted before the worker's last backward of the round; each
    /// starts when that backward has computed it. Several rounds may be posted before the first Wait; they complete and
    /// apply in order.
    AllReduce {
        /// A stage of this worker.
        stage: StageId,
        /// The round.
        round: u32,
        /// Bucket index, in backward order.
        #[serde(default, skip_serializing_if = "is_first")]
        bucket: u32,
        /// Token for Wait.
        token: Token,
    },
    /// Like AllReduce, but this replica receives only its shard of the sum. A Step of the round computes its shard of a
    /// version, which must be gathered before use. ZeRO stages sum all rounds this way, other stages none.
    ReduceScatter {
        /// A stage of this worker.
        stage: StageId,
        /// The round.
        round: u32,
        /// Bucket index, in backward order.
        #[serde(default, skip_serializing_if = "is_first")]
        bucket: u32,
        /// Token for Wait.
        token: Token,
    },
    /// Post the all-gather of the parameters of one bucket of a sharded version. Buckets are gathered from last to
    /// first, in the order of the forward.
    AllGather {
        /// A stage of this worker.
        stage: StageId,
        /// The version.
        version: Version,
        /// Bucket index.
        #[serde(default, skip_serializing_if = "is_first")]
        bucket: u32,
        /// Token for Wait; the version is available after it.
        token: Token,
    },
    /// Apply the round's gradients, divided by `count`, to version `from`; the result is version `to`. The gradients
    /// are then free.
    Step {
        /// A stage of this worker.
        stage: StageId,
        /// The round.
        round: u32,
        /// The newest version before.
        from: Version,
        /// The newest version after: `from + 1`.
        to: Version,
        /// Number of micro-batches averaged, over all replicas.
        count: u32,
        /// True if version `from` is not used again: the new weights overwrite it, without a Drop.
        in_place: bool,
    },
    /// Free a version that is not used again.
    Drop {
        /// A stage of this worker.
        stage: StageId,
        /// The version.
        version: Version,
    },
    /// Write a version of the stage's weights to the run's checkpoint.
    Checkpoint {
        /// A stage of this worker.
        stage: StageId,
        /// The version.
        version: Version,
    },
}

/// The program of one worker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkerProgram {
    /// Its rank, which determines its stages.
    pub rank: RankId,
    /// Its index among the rank's replicas.
    pub replica: u32,
    /// Its instructions, in order.
    pub instructions: Vec<Instruction>,
}

/// A stage of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProgramStage {
    /// Its rank.
    pub rank: RankId,
    /// Number of replicas.
    pub replicas: u32,
    /// In-flight cap: micro-batches in flight per replica.
    pub cap: u32,
    /// True if a forward saves only its inputs, so that a Recompute precedes every backward.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recompute: bool,
    /// Gradient buckets per round.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub buckets: u32,
    /// ZeRO stage; 0 for none.
    #[serde(default, skip_serializing_if = "is_first")]
    pub zero: u32,
    /// Number of replicas that shard together under ZeRO; 0 for all.
    #[serde(default, skip_serializing_if = "is_first")]
    pub shard_degree: u32,
}

impl ProgramStage {
    /// Number of replicas that shard together under ZeRO.
    pub fn shards(&self) -> u32 {
        if self.shard_degree > 0 { self.shard_degree } else { self.replicas }
    }
}

fn is_first(number: &u32) -> bool {
    *number == 0
}

/// The programs of all workers, with the data that the checker needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Program {
    pub schedule: Schedule,
    /// Micro-batches of the whole run.
    pub items: u32,
    /// Micro-batches per minibatch; 1 under the round-robin schedules.
    pub microbatches: u32,
    pub stages: Vec<ProgramStage>,
    /// (sender, receiver) of the activations.
    pub edges: Vec<(StageId, StageId)>,
    pub workers: Vec<WorkerProgram>,
}

impl Program {
    /// The stages that an edge connects; stage 0 twice if there is no such edge.
    fn ends(&self, edge: EdgeId) -> (StageId, StageId) {
        self.edges.get(edge.index()).copied().unwrap_or((StageId(0), StageId(0)))
    }

    pub fn worker_name(&self, worker: WorkerId) -> String {
        match self.workers.get(worker.index()) {
            Some(program) => format!("{}.{}", program.rank.0, program.replica),
            None => format!("?{}", worker.0),
        }
    }

    /// The stages of a rank, ascending.
    pub fn stages_of(&self, rank: RankId) -> impl Iterator<Item = StageId> + '_ {
        (0..).map(StageId).zip(&self.stages).filter(move |(_, stage)| stage.rank == rank).map(|(id, _)| id)
    }
}
