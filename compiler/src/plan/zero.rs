//! ZeRO over the replicas of a stage (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020):
//! what all replicas would hold alike, each holds a share of.
//!
//! ```text
//! level   optimizer   gradients   weights
//! 0       O           G + G       W            those of the replica's items, and their sum over replicas; under 2BW that lies where an older version
//!                                              lay, of which no item is left then
//! 1       O / r       G + G / r   W            of the sum its share; under 2BW G + G / r lie beside two versions
//! 2       O / r       v G / r + g W            of the sum its share, and the gradients that an op is making
//! 3       O / r       v G / r + g W / r        of each version its share, and the weights that an op reads or the gradients that it makes; both
//!                                              where a kernel does both, as those of recurrent layers do
//! ```
//!
//! O is the optimizer's state, and masters where parameters have two bytes a number. r are the replicas, g the parameters of the op that uses most, v is 2
//! where a stage has several versions of its weights, else 1: others may add to a replica's share of a round before it has stepped the one before. A share is a range of the elements of each parameter, so that a step is the same elementwise work on the same
//! numbers, and weights come to the same bits as without shares. At level 2 a gradient goes to its owners as soon as it is made, item by
//! item and in their order: the bits are those without shares where a replica has one item in a round, and else those of another order of
//! sums. Then each item's gradients go by a reduce-scatter of their own, beside its backward. Gradients are summed by a reduce-scatter, new weights come by an
//! all-gather: together they carry what an all-reduce carries. At level 3 no version is gathered as a whole: a forward and a backward gather
//! what each of their ops reads in front of it, and drop it behind it, so that weights travel twice for every item. A parameter that stages share is stepped whole by all who hold it.

use crate::plan::memory::{MemoryMultipliers, MemoryTerms};
use crate::plan::{ScheduleKind, Stage};

/// The highest level.
pub const MOST: u32 = 3;
/// The levels in words.
pub const LEVELS: &str = "from 0 to 3";

/// Bytes of a share of these.
fn share(bytes: u64, replicas: u32) -> u64 {
    bytes.div_ceil(u64::from(replicas.max(1)))
}

/// Bytes of gradients and of the optimizer's state that a replica of a stage that trains holds.
pub fn held(holdings: &MemoryTerms, multiples: &MemoryMultipliers) -> (u64, u64) {
    let MemoryTerms { weights, summed, masters, terms, shared, largest, needed, .. } = *holdings;
    let MemoryMultipliers { replicas, optimizer_state, .. } = *multiples;
    // `as` saturates; state is a small factor checked with the problem.
    let state = |summed: u64, masters: u64| ((summed as f64 * optimizer_state).ceil() as u64).saturating_add(masters);
    // What stages share is whole at each of them, and each adds up with what the others have of it.
    let alone = |bytes: u64, shared: u64| share(bytes.saturating_sub(shared), replicas).saturating_add(shared);
    let own = terms.saturating_add(shared);
    let sums = alone(terms, shared);
    // Where an older version does, a replica adds to the sums of a round before the others are done with the one before.
    let open = if multiples.versions > 1 { sums.saturating_mul(2) } else { sums };
    // Under 2BW it does so before it has its share of that, and while its own sums of that wait for the others'.
    let waiting = if multiples.schedule == ScheduleKind::TwoBw { terms } else { shared };
    // Under 2BW a round is added up when no item sees the older version any more: the sum lies where that lay.
    let reused = if multiples.schedule == ScheduleKind::TwoBw && masters == 0 { weights.min(terms) } else { 0 };
    let gradients = match multiples.level() {
        0 if replicas < 2 => own,
        0 => own.saturating_add(terms).saturating_sub(reused),
        1 => own
            .saturating_add(share(terms.saturating_sub(shared), replicas))
            .saturating_add(waiting)
            .saturating_sub(reused),
        // It is added up when no op makes gradients: what the largest would take has room for that.
        2 => largest.max(shared).saturating_add(open),
        _ => needed.max(shared).saturating_add(open),
    };
    let stepped = match multiples.level() {
        0 => state(summed, masters),
        _ => state(alone(summed, shared), alone(masters, shared.min(masters))),
    };
    (gradients, stepped)
}

/// Bytes of one version of the weights that a replica of a stage holds between its ops.
pub fn kept(holdings: &MemoryTerms, multiples: &MemoryMultipliers) -> u64 {
    let MemoryTerms { weights, shared, .. } = *holdings;
    match multiples.level() {
        // Sums are no narrower than weights: of what stages share no less than all is counted.
        3 => share(weights.saturating_sub(shared), multiples.replicas).saturating_add(shared).min(weights),
        _ => weights,
    }
}

/// Why a stage cannot be shared as it says, if so.
pub fn contradiction(stage: &Stage, trains: bool) -> Option<String> {
    let (all, held) = (stage.parameter_bytes, stage.memory.weights);
    match stage.zero {
        0..3 if all > 0 => {
            Some(format!("parameter_bytes is {all}, and its replicas hold all of them: zero is {}", stage.zero))
        }
        3 if stage.replicas > 0 && !(share(all, stage.replicas)..=all).contains(&held) => {
            Some(format!("weights are {held} B, no share of {all} B for one of {} replicas", stage.replicas))
        }
        0 => None,
        level if level > MOST => Some(format!("zero is {level}; ZeRO has levels 0 to {MOST}")),
        level if stage.replicas < 2 => Some(format!("zero is {level}, and one replica has nobody to share with")),
        level if !trains => Some(format!("zero is {level}, and nothing is trained")),
        _ => None,
    }
}
