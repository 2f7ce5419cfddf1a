//! Errors that the program checker reports.

use crate::schedule::{MicrobatchId, Payload, Slot, Token, Version};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    #[error("program: {reason}")]
    Shape { reason: String },
    #[error("worker {worker}, instruction {at} (`{instruction}`): {fault}")]
    At { worker: String, at: usize, instruction: String, fault: Fault },
    #[error("worker {worker}, at its end: {fault}")]
    End { worker: String, fault: Fault },
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Fault {
    #[error("names a stage, edge or worker that this worker does not use")]
    NotMine,
    #[error("micro-batch {} belongs to another worker", .0.0)]
    NotMyItem(MicrobatchId),
    #[error("micro-batch {} is a duplicate", .0.0)]
    Again(MicrobatchId),
    #[error("micro-batch {} follows micro-batch {}, which has a later position", .item.0, .after.0)]
    OutOfOrder { item: MicrobatchId, after: MicrobatchId },
    #[error("micro-batch {} has not been loaded", .0.0)]
    NotLoaded(MicrobatchId),
    #[error("there is no Wait yet for the {} of micro-batch {} over edge {edge}", name(.kind), .item.0)]
    NotReceived { edge: u32, item: MicrobatchId, kind: Payload },
    #[error("the {} of micro-batch {} do not exist here at this point", name(.kind), .item.0)]
    NotMade { item: MicrobatchId, kind: Payload },
    #[error("the stage only saves the inputs of micro-batch {}, and there was no Recompute", .0.0)]
    NotRecomputed(MicrobatchId),
    #[error("weights: found version {}, the schedule requires {}", .found.0, .rule.0)]
    WrongVersion { found: Version, rule: Version },
    #[error("weights: the forward used version {}, this backward uses {}", .forward.0, .found.0)]
    OtherVersion { found: Version, forward: Version },
    #[error("the stage uses ZeRO {level}, whose rounds need {needs}")]
    Zero { level: u32, needs: &'static str },
    #[error("version {} is sharded and has not been gathered", .0.0)]
    NotGathered(Version),
    #[error("version {} does not exist at this point", .0.0)]
    NoVersion(Version),
    #[error("slot {} is in use, or there is no Wait yet for a Send of its content", .0.0)]
    SlotTaken(Slot),
    #[error("slot {} does not contain micro-batch {}", .slot.0, .item.0)]
    SlotEmpty { slot: Slot, item: MicrobatchId },
    #[error("slot: the forward used slot {}, this backward uses {}", .forward.0, .found.0)]
    OtherSlot { found: Slot, forward: Slot },
    #[error("{in_flight} micro-batches would be in flight; the cap is {cap}")]
    OverCap { in_flight: u32, cap: u32 },
    #[error("the gradient buffer is not free: {reason}")]
    GradientBuffer { reason: &'static str },
    #[error("token {} has no Wait yet", .0.0)]
    TokenTaken(Token),
    #[error("token {} was never posted", .0.0)]
    NoToken(Token),
    #[error("the channel's next {} has micro-batch {}, this has micro-batch {}", .other, .expected.0, .found.0)]
    ChannelOrder { other: &'static str, expected: MicrobatchId, found: MicrobatchId },
    #[error("another replica's next all-reduce is that of stage {stage}, round {round}, bucket {bucket}")]
    CollectiveOrder { stage: u32, round: u32, bucket: u32 },
    #[error("bucket {found} where bucket {expected} is next; the stage has {buckets}")]
    WrongBucket { found: u32, expected: u32, buckets: u32 },
    #[error("round {found} where round {expected} is next")]
    WrongRound { found: u32, expected: u32 },
    #[error("round {round} is not complete here: {reason}")]
    RoundIncomplete { round: u32, reason: &'static str },
    #[error("averages {found} micro-batches; the round has {expected}")]
    WrongCount { found: u32, expected: u32 },
    #[error("deadlock: {0}")]
    Deadlock(String),
    #[error("{left} of {what} left")]
    Left { what: &'static str, left: u64 },
}

fn name(kind: &Payload) -> &'static str {
    match kind {
        Payload::Activation => "activations",
        Payload::Gradient => "gradients",
    }
}
