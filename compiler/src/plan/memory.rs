//! What one replica of a stage holds at its fullest moment, as the runtime allocates it.
//!
//! ```text
//! total       = weights · versions + gradients + optimizer + activations + between + messages + workspace
//! gradients   = terms, twice where replicas add theirs up, + (1 + late) · shared        where replicas have shares, also of weights: see `zero`
//! optimizer   = state · summed + masters                                   the same
//! activations = in_flight · (saved + inputs + sent)          recomputed: in_flight · (inputs + outputs) + max(1, apart) · (saved + outputs)
//!               saved + inputs + sent + (in_flight - 1) · outputs                   inference
//! between     = apart · halves + (apart - 1) · outputs       0 where backwards are whole
//! messages    = passed + outputs                             inference: inputs
//! ```
//!
//! `saved` is what forward keeps for backward, what is fed to the model included, `inputs` the tensors that come from other stages, `sent` those of the `outputs`, which
//! go to others, that would not be kept otherwise; `workspace` is the arena: what is alive within a run, scratch included, at the op
//! where that is most ([`arena`](crate::profile::arena): without what crosses a cut, and where backwards are split without their halves), and what is put by where gradients of several items are made at once ([`joint`](crate::pass::batched_weight_grad)). The `terms` of gradients have a sum each: a parameter has as many as ops of the stage use it,
//! and those that are `shared` with other stages are added up with theirs, `late` rounds of them after the stage's own (`caps`). The messages are the gradients
//! that one item gets and gives: `passed` is `inputs`, or twice that where those of the item before may still be on their way (`passing`). A recomputed stage keeps its inputs and what it sent, and runs forward once more before backward, into other buffers. Versions are
//! held by pointer: V versions take V copies of the weights and no more. A tied parameter counts once in each stage that uses
//! it. Parameters of two bytes a number have sums of four, `summed` each once, and the optimizer moves `masters` of four beside them. Where backwards are split, `apart` items at the most have the first half behind them and not the second: each keeps `halves`,
//! what the second reads of the first, and the gradients that came for it. A stage that gets nothing from others has no first half.
//! For inference there are no gradients and no optimizer; one item at a time is worked on, of those before only what is sent is held,
//! and the next may be under way.

use crate::pass::batched_weight_grad::joins;
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::{ScheduleKind, StageMemory, zero};
use crate::profile::arena::{Arena, Way};
use crate::profile::cost_graph::{CostGraph, Flows, OpId};

/// The sizes of a set of ops, in bytes, before anything is multiplied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTerms {
    /// Parameters, each once.
    pub weights: u64,
    /// Sums of their gradients, each once.
    pub summed: u64,
    /// What is moved in the place of those that are narrower than their sums.
    pub masters: u64,
    /// Sums of gradients, one for every op that uses a parameter.
    pub terms: u64,
    /// Sums of parameters that ops outside the set use as well.
    pub shared: u64,
    /// The most bytes of sums of the parameters that one op uses, and of those with what it reads of them in the same run of a kernel.
    pub largest: u64,
    /// The latter.
    pub needed: u64,
    /// Saved for backward, of one micro-batch.
    pub saved: u64,
    /// Tensors from outside the set, of one micro-batch.
    pub inputs: u64,
    /// The places of their gradients.
    pub passed: u64,
    /// Tensors that are read outside the set, of one micro-batch, each once.
    pub outputs: u64,
    /// Those of them that are kept only because they are sent.
    pub sent: u64,
    /// The arena of the op that needs most.
    pub arena: Arena,
    /// What is put by where gradients of several items are made at once.
    pub put_by: u64,
    /// What the second half of a split backward reads of the first, of one micro-batch.
    pub halves: u64,
}

/// How often each of them is held.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryMultipliers {
    /// Micro-batches in flight.
    pub in_flight: u32,
    /// Those of them that may be between the halves of their backward; 0 where it is whole.
    pub apart: u32,
    /// Weight versions.
    pub versions: u32,
    /// Rounds of which the sums of shared parameters wait.
    pub late: u32,
    /// Replicas of the stage.
    pub replicas: u32,
    /// Whether forward runs again before backward.
    pub recompute: bool,
    /// The level of ZeRO, where the stage has replicas.
    pub zero: u32,
    /// Bytes of optimizer state for each byte of weights.
    pub optimizer_state: f64,
    /// Order of work.
    pub schedule: ScheduleKind,
    /// Micro-batches of a minibatch.
    pub microbatches: u32,
}

impl MemoryMultipliers {
    /// The level of ZeRO: none for one replica.
    pub fn level(&self) -> u32 {
        if self.replicas > 1 { self.zero } else { 0 }
    }

    /// How the backwards of a stage run that gets so many bytes from others: without any it has no first half.
    pub fn way(&self, inputs: u64) -> Way {
        Way { is_joint: self.joins(), is_split: self.apart > 0 && inputs > 0 }
    }

    /// Whether gradients of several items of a round are made at once.
    fn joins(&self) -> bool {
        use ScheduleKind::{Inference, RoundRobin, RoundRobinVsync};
        let of_round = self.microbatches.div_ceil(self.replicas.max(1));
        !matches!(self.schedule, Inference | RoundRobin | RoundRobinVsync) && joins(of_round, self.replicas, self.zero)
    }
}

impl MemoryTerms {
    /// The sizes of the ops of which `inside` is true; `flows` are those of the graph.
    pub fn of(graph: &CostGraph, flows: &Flows, inside: &[bool], passing: &GradientBuffers) -> MemoryTerms {
        let mut holdings = MemoryTerms::default();
        for param in &graph.params {
            let users = param.users.iter().filter(|op| inside[op.index()]).count() as u64;
            if users > 0 {
                holdings.weights += param.bytes;
                holdings.summed += param.sum_bytes;
                holdings.masters += param.master_bytes();
                holdings.terms += param.sum_bytes * users;
                holdings.shared += if users < param.users.len() as u64 { param.sum_bytes } else { 0 };
            }
        }
        let most = |bytes: Vec<u64>| {
            let own = bytes.into_iter().zip(inside).filter(|(_, is_inside)| **is_inside);
            own.map(|(bytes, _)| bytes).max().unwrap_or(0)
        };
        (holdings.largest, holdings.needed) = (most(graph.largest_bytes()), most(graph.needed_bytes()));
        for (at, tensor) in graph.tensors.iter().enumerate() {
            let (mut is_read_inside, mut is_read_outside) = (false, false);
            for op in &tensor.consumers {
                let place = if inside[op.index()] { &mut is_read_inside } else { &mut is_read_outside };
                *place = true;
            }
            let is_made_inside = inside[tensor.producer.index()];
            if !is_made_inside && is_read_inside {
                holdings.inputs += tensor.bytes;
            }
            if is_made_inside && is_read_outside {
                holdings.outputs += tensor.bytes;
                holdings.sent += if graph.is_only_sent(at) { tensor.bytes } else { 0 };
            }
        }
        let mut forward_us = 0.0;
        let mut is_handed_on = vec![false; graph.ops.len()];
        let mut is_read = vec![false; graph.ops.len()];
        for tensor in &graph.tensors {
            let reads = |op: &OpId| inside[op.index()];
            is_read[tensor.producer.index()] |= tensor.consumers.iter().any(reads);
            is_handed_on[tensor.producer.index()] |= !tensor.consumers.is_empty();
        }
        for (at, op) in graph.ops.iter().enumerate().filter(|(at, _)| inside[*at]) {
            holdings.saved += op.kept_bytes();
            holdings.halves += op.between_bytes;
            if is_read[at] || !is_handed_on[at] {
                holdings.halves += op.arriving_bytes;
            }
            holdings.arena =
                holdings.arena.max(op.arena(flows.place(graph.leader(OpId(at as u32)).index(), |op| inside[op])));
            forward_us += op.fwd_us;
            holdings.put_by += op.joint_bytes;
        }
        holdings.passed = passing.bytes(holdings.inputs, forward_us);
        holdings
    }

    /// What a stage of these sizes holds. Sums stop at the largest `u64`, which no device has.
    pub fn held(&self, multiples: &MemoryMultipliers) -> StageMemory {
        let trains = multiples.schedule != ScheduleKind::Inference;
        let weights = if trains { zero::kept(self, multiples) } else { self.weights };
        let versions = weights.saturating_mul(u64::from(multiples.versions.saturating_sub(1)));
        let (gradients, optimizer) = if trains { zero::held(self, multiples) } else { (0, 0) };
        let gradients = gradients.saturating_add(self.shared.saturating_mul(u64::from(multiples.late)));
        let apart = u64::from(multiples.apart);
        let again = self.saved.saturating_add(self.outputs).saturating_mul(apart.max(1));
        let (kept, once) = match multiples.recompute {
            true => (self.outputs, again),
            false => (self.saved.saturating_add(self.sent), 0),
        };
        let one = kept.saturating_add(self.inputs);
        let in_flight = u64::from(multiples.in_flight);
        let activations = match trains {
            true => one.saturating_mul(in_flight).saturating_add(once),
            false => one.saturating_add(self.outputs.saturating_mul(in_flight.saturating_sub(1))),
        };
        let halves = if self.inputs > 0 { self.halves } else { 0 };
        let waiting = self.outputs.saturating_mul(apart.saturating_sub(1));
        let between = halves.saturating_mul(apart).saturating_add(waiting);
        let messages = if trains { self.passed.saturating_add(self.outputs) } else { self.inputs };
        let way = multiples.way(self.inputs);
        let put_by = if way.is_joint { self.put_by } else { 0 };
        let workspace = self.arena.of(way).saturating_add(put_by);
        let parts = [weights, versions, gradients, optimizer, activations, between, messages, workspace];
        let total = parts.iter().fold(0u64, |sum, &part| sum.saturating_add(part));
        StageMemory { weights, versions, gradients, optimizer, activations, between, messages, workspace, total }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;
    use crate::profile::cost_graph::{OpCost, OpId, ParamCost, TensorCost};

    #[test]
    fn a_tied_parameter_counts_once_and_inputs_count_for_every_batch_in_flight() {
        let op = |id, saved_bytes, workspace_bytes| OpCost { id, saved_bytes, workspace_bytes, ..OpCost::default() };
        let tensor = |producer, bytes, consumers: &[u32]| TensorCost {
            name: String::new(),
            producer: OpId(producer),
            bytes,
            consumers: consumers.iter().map(|&to| OpId(to)).collect(),
        };
        let graph = CostGraph {
            ops: vec![
                OpCost { unsaved: true, arriving_bytes: 50, ..op(0, 10, 5) },
                OpCost { between_bytes: 3, ..op(1, 20, 9) },
                OpCost { arriving_bytes: 8, ..op(2, 40, 7) },
            ],
            tensors: vec![tensor(0, 100, &[1, 2]), tensor(1, 200, &[2]), tensor(2, 400, &[])],
            params: vec![ParamCost::new("w", 1000, vec![OpId(0), OpId(1), OpId(2)])],
        };
        let passing = GradientBuffers::of(&levels("4:1GB/s").unwrap());
        let of = |inside: &[bool]| MemoryTerms::of(&graph, &graph.flows(), inside, &passing);
        let tail = of(&[false, true, true]);
        let arena = Arena::always(9);
        let rest = MemoryTerms { inputs: 100, passed: 200, arena, halves: 11, ..MemoryTerms::default() };
        assert_eq!(
            tail,
            MemoryTerms {
                weights: 1000,
                summed: 1000,
                terms: 2000,
                shared: 1000,
                largest: 1000,
                needed: 1000,
                saved: 60,
                ..rest
            }
        );
        // In two bytes a number its sums have four, and so has what the optimizer moves and keeps.
        let mut narrow = graph.clone();
        narrow.params[0].bytes = 500;
        let half = MemoryTerms { weights: 500, masters: 1000, ..tail };
        assert_eq!(MemoryTerms::of(&narrow, &narrow.flows(), &[false, true, true], &passing), half);
        let multiples = MemoryMultipliers {
            in_flight: 3,
            apart: 0,
            versions: 3,
            late: 0,
            replicas: 1,
            recompute: false,
            zero: 0,
            optimizer_state: 2.0,
            schedule: ScheduleKind::RoundRobin,
            microbatches: 1,
        };
        let held = tail.held(&multiples);
        assert_eq!((held.versions, held.gradients, held.optimizer, held.activations), (2000, 3000, 2000, 480));
        assert_eq!(held.total, 1000 + 2000 + 3000 + 2000 + 480 + 200 + 9);
        assert_eq!(tail.held(&MemoryMultipliers { late: 2, ..multiples }).total, held.total + 2 * 1000);
        let replicated = tail.held(&MemoryMultipliers { replicas: 2, ..multiples });
        assert_eq!(replicated.gradients, 5000);
        // Shared out, three replicas have a third of each sum and of its state, but for what other stages hold too.
        let tied = tail.held(&MemoryMultipliers { replicas: 3, zero: 1, ..multiples });
        assert_eq!((tied.gradients, tied.optimizer), (2000 + 1000 + 334 + 1000, 2000));
        let whole = MemoryTerms { shared: 0, ..tail }.held(&MemoryMultipliers { replicas: 3, zero: 1, ..multiples });
        assert_eq!((whole.gradients, whole.optimizer), (2000 + 667, 668));
        assert_eq!(tail.held(&MemoryMultipliers { zero: 1, ..multiples }), held);
        let made = MemoryTerms { shared: 0, largest: 600, ..tail }.held(&MemoryMultipliers {
            replicas: 3,
            zero: 2,
            ..multiples
        });
        // Of three versions an older one serves while others are still at the round before.
        assert_eq!((made.gradients, made.optimizer), (600 + 2 * 667, 668));
        // What other stages hold too is there twice while it is added up, and nothing is made then.
        let summed = MemoryMultipliers { replicas: 3, zero: 2, versions: 1, ..multiples };
        assert_eq!(tail.held(&summed).gradients, 1000 + 1000 + 334);
        let two_rounds = MemoryMultipliers { schedule: ScheduleKind::TwoBw, versions: 2, ..summed };
        assert_eq!(tail.held(&two_rounds).gradients, 1000 + 2 * (1000 + 334));
        // Eight items of a round are put by, where gradients stay.
        let joint = MemoryTerms { arena: Arena::by(|way| if way.is_joint { 70 } else { 9 }), put_by: 50, ..tail };
        let of_round = |microbatches, replicas, zero| {
            let schedule = ScheduleKind::OneFOneB;
            joint.held(&MemoryMultipliers { schedule, microbatches, replicas, zero, ..multiples }).workspace
        };
        assert_eq!([of_round(7, 1, 0), of_round(8, 1, 2), of_round(15, 2, 1), of_round(16, 2, 2)], [9, 120, 120, 9]);
        assert_eq!(joint.held(&MemoryMultipliers { microbatches: 8, ..multiples }).workspace, 9);
        let gathered = MemoryTerms { shared: 0, needed: 600, ..tail }.held(&MemoryMultipliers {
            replicas: 3,
            zero: 3,
            ..multiples
        });
        assert_eq!((gathered.weights, gathered.versions, gathered.workspace), (334, 668, 9));
        assert_eq!((gathered.gradients, gathered.optimizer), (made.gradients, made.optimizer));
        // Recomputed, only the inputs wait for each of the three; what one item saves is there while it runs backward.
        let recomputed = tail.held(&MemoryMultipliers { recompute: true, ..multiples });
        assert_eq!(recomputed.activations, 3 * 100 + 60);
        // Two items between the halves of their backward keep what the second reads; recomputed, what is saved as well.
        let split = tail.held(&MemoryMultipliers { apart: 2, ..multiples });
        assert_eq!((split.between, split.total), (22, held.total + 22));
        let both = tail.held(&MemoryMultipliers { apart: 2, recompute: true, ..multiples });
        assert_eq!((both.activations, both.between), (3 * 100 + 2 * 60, 22));
        let head = of(&[true, false, false]);
        assert_eq!(head.halves, 0, "the gradient of what it sends comes as it is");
        assert_eq!(head.held(&MemoryMultipliers { apart: 3, ..multiples }).between, 2 * 100);
        assert_eq!((head.inputs, head.outputs, head.sent), (0, 100, 100));
        let inference = MemoryMultipliers { schedule: ScheduleKind::Inference, in_flight: 1, versions: 1, ..multiples };
        assert_eq!(tail.held(&inference).total, 1000 + 160 + 100 + 9);
        assert_eq!(head.held(&inference).activations, 110);
        assert_eq!(head.held(&MemoryMultipliers { in_flight: 3, ..inference }).activations, 310);
    }
}
