//! ZeRO over the replicas of a stage (Rajbhandari et al., "ZeRO: memory optimizations toward training trillion
//! parameter models", SC 2020).
//!
//! ```text
//! level   optimizer   gradients        weights
//! 0       O           G                W       the sums of all replicas replace those of the replica
//! 1       O / r       G                W       the same, of the replica's shard
//! 0       O           G + G            W       not in place, as in torchtitan; 2BW reuses the buffer of an unused older
//!                                              version for the sums of all replicas
//! 1       O / r       G + G / r        W       the same, for the replica's shard; under 2BW beside two versions
//! 2       O / r       v G / r + g      W       sharded sums, and the gradients of the op that is running
//! 3       O / r       v G / r + g      W / r   each version is sharded; g holds the op's gathered weights or its gradients, both for
//!                                              kernels that need both (recurrent layers)
//! ```
//!
//! Under 1F1B-RR, a replica contributes the gradients of up to V rounds, V its weight versions, before it steps the first of
//! them. In `f32` they take the memory of versions that are not made yet. Narrower weights leave them no such memory, so
//! V - 1 more G count at levels 0 and 1.
//!
//! O is the optimizer state, with master copies for two-byte parameters. r is the number of replicas and g the
//! parameter bytes of the op that uses most. v is 2 with several weight versions, else 1: other replicas may add to a
//! shard before its owner has stepped the previous round.
//!
//! A shard is a range of elements of each parameter. The step is elementwise, so the weights are bitwise those without
//! ZeRO at level 1. From level 2, each gradient is reduce-scattered as soon as it is made, per micro-batch. The result
//! is bitwise the same if a replica has one micro-batch per round; else the order of summation differs. The
//! reduce-scatter moves gradient sums and the all-gather weights, each half as many bytes as an all-reduce of them. At
//! level 3, forward and backward each gather the weights of an op before it and release them after it, so weights
//! travel twice per micro-batch. Tied weights are not sharded: every stage that has them steps all of them. From level 2,
//! g is at least their sum over stages, and their sum over replicas if that is not in place: both exist at once.
//!
//! With a shard degree (hybrid sharding; Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2), r is the degree: groups
//! of so many consecutive replicas shard, and each shard is all-reduced across the groups once per round.

use crate::plan::memory::{MemoryMultipliers, MemoryTerms};
use crate::plan::{Plan, Stage};
use std::fmt;

/// What the replicas of each stage shard, and how many of them together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Zero {
    /// ZeRO stage, 0 to 3.
    pub level: u32,
    /// The most replicas that shard together; 0 for all of a stage.
    pub degree: u32,
}

impl Zero {
    /// Sharding over all replicas of a stage.
    pub fn over_all(level: u32) -> Zero {
        Zero { level, degree: 0 }
    }

    /// How many of these replicas shard together: the largest divisor of their number up to the degree, or all if that
    /// is 1.
    pub fn shards(self, replicas: u32) -> u32 {
        let is_whole = |shards: &u32| replicas.is_multiple_of(*shards);
        let groups = (2..=self.degree.min(replicas)).rev().find(is_whole);
        groups.unwrap_or(replicas)
    }

    /// The same for a stage of so many replicas: no ZeRO for one, and no degree if all shard together.
    pub fn of_stage(self, replicas: u32) -> Zero {
        let shards = self.shards(replicas);
        match self.level {
            0 => Zero::default(),
            _ if replicas < 2 => Zero::default(),
            level => Zero { level, degree: if shards == replicas { 0 } else { shards } },
        }
    }
}

impl fmt::Display for Zero {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.degree {
            0 => write!(f, "{}", self.level),
            degree => write!(f, "{}:{degree}", self.level),
        }
    }
}

impl Stage {
    /// Its ZeRO.
    pub fn sharding(&self) -> Zero {
        Zero { level: self.zero, degree: self.shard_degree }
    }
}

impl Plan {
    /// The highest ZeRO stage, with the shard degree that was asked for if any stage has one.
    pub fn zero(&self) -> Zero {
        let largest = self.stages.iter().map(|stage| stage.shard_degree).max().unwrap_or(0);
        let asked = self.options.get("shard_degree").and_then(|asked| u32::try_from(asked.as_u64()?).ok());
        Zero { level: self.most_zero(), degree: if largest > 0 { asked.unwrap_or(largest) } else { 0 } }
    }
}

pub const MOST: u32 = 3;
pub const LEVELS: &str = "from 0 to 3";

fn share(bytes: u64, replicas: u32) -> u64 {
    bytes.div_ceil(u64::from(replicas.max(1)))
}

/// Bytes of gradients and optimizer state per replica of a training stage.
pub fn held(holdings: &MemoryTerms, multiples: &MemoryMultipliers) -> (u64, u64) {
    let MemoryTerms { weights, summed, masters, terms, shared, largest, needed, .. } = *holdings;
    let MemoryMultipliers { replicas, optimizer_state, .. } = *multiples;
    let shards = multiples.zero.shards(replicas);
    // `as` saturates; `optimizer_state` was validated with the problem (0 to 64).
    let state = |summed: u64, masters: u64| ((summed as f64 * optimizer_state).ceil() as u64).saturating_add(masters);
    // Tied weights are not sharded, and each stage adds the gradient sums of the others.
    let alone = |bytes: u64, shared: u64| share(bytes.saturating_sub(shared), shards).saturating_add(shared);
    let own = terms.saturating_add(shared);
    let sums = alone(terms, shared);
    // With an older weight version, a replica starts on the next round's sums before the others finish the previous
    // one.
    let open = if multiples.versions > 1 { sums.saturating_mul(2) } else { sums };
    // Under 2BW this happens before its shard of the previous round arrived, so all its sums wait.
    let waiting = if multiples.schedule.is_double_buffered() { terms } else { shared };
    // Under 2BW the all-replica sum is made when no micro-batch needs the older version any more, and reuses its
    // buffer.
    let reused = if multiples.schedule.is_double_buffered() && masters == 0 { weights.min(terms) } else { 0 };
    // Tied weights have a sum of all replicas, unless it is in place, and one of all stages.
    let tied = if multiples.in_place { shared } else { shared.saturating_mul(2) };
    let rounds = if multiples.schedule.is_round_robin() && masters > 0 { multiples.versions.max(1) } else { 1 };
    let contributed = own.saturating_add(terms.saturating_mul(u64::from(rounds - 1)));
    let gradients = match multiples.level() {
        0 if replicas < 2 => own,
        // Each replica keeps the all-replica sums, or its shard of them, where they are.
        0 | 1 if multiples.in_place => contributed,
        0 => contributed.saturating_add(terms).saturating_sub(reused),
        1 => contributed
            .saturating_add(share(terms.saturating_sub(shared), shards))
            .saturating_add(waiting)
            .saturating_sub(reused),
        // The all-reduce of tied weights runs when no op makes gradients, so the two share the space.
        2 => largest.max(tied).saturating_add(open),
        _ => needed.max(tied).saturating_add(open),
    };
    let stepped = match multiples.level() {
        0 => state(summed, masters),
        _ => state(alone(summed, shared), alone(masters, shared.min(masters))),
    };
    (gradients, stepped)
}

/// Bytes of one weight version that a replica holds between ops.
pub fn kept(holdings: &MemoryTerms, multiples: &MemoryMultipliers) -> u64 {
    let MemoryTerms { weights, shared, .. } = *holdings;
    match multiples.level() {
        // `shared` counts sums, which may be wider than weights, hence the `min`.
        3 => {
            let shards = multiples.zero.shards(multiples.replicas);
            share(weights.saturating_sub(shared), shards).saturating_add(shared).min(weights)
        }
        _ => weights,
    }
}

/// Checks the ZeRO fields of a stage; returns the contradiction if there is one.
pub fn contradiction(stage: &Stage, trains: bool) -> Option<String> {
    let (all, held) = (stage.parameter_bytes, stage.memory.weights);
    match stage.zero {
        0..3 if all > 0 => {
            Some(format!("parameter_bytes is {all}, but is only valid with zero 3: zero is {}", stage.zero))
        }
        _ if stage.shard_degree > 0 && !(2..stage.replicas).contains(&stage.shard_degree) => {
            Some(format!("shard_degree is {}, expected 2 to {}", stage.shard_degree, stage.replicas.saturating_sub(1)))
        }
        _ if stage.shard_degree > 0 && (!stage.replicas.is_multiple_of(stage.shard_degree) || stage.zero == 0) => Some(
            format!("shard_degree is {} with {} replicas and zero {}", stage.shard_degree, stage.replicas, stage.zero),
        ),
        3 if stage.replicas > 0 && !(share(all, stage.shards())..=all).contains(&held) => {
            Some(format!("weights are {held} B, not a shard of {all} B for one of {} replicas", stage.shards()))
        }
        0 => None,
        level if level > MOST => Some(format!("zero is {level}; ZeRO has stages 0 to {MOST}")),
        level if stage.replicas < 2 => Some(format!("zero is {level}, but ZeRO needs at least 2 replicas")),
        level if !trains => Some(format!("zero is {level}, but the schedule does not train")),
        _ => None,
    }
}
