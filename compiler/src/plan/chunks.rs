//! Cost model `pipec` for pipelines with several stages (chunks) per rank.
//!
//! p ranks of r replicas hold v chunks each. In a loop (interleaved, bfs), stage s is on rank s mod p. In a V (zbv,
//! dualpipev), stages s and 2p - 1 - s are on rank s. C, i, R are as in `cost_estimate`, F is the forward time, and
//! t(e) are the messages of a rank:
//!
//! ```text
//! P     = Σ over the chunks c of max C_s over the ranks: stages c p to c p + p - 1
//! L_k   = max of Σ t(e) over level l, over the stages s of rank k
//! loop    fill = Σ (C_s + 2 i_{s+1}) over the stages s < p - 1
//! V       fill = Σ (F_s + i_{s+1}) over them
//! T = max( ⌈m / r⌉ max(P, L_k) + fill,  m U_u + fill,  Σ (C_s + 2 i_s) over all stages ) + max Σ R_s of a rank
//! ```
//!
//! All ranks work on the same chunk at any time, a few micro-batches apart, so the slowest rank sets the time P per
//! micro-batch. The last rank starts once a micro-batch has passed the first chunks of all other ranks. After its last
//! backward that micro-batch passes back through them. For equal chunks the bubble is (p - 1)(F + B) of one chunk. This
//! is 1/v of the bubble with one stage per rank (Narayanan et al., SC 2021, section 2.2). In a V the backward is split,
//! and weight-gradient passes fill the drain (Qi et al., ICLR 2024, section 6).

use crate::cluster::Level;
use crate::plan::Edge;
use crate::plan::cost_estimate::{CostEstimate, FlowQuery, PlacedStage, messages, shared};
use crate::plan::links;
use crate::plan::schedule::Schedule;
use std::collections::BTreeMap;

pub fn rank_of(schedule: Schedule, ranks: u32, stage: u32) -> u32 {
    match schedule.is_on_a_v() {
        true => stage.min((2 * ranks).saturating_sub(1).saturating_sub(stage)),
        false => stage % ranks.max(1),
    }
}

/// The estimate for schedules with chunks: several stages share their devices.
pub fn outlook(asked: &FlowQuery, levels: &[Level], stages: &[PlacedStage], edges: &[Edge]) -> CostEstimate {
    let messages = messages(levels, stages, edges);
    let mut ranks: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (at, stage) in stages.iter().enumerate() {
        ranks.entry(stage.first).or_default().push(at);
    }
    let items = |replicas: u32| f64::from(asked.microbatches.div_ceil(replicas.max(1)).max(1));
    let compute = |at: usize| stages[at].forward_us + stages[at].backward_us;
    let comes_in =
        |at: usize| messages[at].iter().filter(|message| message.comes_in).map(|message| message.us).sum::<f64>();
    let slowest = |chunk: usize| {
        let end = (chunk + ranks.len()).min(stages.len());
        (chunk..end).map(compute).fold(0.0, f64::max)
    };
    let pace: f64 = (0..stages.len()).step_by(ranks.len().max(1)).map(slowest).sum();
    let (mut busiest, mut reduce, mut most) = (0.0f64, 0.0f64, 0.0f64);
    for held in ranks.values() {
        let replicas = held.first().map_or(1, |&at| stages[at].replicas);
        let work: f64 = held.iter().map(|&at| compute(at)).sum();
        let over = |level: usize| -> f64 {
            let all = held.iter().flat_map(|&at| &messages[at]);
            all.filter(|message| message.level == level).map(|message| message.us).sum()
        };
        let load = (0..levels.len()).map(over).fold(pace, f64::max);
        busiest = busiest.max(items(replicas) * load);
        most = most.max(items(replicas) * work);
        let rings =
            |at: usize| links::rings_of_range(levels, stages[at].first, stages[at].replicas, stages[at].gradient_bytes);
        let all_reduce = |&at: &usize| {
            let alone = if stages[at].replicas > 1 { links::all_reduce_us(&rings(at)) } else { 0.0 };
            alone + stages[at].tied_us
        };
        reduce = reduce.max(held.iter().map(all_reduce).sum());
    }
    for (_, us) in shared(asked, levels, stages, &messages) {
        busiest = busiest.max(f64::from(asked.microbatches.max(1)) * us);
    }
    let before = ranks.len().saturating_sub(1);
    let fill: f64 = match asked.schedule.is_on_a_v() {
        true => (0..before).map(|at| stages[at].forward_us + comes_in(at + 1)).sum(),
        false => (0..before).map(|at| compute(at) + 2.0 * comes_in(at + 1)).sum(),
    };
    let way: f64 = (0..stages.len()).map(|at| compute(at) + 2.0 * comes_in(at)).sum();
    let minibatch_us = (busiest + fill).max(way) + reduce;
    let bubble = if minibatch_us > 0.0 { (1.0 - most / minibatch_us).max(0.0) } else { 0.0 };
    CostEstimate { minibatch_us, busiest_us: busiest, step_us: minibatch_us, bubble }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;

    #[test]
    fn chunks_divide_the_bubble() {
        let cluster = levels("4:1MB/s").unwrap().levels;
        let time = |schedule: Schedule, chunks: u32| {
            let stage = |at: u32| {
                let first = rank_of(schedule, 4, at);
                let forward_us = 1.0 / f64::from(chunks);
                PlacedStage {
                    forward_us,
                    backward_us: 2.0 * forward_us,
                    gradient_bytes: 0.0,
                    first,
                    replicas: 1,
                    in_flight: 1,
                    tied_us: 0.0,
                }
            };
            let stages: Vec<PlacedStage> = (0..4 * chunks).map(stage).collect();
            outlook(&FlowQuery { schedule, microbatches: 8, latency: false, bucket_bytes: 1e9 }, &cluster, &stages, &[])
                .minibatch_us
        };
        // Eight micro-batches of 3 us on each rank, and a bubble of 9 / v.
        assert_eq!(time(Schedule::Interleaved, 1), 24.0 + 9.0);
        assert_eq!(time(Schedule::Interleaved, 2), 24.0 + 4.5);
        assert_eq!(time(Schedule::Zbv, 2), 24.0 + 1.5);
    }

    #[test]
    fn stages_go_round_or_down_and_up() {
        let ranks = |schedule| (0..6).map(|stage| rank_of(schedule, 3, stage)).collect::<Vec<_>>();
        assert_eq!(ranks(Schedule::Interleaved), [0, 1, 2, 0, 1, 2]);
        assert_eq!(ranks(Schedule::Zbv), [0, 1, 2, 2, 1, 0]);
    }
}
