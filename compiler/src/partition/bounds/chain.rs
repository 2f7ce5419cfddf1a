//! A model as a chain of elements, for bounds that count fill and drain.
//!
//! An op that every other op precedes or follows is an element of its own. The ops between two of these are one element,
//! which a cut may divide ([`divisions`](crate::partition::bounds::divisions)). Ops with hardly any work that only start
//! or end a path, such as masks, are left out, because they would hide the chain.
//!
//! The way of a micro-batch is the longest path, message by message. A message between two elements is on it if it comes
//! directly from the element before: an output of an earlier one may be on its way while others compute. If the first or
//! the last element has several ops, different paths may begin or end there, so it is no part of the way.

use crate::partition::bounds::crossings::{Crossing, crossings};
use crate::partition::bounds::divisions::{Division, Members};
use crate::partition::search::fused_graph::FusedGraph;
use crate::partition::search::op_sets::neighbours;
use crate::profile::cost_graph::{CostGraph, OpCost, TensorCost};

/// An op with a smaller part of all work may be left out.
const LIGHT: f64 = 1e-3;

/// An op with a larger part of all parameters is left out only if another such op remains.
const SMALL: f64 = 1e-2;

/// Cuts through elements that divide all work into this many parts.
const PARTS: f64 = 256.0;

/// Microseconds per micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    pub forward_us: f64,
    pub backward_us: f64,
    /// The backward without weight gradients.
    pub input_us: f64,
}

impl Work {
    /// Forward and backward.
    pub fn us(&self) -> f64 {
        self.forward_us + self.backward_us
    }

    pub fn of(op: &OpCost) -> Work {
        Work { forward_us: op.fwd_us, backward_us: op.bwd_us, input_us: op.bwd_us - op.weight_part_us() }
    }

    fn each(self, other: Work, combine: impl Fn(f64, f64) -> f64) -> Work {
        Work {
            forward_us: combine(self.forward_us, other.forward_us),
            backward_us: combine(self.backward_us, other.backward_us),
            input_us: combine(self.input_us, other.input_us),
        }
    }

    pub fn plus(self, other: Work) -> Work {
        self.each(other, |left, right| left + right)
    }

    /// Not negative.
    fn less(self, other: Work) -> Work {
        self.each(other, |left, right| (left - right).max(0.0))
    }

    pub fn min(self, other: Work) -> Work {
        self.each(other, f64::min)
    }

    pub fn max(self, other: Work) -> Work {
        self.each(other, f64::max)
    }
}

#[derive(Clone, Debug, Default)]
struct Element {
    work: Work,
    /// Of the longest path; nothing in a first or last element of several ops.
    way: Work,
    /// Gradient sums of parameters without other users.
    summed: f64,
    /// Bytes of the message from the element before, which is on the way.
    message: f64,
    /// Bytes of the smallest tensor to and from its ops.
    least_in: f64,
    least_out: f64,
    is_divisible: bool,
    /// The cuts through it; if they are not known, its work may be divided in any proportion.
    divisions: Option<Vec<Division>>,
}

impl Element {
    /// This element and the next one as one.
    fn joined(&self, next: &Element) -> Element {
        Element {
            work: self.work.plus(next.work),
            way: self.way.plus(next.way),
            summed: self.summed + next.summed,
            message: self.message,
            least_in: self.least_in.min(next.least_in),
            least_out: self.least_out.min(next.least_out),
            is_divisible: true,
            divisions: None,
        }
    }
}

/// A place between two stages.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Forward and backward of all elements before it: at least, for the stage that ends here, and at most, for the one
    /// that starts here.
    ends_us: f64,
    starts_us: f64,
    /// The same of gradient sums of parameters with users in one element.
    ends_summed: f64,
    starts_summed: f64,
    /// Elements wholly before it, and those of which any part is.
    whole: usize,
    touched: usize,
    /// The longest path through the elements wholly before it.
    way: Work,
    /// The same through the part of the divided element before it.
    way_inside: Work,
    /// Bytes of the message over it that is on the way, and of the smallest such message over an earlier cut.
    message: f64,
    least_before: f64,
    /// Bytes that the stages on both sides send and receive, if it divides an element: at least; and if they hold the
    /// op before, or after, the element.
    sends: [f64; 2],
    receives: [f64; 2],
}

impl Cut {
    /// The cut before this element, with the work and the gradient sums of all elements before it.
    fn between(element: usize, us: f64, summed: f64, way: Work, message: f64, least_before: f64) -> Cut {
        Cut {
            ends_us: us,
            starts_us: us,
            ends_summed: summed,
            starts_summed: summed,
            whole: element,
            touched: element,
            way,
            way_inside: Work::default(),
            message,
            least_before,
            sends: [0.0; 2],
            receives: [0.0; 2],
        }
    }

    /// True if it divides no element, so that all paths to the next stage cross it.
    pub fn is_between(&self) -> bool {
        self.whole == self.touched
    }
}

/// A parameter with users in several elements.
struct Tied {
    bytes: f64,
    /// Ascending.
    users: Vec<usize>,
}

pub struct Chain {
    /// In order; the first is before all elements, the last after all.
    pub cuts: Vec<Cut>,
    /// Sums over the elements before each, of all their ops and of their longest paths.
    work: Vec<Work>,
    ways: Vec<Work>,
    summed: Vec<f64>,
    /// What crosses the cut before each element, and after the last.
    crossing: Vec<Crossing>,
    tied: Vec<Tied>,
    /// Of the ops that are left out.
    light: Work,
}

impl Chain {
    /// A chain with about `most` cuts or fewer.
    pub fn of(graph: &CostGraph, most: usize) -> Chain {
        let joined = FusedGraph::of(graph);
        let graph = joined.graph();
        let kept = kept(&graph);
        let is_alone = is_alone(&graph, &kept);
        // The element of each op.
        let mut element_of = vec![usize::MAX; graph.ops.len()];
        let mut count = 0;
        let mut is_open = false;
        for op in (0..graph.ops.len()).filter(|&op| kept[op]) {
            if is_alone[op] || !is_open {
                count += 1;
            }
            is_open = !is_alone[op];
            element_of[op] = count - 1;
        }
        let (mut elements, mut tied, summed_by) = elements(&graph, &element_of, &is_alone, count);
        let total_us: f64 = graph.total_us();
        let parts = |element: &Element| match element.is_divisible {
            true => (element.work.us() / total_us.max(1e-12) * PARTS).ceil().max(1.0),
            false => 0.0,
        };
        divide(&graph, &element_of, &summed_by, &mut elements, &parts);
        let cuts = |element: &Element| element.divisions.as_ref().map_or(parts(element) as usize, Vec::len);
        if elements.len() + elements.iter().map(cuts).sum::<usize>() > most {
            let (mut short, place) = coarser(&elements, 2.0 * total_us / most as f64);
            for param in &mut tied {
                param.users.iter_mut().for_each(|user| *user = place[*user]);
                param.users.dedup();
                if let [user] = param.users[..] {
                    short[user].summed += param.bytes;
                }
            }
            tied.retain(|param| param.users.len() > 1);
            elements = short;
            let kept = element_of.iter_mut().filter(|element| **element != usize::MAX);
            kept.for_each(|element| *element = place[*element]);
        }
        let crossing = crossings(&graph, &element_of, elements.len());
        let light = (0..graph.ops.len()).filter(|&op| !kept[op]);
        let light = light.fold(Work::default(), |sum, op| sum.plus(Work::of(&graph.ops[op])));
        Chain::cut(&elements, crossing, tied, light, &parts)
    }

    fn cut(
        elements: &[Element],
        crossing: Vec<Crossing>,
        tied: Vec<Tied>,
        light: Work,
        parts: &dyn Fn(&Element) -> f64,
    ) -> Chain {
        let (mut cuts, mut work, mut summed) = (Vec::new(), vec![Work::default()], vec![0.0]);
        let (mut before_us, mut way) = (0.0, Work::default());
        let mut ways = vec![way];
        let mut least_before = f64::INFINITY;
        for (at, element) in elements.iter().enumerate() {
            let between = Cut::between(at, before_us, summed[at], way, element.message, least_before);
            cuts.push(between);
            if at > 0 {
                least_before = least_before.min(between.message);
            }
            let us = element.work.us();
            let anyhow = || anyhow(element, parts(element));
            for division in element.divisions.clone().unwrap_or_else(anyhow) {
                cuts.push(Cut {
                    ends_us: before_us + division.least_us,
                    starts_us: before_us + division.most_us,
                    ends_summed: summed[at] + division.least_summed,
                    starts_summed: summed[at] + division.most_summed,
                    touched: at + 1,
                    way_inside: division.way,
                    least_before,
                    sends: [element.least_out, division.sent],
                    receives: [element.least_in, division.read_next],
                    ..between
                });
            }
            before_us += us;
            way = way.plus(element.way);
            ways.push(way);
            work.push(work[at].plus(element.work));
            summed.push(summed[at] + element.summed);
        }
        let end = elements.len();
        cuts.push(Cut::between(end, before_us, summed[end], way, 0.0, least_before));
        Chain { cuts, work, ways, summed, crossing, tied, light }
    }

    /// All work of a micro-batch.
    pub fn total(&self) -> Work {
        self.work[self.work.len() - 1].plus(self.light)
    }

    /// Bytes of all gradient sums that the bound counts.
    pub fn all_summed(&self) -> f64 {
        self.summed[self.summed.len() - 1] + self.tied.iter().map(|param| param.bytes).sum::<f64>()
    }

    /// True if gradients pass all cuts.
    pub fn passes_gradients(&self) -> bool {
        self.work.get(1).is_some_and(|first| first.backward_us > 0.0)
    }

    /// Forward and backward of a stage between two cuts, in microseconds per micro-batch: at least.
    pub fn work_us(&self, from: usize, to: usize) -> f64 {
        (self.cuts[to].ends_us - self.cuts[from].starts_us).max(0.0)
    }

    /// Forward and backward of a stage between two cuts: at most.
    pub fn most(&self, from: usize, to: usize) -> Work {
        let all = self.work[self.cuts[to].touched].less(self.work[self.cuts[from].whole]);
        all.plus(self.light)
    }

    /// Forward and backward of a stage between two cuts: at least.
    pub fn least(&self, from: usize, to: usize) -> Work {
        self.work[self.cuts[to].whole].less(self.work[self.cuts[from].touched])
    }

    /// The way through all elements.
    pub fn all_ways(&self) -> Work {
        self.ways[self.ways.len() - 1]
    }

    /// The way through the elements wholly before this one.
    pub fn way_before(&self, element: usize) -> Work {
        self.ways[element]
    }

    /// The way to a stage between two cuts: at least. If the stage holds the op after a divided element, it waits for all of
    /// the part before the cut.
    pub fn way(&self, from: usize, to: usize) -> Work {
        let (first, last) = (&self.cuts[from], &self.cuts[to]);
        let is_inner = first.whole > 0 && last.whole > first.touched;
        if is_inner { first.way.plus(first.way_inside) } else { first.way }
    }

    /// The way through the elements after a cut.
    pub fn way_after(&self, to: usize) -> Work {
        self.all_ways().less(self.ways[self.cuts[to].touched])
    }

    /// Bytes of the message on the way to a stage that starts at a cut: at least; `None` if there may be none.
    pub fn entry(&self, from: usize) -> Option<f64> {
        let cut = &self.cuts[from];
        let inside = cut.receives[0].min(cut.sends[0]);
        (cut.whole > 0).then_some(if cut.is_between() { cut.message } else { inside })
    }

    /// The same for the message on the way from a stage that ends at a cut.
    pub fn exit(&self, to: usize) -> Option<f64> {
        let cut = &self.cuts[to];
        let elements = self.work.len() - 1;
        (cut.touched < elements).then_some(if cut.is_between() { cut.message } else { cut.sends[0] })
    }

    /// Bytes of the smallest message on the way over a cut between elements before this one.
    pub fn least_before(&self, from: usize) -> f64 {
        let least = self.cuts[from].least_before;
        if least.is_finite() { least } else { 0.0 }
    }

    /// Bytes that a stage between two cuts receives and sends per micro-batch: at least; and the first element that may make
    /// any of what it receives.
    pub fn received_and_sent(&self, from: usize, to: usize) -> ([f64; 2], usize) {
        let (first, last) = (&self.cuts[from], &self.cuts[to]);
        let inside = first.touched..last.whole;
        let holds_next = inside.contains(&first.touched);
        let (received, since) = match first.is_between() {
            true => (self.crossing[first.whole].read_before(last.whole), self.crossing[first.whole].since),
            false => {
                (first.receives[usize::from(holds_next)], if holds_next { first.whole.saturating_sub(1) } else { 0 })
            }
        };
        let sent = match last.is_between() {
            true => self.crossing[last.whole].made_from(first.touched),
            false => last.sends[usize::from(last.whole > 0 && inside.contains(&(last.whole - 1)))],
        };
        ([received, sent], since)
    }

    /// Bytes of gradient sums of a stage between two cuts: at least.
    pub fn summed(&self, from: usize, to: usize) -> f64 {
        let (first, last) = (&self.cuts[from], &self.cuts[to]);
        let inside = first.touched..last.whole;
        let tied = self.tied.iter().filter(|param| param.users.iter().any(|user| inside.contains(user)));
        (last.ends_summed - first.starts_summed).max(0.0) + tied.map(|param| param.bytes).sum::<f64>()
    }

    /// The parameters that a stage between two cuts shares with other stages: their number, and bytes of gradient sums.
    pub fn tied(&self, from: usize, to: usize) -> (f64, f64) {
        let (first, last) = (&self.cuts[from], &self.cuts[to]);
        let is_shared = |param: &&Tied| {
            param.users.iter().any(|user| (first.touched..last.whole).contains(user))
                && param.users.iter().any(|user| !(first.whole..last.touched).contains(user))
        };
        self.tied.iter().filter(is_shared).fold((0.0, 0.0), |sum, param| (sum.0 + 1.0, sum.1 + param.bytes))
    }
}

/// For each op whether it is kept; see the module.
fn kept(graph: &CostGraph) -> Vec<bool> {
    let ops = graph.ops.len();
    let light_us = LIGHT * graph.total_us();
    let small = SMALL * graph.ops.iter().map(|op| op.param_bytes as f64).sum::<f64>();
    let is_light = |op: usize| graph.ops[op].fwd_us + graph.ops[op].bwd_us < light_us;
    let is_small = |op: usize| graph.ops[op].param_bytes as f64 <= small;
    let [before, after] = neighbours(graph);
    let mut kept = vec![true; ops];
    let mut has_source = false;
    for op in 0..ops {
        let is_source = !before[op].iter().any(|&other| kept[other]);
        if is_source && is_light(op) && (is_small(op) || has_source) {
            kept[op] = false;
        }
        has_source |= is_source && kept[op];
    }
    for op in (0..ops).rev() {
        let is_sink = !after[op].iter().any(|&other| kept[other]);
        if is_sink && is_light(op) && is_small(op) && op + 1 < ops {
            kept[op] = false;
        }
    }
    kept
}

/// For each op whether all others precede or follow it. In topological order, all ops before it lead to it if each has a
/// reader that is not behind it.
fn is_alone(graph: &CostGraph, kept: &[bool]) -> Vec<bool> {
    let ops = graph.ops.len();
    // The first reader of each op, and one more than the last op that it reads.
    let (mut first_reader, mut last_read) = (vec![usize::MAX; ops], vec![0usize; ops]);
    for (from, to) in graph.edges() {
        let (from, to) = (from.index(), to.index());
        if kept[from] && kept[to] {
            first_reader[from] = first_reader[from].min(to);
            last_read[to] = last_read[to].max(from + 1);
        }
    }
    let mut alone = kept.to_vec();
    let mut farthest = 0;
    for op in (0..ops).filter(|&op| kept[op]) {
        alone[op] &= farthest <= op;
        farthest = farthest.max(first_reader[op]);
    }
    let mut nearest = usize::MAX;
    for op in (0..ops).rev().filter(|&op| kept[op]) {
        alone[op] &= nearest > op;
        nearest = nearest.min(last_read[op]);
    }
    alone
}

fn elements(
    graph: &CostGraph,
    element_of: &[usize],
    is_alone: &[bool],
    count: usize,
) -> (Vec<Element>, Vec<Tied>, Vec<f64>) {
    let ops = graph.ops.len();
    let mut elements = vec![Element::default(); count];
    let [before, _] = neighbours(graph);
    let mut ways = vec![Work::default(); ops];
    for op in (0..ops).filter(|&op| element_of[op] != usize::MAX) {
        let element = &mut elements[element_of[op]];
        element.is_divisible = !is_alone[op];
        let work = Work::of(&graph.ops[op]);
        element.work = element.work.plus(work);
        let inside = before[op].iter().filter(|&&other| element_of[other] == element_of[op]);
        ways[op] = inside.map(|&other| ways[other]).fold(Work::default(), Work::max).plus(work);
        element.way = element.way.max(ways[op]);
    }
    let mut least = vec![(f64::INFINITY, f64::INFINITY); count];
    let mut messages: Vec<Option<f64>> = vec![None; count];
    for tensor in graph.tensors.iter().filter(|tensor| element_of[tensor.producer.index()] != usize::MAX) {
        let bytes = tensor.bytes as f64;
        let from = element_of[tensor.producer.index()];
        let mut readers: Vec<usize> = tensor.consumers.iter().map(|op| element_of[op.index()]).collect();
        readers.retain(|to| *to != usize::MAX);
        readers.dedup();
        if readers.is_empty() {
            continue;
        }
        least[from].1 = least[from].1.min(bytes);
        for to in readers {
            least[to].0 = least[to].0.min(bytes);
            if to == from + 1 {
                // One op sends all that another one needs; of several ops, any may be the one on the way.
                let is_direct = !elements[from].is_divisible && !elements[to].is_divisible;
                let joined = if is_direct { f64::max } else { f64::min };
                messages[to] = Some(messages[to].map_or(bytes, |other| joined(other, bytes)));
            }
        }
    }
    for (at, (element, (least_in, least_out))) in elements.iter_mut().zip(least).enumerate() {
        // Nothing precedes all ops of the first element, or follows all of the last.
        element.least_in = if at == 0 || !least_in.is_finite() { 0.0 } else { least_in };
        element.least_out = if at + 1 == count || !least_out.is_finite() { 0.0 } else { least_out };
        element.message = messages[at].unwrap_or(0.0);
        if element.is_divisible && (at == 0 || at + 1 == count) {
            element.way = Work::default();
        }
    }
    let mut tied = Vec::new();
    let mut summed_by = vec![0.0; ops];
    for param in graph.params.iter().filter(|param| param.sum_bytes > 0) {
        let bytes = param.sum_bytes as f64;
        let mut users: Vec<usize> = param.users.iter().map(|op| op.index()).collect();
        users.retain(|user| element_of[*user] != usize::MAX);
        users.sort_unstable();
        users.dedup();
        if let [user] = users[..] {
            summed_by[user] += bytes;
        }
        users.iter_mut().for_each(|user| *user = element_of[*user]);
        users.dedup();
        match users[..] {
            [] => {}
            [user] => elements[user].summed += bytes,
            _ => tied.push(Tied { bytes, users }),
        }
    }
    (elements, tied, summed_by)
}

/// The work of an element divided into this many parts, in any proportion.
fn anyhow(element: &Element, parts: f64) -> Vec<Division> {
    let us = element.work.us();
    let of = |part: usize| Division {
        least_us: us * part as f64 / parts,
        most_us: us * (part + 1) as f64 / parts,
        least_summed: 0.0,
        most_summed: element.summed,
        way: Work::default(),
        sent: element.least_out,
        read_next: element.least_in,
    };
    (0..parts as usize).map(of).collect()
}

/// Lists the cuts through elements.
fn divide(
    graph: &CostGraph,
    element_of: &[usize],
    summed_by: &[f64],
    elements: &mut [Element],
    parts: &dyn Fn(&Element) -> f64,
) {
    let mut members: Vec<Vec<usize>> = vec![Vec::new(); elements.len()];
    let mut tensors: Vec<Vec<&TensorCost>> = vec![Vec::new(); elements.len()];
    let kept = (0..graph.ops.len()).filter(|&op| element_of[op] != usize::MAX);
    kept.for_each(|op| members[element_of[op]].push(op));
    for tensor in &graph.tensors {
        let element = element_of[tensor.producer.index()];
        if element != usize::MAX {
            tensors[element].push(tensor);
            // Those of the op before an element may cross it.
            if !elements[element].is_divisible && element + 1 < elements.len() {
                tensors[element + 1].push(tensor);
            }
        }
    }
    for at in (0..elements.len()).filter(|&at| elements[at].is_divisible).collect::<Vec<_>>() {
        let of = Members {
            graph,
            ops: &members[at],
            summed: &|op| summed_by[op],
            tensors: &tensors[at],
            is_kept: &|op| element_of[op] != usize::MAX,
            is_near: &|op| element_of[op] == at || element_of[op] == at + 1,
        };
        let divisions = of.divisions(parts(&elements[at]) as usize);
        // A parameter that several ops of the element use may be on either side of a cut.
        let shared = elements[at].summed - members[at].iter().map(|&op| summed_by[op]).sum::<f64>();
        let with_shared = |one: Division| Division { most_summed: one.most_summed + shared, ..one };
        elements[at].divisions = divisions.map(|all| all.into_iter().map(with_shared).collect());
    }
}

/// Joins elements until each has at least this much work. Returns them, and the new place of each.
fn coarser(elements: &[Element], least_us: f64) -> (Vec<Element>, Vec<usize>) {
    let mut short: Vec<Element> = Vec::new();
    let mut place = Vec::with_capacity(elements.len());
    for element in elements {
        match short.last_mut() {
            Some(last) if last.work.us() < least_us => *last = last.joined(element),
            _ => short.push(element.clone()),
        }
        place.push(short.len() - 1);
    }
    (short, place)
}
