//! The schedules, one row of properties each. Costs, memory, checks and the simulator read properties, never names.
//!
//! To add a schedule: a variant and a row here, a generator in `schedule/generators/`, and its row in
//! `schedule/generators.rs`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Pipeline schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Schedule {
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
    /// Zero bubble, ZB-H1.
    #[serde(rename = "zb-h1")]
    ZbH1,
    /// Zero bubble, ZB-H2.
    #[serde(rename = "zb-h2")]
    ZbH2,
    /// Zero bubble on a V of two chunks.
    #[serde(rename = "zbv")]
    Zbv,
    /// DualPipeV: paired forwards and backwards on a V of two chunks.
    #[serde(rename = "dualpipev")]
    DualPipeV,
    /// PipeDream-2BW: two weight versions, a new one for every minibatch.
    #[serde(rename = "2bw")]
    TwoBw,
    /// 1F1B with round-robin replicas and weight stashing.
    #[serde(rename = "1f1b-rr")]
    OneFOneBRr,
    /// 1F1B-RR with vertical sync: all stages use one weight version per minibatch.
    #[serde(rename = "1f1b-rr-vsync")]
    OneFOneBRrVsync,
    /// 1F1B-RR without stashing: forward and backward each use the newest weights. Training alone uses it; no plan does.
    #[serde(skip)]
    OneFOneBRrNewest,
    /// Forward only.
    #[serde(rename = "inference")]
    Inference,
    /// A custom schedule from a file.
    #[serde(rename = "csv")]
    Csv,
}

/// The event after which a stage updates its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpdateRule {
    /// No updates: inference.
    None,
    /// A minibatch, after a flush.
    Flush,
    /// A minibatch, without a flush: a new weight version while the last one is in use (PipeDream-2BW).
    DoubleBuffered,
    /// A round of whole minibatches over the replicas of the stage, without a flush (PipeDream).
    Round,
}

/// The weight version that an item uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VersionRule {
    /// There is one version at a time.
    Single,
    /// The previous version, while the newest is being made.
    Previous,
    /// The newest at the forward, stashed for the backward.
    Stashed,
    /// That of the first stage: vertical sync.
    Synchronised,
    /// The newest at each forward and each backward.
    Newest,
}

/// The stages of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunks {
    /// One.
    One,
    /// Several, in a loop over the ranks.
    Looped,
    /// Two, down the ranks and back up.
    V,
}

/// The number of in-flight micro-batches of a stage, with `w` workers from the stage to the end of the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InFlightRule {
    /// All micro-batches of a minibatch.
    Minibatch,
    /// Up to `w`.
    Depth,
    /// Up to `w`, and the forwards of other chunks between.
    InterleavedDepth,
    /// `w`, with weight gradients held back.
    Workers,
    /// `w + 1`.
    WorkersAndOne,
    /// `2 w - 1`.
    TwiceWorkers,
    /// Enough whole minibatches for the replicas of the stage and the workers after it.
    Rounds,
    /// Two if a stage follows.
    Forward,
}

/// The limit of micro-batches whose weight gradients are pending on a replica of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PendingWeightGrads {
    /// One, and this many for each worker before the stage.
    PerEarlierWorker(u32),
    /// The in-flight limit.
    InFlight,
}

/// The properties of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Properties {
    pub schedule: Schedule,
    /// Name on the command line and in files.
    pub name: &'static str,
    pub update: UpdateRule,
    pub versions: VersionRule,
    pub chunks: Chunks,
    pub in_flight: InFlightRule,
    /// Whether in-flight limits are configurable. Otherwise they follow from the micro-batches and stages.
    pub takes_caps: bool,
    /// The limit of pending weight gradients; none if the backward is not split.
    pub split: Option<PendingWeightGrads>,
}

const fn row(
    schedule: Schedule,
    name: &'static str,
    update: UpdateRule,
    versions: VersionRule,
    in_flight: InFlightRule,
) -> Properties {
    Properties { schedule, name, update, versions, chunks: Chunks::One, in_flight, takes_caps: false, split: None }
}

const fn flush(schedule: Schedule, name: &'static str, in_flight: InFlightRule) -> Properties {
    row(schedule, name, UpdateRule::Flush, VersionRule::Single, in_flight)
}

const fn round(schedule: Schedule, name: &'static str, versions: VersionRule) -> Properties {
    Properties { takes_caps: true, ..row(schedule, name, UpdateRule::Round, versions, InFlightRule::Rounds) }
}

/// One row for each schedule.
const TABLE: [Properties; 14] = {
    use PendingWeightGrads::{InFlight, PerEarlierWorker};
    [
        flush(Schedule::Gpipe, "gpipe", InFlightRule::Minibatch),
        Properties { takes_caps: true, ..flush(Schedule::OneFOneB, "1f1b", InFlightRule::Depth) },
        Properties {
            chunks: Chunks::Looped,
            ..flush(Schedule::Interleaved, "interleaved", InFlightRule::InterleavedDepth)
        },
        Properties { chunks: Chunks::Looped, ..flush(Schedule::Bfs, "bfs", InFlightRule::Minibatch) },
        Properties { split: Some(PerEarlierWorker(1)), ..flush(Schedule::ZbH1, "zb-h1", InFlightRule::Workers) },
        Properties { split: Some(PerEarlierWorker(2)), ..flush(Schedule::ZbH2, "zb-h2", InFlightRule::TwiceWorkers) },
        Properties { chunks: Chunks::V, split: Some(InFlight), ..flush(Schedule::Zbv, "zbv", InFlightRule::Workers) },
        Properties {
            chunks: Chunks::V,
            split: Some(InFlight),
            ..flush(Schedule::DualPipeV, "dualpipev", InFlightRule::WorkersAndOne)
        },
        Properties {
            takes_caps: true,
            ..row(Schedule::TwoBw, "2bw", UpdateRule::DoubleBuffered, VersionRule::Previous, InFlightRule::Depth)
        },
        round(Schedule::OneFOneBRr, "1f1b-rr", VersionRule::Stashed),
        round(Schedule::OneFOneBRrVsync, "1f1b-rr-vsync", VersionRule::Synchronised),
        round(Schedule::OneFOneBRrNewest, "1f1b-rr-newest", VersionRule::Newest),
        Properties {
            takes_caps: true,
            ..row(Schedule::Inference, "inference", UpdateRule::None, VersionRule::Single, InFlightRule::Forward)
        },
        Properties { takes_caps: true, ..flush(Schedule::Csv, "csv", InFlightRule::Minibatch) },
    ]
};

impl Schedule {
    /// Every schedule that a plan may have.
    pub const ALL: [Schedule; 13] = [
        Schedule::Gpipe,
        Schedule::OneFOneB,
        Schedule::Interleaved,
        Schedule::Bfs,
        Schedule::ZbH1,
        Schedule::ZbH2,
        Schedule::Zbv,
        Schedule::DualPipeV,
        Schedule::TwoBw,
        Schedule::OneFOneBRr,
        Schedule::OneFOneBRrVsync,
        Schedule::Inference,
        Schedule::Csv,
    ];

    /// Every schedule with a generator, in documentation order.
    pub const GENERATED: [Schedule; 13] = [
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

    /// The row of the schedule.
    pub const fn properties(self) -> &'static Properties {
        &TABLE[self as usize]
    }

    /// Name on the command line and in files.
    pub fn name(self) -> &'static str {
        self.properties().name
    }

    /// The plannable schedule of that name.
    pub fn from_name(name: &str) -> Option<Schedule> {
        Schedule::ALL.into_iter().find(|schedule| schedule.name() == name)
    }

    /// The event after which a stage updates its weights.
    pub fn update(self) -> UpdateRule {
        self.properties().update
    }

    /// The weight version that an item uses.
    pub fn versions(self) -> VersionRule {
        self.properties().versions
    }

    /// True if there are backwards and weight updates.
    pub fn trains(self) -> bool {
        self.update() != UpdateRule::None
    }

    /// True if every item sees the updates of all earlier minibatches.
    pub fn flushes(self) -> bool {
        self.update() == UpdateRule::Flush
    }

    /// True if minibatches overlap: there is no flush between weight updates.
    pub fn is_continuous(self) -> bool {
        !self.flushes()
    }

    /// True if an item is a whole minibatch, and each round over the replicas makes one update.
    pub fn is_round_robin(self) -> bool {
        self.update() == UpdateRule::Round
    }

    /// True if an update averages a whole minibatch of micro-batches.
    pub fn is_by_minibatch(self) -> bool {
        matches!(self.update(), UpdateRule::Flush | UpdateRule::DoubleBuffered)
    }

    /// True if there are two weight versions, one of them in the making.
    pub fn is_double_buffered(self) -> bool {
        self.update() == UpdateRule::DoubleBuffered
    }

    /// True if a backward uses the weights of its forward.
    pub fn stashes(self) -> bool {
        self.versions() != VersionRule::Newest
    }

    /// True if the backward is split into input-gradient and weight-gradient passes.
    pub fn splits_backward(self) -> bool {
        self.properties().split.is_some()
    }

    /// True if a rank holds several stages.
    pub fn has_chunks(self) -> bool {
        self.properties().chunks != Chunks::One
    }

    /// True if the stages go down the ranks and back up in a V, two per rank.
    pub fn is_on_a_v(self) -> bool {
        self.properties().chunks == Chunks::V
    }

    /// True if in-flight limits are configurable.
    pub fn takes_caps(self) -> bool {
        self.properties().takes_caps
    }

    /// True if the order comes from a table or a program, not from a generator.
    pub fn is_custom(self) -> bool {
        self == Schedule::Csv
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_that_of_its_schedule() {
        for (at, row) in TABLE.iter().enumerate() {
            assert_eq!(row.schedule as usize, at);
            assert_eq!(row.schedule.properties().name, row.name);
        }
        assert!(Schedule::ALL.into_iter().all(|schedule| Schedule::from_name(schedule.name()) == Some(schedule)));
        assert_eq!(Schedule::from_name("1f1b-rr-newest"), None);
    }

    #[test]
    fn files_have_the_names_of_the_table() {
        for schedule in Schedule::ALL {
            assert_eq!(serde_json::to_string(&schedule).unwrap(), format!("\"{}\"", schedule.name()));
        }
        assert!(serde_json::from_str::<Schedule>("\"1f1b-rr-newest\"").is_err());
    }
}
