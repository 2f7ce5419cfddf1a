//! What every run between two places to cut computes, holds and exchanges with the others, exactly.
//!
//! A [`DownSets`] knows what crosses a cut. A run needs more: of the tensors that cross the cut before it, those that it reads; of
//! those that cross the cut after it, those that it makes; and each parameter once, however many of its ops use it. Few
//! tensors cross any cut, so they are listed for every place and gone through for every run.

use crate::partition::search::downsets::DownSets;
use crate::partition::search::largest_in_range::Ranking;
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::memory::MemoryTerms;
use crate::profile::arena::{Arena, ArenaPosition, Needs, Way};
use crate::profile::cost_graph::{CostGraph, Flows, OpId};
use std::ops::Range;

/// The places of a space with their sums.
#[derive(Clone, Debug)]
pub struct RangeCosts<'a> {
    /// The graph.
    pub graph: &'a CostGraph,
    /// The space.
    pub space: &'a DownSets,
    words: usize,
    bits: Vec<u64>,
    forward: Vec<f64>,
    backward: Vec<f64>,
    /// Bytes of the parameters that one op uses.
    weights: Vec<u64>,
    /// The same of the sums of their gradients.
    summed: Vec<u64>,
    /// The same of their masters.
    masters: Vec<u64>,
    /// Bytes of sums of the parameters that each op uses, summed up.
    terms: Vec<u64>,
    saved: Vec<u64>,
    /// Parameters that several ops use.
    tied: Vec<usize>,
    /// What split backwards keep between their halves.
    halves: Vec<u64>,
    /// What decides the places of gradients on their way.
    passing: GradientBuffers,
    /// The tensors that each op makes.
    made: Vec<Vec<u32>>,
    /// Tensors that cross the cut after each set.
    crossing: Vec<Vec<u32>>,
    /// Ops by the bytes of parameters that they use, and that they need.
    by_use: Ranking,
    by_need: Ranking,
    /// What each op needs of an arena.
    needs: Vec<Needs>,
    flows: Flows,
    /// Whether gradients of several items at once make any difference.
    is_joint: bool,
    /// By way ops by what they need of an arena within a run.
    by_arena: [Ranking; 4],
    /// What is put by where gradients of several items are made at once.
    put_by: Vec<u64>,
}

/// One run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Run {
    /// Forward microseconds of an item.
    pub forward_us: f64,
    /// Backward microseconds of an item.
    pub backward_us: f64,
    /// Bytes that come in; each tensor once.
    pub in_bytes: u64,
    /// Bytes of the tensors that go out, each once, however many stages will read it.
    pub out_bytes: u64,
    /// What it holds.
    pub holdings: MemoryTerms,
    /// Whether nothing comes before it.
    pub is_first: bool,
}

impl Run {
    /// The same on devices that are so many times as fast.
    pub fn at(self, pace: f64) -> Run {
        Run { forward_us: self.forward_us / pace, backward_us: self.backward_us / pace, ..self }
    }
}

impl<'a> RangeCosts<'a> {
    /// Sums up the places of `space`.
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
            weights: vec![0; count],
            summed: vec![0; count],
            masters: vec![0; count],
            terms: vec![0; count],
            put_by: vec![0; count],
            saved: vec![0; count],
            halves: vec![0; count],
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
        for way in places.ways() {
            let within = places.needs.iter().map(|needs| needs.at(ArenaPosition::default()).of(way));
            places.by_arena[way.index()] = Ranking::of(within);
        }
        let mut own = vec![[0u64; 3]; ops];
        for param in graph.params.iter().filter(|param| param.users.len() == 1) {
            let [bytes, summed, masters] = &mut own[param.users[0].index()];
            *bytes += param.bytes;
            *summed += param.sum_bytes;
            *masters += param.master_bytes();
        }
        let used = graph.summed_bytes();
        for (at, tensor) in graph.tensors.iter().enumerate() {
            places.made[tensor.producer.index()].push(at as u32);
        }
        for set in 1..count {
            // Along a line each set adds to the one before; among closed sets one starts anew where it does not.
            let base = if space.nested(set - 1, set) { set - 1 } else { 0 };
            let added = space.between(base, set);
            places.bits.copy_within(base * words..(base + 1) * words, set * words);
            for &op in &added {
                places.bits[set * words + op as usize / 64] |= 1 << (op % 64);
            }
            let fresh = added.iter().flat_map(|&op| places.made[op as usize].iter().copied());
            let open: Vec<u32> = places.crossing[base].iter().copied().chain(fresh).collect();
            places.crossing[set] = open.into_iter().filter(|&tensor| places.leaves(tensor, set)).collect();
            let sum = |start: u64, bytes: &dyn Fn(usize) -> u64| {
                added.iter().fold(start, |sum, &op| sum.saturating_add(bytes(op as usize)))
            };
            places.weights[set] = sum(places.weights[base], &|op| own[op][0]);
            places.summed[set] = sum(places.summed[base], &|op| own[op][1]);
            places.masters[set] = sum(places.masters[base], &|op| own[op][2]);
            places.terms[set] = sum(places.terms[base], &|op| used[op]);
            places.put_by[set] = sum(places.put_by[base], &|op| graph.ops[op].joint_bytes);
            places.saved[set] = sum(places.saved[base], &|op| graph.ops[op].kept_bytes());
            places.halves[set] = sum(places.halves[base], &|op| graph.ops[op].apart_bytes());
            let time =
                |start: f64, us: &dyn Fn(usize) -> f64| added.iter().fold(start, |sum, &op| sum + us(op as usize));
            places.forward[set] = time(places.forward[base], &|op| graph.ops[op].fwd_us);
            places.backward[set] = time(places.backward[base], &|op| graph.ops[op].bwd_us);
        }
        places
    }

    /// Number of places.
    pub fn len(&self) -> usize {
        self.forward.len()
    }

    /// Whether there is nothing but the empty set.
    pub fn is_empty(&self) -> bool {
        self.len() < 2
    }

    /// Whether an op is in a set.
    pub fn has(&self, set: usize, op: usize) -> bool {
        self.bits[set * self.words + op / 64] >> (op % 64) & 1 == 1
    }

    /// Whether set `inner` is contained in set `outer`, which comes after it.
    pub fn nested(&self, inner: usize, outer: usize) -> bool {
        let words = |set: usize| &self.bits[set * self.words..(set + 1) * self.words];
        words(inner).iter().zip(words(outer)).all(|(inner, outer)| inner & !outer == 0)
    }

    /// Ops of which none is left out that a run has.
    fn span(&self, from: usize, to: usize) -> Range<usize> {
        let has_any = |&word: &usize| self.bits[to * self.words + word] & !self.bits[from * self.words + word] != 0;
        let first = (0..self.words).find(has_any).unwrap_or(0);
        let end = (first..self.words).rfind(has_any).map_or(first, |last| last + 1);
        first * 64..end * 64
    }

    fn leaves(&self, tensor: u32, set: usize) -> bool {
        self.graph.tensors[tensor as usize].consumers.iter().any(|to| !self.has(set, to.index()))
    }

    /// Compute of a run, in microseconds for one item: forward and backward, or forward alone.
    pub fn compute_us(&self, from: usize, to: usize, trains: bool) -> f64 {
        let forward = self.forward[to] - self.forward[from];
        if trains { forward + self.backward[to] - self.backward[from] } else { forward }
    }

    /// The tensors that come into the run from set `from` to set `to`.
    pub fn inputs(&self, from: usize, to: usize) -> impl Iterator<Item = u32> + '_ {
        let reads = move |tensor: &&u32| {
            let mut consumers = self.graph.tensors[**tensor as usize].consumers.iter();
            consumers.any(|op| self.has(to, op.index()) && !self.has(from, op.index()))
        };
        self.crossing[from].iter().filter(reads).copied()
    }

    /// Whether a tensor is the first of an op of which nothing is read before the cut after a set, and something after it.
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

    /// The ways whose arenas may differ.
    fn ways(&self) -> impl Iterator<Item = Way> + use<> {
        let is_joint = self.is_joint;
        Way::ALL.into_iter().filter(move |way| is_joint || !way.is_joint)
    }

    /// What the arena of a run holds at the op that needs most.
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

    /// The run from set `from` to set `to`.
    pub fn run(&self, from: usize, to: usize) -> Run {
        let bytes = |tensor: u32| self.graph.tensors[tensor as usize].bytes;
        let in_bytes = self.inputs(from, to).map(bytes).sum();
        let made = |tensor: &u32| !self.has(from, self.graph.tensors[*tensor as usize].producer.index());
        let out_bytes = self.crossing[to].iter().copied().filter(made).map(bytes).sum();
        let sent = self.crossing[to].iter().filter(|tensor| made(tensor) && self.graph.is_only_sent(**tensor as usize));
        let sent = sent.copied().map(bytes).sum();
        // A gradient that comes from another stage as it is lies between no halves.
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
        let span = self.span(from, to);
        let most = |ops: &Ranking| ops.within(span.clone()).find(|(_, op)| inside(*op)).map_or(0, |(bytes, _)| bytes);
        let forward_us = (self.forward[to] - self.forward[from]).max(0.0);
        let holdings = MemoryTerms {
            largest: most(&self.by_use),
            needed: most(&self.by_need),
            weights: self.weights[to] - self.weights[from] + tied,
            summed: self.summed[to] - self.summed[from] + summed,
            masters: self.masters[to] - self.masters[from] + masters,
            terms: self.terms[to] - self.terms[from],
            shared,
            saved: self.saved[to] - self.saved[from],
            inputs: in_bytes,
            passed: self.passing.bytes(in_bytes, forward_us),
            outputs: out_bytes,
            sent,
            halves: (self.halves[to] - self.halves[from]).saturating_sub(arriving),
            arena: self.arena(from, to, &span),
            put_by: self.put_by[to] - self.put_by[from],
        };
        Run {
            is_first: from == 0,
            forward_us,
            backward_us: (self.backward[to] - self.backward[from]).max(0.0),
            in_bytes,
            out_bytes,
            holdings,
        }
    }
}
