//! Cost model `pipec` for stages placed on devices.
//!
//! Costs are per item: a whole minibatch under 1F1B-RR and inference, a micro-batch under the other schedules. T is the
//! time of a minibatch; for inference, of one item.
//!
//! ```text
//! C_s    = forward + backward (+ forward again where it is recomputed) + q_s X_s       inference: forward
//! L_s,k  = Σ t(e) over the edges of s that go over level k + q_s ρ_s,k
//! U_u    = Σ over stages on unit u of a shared level: the same, weighted by the fraction of the stage's devices on u
//!
//! never flushed    T = max( C_s / r_s,  q_s R_s / r_s,  L_s,k / r_s,  U_u )
//! 2BW              T = max( ⌈m / r_s⌉ C_s,  R_s,  ⌈m / r_s⌉ L_s,k,  m U_u )
//! flushed          T = P + H + Σ (C_s + 2 i_s) + E       P = max( (⌈m / r_s⌉ - 1) max(C_s, L_s,k),  (m - 1) U_u )
//! latency          T = Σ (forward + i_s)
//! ```
//!
//! | symbol | meaning |
//! | --- | --- |
//! | t, ρ, R | message and all-reduce, see `links` |
//! | X | exchange of gradients of tied parameters, see `tied`; with a flush it is part of R in E |
//! | r_s, m | replicas of stage s, micro-batches of a minibatch |
//! | q_s | all-reduces per item of a replica: 1 under 1F1B-RR, whose replicas step once a round; 1 / ⌈m / r_s⌉ under 2BW; else 0 |
//! | i_s | Σ t(e) over the incoming edges of s |
//! | c_s, W_s | in-flight limit of a replica; way of an item from s to the end and back, Σ over the stages from s, without i_s |
//! | H | max of ⌊(⌈m / r_s⌉ - 1) / c_s⌋ (W_s - c_s P / (⌈m / r_s⌉ - 1)), at least 0; none if the backward is split |
//! | E | max of R_s less the buckets that overlap with the last backward, and less Σ (backward + i) of the stages before s |
//!
//! The model assumes the runtime's overlap. Under 1F1B-RR the all-reduce of a round starts after the round's last
//! backward and must end before the step. Later items run meanwhile, up to the in-flight limits. All-reduces of one stage
//! run one after the other, so R_s is a separate resource. Messages are asynchronous and overlap with compute. Each
//! edge costs both its stages one message out and one in per item (activations and gradients). With a flush, the
//! last bucket of the all-reduce follows the last backward, and fill and drain take one item's forward and backward
//! latency. A replica with c_s items in flight starts the next one when the backward of the first has come back, so slow
//! messages hold it although nobody is busy: that is H. For straight pipelines of equal stages without messages, T is
//! exactly (m - 1) C + Σ C + E.

use crate::cluster::Level;
use crate::plan::Edge;
use crate::plan::in_flight::ScheduleFlow;
use crate::plan::links::{self, Ring, Wire};
use crate::plan::schedule::{Schedule, UpdateRule};
use std::collections::BTreeMap;

/// A stage with its devices: `first`, `first + 1`, one per replica.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedStage {
    /// Microseconds per item.
    pub forward_us: f64,
    /// Microseconds per item, recomputation included.
    pub backward_us: f64,
    /// Gradient sums that replicas all-reduce; each parameter counts once.
    pub gradient_bytes: f64,
    pub first: u32,
    pub replicas: u32,
    /// Micro-batches in flight on each replica.
    pub in_flight: u32,
    /// Exchange of the gradients of tied parameters, per update.
    pub tied_us: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct CostEstimate {
    /// The objective: microseconds per minibatch, or the latency of one item.
    pub minibatch_us: f64,
    /// The part of `minibatch_us` due to the busiest stage or link.
    pub busiest_us: f64,
    pub step_us: f64,
    /// Fraction of the step in which the busiest stage waits for the pipeline to fill and drain.
    pub bubble: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FlowQuery {
    pub schedule: Schedule,
    pub microbatches: u32,
    /// True if the objective is the latency of one item.
    pub latency: bool,
    /// Size of a gradient bucket.
    pub bucket_bytes: f64,
}

impl FlowQuery {
    pub fn of(flow: &ScheduleFlow, latency: bool, bucket_bytes: f64) -> FlowQuery {
        FlowQuery { schedule: flow.schedule, microbatches: flow.microbatches, latency, bucket_bytes }
    }

    pub fn trains(&self) -> bool {
        self.schedule.trains()
    }

    /// q_s: all-reduces per item of a replica.
    pub fn reduces(&self, replicas: u32) -> f64 {
        match self.schedule.update() {
            UpdateRule::Round => 1.0,
            UpdateRule::DoubleBuffered => 1.0 / self.dealt(replicas),
            _ => 0.0,
        }
    }

    /// All-reduces per item over all replicas.
    fn all_reduces_per_item_of_all(&self, replicas: u32) -> f64 {
        match self.schedule.update() {
            UpdateRule::Round => 1.0 / f64::from(replicas.max(1)),
            UpdateRule::DoubleBuffered => 1.0 / f64::from(self.microbatches.max(1)),
            _ => 0.0,
        }
    }

    /// ⌈m / r⌉: items of a minibatch on the busiest replica.
    fn dealt(&self, replicas: u32) -> f64 {
        f64::from(self.microbatches.div_ceil(replicas.max(1)).max(1))
    }

    /// Weight of the busiest replica's time per item in the objective.
    pub fn weight(&self, replicas: u32) -> f64 {
        match self.schedule.update() {
            _ if self.latency => 0.0,
            UpdateRule::DoubleBuffered => self.dealt(replicas),
            UpdateRule::Round | UpdateRule::None => 1.0 / f64::from(replicas),
            UpdateRule::Flush => self.dealt(replicas) - 1.0,
        }
    }

    /// Weight of the busiest shared link's time per item.
    pub fn link_weight(&self) -> f64 {
        match self.schedule.update() {
            _ if self.latency => 0.0,
            UpdateRule::DoubleBuffered => f64::from(self.microbatches.max(1)),
            UpdateRule::Round | UpdateRule::None => 1.0,
            UpdateRule::Flush => f64::from(self.microbatches.max(1) - 1),
        }
    }

    /// The rounds of `in_flight` items for which a replica waits until the first has come back; 0 if it never waits.
    pub fn holds(&self, replicas: u32, in_flight: u32) -> u32 {
        let can_wait = self.schedule.flushes() && !self.schedule.splits_backward() && !self.latency;
        if can_wait { (self.dealt(replicas) as u32 - 1) / in_flight.max(1) } else { 0 }
    }

    /// False if waits for items in flight alone take longer than `limit_us`; `way_us` is the way of one to the end and back.
    pub fn comes_back(&self, replicas: u32, in_flight: u32, way_us: f64, limit_us: f64) -> bool {
        f64::from(self.holds(replicas, in_flight)) * way_us <= limit_us
    }

    /// The part of an all-reduce after the last backward; all but its last bucket overlap with it.
    fn exposed_us(&self, stage: &PlacedStage, all_reduce_us: f64) -> f64 {
        let last = (self.bucket_bytes / stage.gradient_bytes.max(1.0)).min(1.0);
        (all_reduce_us - (1.0 - last) * stage.backward_us).max(all_reduce_us * last)
    }

    /// True if the latency of one item is added to the objective.
    pub fn adds(&self) -> bool {
        self.latency || !self.schedule.is_continuous()
    }
}

/// One stage's contribution to the objective.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageLoad {
    /// Contribution to the maximum over stages and links.
    pub busiest_us: f64,
    /// Contribution to the sum: fill and drain, or latency.
    pub way_us: f64,
    /// The part of `way_us` that messages to the stage take.
    pub in_us: f64,
    /// The all-reduce after the last backward; the longest one counts.
    pub reduce_us: f64,
}

/// One message per item.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Message {
    /// The outermost level it crosses.
    pub level: usize,
    pub us: f64,
    pub comes_in: bool,
}

impl StageLoad {
    /// Load of a stage with the given messages. Traffic over shared levels is added in [`outlook`], because several
    /// stages contribute to it.
    pub fn of(asked: &FlowQuery, levels: &[Level], stage: &PlacedStage, messages: &[Message]) -> StageLoad {
        let rings = match asked.trains() && stage.replicas > 1 {
            true => links::rings_of_range(levels, stage.first, stage.replicas, stage.gradient_bytes),
            false => Vec::new(),
        };
        let compute = stage.forward_us + if asked.trains() { stage.backward_us } else { 0.0 };
        let all_reduce = links::all_reduce_us(&rings);
        let q = asked.reduces(stage.replicas);
        let mut item = (compute + q * stage.tied_us).max(q * all_reduce);
        for level in 0..levels.len() {
            item = item.max(level_traffic_us(asked, &rings, messages, level, q));
        }
        let comes_in: f64 = messages.iter().filter(|message| message.comes_in).map(|message| message.us).sum();
        let ways = if asked.trains() { 2.0 } else { 1.0 };
        StageLoad {
            busiest_us: asked.weight(stage.replicas) * item,
            way_us: if asked.adds() { compute + ways * comes_in } else { 0.0 },
            in_us: if asked.adds() { ways * comes_in } else { 0.0 },
            reduce_us: if asked.adds() { asked.exposed_us(stage, all_reduce) + stage.tied_us } else { 0.0 },
        }
    }
}

/// Outgoing traffic over one level per item of a replica. In training, incoming traffic is equal; in inference the
/// larger of the two counts.
fn level_traffic_us(asked: &FlowQuery, rings: &[Ring], messages: &[Message], level: usize, q: f64) -> f64 {
    let reduce: f64 = rings.iter().filter(|ring| ring.level == level).map(|ring| ring.us).sum();
    let sum = |wanted: &dyn Fn(&Message) -> bool| -> f64 {
        messages.iter().filter(|message| message.level == level && wanted(message)).map(|message| message.us).sum()
    };
    if asked.trains() {
        return sum(&|_| true) + q * reduce;
    }
    sum(&|message| message.comes_in).max(sum(&|message| !message.comes_in))
}

/// Estimates time per minibatch and bubble of placed stages with these edges (forward bytes per item).
pub fn outlook(asked: &FlowQuery, levels: &[Level], stages: &[PlacedStage], edges: &[Edge]) -> CostEstimate {
    let messages = messages(levels, stages, edges);
    let loads: Vec<StageLoad> =
        stages.iter().zip(&messages).map(|(stage, messages)| StageLoad::of(asked, levels, stage, messages)).collect();
    let mut busiest = loads.iter().map(|load| load.busiest_us).fold(0.0, f64::max);
    for (_, us) in shared(asked, levels, stages, &messages) {
        busiest = busiest.max(asked.link_weight() * us);
    }
    let (mut way, mut held) = (0.0, 0.0f64);
    for (stage, load) in stages.iter().zip(&loads).rev() {
        way += load.way_us;
        let rounds = f64::from(asked.holds(stage.replicas, stage.in_flight));
        let pace = busiest * f64::from(stage.in_flight.max(1)) / asked.weight(stage.replicas).max(1.0);
        held = held.max(rounds * (way - load.in_us - pace));
    }
    busiest += held;
    // The backward of a minibatch ends in the first stage, so later ones may take longer to all-reduce.
    let (mut before, mut reduce) = (0.0, 0.0f64);
    for (stage, load) in stages.iter().zip(&loads) {
        before += load.in_us / 2.0;
        reduce = reduce.max(load.reduce_us - before);
        before += stage.backward_us;
    }
    let minibatch_us = busiest + way + reduce;
    let step_us = minibatch_us;
    let work = |stage: &PlacedStage| (stage.forward_us + stage.backward_us) * asked.dealt(stage.replicas);
    let most = stages.iter().map(work).fold(0.0, f64::max);
    let bubble = if asked.adds() && !asked.latency && step_us > 0.0 { (1.0 - most / step_us).max(0.0) } else { 0.0 };
    CostEstimate { minibatch_us, busiest_us: busiest, step_us, bubble }
}

/// Messages per item, by stage.
pub fn messages(levels: &[Level], stages: &[PlacedStage], edges: &[Edge]) -> Vec<Vec<Message>> {
    let mut messages = vec![Vec::new(); stages.len()];
    for edge in edges {
        let (from, to) = (&stages[edge.from.index()], &stages[edge.to.index()]);
        if (from.first, from.replicas) == (to.first, to.replicas) {
            continue;
        }
        // A stage's devices are consecutive, so the farthest two are at the ends.
        let ends = |stage: &PlacedStage| [stage.first, stage.first + stage.replicas.max(1) - 1];
        let all = ends(from).into_iter().chain(ends(to));
        let Some(wire) = Wire::between(levels, all) else { continue };
        let us = wire.time(edge.bytes as f64);
        messages[edge.from.index()].push(Message { level: wire.level, us, comes_in: false });
        messages[edge.to.index()].push(Message { level: wire.level, us, comes_in: true });
    }
    messages
}

/// U_u: microseconds per item over the port of each unit, by level and unit.
pub fn shared(
    asked: &FlowQuery,
    levels: &[Level],
    stages: &[PlacedStage],
    messages: &[Vec<Message>],
) -> BTreeMap<(usize, u32), f64> {
    let mut ports: BTreeMap<(usize, u32), [f64; 3]> = BTreeMap::new();
    let mut unit = 1u64;
    for (at, level) in levels.iter().enumerate() {
        if level.shared && at > 0 {
            for (stage, messages) in stages.iter().zip(messages) {
                let r = f64::from(stage.replicas);
                let rings = match asked.trains() {
                    true => links::rings_of_range(levels, stage.first, stage.replicas, stage.gradient_bytes),
                    false => Vec::new(),
                };
                let reduce: f64 = rings.iter().filter(|ring| ring.level == at).map(|ring| ring.us).sum();
                let sum = |comes_in: bool| -> f64 {
                    let over = messages.iter().filter(|message| message.level == at && message.comes_in == comes_in);
                    over.map(|message| message.us).sum()
                };
                let (first, last) = (u64::from(stage.first), u64::from(stage.first + stage.replicas.max(1) - 1));
                for of in first / unit..=last / unit {
                    let on = (last + 1).min((of + 1) * unit) - first.max(of * unit);
                    let port = ports.entry((at, of as u32)).or_default();
                    port[0] += sum(true) * on as f64 / r;
                    port[1] += sum(false) * on as f64 / r;
                    port[2] += asked.all_reduces_per_item_of_all(stage.replicas) * reduce;
                }
            }
        }
        unit = unit.saturating_mul(u64::from(level.count.max(1)));
    }
    let one = |[comes_in, goes_out, reduce]: [f64; 3]| match asked.trains() {
        true => comes_in + goes_out + reduce,
        false => comes_in.max(goes_out),
    };
    ports.into_iter().map(|(key, port)| (key, one(port))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;
    use crate::plan::StageId;

    fn stage(first: u32, replicas: u32, us: f64, gradient_bytes: f64) -> PlacedStage {
        PlacedStage {
            forward_us: us,
            backward_us: 2.0 * us,
            gradient_bytes,
            first,
            replicas,
            in_flight: 8,
            tied_us: 0.0,
        }
    }

    fn edge(from: u32, to: u32, bytes: u64) -> Edge {
        Edge { from: StageId(from), to: StageId(to), tensors: Vec::new(), bytes }
    }

    fn asked(schedule: Schedule, microbatches: u32) -> FlowQuery {
        FlowQuery { schedule, microbatches, latency: false, bucket_bytes: 1e9 }
    }

    #[test]
    fn the_busiest_counts() {
        let cluster = levels("4:1MB/s").unwrap().levels;
        let us = |stages: &[PlacedStage], bytes| {
            outlook(&asked(Schedule::OneFOneBRr, 1), &cluster, stages, &[edge(0, 1, bytes)]).minibatch_us
        };
        // Stage 0 computes 90 us on 3 replicas; its all-reduce takes 2 · 2/3 · 30 = 40 us per round of 3.
        assert_eq!(us(&[stage(0, 3, 30.0, 30.0), stage(3, 1, 10.0, 0.0)], 0), 30.0);
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
        near(us(&[stage(0, 3, 30.0, 150.0), stage(3, 1, 10.0, 0.0)], 0), 200.0 / 3.0);
        // A message of 50 us: each of three senders sends every third item, the receiver receives all.
        assert_eq!(us(&[stage(0, 3, 30.0, 30.0), stage(3, 1, 10.0, 0.0)], 50), 50.0);
        // One port carries both the all-reduce and the messages.
        near(us(&[stage(0, 3, 10.0, 150.0), stage(3, 1, 10.0, 0.0)], 20), 220.0 / 3.0);
    }

    #[test]
    fn a_shared_port_carries_the_sum() {
        let mut cluster = levels("2:1000MB/s,2:1MB/s").unwrap().levels;
        let stages: Vec<PlacedStage> = (0..4).map(|at| stage(at, 1, 5.0, 0.0)).collect();
        let edges = [edge(0, 2, 10), edge(1, 3, 10), edge(0, 1, 10), edge(2, 3, 10)];
        let us = |cluster: &[Level]| outlook(&asked(Schedule::OneFOneBRr, 1), cluster, &stages, &edges).minibatch_us;
        assert_eq!(us(&cluster), 15.0);
        cluster[1].shared = true;
        assert_eq!(us(&cluster), 20.0);
    }

    #[test]
    fn the_replica_with_most_items_of_a_minibatch_counts() {
        let cluster = levels("4:1MB/s").unwrap().levels;
        let us = |microbatches, stages: &[PlacedStage]| {
            outlook(&asked(Schedule::TwoBw, microbatches), &cluster, stages, &[]).minibatch_us
        };
        // Four items on three replicas: one replica has two of 90 us.
        assert_eq!(us(4, &[stage(0, 3, 30.0, 0.0), stage(3, 1, 10.0, 0.0)]), 180.0);
        assert_eq!(us(6, &[stage(0, 3, 30.0, 0.0), stage(3, 1, 10.0, 0.0)]), 180.0);
        // One all-reduce of 200 us for all of them.
        assert!((us(4, &[stage(0, 3, 30.0, 150.0)]) - 200.0).abs() < 1e-9);
    }

    #[test]
    fn flushes_fill_and_drain() {
        let cluster = levels("4:1MB/s").unwrap().levels;
        let straight: Vec<PlacedStage> = (0..4).map(|at| stage(at, 1, 1.0, 0.0)).collect();
        let flushed = outlook(&asked(Schedule::OneFOneB, 8), &cluster, &straight, &[]);
        assert_eq!((flushed.minibatch_us, flushed.step_us), (33.0, 33.0));
        assert!((flushed.bubble - 9.0 / 33.0).abs() < 1e-12);
        // Data parallelism: two micro-batches on each of four, then the all-reduce of 2 · 3/4 · 8.
        let all = outlook(&asked(Schedule::Gpipe, 8), &cluster, &[stage(0, 4, 1.0, 8.0)], &[]);
        assert_eq!(all.minibatch_us, 6.0 + 12.0);
        let way = FlowQuery { schedule: Schedule::Inference, microbatches: 1, latency: true, bucket_bytes: 1e9 };
        assert_eq!(outlook(&way, &cluster, &straight, &[edge(0, 1, 7)]).minibatch_us, 4.0 + 7.0);
    }
}
