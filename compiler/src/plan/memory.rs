//! Peak memory of one replica of a stage, as the runtime allocates it.
//!
//! ```text
//! total       = weights · versions + frozen + gradients + optimizer + activations + split_backward + messages + workspace
//! gradients   = terms, twice with replicas unless in place, + (1 + late) · shared        ZeRO: see `zero`
//! optimizer   = state · summed + masters                                                 ZeRO: see `zero`
//! activations = in_flight · (saved + inputs + sent - freed + kept) + max(1, pending) · again
//!               saved + inputs + sent + (in_flight - 1) · outputs                   inference
//! split_backward = pending · halves + (pending - 1) · outputs    0 if backwards are not split
//! messages    = passed + outputs                             inference: inputs
//! ```
//!
//! - `in_flight`: the limit; under Megatron-LM's interleaved 1F1B those in flight when the device is
//!   [fullest](super::fullest_moment).
//! - `saved`: tensors that forward saves for backward, model inputs included.
//! - `inputs`: tensors from other stages. `outputs`: tensors that other stages read. `sent`: the outputs that are not
//!   also saved.
//! - `freed`: 0 without recomputation; else tensors saved by the recomputed ops, except model inputs, outputs and inputs
//!   of layers. `kept`: inputs of layers that are not saved. `again`: `freed`, or that of the largest layer if layers are
//!   recomputed one by one and the backward is not split. In pipec's runtime a layer shares the arena of the stage: only
//!   what exceeds `workspace` counts ([`recompute_scope`](crate::profile::recompute_scope)).
//! - `terms`: one gradient sum per use of a parameter by an op. `shared`: the sums of weights tied with other stages,
//!   which are all-reduced across stages, `late` rounds after the stage's own (`in_flight`).
//! - `summed`: one sum per parameter; two-byte parameters have four-byte sums and four-byte `masters`.
//! - `passed`: buffers for the gradients sent to earlier stages: `inputs`, or twice that if transfers are slow (`gradient_buffers`).
//! - `pending`: upper bound of micro-batches with pending weight gradients. Each holds `halves` (tensors that the
//!   weight-gradient pass reads from the input-gradient pass) and its output gradients. A stage without inputs has no
//!   input-gradient pass.
//! - `workspace`: the arena, that is the peak of live tensors and scratch within a run
//!   ([`arena`](crate::profile::arena)), without tensors that cross a cut and without `halves`. Plus the buffers of
//!   batched weight gradients ([`batched_weight_grad`](crate::pass::batched_weight_grad)).
//!
//! Recomputation keeps inputs and outputs and frees what the recomputed ops saved. It reruns their forward before the
//! backward into separate buffers, or layer by layer within the backward, in its arena. Weight versions are held by
//! pointer, so V versions take V copies of the weights. A tied
//! weight counts once in each stage that uses it. Inference has no gradients or optimizer state. One micro-batch is
//! computed at a time, earlier ones hold only their outputs, and the inputs of the next may arrive.

use crate::pass::batched_weight_grad::joins;
use crate::plan::StageMemory;
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::schedule::Schedule;
use crate::plan::zero::{self, Zero};
use crate::profile::arena::{Arena, Way};
use crate::profile::cost_graph::{CostGraph, Flows, OpId};
use crate::profile::recompute_scope::{RecomputeCosts, RecomputeTerms, Recomputed};
use std::collections::BTreeSet;

/// Unmultiplied memory sizes of a set of ops, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTerms {
    /// Each parameter counts once.
    pub weights: u64,
    /// Weights that are not trained.
    pub frozen: u64,
    /// Gradient sums, one per parameter.
    pub summed: u64,
    /// Master copies of the parameters narrower than their sums.
    pub masters: u64,
    /// Gradient sums, one per op that uses a parameter.
    pub terms: u64,
    /// Gradient sums of weights tied with ops outside the set.
    pub shared: u64,
    /// Largest gradient sum of the parameters of one op.
    pub largest: u64,
    /// As `largest`, plus the weights that the same kernel reads.
    pub needed: u64,
    /// Saved for backward, per micro-batch.
    pub saved: u64,
    /// Tensors from outside the set, per micro-batch.
    pub inputs: u64,
    /// Buffers for their gradients.
    pub passed: u64,
    /// Tensors read outside the set, per micro-batch; each counts once.
    pub outputs: u64,
    /// The outputs that are kept only for sending.
    pub sent: u64,
    /// If all ops are recomputed.
    pub recompute: RecomputeTerms,
    pub arena: Arena,
    /// Buffers of batched weight gradients.
    pub batched_grads: u64,
    /// Tensors that the weight-gradient pass reads from the input-gradient pass, per micro-batch.
    pub halves: u64,
}

/// What recomputing `ops` of the stage `inside` frees and keeps.
pub fn recomputed(graph: &CostGraph, costs: &RecomputeCosts, inside: &[bool], ops: &[u32]) -> RecomputeTerms {
    recomputed_of(graph, costs, inside, ops, 0..graph.tensors.len())
}

fn recomputed_of(
    graph: &CostGraph,
    costs: &RecomputeCosts,
    inside: &[bool],
    ops: &[u32],
    tensors: impl Iterator<Item = usize>,
) -> RecomputeTerms {
    let mut terms = RecomputeTerms::default();
    let mut is_recomputed = vec![false; inside.len()];
    for &op in ops {
        is_recomputed[op as usize] = true;
        terms.add(costs, op as usize);
    }
    for (at, tensor) in tensors.map(|at| (at, &graph.tensors[at])) {
        if is_recomputed[tensor.producer.index()] && tensor.consumers.iter().any(|op| !inside[op.index()]) {
            terms.add_sent(costs, at, tensor.bytes);
        }
    }
    terms
}

/// Multipliers of the memory terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryMultipliers {
    pub in_flight: u32,
    /// Micro-batches with pending weight gradients; 0 if the backward is not split.
    pub pending_weight_grads: u32,
    pub versions: u32,
    /// Rounds for which sums of tied weights wait.
    pub late: u32,
    pub replicas: u32,
    pub recompute: bool,
    /// ZeRO, used if the stage has replicas that shard.
    pub zero: Zero,
    /// True if gradients are all-reduced in their own buffer.
    pub in_place: bool,
    /// Bytes of optimizer state per byte of gradient sum.
    pub optimizer_state: f64,
    pub schedule: Schedule,
    pub microbatches: u32,
}

impl MemoryMultipliers {
    /// The effective ZeRO stage: 0 with one replica.
    pub fn level(&self) -> u32 {
        self.zero.of_stage(self.replicas).level
    }

    /// Backward mode of a stage that receives `inputs` bytes from other stages. Without any it has no input-gradient
    /// pass.
    pub fn way(&self, inputs: u64) -> Way {
        Way { is_joint: self.joins(), is_split: self.pending_weight_grads > 0 && inputs > 0 }
    }

    /// True if weight gradients of several micro-batches are batched.
    fn joins(&self) -> bool {
        use Schedule::{Inference, OneFOneBRr, OneFOneBRrVsync};
        let of_round = self.microbatches.div_ceil(self.replicas.max(1));
        !matches!(self.schedule, Inference | OneFOneBRr | OneFOneBRrVsync)
            && joins(of_round, self.replicas, self.level())
    }
}

/// The ops of a set, and the parameters and tensors that they use or make, all ascending.
#[derive(Clone, Debug, Default)]
pub struct Touched {
    ops: Vec<u32>,
    params: Vec<usize>,
    frozen: Vec<usize>,
    tensors: Vec<usize>,
}

impl Touched {
    fn of(graph: &CostGraph) -> Touched {
        let ops = (0..graph.ops.len() as u32).collect();
        let (params, frozen) = ((0..graph.params.len()).collect(), (0..graph.frozen.len()).collect());
        Touched { ops, params, frozen, tensors: (0..graph.tensors.len()).collect() }
    }

    /// Those of each stage; `stage_of` has the stage of every op.
    pub fn by_stage(graph: &CostGraph, stage_of: &[u32], stages: usize) -> Vec<Touched> {
        let mut all = vec![Touched::default(); stages];
        let distinct =
            |ops: &mut dyn Iterator<Item = &OpId>| -> BTreeSet<u32> { ops.map(|op| stage_of[op.index()]).collect() };
        (0u32..).zip(stage_of).for_each(|(op, stage)| all[*stage as usize].ops.push(op));
        for (at, param) in graph.params.iter().enumerate() {
            distinct(&mut param.users.iter()).into_iter().for_each(|stage| all[stage as usize].params.push(at));
        }
        for (at, frozen) in graph.frozen.iter().enumerate() {
            distinct(&mut frozen.users.iter()).into_iter().for_each(|stage| all[stage as usize].frozen.push(at));
        }
        for (at, tensor) in graph.tensors.iter().enumerate() {
            let ends = &mut tensor.consumers.iter().chain([&tensor.producer]);
            distinct(ends).into_iter().for_each(|stage| all[stage as usize].tensors.push(at));
        }
        all
    }
}

impl MemoryTerms {
    /// Sums the terms of the ops for which `inside` is true. `flows` and `recompute` must belong to the graph.
    pub fn of(
        graph: &CostGraph,
        costs: (&Flows, &RecomputeCosts),
        inside: &[bool],
        passing: &GradientBuffers,
    ) -> MemoryTerms {
        let needs = [graph.largest_bytes(), graph.needed_bytes()];
        MemoryTerms::of_touched(graph, costs, inside, passing, (&Touched::of(graph), &needs))
    }

    /// The same, with what these ops touch, and the largest and the needed bytes of all ops.
    pub fn of_touched(
        graph: &CostGraph,
        (flows, recompute): (&Flows, &RecomputeCosts),
        inside: &[bool],
        passing: &GradientBuffers,
        (touched, needs): (&Touched, &[Vec<u64>; 2]),
    ) -> MemoryTerms {
        let mut holdings = MemoryTerms::default();
        let own = || touched.ops.iter().map(|op| *op as usize).filter(|op| inside[*op]);
        for param in touched.params.iter().map(|at| &graph.params[*at]) {
            let users = param.users.iter().filter(|op| inside[op.index()]).count() as u64;
            if users > 0 {
                holdings.weights += param.bytes;
                holdings.summed += param.sum_bytes;
                holdings.masters += param.master_bytes();
                holdings.terms += param.sum_bytes * users;
                holdings.shared += if users < param.users.len() as u64 { param.sum_bytes } else { 0 };
            }
        }
        let frozen = touched.frozen.iter().map(|at| &graph.frozen[*at]);
        let read = frozen.filter(|frozen| frozen.users.iter().any(|op| inside[op.index()]));
        holdings.frozen = read.map(|frozen| frozen.bytes).sum();
        let most = |bytes: &[u64]| own().map(|op| bytes[op]).max().unwrap_or(0);
        (holdings.largest, holdings.needed) = (most(&needs[0]), most(&needs[1]));
        for (at, tensor) in touched.tensors.iter().map(|at| (*at, &graph.tensors[*at])) {
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
        for tensor in touched.tensors.iter().map(|at| &graph.tensors[*at]) {
            let reads = |op: &OpId| inside[op.index()];
            is_read[tensor.producer.index()] |= tensor.consumers.iter().any(reads);
            is_handed_on[tensor.producer.index()] |= !tensor.consumers.is_empty();
        }
        for (at, op) in own().map(|at| (at, &graph.ops[at])) {
            holdings.saved += op.kept_bytes();
            holdings.halves += op.between_bytes;
            if is_read[at] || !is_handed_on[at] {
                holdings.halves += op.arriving_bytes;
            }
            holdings.arena =
                holdings.arena.max(op.arena(flows.place(graph.leader(OpId(at as u32)).index(), |op| inside[op])));
            forward_us += op.fwd_us;
            holdings.batched_grads += op.batched_grad_bytes;
        }
        let ops: Vec<u32> = own().map(|op| op as u32).collect();
        holdings.recompute = recomputed_of(graph, recompute, inside, &ops, touched.tensors.iter().copied());
        holdings.passed = passing.bytes(holdings.inputs, forward_us);
        holdings
    }

    /// How activations are recomputed, and the bytes that a micro-batch in flight holds until its backward.
    fn in_flight(&self, multiples: &MemoryMultipliers) -> (Recomputed, u64) {
        let arena = self.arena.of(multiples.way(self.inputs));
        let recompute = if multiples.recompute { self.recompute } else { RecomputeTerms::default() };
        let pending = u64::from(multiples.pending_weight_grads);
        let again = recompute.held(u64::from(multiples.in_flight), pending, arena);
        let kept = self.saved.saturating_sub(again.saves).saturating_add(again.kept);
        (again, kept.saturating_add(self.sent).saturating_add(self.inputs))
    }

    /// Bytes that a micro-batch in flight holds until its backward.
    pub fn per_microbatch(&self, multiples: &MemoryMultipliers) -> u64 {
        self.in_flight(multiples).1
    }

    /// Memory of a stage. Saturates at `u64::MAX`.
    pub fn held(&self, multiples: &MemoryMultipliers) -> StageMemory {
        self.held_with(multiples, multiples.in_flight)
    }

    /// The same with `in_flight` micro-batches when its device is fullest, at most the limit.
    pub fn held_with(&self, multiples: &MemoryMultipliers, in_flight: u32) -> StageMemory {
        let trains = multiples.schedule.trains();
        let weights = if trains { zero::kept(self, multiples) } else { self.weights };
        let versions = weights.saturating_mul(u64::from(multiples.versions.saturating_sub(1)));
        let (gradients, optimizer) = if trains { zero::held(self, multiples) } else { (0, 0) };
        let gradients = gradients.saturating_add(self.shared.saturating_mul(u64::from(multiples.late)));
        let pending = u64::from(multiples.pending_weight_grads);
        let way = multiples.way(self.inputs);
        let arena = self.arena.of(way);
        let (again, one) = self.in_flight(multiples);
        let in_flight = u64::from(in_flight);
        let activations = match trains {
            true => one.saturating_mul(in_flight).saturating_add(again.again),
            false => one.saturating_add(self.outputs.saturating_mul(in_flight.saturating_sub(1))),
        };
        let halves = if self.inputs > 0 { self.halves } else { 0 };
        let waiting = self.outputs.saturating_mul(pending.saturating_sub(1));
        let split_backward = halves.saturating_mul(pending).saturating_add(waiting);
        let messages = if trains { self.passed.saturating_add(self.outputs) } else { self.inputs };
        let batched_grads = if way.is_joint { self.batched_grads } else { 0 };
        let workspace = arena.saturating_add(batched_grads);
        let frozen = self.frozen;
        let fixed = StageMemory { weights, frozen, versions, gradients, optimizer, ..StageMemory::default() };
        StageMemory { activations, split_backward, messages, workspace, by_part: again.by_part, ..fixed }.with_total()
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
        let tensor = TensorCost::new;
        let graph = CostGraph {
            ops: vec![
                OpCost { unsaved: true, arriving_bytes: 50, ..op(0, 10, 5) },
                OpCost { between_bytes: 3, ..op(1, 20, 9) },
                OpCost { arriving_bytes: 8, ..op(2, 40, 7) },
            ],
            tensors: vec![tensor(0, 100, &[1, 2]), tensor(1, 200, &[2]), tensor(2, 400, &[])],
            params: vec![ParamCost::new("w", 1000, vec![OpId(0), OpId(1), OpId(2)])],
            ..CostGraph::default()
        };
        let passing = GradientBuffers::of(&levels("4:1GB/s").unwrap());
        let of =
            |inside: &[bool]| MemoryTerms::of(&graph, (&graph.flows(), &RecomputeCosts::of(&graph)), inside, &passing);
        let tail = of(&[false, true, true]);
        let arena = Arena::always(9);
        let recompute = RecomputeTerms { freed: 60, layer: u64::MAX, ..RecomputeTerms::default() };
        let rest = MemoryTerms { inputs: 100, passed: 200, arena, halves: 11, recompute, ..MemoryTerms::default() };
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
        // Two-byte parameters have four-byte sums, optimizer state and master copies.
        let mut narrow = graph.clone();
        narrow.params[0].bytes = 500;
        let half = MemoryTerms { weights: 500, masters: 1000, ..tail };
        assert_eq!(
            MemoryTerms::of(&narrow, (&narrow.flows(), &RecomputeCosts::of(&narrow)), &[false, true, true], &passing),
            half
        );
        let multiples = MemoryMultipliers {
            in_flight: 3,
            pending_weight_grads: 0,
            versions: 3,
            late: 0,
            replicas: 1,
            recompute: false,
            zero: Zero::default(),
            in_place: false,
            optimizer_state: 2.0,
            schedule: Schedule::OneFOneBRr,
            microbatches: 1,
        };
        let held = tail.held(&multiples);
        assert_eq!((held.versions, held.gradients, held.optimizer, held.activations), (2000, 3000, 2000, 480));
        assert_eq!(held.total, 1000 + 2000 + 3000 + 2000 + 480 + 200 + 9);
        assert_eq!(tail.held(&MemoryMultipliers { late: 2, ..multiples }).total, held.total + 2 * 1000);
        let replicated = tail.held(&MemoryMultipliers { replicas: 2, ..multiples });
        assert_eq!(replicated.gradients, 5000);
        // Sharded over three replicas, except for tied weights.
        let tied = tail.held(&MemoryMultipliers { replicas: 3, zero: Zero::over_all(1), ..multiples });
        assert_eq!((tied.gradients, tied.optimizer), (2000 + 1000 + 334 + 1000, 2000));
        let whole = MemoryTerms { shared: 0, ..tail }.held(&MemoryMultipliers {
            replicas: 3,
            zero: Zero::over_all(1),
            ..multiples
        });
        assert_eq!((whole.gradients, whole.optimizer), (2000 + 667, 668));
        assert_eq!(tail.held(&MemoryMultipliers { zero: Zero::over_all(1), ..multiples }), held);
        let made = MemoryTerms { shared: 0, largest: 600, ..tail }.held(&MemoryMultipliers {
            replicas: 3,
            zero: Zero::over_all(2),
            ..multiples
        });
        // With three versions, sums are double-buffered: others may still be in the previous round.
        assert_eq!((made.gradients, made.optimizer), (600 + 2 * 667, 668));
        // Tied weights have a sum over replicas and one over stages, while no op makes gradients.
        let summed = MemoryMultipliers { replicas: 3, zero: Zero::over_all(2), versions: 1, ..multiples };
        assert_eq!(tail.held(&summed).gradients, 2 * 1000 + 1000 + 334);
        assert_eq!(tail.held(&MemoryMultipliers { in_place: true, ..summed }).gradients, 1000 + 1000 + 334);
        let two_rounds = MemoryMultipliers { schedule: Schedule::TwoBw, versions: 2, ..summed };
        assert_eq!(tail.held(&two_rounds).gradients, 2 * 1000 + 2 * (1000 + 334));
        // Batched weight gradients need 8 micro-batches per worker, and unsharded gradients if replicated.
        let joint =
            MemoryTerms { arena: Arena::by(|way| if way.is_joint { 70 } else { 9 }), batched_grads: 50, ..tail };
        let of_round = |microbatches, replicas, level| {
            let schedule = Schedule::OneFOneB;
            let zero = Zero::over_all(level);
            joint.held(&MemoryMultipliers { schedule, microbatches, replicas, zero, ..multiples }).workspace
        };
        assert_eq!([of_round(7, 1, 0), of_round(8, 1, 2), of_round(15, 2, 1), of_round(16, 2, 2)], [9, 120, 120, 9]);
        assert_eq!(joint.held(&MemoryMultipliers { microbatches: 8, ..multiples }).workspace, 9);
        let gathered = MemoryTerms { shared: 0, needed: 600, ..tail }.held(&MemoryMultipliers {
            replicas: 3,
            zero: Zero::over_all(3),
            ..multiples
        });
        assert_eq!((gathered.weights, gathered.versions, gathered.workspace), (334, 668, 9));
        assert_eq!((gathered.gradients, gathered.optimizer), (made.gradients, made.optimizer));
        // Six replicas in groups of three hold what three do.
        let of_groups = |replicas, degree| {
            let zero = Zero { level: 3, degree };
            MemoryTerms { shared: 0, needed: 600, ..tail }.held(&MemoryMultipliers { replicas, zero, ..multiples })
        };
        assert_eq!(
            [of_groups(6, 3), of_groups(3, 0), of_groups(9, 4), of_groups(2, 4)].map(|held| held.weights),
            [334, 334, 334, 500]
        );
        assert_eq!(of_groups(6, 3), gathered);
        assert_eq!((of_groups(5, 4).weights, of_groups(6, 5).weights), (200, 334), "the largest divisor, or all");
        // With recomputation, inputs are held for all three and saved tensors for one.
        let again = tail.held(&MemoryMultipliers { recompute: true, ..multiples });
        assert_eq!(again.activations, 3 * 100 + 60);
        // The first op sends its saved tensor to the stage itself only; the model input of op 2 is never recomputed.
        let mut fed = graph.clone();
        (fed.ops[1].fed_bytes, fed.ops[2].fed_bytes) = (0, 5);
        let inside = [false, true, true];
        let fed_tail = MemoryTerms::of(&fed, (&fed.flows(), &RecomputeCosts::of(&fed)), &inside, &passing);
        assert_eq!(fed_tail, MemoryTerms { saved: 65, ..tail });
        let of_ops = |graph: &CostGraph, inside: &[bool], ops: &[u32]| {
            recomputed(graph, &RecomputeCosts::of(graph), inside, ops)
        };
        let activations = |ops: Option<&[u32]>| {
            let recompute = ops.map_or(fed_tail.recompute, |ops| of_ops(&fed, &inside, ops));
            MemoryTerms { recompute, ..fed_tail }.held(&MemoryMultipliers { recompute: true, ..multiples }).activations
        };
        assert_eq!(activations(None), 3 * (100 + 5) + 60);
        assert_eq!([&[1, 2][..], &[1], &[]].map(|ops| activations(Some(ops))), [375, 3 * (100 + 5 + 40) + 20, 3 * 165]);
        // Two micro-batches with pending weight gradients; with recomputation their saved tensors count as well.
        let split = tail.held(&MemoryMultipliers { pending_weight_grads: 2, ..multiples });
        assert_eq!((split.split_backward, split.total), (22, held.total + 22));
        let both = tail.held(&MemoryMultipliers { pending_weight_grads: 2, recompute: true, ..multiples });
        assert_eq!((both.activations, both.split_backward), (3 * 100 + 2 * 60, 22));
        let head = of(&[true, false, false]);
        assert_eq!(head.halves, 0, "the gradient of what it sends comes as it is");
        assert_eq!(head.held(&MemoryMultipliers { pending_weight_grads: 3, ..multiples }).split_backward, 2 * 100);
        assert_eq!((head.inputs, head.outputs, head.sent), (0, 100, 100));
        // What it sends is kept for all three; what it saves is freed unless it is also sent.
        assert_eq!(head.held(&MemoryMultipliers { recompute: true, ..multiples }).activations, 3 * 100 + 10);
        assert_eq!(of_ops(&graph, &[true, false, false], &[0]).saves(), 10);
        assert_eq!(of_ops(&graph, &[true, true, false], &[0]).saves(), 10);
        let mut saved = graph.clone();
        (saved.ops[0].saved_bytes, saved.ops[0].unsaved) = (110, false);
        assert_eq!(of_ops(&saved, &[true, false, false], &[0]).saves(), 10);
        assert_eq!(of_ops(&saved, &[true, true, true], &[0]).saves(), 110);
        let inference = MemoryMultipliers { schedule: Schedule::Inference, in_flight: 1, versions: 1, ..multiples };
        assert_eq!(tail.held(&inference).total, 1000 + 160 + 100 + 9);
        assert_eq!(head.held(&inference).activations, 110);
        assert_eq!(head.held(&MemoryMultipliers { in_flight: 3, ..inference }).activations, 310);
    }
}
