//! A linear order of cuts (or all down-sets, if few) with the memory terms of every range between two cuts.
//!
//! Along an order the terms of all ranges are precomputed exactly: each parameter counts once per range that uses it,
//! and each input tensor once per range.

use crate::partition::search::downsets::DownSets;
use crate::partition::search::range_costs::RangeCosts;
use crate::plan::cut_bytes::CutBytes;
use crate::plan::gradient_buffers::GradientBuffers;
use crate::plan::memory::MemoryTerms;
use crate::plan::problem::CostModel;
use crate::profile::arena::{ArenaPosition, Needs};
use crate::profile::cost_graph::CostGraph;
use crate::profile::recompute_scope::RecomputeCosts;

/// A chain of sets, or arbitrary sets of which only nested ones form a range, with the memory terms of every range.
#[derive(Clone, Debug)]
pub struct LinearOrder {
    /// The cuts: set 0 is empty, the last set is the whole model.
    pub space: DownSets,
    holdings: Vec<MemoryTerms>,
}

impl LinearOrder {
    /// Builds the ranges along `order`, cut after `ends[1]`, `ends[2]` … ops; see [`DownSets::chain`]. Memory is
    /// quadratic in the number of cuts; time is that number times the size of the graph.
    pub fn new(
        graph: &CostGraph,
        model: CostModel,
        order: Vec<u32>,
        ends: Vec<usize>,
        passing: GradientBuffers,
    ) -> LinearOrder {
        let holdings = holdings(graph, &order, &ends, passing);
        LinearOrder { space: DownSets::chain(graph, model, order, ends), holdings }
    }

    /// As [`LinearOrder::new`], for any down-sets instead of an order.
    pub fn over(graph: &CostGraph, space: DownSets, passing: GradientBuffers) -> LinearOrder {
        let sets = space.len();
        let mut holdings = vec![MemoryTerms::default(); sets * sets];
        let places = RangeCosts::new(graph, &space, passing);
        for from in 0..sets {
            for to in (from + 1..sets).filter(|&to| space.nested(from, to)) {
                holdings[from * sets + to] = places.run(from, to).holdings;
            }
        }
        LinearOrder { space, holdings }
    }

    pub fn holdings(&self, from: usize, to: usize) -> &MemoryTerms {
        &self.holdings[from * self.space.len() + to]
    }
}

/// Bisection steps for the time of the longest stage.
const HALVINGS: usize = 48;

/// Chooses the cuts of an order for at most `limit` ranges: everywhere, or where the fewest bytes cross.
pub fn ends(graph: &CostGraph, model: CostModel, order: &[u32], limit: usize) -> Vec<usize> {
    let limit = limit.max(1);
    if order.len() <= limit {
        return (0..=order.len()).collect();
    }
    let total_us = graph.total_us().max(f64::MIN_POSITIVE);
    let total_bytes: f64 = graph.ops.iter().map(|op| op.param_bytes as f64).sum::<f64>().max(1.0);
    let weight = |op: u32| {
        let op = &graph.ops[op as usize];
        (op.fwd_us + op.bwd_us) / total_us + op.param_bytes as f64 / total_bytes + 1.0 / order.len() as f64
    };
    let total: f64 = order.iter().map(|&op| weight(op)).sum();
    let cuts = CutBytes::new(model, graph).estimates(order);
    // Divides the order into `limit - 1` slices of equal weight and takes the cheapest cut in each.
    let slices = (limit - 1).max(1);
    let mut best: Vec<Option<usize>> = vec![None; slices];
    let mut sum = 0.0;
    for (at, &op) in order.iter().enumerate().take(order.len() - 1) {
        sum += weight(op);
        let slice = ((sum / total * slices as f64) as usize).min(slices - 1);
        let end = at + 1;
        if best[slice].is_none_or(|other| cuts[end] < cuts[other]) {
            best[slice] = Some(end);
        }
    }
    let mut ends = vec![0];
    ends.extend(best.into_iter().flatten());
    ends.push(order.len());
    ends
}

/// As [`ends`], plus the balanced cuts for stages with these replicas. Gives at least one range per stage if there are
/// enough ops.
pub fn ends_for(graph: &CostGraph, model: CostModel, order: &[u32], limit: usize, replicas: &[u32]) -> Vec<usize> {
    let mut ends = ends(graph, model, order, limit);
    if ends.len() <= order.len() && replicas.len() > 1 {
        ends.extend(balanced(graph, order, replicas));
        ends.sort_unstable();
        ends.dedup();
    }
    ends
}

/// Cuts into one stage per entry of `replicas`, each with at least one op, that minimise the longest stage time per
/// replica.
pub fn balanced(graph: &CostGraph, order: &[u32], replicas: &[u32]) -> Vec<usize> {
    let stages = replicas.len();
    if stages > order.len() {
        return Vec::new();
    }
    let mut sums = vec![0.0];
    for &op in order {
        let op = &graph.ops[op as usize];
        sums.push(sums[sums.len() - 1] + op.fwd_us + op.bwd_us);
    }
    let share = |stage: usize| f64::from(replicas[stage].max(1));
    // Fills every stage up to the given time, leaving one op for each later stage; `None` if the last stage takes
    // longer.
    let filled = |longest: f64| {
        let mut ends = vec![0];
        for stage in 0..stages {
            let (from, last) = (ends[stage], order.len() - (stages - 1 - stage));
            let most = sums[from] + longest * share(stage);
            let to = sums.partition_point(|&sum| sum <= most).saturating_sub(1).clamp(from + 1, last);
            if sums[to] > most * (1.0 + 1e-12) || (stage + 1 == stages && to < order.len()) {
                return None;
            }
            ends.push(to);
        }
        Some(ends)
    };
    let (mut least, mut most) = (0.0, sums[order.len()]);
    let mut best = filled(most);
    for _ in 0..HALVINGS {
        let middle = (least + most) / 2.0;
        match filled(middle) {
            Some(ends) => (best, most) = (Some(ends), middle),
            None => least = middle,
        }
    }
    // NaN times cannot be balanced.
    best.unwrap_or_else(|| (0..stages).chain([order.len()]).collect())
}

fn holdings(graph: &CostGraph, order: &[u32], ends: &[usize], passing: GradientBuffers) -> Vec<MemoryTerms> {
    let places = ends.len();
    let mut place = vec![0usize; order.len()];
    order.iter().enumerate().for_each(|(at, &op)| place[op as usize] = at);
    let mut params: Vec<Vec<usize>> = vec![Vec::new(); order.len()];
    for (at, param) in graph.params.iter().enumerate() {
        param.users.iter().for_each(|op| params[op.index()].push(at));
    }
    let mut frozen: Vec<Vec<usize>> = vec![Vec::new(); order.len()];
    for (at, read) in graph.frozen.iter().enumerate() {
        read.users.iter().for_each(|op| frozen[op.index()].push(at));
    }
    let mut inputs: Vec<Vec<usize>> = vec![Vec::new(); order.len()];
    for (at, tensor) in graph.tensors.iter().enumerate() {
        tensor.consumers.iter().for_each(|op| inputs[op.index()].push(at));
    }
    let mut made: Vec<Vec<usize>> = vec![Vec::new(); order.len()];
    // Position of the last reader; 0 if there is none.
    let mut last_reader: Vec<usize> = vec![0; graph.tensors.len()];
    for (at, tensor) in graph.tensors.iter().enumerate() {
        made[tensor.producer.index()].push(at);
        last_reader[at] = tensor.consumers.iter().map(|op| place[op.index()]).max().unwrap_or(0);
    }
    let (largest, needed) = (graph.largest_bytes(), graph.needed_bytes());
    let needs: Vec<Needs> = graph.ops.iter().map(|op| Needs::by(|place| op.arena(place))).collect();
    let (flows, recompute) = (graph.flows(), RecomputeCosts::of(graph));
    let can_be: Vec<ArenaPosition> = (0..order.len()).map(|op| flows.ends(op)).collect();
    let mut is_first = vec![false; order.len()];
    let mut table = vec![MemoryTerms::default(); places * places];
    let is_handed_on = |op: usize| made[op].iter().any(|&tensor| !graph.tensors[tensor].consumers.is_empty());
    let is_handed_on: Vec<bool> = (0..order.len()).map(is_handed_on).collect();
    let mut op_seen = vec![usize::MAX; order.len()];
    let mut param_seen = vec![usize::MAX; graph.params.len()];
    let mut users_seen = vec![0; graph.params.len()];
    let mut frozen_seen = vec![usize::MAX; graph.frozen.len()];
    let mut tensor_seen = vec![usize::MAX; graph.tensors.len()];
    for from in 0..places - 1 {
        let mut run = MemoryTerms::default();
        let mut forward_us = 0.0;
        for to in from + 1..places {
            for &op in &order[ends[to - 1]..ends[to]] {
                let op = op as usize;
                (run.largest, run.needed) = (run.largest.max(largest[op]), run.needed.max(needed[op]));
                for &at in &params[op] {
                    let param = &graph.params[at];
                    run.terms += param.sum_bytes;
                    if std::mem::replace(&mut param_seen[at], from) != from {
                        run.weights += param.bytes;
                        run.summed += param.sum_bytes;
                        run.masters += param.master_bytes();
                        run.shared += param.sum_bytes;
                        users_seen[at] = 0;
                    }
                    users_seen[at] += 1;
                    if users_seen[at] == param.users.len() {
                        run.shared -= param.sum_bytes;
                    }
                }
                for &at in &frozen[op] {
                    let is_known = std::mem::replace(&mut frozen_seen[at], from) == from;
                    run.frozen += if is_known { 0 } else { graph.frozen[at].bytes };
                }
                for &tensor in &made[op] {
                    if last_reader[tensor] > place[op] {
                        run.outputs += graph.tensors[tensor].bytes;
                        run.sent += if graph.is_only_sent(tensor) { graph.tensors[tensor].bytes } else { 0 };
                        run.recompute.add_sent(&recompute, tensor, graph.tensors[tensor].bytes);
                    }
                }
                for &tensor in &inputs[op] {
                    // A tensor whose last reader is inside is not an output.
                    let is_last = last_reader[tensor] == place[op];
                    if is_last && place[graph.tensors[tensor].producer.index()] >= ends[from] {
                        run.outputs -= graph.tensors[tensor].bytes;
                        run.sent -= if graph.is_only_sent(tensor) { graph.tensors[tensor].bytes } else { 0 };
                        run.recompute.remove_sent(&recompute, tensor, graph.tensors[tensor].bytes);
                    }
                    let producer = graph.tensors[tensor].producer.index();
                    let comes_in = place[producer] < ends[from];
                    if !comes_in && std::mem::replace(&mut op_seen[producer], from) != from {
                        run.halves += graph.ops[producer].arriving_bytes;
                    }
                    if comes_in && std::mem::replace(&mut tensor_seen[tensor], from) != from {
                        run.inputs += graph.tensors[tensor].bytes;
                    }
                }
                run.halves += graph.ops[op].between_bytes;
                if !is_handed_on[op] {
                    run.halves += graph.ops[op].arriving_bytes;
                }
                run.saved += graph.ops[op].kept_bytes();
                run.recompute.add(&recompute, op);
                // The ops it reads are no longer last in the range.
                let before = flows.before[op].iter().map(|&made| made as usize);
                let is_within = before.filter(|&made| place[made] >= ends[from]);
                let mut reads = false;
                for made in is_within {
                    reads = true;
                    if !graph.ops[op].is_view {
                        run.arena = run.arena.max(needs[made].at(ArenaPosition { first: is_first[made], last: false }));
                    }
                }
                is_first[op] = can_be[op].first && !reads;
                let end = ArenaPosition { first: is_first[op], last: can_be[op].last };
                run.arena = run.arena.max(needs[op].at(end));
                forward_us += graph.ops[op].fwd_us;
                run.batched_grads += graph.ops[op].batched_grad_bytes;
            }
            run.passed = passing.bytes(run.inputs, forward_us);
            table[from * places + to] = run;
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::read::levels;
    use crate::profile::arena::Live;
    use crate::profile::cost_graph::{FrozenCost, OpCost, OpId, ParamCost, TensorCost};
    use crate::profile::recompute_scope::RecomputeScope;

    fn chain(ops: u32) -> CostGraph {
        let bytes = |at: u32| if at % 5 == 4 { 1 } else { 8 };
        let op = |id| OpCost {
            id,
            fwd_us: 1.0,
            bwd_us: 2.0,
            out_bytes: bytes(id),
            saved_bytes: 3,
            between_bytes: 1,
            arriving_bytes: bytes(id),
            live: Live { whole: [9 + u64::from(id), 5, 6, 2], split: [7, 4 + u64::from(id % 3), 3, 1] },
            ..OpCost::default()
        };
        let tensor = |at| TensorCost {
            name: String::new(),
            producer: OpId(at),
            bytes: bytes(at),
            consumers: [at + 1, at + 7].into_iter().filter(|&to| to < ops).map(OpId).collect(),
        };
        let tied = ParamCost::new("w", 100, vec![OpId(1), OpId(4)]);
        let frozen = |bytes, users: &[u32]| FrozenCost {
            name: String::new(),
            bytes,
            users: users.iter().map(|&op| OpId(op)).collect(),
        };
        CostGraph {
            ops: (0..ops).map(op).collect(),
            tensors: (0..ops).map(tensor).collect(),
            params: vec![tied],
            frozen: vec![frozen(1000, &[2, 3, 8]), frozen(10_000, &[5]), frozen(100_000, &[0, 1])],
        }
    }

    #[test]
    fn runs_hold_what_their_ops_hold() {
        let mut layers = chain(12);
        for (at, op) in layers.ops.iter_mut().enumerate() {
            (op.saved_bytes, op.unsaved) = (20 + at as u64, at % 4 == 1);
            op.recompute = if at < 11 { RecomputeScope::Layer(at as u32 / 3) } else { RecomputeScope::Never };
        }
        for graph in [chain(12), layers] {
            let order: Vec<u32> = (0..12).collect();
            let (flows, passing) = (graph.flows(), GradientBuffers::of(&levels("4:10MB/s").unwrap()));
            let line = LinearOrder::new(&graph, CostModel::Paper, order.clone(), (0..=12).collect(), passing);
            let space = DownSets::chain(&graph, CostModel::Paper, order, (0..=12).collect());
            let sets = LinearOrder::over(&graph, space, passing);
            for from in 0..12 {
                for to in from + 1..=12 {
                    let inside: Vec<bool> = (0..12).map(|op| (from..to).contains(&op)).collect();
                    let held = MemoryTerms::of(&graph, (&flows, &RecomputeCosts::of(&graph)), &inside, &passing);
                    assert_eq!(*line.holdings(from, to), held, "{from}..{to}");
                    assert_eq!(*sets.holdings(from, to), held, "{from}..{to}");
                }
            }
        }
    }

    #[test]
    fn grouping_cuts_where_little_crosses() {
        let mut graph = chain(100);
        graph.tensors.iter_mut().for_each(|tensor| tensor.consumers.truncate(1));
        let order: Vec<u32> = (0..100).collect();
        let ends = ends(&graph, CostModel::Paper, &order, 11);
        assert_eq!((ends[0], ends[ends.len() - 1]), (0, 100));
        assert!(ends.len() <= 12 && ends.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(ends[1..ends.len() - 1].iter().all(|end| end % 5 == 0), "{ends:?}");
    }
}
