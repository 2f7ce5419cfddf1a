//! Schedules: from a pipeline to one instruction list per worker.
//!
//! A [`Pipeline`] is a plan as the schedulers see it: stage times, replicas, in-flight caps and edges. A [`Program`]
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
pub mod scheduler;
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
    pub forward: f64,
    /// Backward time per item on one replica, weight-gradient pass and recomputation included.
    pub backward: f64,
    /// The weight-gradient part of `backward`; no other stage waits for it.
    pub weight: f64,
    /// The recomputation part of `backward`, run as a separate Recompute; `None` if activations are saved.
    pub recompute: Option<f64>,
    pub step: f64,
    /// Time of one gradient all-reduce, all buckets together; ignored for one replica.
    pub all_reduce: f64,
    /// Gradient buckets in backward order; empty for one bucket.
    pub buckets: Vec<Bucket>,
    /// ZeRO stage, see [`crate::plan::zero`].
    pub zero: u32,
    /// In-flight items per replica, at least 1.
    pub cap: u32,
    pub param_bytes: u64,
    /// Activation bytes saved per item in flight.
    pub saved_bytes: u64,
}

impl StageSpec {
    /// A stage with cap 1 and no bytes. Half of the backward is the weight-gradient pass, as for matrix products.
    pub fn new(replicas: u32, forward: f64, backward: f64) -> Self {
        let weight = backward / 2.0;
        Self {
            replicas,
            forward,
            backward,
            weight,
            recompute: None,
            step: 0.0,
            all_reduce: 0.0,
            buckets: Vec::new(),
            zero: 0,
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

/// PipeDream's in-flight caps: ⌈n_s / r_s⌉, with n_s the workers from stage s to the end.
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

/// What travels over an edge.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Payload {
    /// From the earlier stage to the later one.
    Activation,
    /// From the later stage back to the earlier one.
    Gradient,
}

/// One thing a worker does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "op", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Instruction {
    /// Fetch the item's rows of the graph inputs and labels that this stage reads, if it reads any.
    Load {
        /// A stage of this worker.
        stage: StageId,
        /// The item to fetch.
        item: MicrobatchId,
    },
    /// Run the stage's forward; what the backward needs is kept in `slot`.
    Forward {
        /// A stage of this worker.
        stage: StageId,
        /// The item.
        item: MicrobatchId,
        /// The weights to use.
        version: Version,
        /// Where the saved activations live until the item's backward; a slot may be reused only when the
        /// Sends out of it have been waited for. Each stage has slots of its own.
        slot: Slot,
    },
    /// Run the stage's backward; gradients of weights are added, in the order of the program, to those that the stage's
    /// next AllReduce takes, or its next Step where it has one replica.
    Backward {
        /// A stage of this worker.
        stage: StageId,
        /// The item.
        item: MicrobatchId,
        /// The weights that the forward used.
        version: Version,
        /// The slot that the forward filled; free after this.
        slot: Slot,
    },
    /// Run the stage's forward again, from what it read, to fill `slot` for the item's backward: it comes between the two, and
    /// may come while the gradients are on their way.
    Recompute {
        /// A stage of this worker.
        stage: StageId,
        /// The item.
        item: MicrobatchId,
        /// The weights that the forward used.
        version: Version,
        /// The slot that the forward took.
        slot: Slot,
    },
    /// Run the part of the stage's backward that makes the gradients which other stages wait for; what the other part needs stays
    /// in `slot`.
    BackwardInput {
        /// A stage of this worker.
        stage: StageId,
        /// The item.
        item: MicrobatchId,
        /// The weights that the forward used.
        version: Version,
        /// The slot that the forward filled.
        slot: Slot,
    },
    /// Run the rest of the stage's backward, which makes the gradients of weights; they are added as [`Instruction::Backward`]
    /// adds them.
    BackwardWeight {
        /// A stage of this worker.
        stage: StageId,
        /// The item, whose BackwardInput came before.
        item: MicrobatchId,
        /// The weights that the forward used.
        version: Version,
        /// The slot that the forward filled; free after this.
        slot: Slot,
    },
    /// Post the sending of an item's activations or gradients.
    Send {
        /// The edge.
        edge: EdgeId,
        /// The item.
        item: MicrobatchId,
        /// The direction.
        kind: Payload,
        /// The receiver.
        peer: WorkerId,
        /// To wait for; the buffer is held until then.
        token: Token,
    },
    /// Post the receiving of an item's activations or gradients.
    Recv {
        /// The edge.
        edge: EdgeId,
        /// The item.
        item: MicrobatchId,
        /// The direction.
        kind: Payload,
        /// The sender.
        peer: WorkerId,
        /// To wait for; the data may be read after that.
        token: Token,
    },
    /// Block until what `token` names is complete.
    Wait {
        /// A token of an earlier Send, Recv or collective of this worker.
        token: Token,
    },
    /// Post the sum, over all replicas of the stage, of one bucket of the gradients of one round, which ends with the posting of the
    /// last bucket and the round's last backward: later backwards start from zero in another buffer. A replica that had no item in
    /// the round gives zeros. Where a stage has several buckets they may be posted before the worker's last backward of the round, and
    /// each is on its way as soon as that backward has made its part. Several rounds may be posted before the first is waited for;
    /// they are waited for and applied in order.
    AllReduce {
        /// A stage of this worker.
        stage: StageId,
        /// The round.
        round: u32,
        /// Which of the stage's buckets, in the order in which backwards make them.
        #[serde(default, skip_serializing_if = "is_first")]
        bucket: u32,
        /// To wait for.
        token: Token,
    },
    /// As AllReduce, but this replica gets its share of the sum only: a Step of the round makes its share of a version, which nobody
    /// uses before it is gathered. In stages that ZeRO shares all rounds are summed so, in others none.
    ReduceScatter {
        /// A stage of this worker.
        stage: StageId,
        /// The round.
        round: u32,
        /// Which of the stage's buckets, in the order in which backwards make them.
        #[serde(default, skip_serializing_if = "is_first")]
        bucket: u32,
        /// To wait for.
        token: Token,
    },
    /// Post the gathering of the parameters of one bucket in a version of which each replica has made its share. Buckets are gathered from
    /// the last to the first: a forward uses first what a backward makes last.
    AllGather {
        /// A stage of this worker.
        stage: StageId,
        /// The version.
        version: Version,
        /// Which of the stage's buckets.
        #[serde(default, skip_serializing_if = "is_first")]
        bucket: u32,
        /// To wait for; the version may be used after that.
        token: Token,
    },
    /// Apply the round's gradients, divided by `count`, to version `from`; the result is version `to`. The round's gradients
    /// are nobody's after this.
    Step {
        /// A stage of this worker.
        stage: StageId,
        /// The round.
        round: u32,
        /// The newest version before.
        from: Version,
        /// The newest version after: `from + 1`.
        to: Version,
        /// Items that are averaged, over all replicas.
        count: u32,
        /// Nobody uses `from` after this: write the new weights over it. It needs no Drop then.
        in_place: bool,
    },
    /// Nobody uses this version after this.
    Drop {
        /// A stage of this worker.
        stage: StageId,
        /// The version.
        version: Version,
    },
    /// Write this version of the stage's weights to the run's checkpoint.
    Checkpoint {
        /// A stage of this worker.
        stage: StageId,
        /// The version.
        version: Version,
    },
}

/// What one worker runs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkerProgram {
    /// Its rank, which says its stages.
    pub rank: RankId,
    /// Its place among the rank's replicas.
    pub replica: u32,
    /// What it does, in order.
    pub instructions: Vec<Instruction>,
}

/// What a program remembers of a stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProgramStage {
    /// The rank that holds it.
    pub rank: RankId,
    /// Workers that share the stage's items.
    pub replicas: u32,
    /// Items that may be in flight on a replica.
    pub cap: u32,
    /// Whether a forward keeps nothing but what it read, so that a Recompute comes before every backward.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recompute: bool,
    /// Parts in which the gradients of a round are summed over replicas.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub buckets: u32,
    /// The level of ZeRO by which replicas share what the stage holds; 0 where each holds all of it.
    #[serde(default, skip_serializing_if = "is_first")]
    pub zero: u32,
}

fn is_first(number: &u32) -> bool {
    *number == 0
}

fn one() -> u32 {
    1
}

fn is_one(number: &u32) -> bool {
    *number == 1
}

/// The programs of all workers, with the data that the checker needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Program {
    pub schedule: Schedule,
    /// Items of the whole run.
    pub items: u32,
    /// Items per minibatch; 1 under the round-robin schedules.
    pub microbatches: u32,
    pub stages: Vec<ProgramStage>,
    /// (sender, receiver) of the activations.
    pub edges: Vec<(StageId, StageId)>,
    pub workers: Vec<WorkerProgram>,
}

impl Program {
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
