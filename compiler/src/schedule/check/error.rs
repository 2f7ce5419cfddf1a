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
    #[error("names a stage, edge or worker that this worker has nothing to do with")]
    NotMine,
    #[error("item {} belongs to another worker", .0.0)]
    NotMyItem(MicrobatchId),
    #[error("item {} comes a second time", .0.0)]
    Again(MicrobatchId),
    #[error("item {} comes after item {}, which is later in the order of items", .item.0, .after.0)]
    OutOfOrder { item: MicrobatchId, after: MicrobatchId },
    #[error("item {} has not been loaded", .0.0)]
    NotLoaded(MicrobatchId),
    #[error("the {} of item {} over edge {edge} have not been waited for", name(.kind), .item.0)]
    NotReceived { edge: u32, item: MicrobatchId, kind: Payload },
    #[error("the {} of item {} do not exist here at this point", name(.kind), .item.0)]
    NotMade { item: MicrobatchId, kind: Payload },
    #[error("the stage keeps only what the forward of item {} read, and it has not run again", .0.0)]
    NotRecomputed(MicrobatchId),
    #[error("weights: found version {}, the schedule's rule says {}", .found.0, .rule.0)]
    WrongVersion { found: Version, rule: Version },
    #[error("weights: the forward used version {}, this backward uses {}", .forward.0, .found.0)]
    OtherVersion { found: Version, forward: Version },
    #[error("the stage is shared by ZeRO {level}, whose rounds are summed by {needs}")]
    Zero { level: u32, needs: &'static str },
    #[error("version {} is in shares that have not been gathered", .0.0)]
    NotGathered(Version),
    #[error("version {} does not exist at this point", .0.0)]
    NoVersion(Version),
    #[error("slot {} is in use, or a Send out of it has not been waited for", .0.0)]
    SlotTaken(Slot),
    #[error("slot {} does not hold item {}", .slot.0, .item.0)]
    SlotEmpty { slot: Slot, item: MicrobatchId },
    #[error("slot: the forward used slot {}, this backward uses {}", .forward.0, .found.0)]
    OtherSlot { found: Slot, forward: Slot },
    #[error("{in_flight} items would be in flight; the cap is {cap}")]
    OverCap { in_flight: u32, cap: u32 },
    #[error("the gradient buffer is not free: {reason}")]
    GradientBuffer { reason: &'static str },
    #[error("token {} is still waiting to be waited for", .0.0)]
    TokenTaken(Token),
    #[error("token {} names nothing that was posted", .0.0)]
    NoToken(Token),
    #[error("the channel's next {} has item {}, this has item {}", .other, .expected.0, .found.0)]
    ChannelOrder { other: &'static str, expected: MicrobatchId, found: MicrobatchId },
    #[error("another replica's next all-reduce is that of stage {stage}, round {round}, bucket {bucket}")]
    CollectiveOrder { stage: u32, round: u32, bucket: u32 },
    #[error("bucket {found} where bucket {expected} is next; the stage has {buckets}")]
    WrongBucket { found: u32, expected: u32, buckets: u32 },
    #[error("round {found} where round {expected} is next")]
    WrongRound { found: u32, expected: u32 },
    #[error("round {round} is not complete here: {reason}")]
    RoundIncomplete { round: u32, reason: &'static str },
    #[error("averages {found} items; the round has {expected}")]
    WrongCount { found: u32, expected: u32 },
    #[error("waits for ever: {0}")]
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
