//! Exact time, memory and traffic of every range between two down-sets.
//!
//! [`DownSets`] only knows which bytes cross a cut. A range also needs: the crossing tensors that it reads, those that
//! it produces, and each parameter once even if several ops use it. Few tensors cross a cut, so each set lists its
//! crossing tensors, and each range scans that list.

use crate::partition::search::downsets::DownSets;
use crate::partition::search::largest_in_range::Ranking;
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::memory::MemoryTerms;
use crate::profile::arena::{Arena, ArenaPosition, Needs, Way};
use crate::profile::cost_graph::{CostGraph, Flows, OpCost, OpId, ParamCost};
use crate::profile::recompute_scope::{RecomputeCosts, RecomputeTerms};
use std::ops::Range;

#[derive(Clone, Debug)]
pub struct RangeCosts<'a> {
    pub graph: &'a CostGraph,
    pub space: &'a DownSets,
    words: usize,
    bits: Vec<u64>,
    forward: Vec<f64>,
    backward: Vec<f64>,
    /// Forward of the ops that can be recomputed.
    again: Vec<f64>,
    /// Sums over the ops of each set.
    sums: Vec<Sums>,
    shared_frozen: Vec<usize>,
    recompute: RecomputeCosts,
    /// Ops ranked by the bytes that recomputing their layer frees.
    by_layer: Ranking,
    tied: Vec<usize>,
    /// Determines whether output gradients need a second buffer.
    passing: GradientBuffers,
    made: Vec<Vec<u32>>,
    /// Tensors that cross the cut after each set.
    crossing: Vec<Vec<u32>>,
    /// Ops ranked by the bytes of their parameters, and by those of parameters and gradient sums needed at the same
    /// time.
    by_use: Ranking,
    by_need: Ranking,
    needs: Vec<Needs>,
    flows: Flows,
    /// True if batched weight gradients change any arena.
    is_joint: bool,
    /// For each `Way`: ops ranked by their arena bytes inside a range.
    by_arena: [Ranking; 4],
}

/// Bytes of an op, or of all ops of a set: parameters with a single user, their gradient sums and master weights,
/// frozen weights with a single user, gradient sums once per use of a parameter, batched weight gradients, what is
/// saved, what recomputation frees and keeps, what it frees at once, and what the weight-gradient pass needs.
type Sums = [u64; 11];

/// The ops between two nested down-sets: a possible stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Run {
    /// Per micro-batch.
    pub forward_us: f64,
    /// Per micro-batch.
    pub backward_us: f64,
    /// Per micro-batch, if the range is recomputed.
    pub recompute_us: f64,
    /// Bytes of input tensors, each counted once.
    pub in_bytes: u64,
    /// Bytes of output tensors, each counted once, regardless of the number of reader stages.
    pub out_bytes: u64,
    pub holdings: MemoryTerms,
    /// True if it begins at the empty set.
    pub is_first: bool,
}

impl Run {
    pub fn at(self, pace: f64) -> Run {
        Run {
            forward_us: self.forward_us / pace,
            backward_us: self.backward_us / pace,
            recompute_us: self.recompute_us / pace,
            ..self
        }
    }
}

impl<'a> RangeCosts<'a> {
    pub fn new(graph: &'a CostGraph, space: &'a DownSets, passing: GradientBuffers) -> RangeCosts<'a> {
        let ops = graph.ops.len();
        let words = ops.div_ceil(64);
        let count = space.len();
        let needs: Vec<Needs> = graph.ops.iter().map(|op| Needs::by(|place| op.arena(place))).collect();
        let mut places = RangeCosts {
            graph,
            space,
            words,
            bits: vec![0; words * count],
            forward: vec![0.0; count],
            backward: vec![0.0; count],
            again: vec![0.0; count],
            sums: vec![[0; 11]; count],
            shared_frozen: (0..graph.frozen.len()).filter(|&at| graph.frozen[at].users.len() > 1).collect(),
            recompute: RecomputeCosts::of(graph),
            by_layer: Ranking::default(),
            passing,
            made: vec![Vec::new(); ops],
            tied: (0..graph.params.len()).filter(|&at| graph.params[at].users.len() > 1).collect(),
            crossing: vec![Vec::new(); count],
            by_use: Ranking::of(graph.largest_bytes().into_iter()),
            by_need: Ranking::of(graph.needed_bytes().into_iter()),
            by_arena: Default::default(),
            is_joint: needs.iter().any(Needs::differ_where_joint),
            needs,
            flows: graph.flows(),
        };
        places.by_layer = Ranking::of(places.recompute.layer.iter().copied());
        for way in places.ways() {
            let within = places.needs.iter().map(|needs| needs.at(ArenaPosition::default()).of(way));
            places.by_arena[way.index()] = Ranking::of(within);
        }
        let (used, costs) = (graph.summed_bytes(), &places.recompute);
        let of_op = |(op, cost): (usize, &OpCost)| -> Sums {
            let (freed, kept) = (costs.freed[op], costs.kept[op]);
            let (saved, halves) = (cost.kept_bytes(), cost.pending_weight_grad_bytes());
            [0, 0, 0, 0, used[op], cost.batched_grad_bytes, saved, freed, kept, cost.saved_bytes, halves]
        };
        let mut own: Vec<Sums> = graph.ops.iter().enumerate().map(of_op).collect();
        for param in graph.params.iter().filter(|param| param.users.len() == 1) {
            let [bytes, summed, masters, ..] = &mut own[param.users[0].index()];
            *bytes += param.bytes;
            *summed += param.sum_bytes;
            *masters += param.master_bytes();
        }
        for frozen in graph.frozen.iter().filter(|frozen| frozen.users.len() == 1) {
            own[frozen.users[0].index()][3] += frozen.bytes;
        }
        for (at, tensor) in graph.tensors.iter().enumerate() {
            places.made[tensor.producer.index()].push(at as u32);
        }
        for set in 1..count {
            // Along an order each set extends the previous one; otherwise sums start from the empty set.
            let base = if space.nested(set - 1, set) { set - 1 } else { 0 };
            let added = space.between(base, set);
            places.bits.copy_within(base * words..(base + 1) * words, set * words);
            for &op in &added {
                places.bits[set * words + op as usize / 64] |= 1 << (op % 64);
            }
            let fresh = added.iter().flat_map(|&op| places.made[op as usize].iter().copied());
            let open: Vec<u32> = places.crossing[base].iter().copied().chain(fresh).collect();
            places.crossing[set] = open.into_iter().filter(|&tensor| places.leaves(tensor, set)).collect();
            places.sums[set] = places.sums[base];
            for &op in &added {
                places.sums[set].iter_mut().zip(own[op as usize]).for_each(|(sum, own)| *sum = sum.saturating_add(own));
            }
            let time =
                |start: f64, us: &dyn Fn(usize) -> f64| added.iter().fold(start, |sum, &op| sum + us(op as usize));
            places.forward[set] = time(places.forward[base], &|op| graph.ops[op].fwd_us);
            places.backward[set] = time(places.backward[base], &|op| graph.ops[op].bwd_us);
            places.again[set] = time(places.again[base], &|op| graph.ops[op].recompute_us());
        }
        places
    }

    /// Parameters with several users.
    pub fn tied(&self) -> impl Iterator<Item = &ParamCost> {
        self.tied.iter().map(|&at| &self.graph.params[at])
    }

    /// The tensors that cross the cut after a set.
    pub fn crossing(&self, set: usize) -> &[u32] {
        &self.crossing[set]
    }

    pub fn has(&self, set: usize, op: usize) -> bool {
        self.bits[set * self.words + op / 64] >> (op % 64) & 1 == 1
    }

    pub fn nested(&self, inner: usize, outer: usize) -> bool {
        let words = |set: usize| &self.bits[set * self.words..(set + 1) * self.words];
        words(inner).iter().zip(words(outer)).all(|(inner, outer)| inner & !outer == 0)
    }

    /// A range of op ids, rounded to words of 64, that contains the ops of the range.
    fn span(&self, from: usize, to: usize) -> Range<usize> {
        let has_any = |&word: &usize| self.bits[to * self.words + word] & !self.bits[from * self.words + word] != 0;
        let first = (0..self.words).find(has_any).unwrap_or(0);
        let end = (first..self.words).rfind(has_any).map_or(first, |last| last + 1);
        first * 64..end * 64
    }

    fn leaves(&self, tensor: u32, set: usize) -> bool {
        self.graph.tensors[tensor as usize].consumers.iter().any(|to| !self.has(set, to.index()))
    }

    /// Compute of a range in microseconds per micro-batch: forward and backward, or forward only.
    pub fn compute_us(&self, from: usize, to: usize, trains: bool) -> f64 {
        let forward = self.forward[to] - self.forward[from];
        if trains { forward + self.backward[to] - self.backward[from] } else { forward }
    }

    pub fn inputs(&self, from: usize, to: usize) -> impl Iterator<Item = u32> + '_ {
        let reads = move |tensor: &&u32| {
            let mut consumers = self.graph.tensors[**tensor as usize].consumers.iter();
            consumers.any(|op| self.has(to, op.index()) && !self.has(from, op.index()))
        };
        self.crossing[from].iter().filter(reads).copied()
    }

    /// Returns whether a tensor is the first crossing output of an op whose outputs are read only after the cut.
    fn is_first_of_sent(&self, tensor: u32, set: usize) -> bool {
        let producer = self.graph.tensors[tensor as usize].producer.index();
        if self.graph.ops[producer].arriving_bytes == 0 {
            return false;
        }
        let tensors = &self.made[producer];
        let read =
            |tensor: &u32| self.graph.tensors[*tensor as usize].consumers.iter().any(|op| self.has(set, op.index()));
        tensors.iter().find(|tensor| self.leaves(**tensor, set)) == Some(&tensor) && !tensors.iter().any(read)
    }

    fn ways(&self) -> impl Iterator<Item = Way> + use<> {
        let is_joint = self.is_joint;
        Way::ALL.into_iter().filter(move |way| is_joint || !way.is_joint)
    }

    /// Arena bytes at the op that needs most.
    fn arena(&self, from: usize, to: usize, span: &Range<usize>) -> Arena {
        let inside = |op: usize| self.has(to, op) && !self.has(from, op);
        let most = |way: Way| {
            let mut most = 0;
            for (within, op) in self.by_arena[way.index()].within(span.clone()) {
                if within <= most {
                    break;
                }
                if inside(op) {
                    most = most.max(self.needs[op].at(self.flows.place(op, inside)).of(way));
                }
            }
            most
        };
        let mut found = [0; 4];
        self.ways().for_each(|way| found[way.index()] = most(way));
        Arena::by(|way| found[Way { is_joint: way.is_joint && self.is_joint, ..way }.index()])
    }

    pub fn run(&self, from: usize, to: usize) -> Run {
        let bytes = |tensor: u32| self.graph.tensors[tensor as usize].bytes;
        let in_bytes = self.inputs(from, to).map(bytes).sum();
        let made = |tensor: &u32| !self.has(from, self.graph.tensors[*tensor as usize].producer.index());
        let out_bytes = self.crossing[to].iter().copied().filter(made).map(bytes).sum();
        let sent = self.crossing[to].iter().filter(|tensor| made(tensor) && self.graph.is_only_sent(**tensor as usize));
        let sent = sent.copied().map(bytes).sum();
        // A gradient that arrives unchanged from another stage is not kept between the two backward passes.
        let whole = self.crossing[to].iter().filter(|tensor| made(tensor) && self.is_first_of_sent(**tensor, to));
        let producer = |tensor: &u32| self.graph.tensors[*tensor as usize].producer.index();
        let arriving: u64 = whole.map(|tensor| self.graph.ops[producer(tensor)].arriving_bytes).sum();
        let inside = |op: usize| self.has(to, op) && !self.has(from, op);
        let (mut tied, mut summed, mut masters, mut shared) = (0, 0, 0, 0);
        for param in self.tied.iter().map(|&at| &self.graph.params[at]) {
            let is_inside = |op: &OpId| inside(op.index());
            if param.users.iter().any(is_inside) {
                tied += param.bytes;
                summed += param.sum_bytes;
                masters += param.master_bytes();
                shared += if param.users.iter().all(is_inside) { 0 } else { param.sum_bytes };
            }
        }
        let shared_frozen = self.shared_frozen.iter().map(|&at| &self.graph.frozen[at]);
        let read = shared_frozen.filter(|frozen| frozen.users.iter().any(|op| inside(op.index())));
        let frozen: u64 = read.map(|frozen| frozen.bytes).sum();
        let span = self.span(from, to);
        let most = |ops: &Ranking| ops.within(span.clone()).find(|(_, op)| inside(*op)).map_or(0, |(bytes, _)| bytes);
        let forward_us = (self.forward[to] - self.forward[from]).max(0.0);
        let (before, mut within) = (&self.sums[from], self.sums[to]);
        within.iter_mut().zip(before).for_each(|(sum, before)| *sum -= before);
        let [weights, own_summed, own_masters, own_frozen, terms, batched_grads, saved, freed, kept, at_once, halves] =
            within;
        let mut recompute = RecomputeTerms {
            freed,
            kept,
            layer: most(&self.by_layer),
            is_by_part: self.recompute.is_by_part,
            at_once: if self.recompute.is_by_part { at_once } else { 0 },
            ..RecomputeTerms::default()
        };
        for tensor in self.crossing[to].iter().filter(|tensor| made(tensor)) {
            recompute.add_sent(&self.recompute, *tensor as usize, bytes(*tensor));
        }
        let holdings = MemoryTerms {
            largest: most(&self.by_use),
            needed: most(&self.by_need),
            weights: weights + tied,
            frozen: own_frozen + frozen,
            summed: own_summed + summed,
            masters: own_masters + masters,
            terms,
            shared,
            saved,
            inputs: in_bytes,
            passed: self.passing.bytes(in_bytes, forward_us),
            outputs: out_bytes,
            sent,
            recompute,
            halves: halves.saturating_sub(arriving),
            arena: self.arena(from, to, &span),
            batched_grads,
        };
        Run {
            is_first: from == 0,
            forward_us,
            backward_us: (self.backward[to] - self.backward[from]).max(0.0),
            recompute_us: (self.again[to] - self.again[from]).max(0.0),
            in_bytes,
            out_bytes,
            holdings,
        }
    }
}
