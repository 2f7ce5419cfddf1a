//! Schedules: from the shape of a pipeline to one program for each worker.
//!
//! A [`Pipeline`] is what a schedule needs to know of a plan: how long each stage computes, how often it is replicated,
//! how many rounds may be in flight, and which stages speak to which. A [`Program`] is the answer: one flat list of
//! [`Instruction`]s for each worker, with every operand explicit, so that a worker is a loop with one `match`.
//!
//! A *rank* is a place in the pipeline: `replicas` workers that hold the same stages. Most often a rank holds one stage and has
//! its number; under the schedules with chunks it holds several. Workers are numbered in rank order, replica minor, and print
//! as `rank.replica`. Work comes in *items*: minibatches under the asynchronous schedules, microbatches under those that flush.
//!
//! What the instructions promise each other: Send, Recv and the collectives only post, Wait blocks. A Send completes when its
//! Recv is posted (channels hold nothing), so a program that runs here runs on any link. A channel is (edge, kind, from
//! worker, to worker) and first in, first out; the two directions of an edge are separate channels. Stages of one rank speak to
//! each other in the same words: a worker may send to itself.
//!
//! Two things need no instruction: a backward adds its gradients to those of its round itself, and a Step that is not in place keeps
//! the version before, until its Drop.

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
            /// The position this id names in a list.
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
    /// An item of work: a minibatch under asynchronous schedules, a microbatch (counted over the whole run) under flush.
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

/// The schedules that can be asked for, by the names of the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Schedule {
    /// `gpipe`: all forwards of a minibatch, then all its backwards.
    Gpipe,
    /// `1f1b`: one forward, one backward, and a flush after every minibatch.
    OneFOneB,
    /// `interleaved`: 1F1B with flush over several stages on each rank.
    Interleaved,
    /// `bfs`: looped breadth-first: as gpipe, over several stages on each rank.
    Bfs,
    /// `zb-h1`: 1F1B with flush and the backward in two parts, of which that of the weights fills idle time.
    ZbH1,
    /// `zb-h2`: the same with more items in flight and no idle time within a rank's work.
    ZbH2,
    /// `zbv`: the same on ranks that hold two stages of a V.
    Zbv,
    /// `dualpipev`: forwards and backwards in pairs on ranks that hold two stages of a V.
    DualPipeV,
    /// `1f1b-rr`: one forward, one backward, round-robin over replicas, weight stashing, no flush.
    OneFOneBRr,
    /// `1f1b-rr-vsync`: the same with vertical sync: all stages use the version of the first.
    OneFOneBRrVsync,
    /// `1f1b-rr-newest`: the same without stashing: forward and backward each use the newest weights.
    OneFOneBRrNewest,
    /// `2bw`: PipeDream-2BW, double-buffered weights.
    TwoBw,
    /// `inference`: forwards only.
    Inference,
    /// `csv`: an order of the user's own, from a table or from Rust.
    Csv,
}

impl Schedule {
    /// Every schedule that is generated, in the order of the documentation.
    pub const ALL: [Schedule; 13] = [
        Schedule::Gpipe,
        Schedule::OneFOneB,
        Schedule::Interleaved,
        Schedule::Bfs,
        Schedule::ZbH1,
        Schedule::ZbH2,
        Schedule::Zbv,
        Schedule::DualPipeV,
        Schedule::OneFOneBRr,
        Schedule::OneFOneBRrVsync,
        Schedule::OneFOneBRrNewest,
        Schedule::TwoBw,
        Schedule::Inference,
    ];

    /// The name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Schedule::Gpipe => "gpipe",
            Schedule::OneFOneB => "1f1b",
            Schedule::Interleaved => "interleaved",
            Schedule::Bfs => "bfs",
            Schedule::ZbH1 => "zb-h1",
            Schedule::ZbH2 => "zb-h2",
            Schedule::Zbv => "zbv",
            Schedule::DualPipeV => "dualpipev",
            Schedule::OneFOneBRr => "1f1b-rr",
            Schedule::OneFOneBRrVsync => "1f1b-rr-vsync",
            Schedule::OneFOneBRrNewest => "1f1b-rr-newest",
            Schedule::TwoBw => "2bw",
            Schedule::Inference => "inference",
            Schedule::Csv => "csv",
        }
    }

    /// Whether an item is a whole minibatch, and each round of replicas makes an update of its own.
    pub fn is_round_robin(self) -> bool {
        matches!(self, Schedule::OneFOneBRr | Schedule::OneFOneBRrVsync | Schedule::OneFOneBRrNewest)
    }

    /// Whether a backward uses the weights of its forward.
    pub fn stashes(self) -> bool {
        self != Schedule::OneFOneBRrNewest
    }

    /// Whether an update is made of a whole minibatch of microbatches.
    pub fn is_by_minibatch(self) -> bool {
        self.trains() && !self.is_round_robin()
    }

    /// Whether every item of a minibatch sees the weights that all minibatches before it have made.
    pub fn flushes(self) -> bool {
        self.is_by_minibatch() && self != Schedule::TwoBw
    }

    /// Whether backwards come in two parts.
    pub fn splits_backward(self) -> bool {
        matches!(self, Schedule::ZbH1 | Schedule::ZbH2 | Schedule::Zbv | Schedule::DualPipeV)
    }

    /// Whether items run backward and weights are updated.
    pub fn trains(self) -> bool {
        self != Schedule::Inference
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    fn from_str(name: &str) -> Result<Self, ScheduleError> {
        let found = Schedule::ALL.into_iter().chain([Schedule::Csv]).find(|schedule| schedule.name() == name);
        found.ok_or_else(|| ScheduleError::UnknownName { name: name.to_string() })
    }
}

/// What a schedule needs to know of one stage.
#[derive(Clone, PartialEq, Debug)]
pub struct StageSpec {
    /// Workers that share the stage's items.
    pub replicas: u32,
    /// Time of one item's forward on one replica, in microseconds.
    pub forward: f64,
    /// Time of one item's backward on one replica, in microseconds.
    pub backward: f64,
    /// The part of `backward` that makes gradients of weights, which nobody else waits for, in microseconds.
    pub weight: f64,
    /// The part of `backward` that runs the forward again, as a Recompute of its own before it, in microseconds; none where what the
    /// backward reads is kept.
    pub recompute: Option<f64>,
    /// Time of one optimizer step, in microseconds.
    pub step: f64,
    /// Time of one all-reduce of the stage's gradients, in microseconds, of all buckets together; nothing for a single replica.
    pub all_reduce: f64,
    /// The parts in which the gradients are all-reduced, in the order in which a backward makes them; empty for one part.
    pub buckets: Vec<Bucket>,
    /// The level of ZeRO by which replicas share what the stage holds: see [`crate::plan::zero`].
    pub zero: u32,
    /// Rounds that may be in flight on a replica, at least 1.
    pub cap: u32,
    /// Bytes of one version of the stage's parameters.
    pub param_bytes: u64,
    /// Bytes kept for the backward of one item in flight.
    pub saved_bytes: u64,
}

impl StageSpec {
    /// A stage with `replicas` workers that compute `forward` and `backward` microseconds an item, half of the backward for the
    /// weights, as matrix products have it; cap 1, no bytes.
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

    /// Microseconds of the all-reduce that are left when a round's last backward ends, if nothing else is on its links: the rest is
    /// under way beside that backward.
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

/// One part of the gradients that the replicas of a stage sum.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bucket {
    /// The share of a backward after which its gradients are made, 0 to 1.
    pub ready: f64,
    /// Its share of the time of the whole all-reduce.
    pub share: f64,
}

/// Tensors that go from one stage to a later one, and their gradients back.
#[derive(Clone, PartialEq, Debug)]
pub struct Edge {
    /// The stage that sends activations.
    pub from: StageId,
    /// The stage that receives them; later than `from`, not always the next.
    pub to: StageId,
    /// Bytes of one item's activations.
    pub forward_bytes: u64,
    /// Bytes of one item's gradients.
    pub backward_bytes: u64,
    /// Time one item's activations take, in microseconds.
    pub forward_us: f64,
    /// Time one item's gradients take, in microseconds.
    pub backward_us: f64,
}

impl Edge {
    /// An edge that carries nothing and takes no time.
    pub fn new(from: u32, to: u32) -> Self {
        let (from, to) = (StageId(from), StageId(to));
        Self { from, to, forward_bytes: 0, backward_bytes: 0, forward_us: 0.0, backward_us: 0.0 }
    }
}

/// A plan as schedules see it: stages in order and the edges between them, at most one for each pair of stages.
#[derive(Clone, PartialEq, Debug)]
pub struct Pipeline {
    /// The stages, first to last.
    pub stages: Vec<StageSpec>,
    /// The rank of each stage; all ranks hold equally many stages, and those of one rank have equally many replicas.
    pub ranks: Vec<RankId>,
    /// The edges, each from an earlier to a later stage.
    pub edges: Vec<Edge>,
    /// What transfers share; nothing where no cluster is known.
    pub ports: Ports,
}

/// PipeDream's in-flight caps in rounds: ⌈n_s / r_s⌉, where n_s counts the workers from stage s to the end.
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

/// One program for each worker of a pipeline, and what is needed to judge it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Program {
    /// The schedule that it follows.
    pub schedule: Schedule,
    /// Items in all.
    pub items: u32,
    /// Items of one minibatch; 1 under the round-robin schedules.
    pub microbatches: u32,
    /// The stages.
    pub stages: Vec<ProgramStage>,
    /// The edges, as (sender, receiver) of activations.
    pub edges: Vec<(StageId, StageId)>,
    /// The programs, by [`WorkerId`].
    pub workers: Vec<WorkerProgram>,
}

impl Program {
    /// The worker's name: `rank.replica`.
    pub fn worker_name(&self, worker: WorkerId) -> String {
        match self.workers.get(worker.index()) {
            Some(program) => format!("{}.{}", program.rank.0, program.replica),
            None => format!("?{}", worker.0),
        }
    }

    /// The stages of a rank, in order.
    pub fn stages_of(&self, rank: RankId) -> impl Iterator<Item = StageId> + '_ {
        (0..).map(StageId).zip(&self.stages).filter(move |(_, stage)| stage.rank == rank).map(|(id, _)| id)
    }
}
